// Stacked bars of bytes over the last minutes. A chart keeps the samples that it was given while the page was open.

import { bytes, clock, make, share, write } from "./text.js";

const STEP_S = 2;
const STEPS = 150;
const HEIGHT = 100;

export class Chart {
  // parts: names of what is stacked, from the bottom; what is left of the budget is called `rest`.
  constructor(title, parts, rest) {
    this.samples = [];
    this.names = [...parts, rest];
    this.title = title;
    const stripes = make("svg:pattern", { id: "stripes", width: 4, height: 6, patternUnits: "userSpaceOnUse" },
      make("svg:rect", { width: 4, height: 3 })); // parts differ without their colours, too
    this.paths = parts.map((_, n) => make("svg:path", { class: `part-${n}` }));
    this.picture = make(
      "svg:svg",
      { viewBox: `0 0 ${STEPS} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
        pointermove: (event) => this.point(event), pointerleave: () => this.read(this.samples.at(-1)) },
      ...(parts.length > 1 ? [make("svg:defs", {}, stripes)] : []),
      ...this.paths,
    );
    this.reading = make("span", { class: "reading" });
    this.legend = this.names.map(() => make("span"));
    const keys = this.names.map((name, n) =>
      make("li", {}, make("i", { class: n < parts.length ? `key part-${n}` : "key" }), ` ${name} `, this.legend[n]));
    this.range = make("span");
    this.element = make("figure", {},
      make("figcaption", {}, make("span", {}, title), this.reading),
      this.picture,
      make("p", { class: "axis dim" }, make("span", {}, `${(STEP_S * STEPS) / 60} min ago`), this.range, make("span", {}, "now")),
      make("ul", { class: "legend" }, ...keys));
  }

  // parts: bytes of each part. A pause leaves a gap.
  add(at, parts, budget) {
    const last = this.samples.at(-1);
    const slot = last ? last.slot + Math.max(1, Math.round((at - last.at) / STEP_S)) : 0;
    this.samples.push({ slot, at, parts, budget, used: parts.reduce((sum, part) => sum + part, 0) });
    while (this.samples[0].slot <= slot - STEPS) this.samples.shift();
    this.draw();
  }

  draw() {
    const last = this.samples.at(-1);
    const top = Math.max(1, ...this.samples.map((sample) => Math.max(sample.budget, sample.used)));
    this.paths.forEach((path, n) => path.setAttribute("d", this.bars(n, last.slot, top)));
    const used = this.samples.map((sample) => sample.used);
    const range = `highest ${bytes(Math.max(...used))}, lowest ${bytes(Math.min(...used))}`;
    write(this.range, range);
    [...last.parts, Math.max(0, last.budget - last.used)].forEach((size, n) => write(this.legend[n], bytes(size)));
    this.read(last);
    this.picture.setAttribute("aria-label", `${this.title} over time: now ${this.reading.textContent}, ${range}`);
  }

  bars(part, now, top) {
    return this.samples.map((sample) => {
      const x = STEPS - 1 - (now - sample.slot);
      const below = sample.parts.slice(0, part).reduce((sum, size) => sum + size, 0);
      const [height, foot] = [(sample.parts[part] / top) * HEIGHT, HEIGHT - (below / top) * HEIGHT];
      return height > 0 ? `M${x} ${foot.toFixed(2)}h.8v${(-height).toFixed(2)}h-.8z` : "";
    }).join("");
  }

  point(event) {
    const box = this.picture.getBoundingClientRect();
    const slot = this.samples.at(-1)?.slot - STEPS + 1 + Math.floor(((event.clientX - box.left) / box.width) * STEPS);
    const sample = this.samples.find((each) => each.slot === slot);
    if (sample) this.read(sample, `${clock(sample.at)}: `);
  }

  read(sample, when = "") {
    if (sample) write(this.reading, `${when}${bytes(sample.used)} of ${bytes(sample.budget)}, ${share(sample.used, sample.budget)}`);
  }
}
