// The table of sessions, and what it shares with the dialog of one session.

import { serverNow } from "./api.js";
import { ago, bytes, count, make, span, write } from "./text.js";

export const STATES = ["active", "idle", "cold"];
export const mark = (state) => make("i", { class: `mark ${state}`, "aria-hidden": "true" }, state[0].toUpperCase());
const keyOf = (session) => JSON.stringify([session.engine, session.id]); // engines may have one each of a name

const COLUMNS = [ // title, sort key of the API, classes, text of a session's cell
  ["Session", "id", "name"],
  ["State", "state", "state"],
  ["Tokens", "tokens", "number tokens", (s) => count(s.tokens)],
  ["In the pool", "hot_bytes", "number", (s) => (s.hot_bytes ? bytes(s.hot_bytes) : "–")],
  ["Cold", "cold_bytes", "number", (s) => (s.cold_bytes ? `${bytes(s.cold_bytes)} ${whereCold(s)}` : "–")],
  ["Last used", "last_used", "number", (s) => ago(serverNow() - s.last_used)],
  ["Expected", "expected", "number expected", expected],
  ["Requests", null, "number requests", (s) => count(s.requests)],
  ["Steer", null, "actions"],
];

// What can be done with a session, and the sentence that says why not.
const ACTIONS = [
  { name: "evict", label: () => "Evict", refused: (s) => (s.state === "cold" ? "is cold already" : null) },
  { name: "prefetch", label: () => "Prefetch", refused: (s) => (s.state === "cold" ? null : "is not cold") },
  { name: "pin", label: (s) => (s.pinned ? "Unpin" : "Pin"), refused: () => null },
  { name: "release", label: () => "Release…", refused: () => null },
];

// Buttons for a session; they stay the same elements when the session changes. A click calls steer(session, action).
export class Buttons {
  constructor(steer) {
    this.all = ACTIONS.map((action) =>
      make("button", { type: "button", class: action.name, click: () => steer(this.session, action) }));
  }

  update(session) {
    this.session = session;
    ACTIONS.forEach((action, n) => {
      write(this.all[n], action.label(session));
      this.all[n].setAttribute("aria-label", `${action.label(session).replace("…", "")} ${session.id}`);
      this.all[n].setAttribute("aria-disabled", action.refused(session) !== null);
    });
  }
}

// The tiers that have its compressed blocks, and the share of those that do not have all.
export function whereCold(session) {
  return Object.entries(session.tiers).map(([name, { bytes: size }]) =>
    (size < session.cold_bytes ? `${name} ${Math.max(1, Math.floor((100 * size) / session.cold_bytes))}%` : name)).join(", ");
}

export function expected(session) {
  if (!session.expected_return) return "–";
  const left = session.expected_return - serverNow();
  return left >= 1 ? `in ${span(Math.floor(left))}` : "any time";
}

export class Table {
  // look(session): show its life. steer: as for Buttons. order(column): sort by it.
  constructor(look, steer, order) {
    this.rows = new Map();
    this.newRow = () => new Row(look, steer);
    this.heads = COLUMNS.map(([title, sort, cls]) => {
      const inside = sort ? make("button", { type: "button", click: () => order(sort) }, title) : title;
      return make("th", { scope: "col", role: "columnheader", class: cls, "data-sort": sort }, inside);
    });
    this.body = make("tbody", { role: "rowgroup" });
    this.element = make("table", { role: "table", "aria-labelledby": "sessions-title" },
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...this.heads)), this.body);
  }

  sorted(by, order) {
    for (const head of this.heads) {
      if (head.dataset.sort === by) head.setAttribute("aria-sort", order === "asc" ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
  }

  // Rows for these sessions, in this order, with the focus where it was. held: leave the rows where they are, because
  // somebody is about to press something there.
  update(sessions, held) {
    const before = this.rows;
    const after = new Map(sessions.map((session) => [keyOf(session), before.get(keyOf(session)) ?? this.newRow()]));
    sessions.forEach((session) => after.get(keyOf(session)).update(session));
    if (held) return;
    const focused = document.activeElement;
    this.rows = after;
    for (const [key, row] of before) if (!after.has(key)) row.element.remove();
    [...after.values()].forEach(({ element }, n) => {
      if (this.body.children[n] !== element) this.body.insertBefore(element, this.body.children[n] ?? null);
    });
    if (focused.isConnected) focused.focus({ preventScroll: true });
  }
}

class Row {
  constructor(look, steer) {
    this.buttons = new Buttons(steer);
    this.name = make("bdi");
    this.owner = make("span", { class: "owner dim" });
    this.pin = make("span", { class: "pinned-mark" });
    this.open = make("button", { type: "button", class: "open", click: () => look(this.session) }, this.name);
    this.cells = COLUMNS.map(([title, , cls]) => make("td", { role: "cell", class: cls, "data-title": title }));
    this.cells[0].append(this.open, this.pin, this.owner);
    this.cells.at(-1).append(...this.buttons.all);
    this.element = make("tr", { role: "row" }, ...this.cells);
  }

  update(session) {
    if (this.session?.state !== session.state) this.cells[1].replaceChildren(mark(session.state), ` ${session.state}`);
    this.session = session;
    this.buttons.update(session);
    write(this.name, session.id);
    this.open.title = session.id;
    const isInName = session.id.startsWith(`${session.tenant}/`); // in an operator's list
    write(this.owner, session.tenant && !isInName ? `of ${session.tenant}` : "");
    write(this.pin, session.pinned ? "pinned" : "");
    COLUMNS.forEach(([, , , text], n) => text && write(this.cells[n], text(session)));
  }
}
