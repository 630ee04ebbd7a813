// What an operator looks for first: is the store up, is it full, who goes next, what went wrong.

import { Chart } from "./charts.js";
import { STATES } from "./sessions.js";
import { ago, byId, bytes, clock, count, make, plural, replaceList, share, span, write } from "./text.js";

const WRONG = 12; // lines kept of what went wrong
const FIRST = 20; // shown of the policy's order
const FULL = 0.97; // blocks are dropped before the last byte is taken
const TILES = {
  store: "Cold store", used: "Store used", pool: "Pool", sessions: "Sessions", failures: "Failures",
  quality: "Codec, quality", saved: "Tokens restored",
};

export class Glance {
  // look(session): show its life; of a session in the policy's order only the id is known.
  constructor(look) {
    this.look = look;
    this.charts = new Map();
    this.wrong = [];
    this.before = null;
    this.opened = Date.now() / 1000;
    this.tellWrong();
    byId("glance").append(...Object.entries(TILES).map(([name, title]) => make("div", { "data-tile": name },
      make("dt", {}, title), make("dd", { class: "figure" }, "…"), make("dd", { class: "note" }))));
  }

  update(now) {
    const { model, policy, pool, store, totals, version } = now;
    const used = Math.max(pool.session_bytes, pool.bytes * (1 - pool.free_blocks / pool.blocks));
    write(byId("where"), `${model} · policy ${policy.name} · codec ${store.codec} · ${version}`);
    document.title = `${store.up ? "" : "▲ store down – "}Manthan: pool ${share(used, pool.bytes)}`;
    this.compare(now);
    tile("store", store.up ? "up" : "▲ DOWN", store.tiers.map((tier) => tier.name).join(", ") || store.kind, store.up ? "" : "bad");
    tileOfTiers(store.tiers);
    tile("pool", share(used, pool.bytes), `${bytes(used)} of ${bytes(pool.bytes)} in use or not saved; saved copies count as free`);
    tile("sessions", count(STATES.reduce((sum, state) => sum + now.sessions[state], 0)),
      STATES.map((state) => `${count(now.sessions[state])} ${state}`).join(", "));
    tile("failures", count(totals.failures), this.wrong.length
      ? `since the start; last trouble seen ${ago(Date.now() / 1000 - this.wrong[0].at)}`
      : "since the start; none seen here", this.wrong.length ? "bad" : "");
    tileOfReturns(totals, now.token_s);
    const cached = Math.max(0, totals.prompt_tokens - totals.computed_tokens);
    const lossy = cached ? `. Of the tokens from the cache ${share(totals.lossy_tokens, cached)} were lossy, the others exact` : "";
    const waits = store.measuring;
    const guard = waits ? `${waits.codec} measured on ${waits.blocks} of ${waits.of} blocks; ${store.codec} until then`
      : ["slow", "unfaithful"].includes(store.verdict) ? `guard: the configured codec is ${store.verdict} on this model`
      : `guard: ${store.verdict.replace("none", "off, or no verdict yet")}`;
    tile("quality", store.codec, `${guard}${lossy}`, ["slow", "unfaithful"].includes(store.verdict) ? "bad" : "");
    this.chart("Pool", ["not saved", "others"]).add(now.now, [pool.session_bytes, used - pool.session_bytes], pool.bytes);
    for (const tier of store.tiers) {
      this.chart(`Cold store: ${tier.name}`, ["used"]).add(now.now, [tier.used_bytes], tier.budget_bytes);
    }
    write(byId("order-title"), `Goes first (${policy.name})`);
    replaceList(byId("order"), policy.order.slice(0, FIRST).map((id) => this.entry(id)), "Nobody: no session has anything to drop.");
  }

  chart(title, parts) {
    if (!this.charts.has(title)) {
      this.charts.set(title, new Chart(title, parts));
      byId("charts").append(this.charts.get(title).element);
    }
    return this.charts.get(title);
  }

  // What went wrong between two answers.
  compare(now) {
    const wasUp = this.before?.store.up ?? true;
    const more = this.before ? now.totals.failures - this.before.totals.failures : 0;
    if (more > 0) this.happened(`${plural(more, "failure")}: the server's log says what failed.`);
    if (wasUp !== now.store.up) this.happened(`The cold store is ${now.store.up ? "up again" : "down"}.`);
    this.before = now;
  }

  happened(what) {
    this.wrong.unshift({ at: Date.now() / 1000, what });
    this.wrong.length = Math.min(this.wrong.length, WRONG);
    this.tellWrong();
  }

  tellWrong() {
    const lines = this.wrong.map((each) => make("li", {}, make("time", { class: "dim" }, clock(each.at)), ` ${each.what}`));
    replaceList(byId("wrong"), lines, `Nothing since ${clock(this.opened)}, when this page was opened.`);
  }

  entry(id) {
    const look = () => this.look({ id });
    return make("li", {}, make("button", { type: "button", class: "open", title: id, click: look }, make("bdi", {}, id)));
  }
}

function tile(name, figure, note, mood = "") {
  const found = document.querySelector(`[data-tile=${name}]`);
  write(found.querySelector(".figure"), figure);
  write(found.querySelector(".note"), note);
  found.className = mood;
}

// The last tier is where blocks stay; one in front of it is full most of the time, and loses nothing by that.
function tileOfTiers(tiers) {
  if (!tiers.length) return tile("used", "–", "no tier");
  const { name, used_bytes: used, budget_bytes: budget } = tiers.at(-1);
  const isFull = used >= FULL * budget;
  const note = `${name}: ${bytes(used)} of ${bytes(budget)}${isFull ? ". ▲ Full: blocks are dropped" : ""}`;
  tile("used", share(used, budget), note, isFull ? "bad" : "");
}

// A return is a request that continues a session. Of the tokens that the session had, some are computed again.
function tileOfReturns(totals, each) {
  const { return_resident_tokens: resident, return_restored_tokens: restored, return_recomputed_tokens: again } = totals;
  const instead = each ? `, about ${span(restored * each)} longer` : "";
  tile("saved", count(totals.restored_tokens), `in ${span(totals.restore_ms / 1000)}, ${plural(totals.restores, "restore")}. `
    + `${plural(totals.returns, "return")}: ${count(resident)} tokens resident, ${count(restored)} restored, `
    + `${count(again)} computed again. Without Manthan ${count(restored + again)} computed again${instead}`);
}
