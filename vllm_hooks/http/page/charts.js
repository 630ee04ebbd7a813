// Stacked bars of bytes over the last minutes. A chart keeps the samples that it was given while the page was open.

import { bytes, make, share, write } from "./text.js";

const STEP_S = 2;
const STEPS = 150;
const HEIGHT = 100;

export class Chart {
  // parts: names of what is stacked, from the bottom.
  constructor(title, parts) {
    this.samples = [];
    this.title = title;
    const stripes = make("svg:pattern", { id: "stripes", width: 4, height: 6, patternUnits: "userSpaceOnUse" },
      make("svg:rect", { width: 4, height: 3 })); // parts differ without their colours, too
    this.paths = parts.map((_, n) => make("svg:path", { class: `part-${n}` }));
    this.picture = make("svg:svg", { viewBox: `0 0 ${STEPS} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      ...(parts.length > 1 ? [make("svg:defs", {}, stripes)] : []), ...this.paths);
    this.empty = make("p", { class: "empty dim", "aria-hidden": "true" }, "nothing in use");
    this.reading = make("span", { class: "reading" });
    this.range = make("span");
    this.sizes = [...parts, "free"].map(() => make("span"));
    const keys = [...parts, "free"].map((name, n) =>
      make("li", {}, make("i", { class: n < parts.length ? `key part-${n}` : "key" }), ` ${name} `, this.sizes[n]));
    this.element = make("figure", {},
      make("figcaption", {}, make("span", {}, title), this.reading),
      make("div", {}, this.picture, this.empty),
      make("p", { class: "axis dim" }, make("span", {}, `${(STEP_S * STEPS) / 60} min ago`), this.range, make("span", {}, "now")),
      make("ul", { class: "legend" }, ...keys));
  }

  // parts: bytes of each part. A pause leaves a gap.
  add(at, parts, budget) {
    const last = this.samples.at(-1);
    const now = last ? last.slot + Math.max(1, Math.round((at - last.at) / STEP_S)) : 0;
    const used = parts.reduce((sum, part) => sum + part, 0);
    this.samples.push({ slot: now, at, parts, budget, used });
    while (this.samples[0].slot <= now - STEPS) this.samples.shift();
    const [sizes, budgets] = ["used", "budget"].map((what) => this.samples.map((sample) => sample[what]));
    const [most, least, top] = [Math.max(...sizes), Math.min(...sizes), Math.max(1, ...sizes, ...budgets)];
    this.paths.forEach((path, n) => path.setAttribute("d", this.samples.map((sample) => bar(sample, n, now, top)).join("")));
    this.empty.hidden = most > 0;
    write(this.range, `highest ${bytes(most)}, lowest ${bytes(least)}`);
    [...parts, Math.max(0, budget - used)].forEach((size, n) => write(this.sizes[n], bytes(size)));
    write(this.reading, `${used ? "" : "nothing in use: "}${bytes(used)} of ${bytes(budget)}, ${share(used, budget)}`);
    this.picture.setAttribute("aria-label", `${this.title} over time: now ${this.reading.textContent}, ${this.range.textContent}`);
  }
}

function bar(sample, part, now, top) {
  const below = sample.parts.slice(0, part).reduce((sum, size) => sum + size, 0);
  const [height, foot] = [(sample.parts[part] / top) * HEIGHT, HEIGHT - (below / top) * HEIGHT];
  return height > 0 ? `M${STEPS - 1 - (now - sample.slot)} ${foot.toFixed(2)}h.8v${(-height).toFixed(2)}h-.8z` : "";
}
