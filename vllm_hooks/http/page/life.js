// One session in a dialog: what it is now, what can be done, and what became of it so far.

import { serverNow, show } from "./api.js";
import { Buttons, expected, mark, whereCold } from "./sessions.js";
import { ago, byId, bytes, clock, count, make, plural, share, span, write } from "./text.js";

const IN_POOL = new Set(["turn", "restored", "prefetched"]);
const STRIP = { width: 1000, height: 40 };

export class Life {
  // refinements(): number of refinements that the codec gives to a new block.
  constructor(steer, refinements) {
    this.dialog = byId("life");
    this.refinements = refinements;
    this.buttons = new Buttons(steer);
    byId("life-actions").append(...this.buttons.all);
    byId("life-close").addEventListener("click", () => this.dialog.close());
  }

  open(session) {
    this.drawn = "";
    for (const id of ["life-strip", "life-events"]) byId(id).replaceChildren();
    for (const id of ["life-sum", "life-trouble"]) write(byId(id), "");
    this.session = session;
    byId("life-title").replaceChildren(make("bdi", {}, session.id));
    byId("life-actions").hidden = true;
    if (session.state) this.update(session);
    this.dialog.showModal();
    return this.refresh();
  }

  // Asks the API again; what it says against it is shown here.
  async refresh() {
    const asked = this.session;
    try {
      const session = await show(asked);
      if (asked.id !== this.session.id) return; // another was opened meanwhile
      write(byId("life-trouble"), "");
      this.update(session);
      this.tell(session.life);
    } catch (error) {
      write(byId("life-trouble"), error.message);
    }
  }

  update(session) {
    this.session = session;
    this.buttons.update(session);
    byId("life-actions").hidden = false;
    byId("life-title").replaceChildren(make("bdi", {}, session.id));
    byId("life-facts").replaceChildren(...facts(session, this.refinements()).map(([name, ...value]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, ...value))));
  }

  tell(events) {
    write(byId("life-sum"), sum(events));
    byId("life-strip").replaceChildren(...strip(events));
    const drawn = JSON.stringify(events);
    if (drawn === this.drawn) return; // what somebody reads or selects stays
    this.drawn = drawn;
    byId("life-events").replaceChildren(...[...events].reverse().map(line));
  }
}

function facts(session, refinements) {
  const where = whereCold(session);
  return [
    ["State", mark(session.state), ` ${session.state}${session.pinned ? ", pinned" : ""}`],
    ["Tokens", `${count(session.tokens)} in ${plural(session.blocks, "block")}`],
    ["In the pool", `${bytes(session.hot_bytes)} in ${plural(session.hot_blocks, "block")}`],
    ["In the cold store", `${bytes(session.cold_bytes)} in ${plural(session.cold_blocks, "block")}${where ? `, ${where}` : ""}`],
    ["Quality", quality(session, refinements)],
    ["Age", span(Math.max(0, Math.floor(serverNow() - session.created)))],
    ["Last used", `${ago(serverNow() - session.last_used)}, ${plural(session.requests, "request")}`],
    ["Expected", session.tool ? `${expected(session)}, after ${session.tool}` : expected(session)],
    ["Priority", String(session.priority)],
    ["Tenant", session.tenant || "nobody"],
  ];
}

function quality(session, refinements) {
  const isCut = session.level !== null && session.level < refinements;
  const cut = isCut ? `, cut to ${session.level} of ${plural(refinements, "refinement")}` : "";
  const last = session.lossy_tokens ? `, ${plural(session.lossy_tokens, "token")} of the last prompt` : "";
  return session.exact ? "exact" : `lossy${cut}${last}`;
}

function sum(events) {
  const total = (kind, what) => events.filter((each) => each.kind === kind).reduce((all, each) => all + (each[what] ?? 0), 0);
  const times = (kind) => events.filter((each) => each.kind === kind).length;
  const parts = [plural(times("turn"), "turn"), plural(times("evicted"), "eviction"), plural(times("restored"), "restore")];
  const saved = total("restored", "saved_tokens") + total("prefetched", "saved_tokens");
  const spent = total("restored", "seconds") + total("prefetched", "seconds");
  const gain = saved ? `${count(saved)} tokens were not computed again` : "";
  const cost = spent ? `restoring took ${span(spent)}` : "";
  return [parts.join(", "), [gain, cost].filter(Boolean).join("; ")].filter(Boolean).join(". ") + ".";
}

function line(event) {
  return make("li", {},
    make("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)),
    make("b", { class: `kind ${event.kind}` }, event.kind),
    make("span", {}, event.text),
    make("span", { class: "cost dim" }, [costOf(event), gainOf(event)].filter(Boolean).join(" ")));
}

const costOf = (event) => (event.seconds && event.kind !== "turn" ? `took ${span(event.seconds)}` : "");
const gainOf = (event) => (event.saved_tokens && event.kind === "turn" ? `saved ${share(event.saved_tokens, event.tokens)}` : "");

// When the session was in the pool (tall) and when it was cold (low), from the first event that is known until now.
function strip(events) {
  if (!events.length) return [];
  const [from, to] = [events[0].at, Math.max(serverNow(), events.at(-1).at + 1)];
  const x = (at) => ((at - from) / (to - from)) * STRIP.width;
  const shapes = events.flatMap((event, n) => {
    const [left, right] = [x(event.at), x(events[n + 1]?.at ?? to)];
    const state = stateAfter(events.slice(0, n + 1));
    const [y, height] = state === "cold" ? [STRIP.height * 0.6, STRIP.height * 0.4] : [0, STRIP.height];
    return state ? [make("svg:rect", { class: state, x: left, y, width: Math.max(1, right - left), height })] : [];
  });
  const turns = events.filter((event) => event.kind === "turn").map((event) =>
    make("svg:rect", { class: "turn", x: Math.min(STRIP.width - 3, x(event.at)), y: 0, width: 3, height: STRIP.height }));
  const box = { viewBox: `0 0 ${STRIP.width} ${STRIP.height}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  const picture = make("svg:svg", box, ...shapes, ...turns);
  const keys = [["turn", "a turn"], ["pool", "in the pool"], ["cold low", "cold"]].map(([key, text]) =>
    make("li", {}, make("i", { class: `key ${key}` }), ` ${text}`));
  const legend = make("ul", { class: "legend", "aria-hidden": "true" }, ...keys);
  const times = [clock(from), span(Math.round(to - from)), "now"].map((text) => make("span", {}, text));
  const axis = make("p", { class: "axis dim" }, ...times);
  return [picture, axis, legend];
}

// Compressed blocks that are lost are no loss of what is in the pool.
function stateAfter(events) {
  let state = null;
  let saved = 0;
  for (const { kind, blocks } of events) {
    if (IN_POOL.has(kind)) state = "pool";
    if (kind === "evicted") [state, saved] = ["cold", blocks];
    if (kind === "dropped" && state === "cold" && blocks >= saved) state = null;
  }
  return state;
}
