// The sessions, as a table and as a map. Both keep what is focused while they are drawn anew.

import { serverNow } from "./api.js";
import { ago, arrange, bytes, count, make, span, write } from "./text.js";

export const STATES = ["active", "idle", "cold"];
export const keyOf = (session) => JSON.stringify([session.engine, session.id]); // engines may have one each of a name
export const mark = (state) => make("i", { class: `mark ${state}`, "aria-hidden": "true" }, state[0].toUpperCase());

const COLUMNS = [ // title, what the API sorts by, class
  ["Session", "id", "name"],
  ["State", "state", "state"],
  ["Tokens", "tokens", "number tokens"],
  ["In the pool", "hot_bytes", "number"],
  ["Cold", "cold_bytes", "number"],
  ["Last used", "last_used", "number"],
  ["Expected", "expected", "number expected"],
  ["Requests", null, "number requests"],
  ["Steer", null, "actions"],
];

// What can be done with a session, and the sentence that says why not.
export const ACTIONS = [
  { name: "evict", label: () => "Evict", refused: (s) => (s.state === "cold" ? "is cold already" : null) },
  { name: "prefetch", label: () => "Prefetch", refused: (s) => (s.state === "cold" ? null : "is not cold") },
  { name: "pin", label: (s) => (s.pinned ? "Unpin" : "Pin"), refused: () => null },
  { name: "release", label: () => "Release…", refused: () => null },
];

// Buttons for a session that stay the same elements whatever becomes of it. steer(session, action) is called.
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

export class TableView {
  // look(session): show its life. steer: as for Buttons. order(column): sort by it.
  constructor(look, steer, order) {
    this.rows = new Map();
    Object.assign(this, { look, steer });
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

  // held: leave the rows where they are, for somebody is about to press something there.
  update(sessions, held) {
    const found = new Map(sessions.map((session) => [keyOf(session), session]));
    if (held) {
      for (const [key, row] of this.rows) if (found.has(key)) row.update(found.get(key));
      return;
    }
    for (const key of this.rows.keys()) if (!found.has(key)) this.rows.delete(key);
    for (const [key, session] of found) {
      if (!this.rows.has(key)) this.rows.set(key, new Row(this.look, this.steer));
      this.rows.get(key).update(session);
    }
    arrange(this.body, [...found.keys()].map((key) => this.rows.get(key).element));
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
    const isInName = session.id.startsWith(`${session.tenant}/`); // as those see it who see all tenants
    write(this.owner, session.tenant && !isInName ? `of ${session.tenant}` : "");
    write(this.pin, session.pinned ? "pinned" : "");
    write(this.cells[2], count(session.tokens));
    write(this.cells[3], session.hot_bytes ? bytes(session.hot_bytes) : "–");
    const where = whereCold(session);
    write(this.cells[4], session.cold_bytes ? `${bytes(session.cold_bytes)}${where ? ` ${where}` : ""}` : "–");
    write(this.cells[5], ago(serverNow() - session.last_used));
    write(this.cells[6], expected(session));
    write(this.cells[7], count(session.requests));
  }
}

export function expected(session) {
  if (!session.expected_return) return "–";
  const left = session.expected_return - serverNow();
  return left >= 1 ? `in ${span(Math.floor(left))}` : "any time";
}

const CELL = { least: 26, most: 84, named: 60 }; // pixels: a finger's width, and room for a name

// A cell a session, grouped by state; its area is in proportion to the tokens.
export class MapView {
  constructor(look) {
    this.cells = new Map();
    this.look = look;
    this.groups = Object.fromEntries(STATES.map((state) => [state, new Group(state)]));
    this.element = make("div", { class: "map", keydown: (event) => this.move(event) },
      make("p", { class: "dim" }, "One cell a session, as large as it has tokens; those with a thick border are pinned. "
        + "Arrow keys go from cell to cell."),
      ...Object.values(this.groups).map((group) => group.element));
  }

  update(sessions) {
    const found = new Map(sessions.map((session) => [keyOf(session), session]));
    const longest = Math.max(1, ...sessions.map((session) => session.tokens));
    for (const key of this.cells.keys()) if (!found.has(key)) this.cells.delete(key);
    for (const [key, session] of found) {
      if (!this.cells.has(key)) this.cells.set(key, new Cell(this.look));
      this.cells.get(key).update(session, longest);
    }
    const all = [...found.keys()].map((key) => this.cells.get(key));
    for (const state of STATES) this.groups[state].update(all.filter((cell) => cell.session.state === state));
    this.oneTabStop();
  }

  oneTabStop() {
    const buttons = [...this.element.querySelectorAll(".cell")];
    const current = buttons.find((button) => button === document.activeElement) ?? buttons.find((button) => button.tabIndex === 0);
    for (const button of buttons) button.tabIndex = button === (current ?? buttons[0]) ? 0 : -1;
  }

  move(event) {
    const buttons = [...this.element.querySelectorAll(".cell")];
    const at = buttons.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (at < 0 || !buttons[to]) return;
    event.preventDefault();
    buttons[to].focus();
    this.oneTabStop();
  }
}

class Group {
  constructor(state) {
    this.size = make("span", { class: "dim" });
    this.cells = make("div", { class: "cells" });
    this.element = make("section", { "aria-label": state }, make("h3", {}, mark(state), ` ${state} `, this.size), this.cells);
  }

  update(cells) {
    const tokens = cells.reduce((sum, cell) => sum + cell.session.tokens, 0);
    write(this.size, cells.length ? `${count(cells.length)}, ${count(tokens)} tokens` : "none");
    arrange(this.cells, cells.map((cell) => cell.element));
  }
}

class Cell {
  constructor(look) {
    this.letter = make("b", { "aria-hidden": "true" });
    this.name = make("bdi", { "aria-hidden": "true" });
    this.element = make("button", { type: "button", tabindex: "-1", click: () => look(this.session) }, this.letter, this.name);
  }

  update(session, longest) {
    this.session = session;
    const side = Math.round(Math.max(CELL.least, CELL.most * Math.sqrt(session.tokens / longest)));
    this.element.className = `cell ${session.state}${session.pinned ? " pinned" : ""}`;
    this.element.style.width = this.element.style.height = `${side}px`;
    write(this.letter, session.state[0].toUpperCase());
    write(this.name, side >= CELL.named ? session.id : "");
    const used = `last used ${ago(serverNow() - session.last_used)}${session.pinned ? ", pinned" : ""}`;
    const what = `${session.id}: ${session.state}, ${count(session.tokens)} tokens, ${used}`;
    this.element.setAttribute("aria-label", what);
    this.element.title = what;
  }
}
