// One session in a dialog: its state now, what can be done, and what became of it so far.

import { serverNow, show } from "./api.js";
import { Buttons, expected, mark, whereCold } from "./sessions.js";
import { ago, byId, bytes, clock, count, make, plural, replaceList, share, span, write } from "./text.js";

export class Life {
  // refinements(): number of refinements that the codec gives to a new block.
  constructor(steer, refinements) {
    this.refinements = refinements;
    this.buttons = new Buttons(steer);
    byId("life-actions").append(...this.buttons.all);
  }

  open(session) {
    for (const id of ["life-facts", "life-events"]) byId(id).replaceChildren();
    for (const id of ["life-sum", "life-trouble"]) write(byId(id), "");
    byId("life-actions").hidden = true;
    this.title(session);
    if (session.state) this.update(session);
    byId("life").showModal();
    return this.refresh();
  }

  // Asks the API again, and shows its refusal in the dialog.
  async refresh() {
    const asked = this.session;
    try {
      const session = await show(asked);
      if (asked.id !== this.session.id) return; // another was opened meanwhile
      write(byId("life-trouble"), "");
      this.update(session);
      write(byId("life-sum"), sum(session.life));
      replaceList(byId("life-events"), [...session.life].reverse().map(line), "Nothing is known of its past.");
    } catch (error) {
      write(byId("life-trouble"), error.message);
    }
  }

  title(session) {
    this.session = session;
    byId("life-title").replaceChildren(make("bdi", {}, session.id));
  }

  update(session) {
    this.title(session);
    this.buttons.update(session);
    byId("life-actions").hidden = false;
    byId("life-facts").replaceChildren(...facts(session, this.refinements()).map(([name, ...value]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, ...value))));
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
  const of = (...kinds) => events.filter((event) => kinds.includes(event.kind));
  const total = (what) => of("restored", "prefetched").reduce((all, event) => all + (event[what] ?? 0), 0);
  const [saved, spent] = [total("saved_tokens"), total("seconds")];
  const counts = [["turn", "turn"], ["evicted", "eviction"], ["restored", "restore"]];
  const gain = saved ? `${count(saved)} tokens were not computed again` : "";
  const cost = spent ? `restoring took ${span(spent)}` : "";
  const parts = [counts.map(([kind, word]) => plural(of(kind).length, word)).join(", "), [gain, cost].filter(Boolean).join("; ")];
  return `${parts.filter(Boolean).join(". ")}.`;
}

function line({ at, kind, text, seconds, saved_tokens: saved, tokens }) {
  const gain = saved ? `saved ${share(saved, tokens)}` : "";
  const cost = seconds ? `took ${span(seconds)}` : "";
  return make("li", {},
    make("time", { datetime: new Date(at * 1000).toISOString() }, clock(at)),
    make("b", { class: `kind ${kind}` }, kind),
    make("span", {}, text),
    make("span", { class: "cost dim" }, kind === "turn" ? gain : cost));
}
