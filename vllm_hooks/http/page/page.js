// The live page: listens to the API while the page is visible, and hands the answers to the drawing modules.

import { ApiError, changes, credentials, get, steer } from "./api.js";
import { Glance } from "./glance.js";
import { Life } from "./life.js";
import { mark, STATES, Table } from "./sessions.js";
import { ago, byId, clock, count, make, plural, write } from "./text.js";

const AGAIN_MS = 2000;
const HOLD_MS = 5000; // after somebody has touched the rows, they do not move for this time
const SAID_MS = 8000;
const ROWS = matchMedia("(max-width: 640px)").matches ? 10 : 25;
const HOLDS = 300; // loads of an image: about a second

const told = {}; // the last data of each of the server's events, by the name of the event
const sorting = { sort: "last_used", order: "desc" };
const life = new Life(act, () => told.state.store.refinements);
const look = (session) => life.open(session);
const glance = new Glance(look);
const table = new Table(look, act, sortBy);

let offset = 0;
let stream = new AbortController();
let timer = 0;
let saidTimer = 0;
let answeredAt = 0;
let touchedAt = 0;
let failing = false;
let locked = false; // until a key is given
let paused = false;

// -- listening ----------------------------------------------------------------------------------------

// Listens anew, with the current query.
async function listen() {
  stream.abort();
  clearTimeout(timer);
  if (document.hidden || paused || locked) return;
  stream = new AbortController();
  const { signal } = stream;
  try {
    for await (const [name, data] of changes({ ...sorting, limit: ROWS, offset, ...filter() }, signal)) {
      if (signal.aborted) return;
      told[name] = data;
      if (name === "now") await draw(); // the end of a round
    }
  } catch (error) {
    failed(error);
    timer = setTimeout(listen, AGAIN_MS);
  }
}

// Keeps the page's load event back until the first answers are drawn, by an image that is loaded again and again. A
// browser that takes a picture of the page (--screenshot) waits for that event alone.
function holdLoad() {
  const image = new Image();
  let left = HOLDS;
  image.onload = () => { if (left-- && !answeredAt && !failing && !locked) image.src = `icon.svg?${left}`; };
  image.onload();
}

async function draw() {
  if (failing) glance.happened("The server answers again.");
  failing = false;
  answeredAt = Date.now();
  document.body.classList.remove("stale");
  write(byId("trouble"), "");
  glance.update({ ...told.state, now: told.now });
  showSessions(told.sessions);
  if (byId("life").open) await life.refresh();
}

function failed(error) {
  if (!(error instanceof ApiError)) throw error;
  if (error.status === 401) return lock();
  const since = answeredAt ? ` What is shown is of ${clock(answeredAt / 1000)}.` : "";
  write(byId("trouble"), `${error.message}${since}`);
  if (!failing) glance.happened(error.message);
  failing = true;
  document.body.classList.add("stale");
  document.title = "▲ no answer – Manthan";
}

// -- the sessions -------------------------------------------------------------------------------------

function filter() {
  const asked = {};
  for (const [name, value] of new FormData(byId("filter"))) {
    if (value) asked[name] = asked[name] ? `${asked[name]},${value}` : value; // several states
  }
  return asked;
}

function showSessions({ sessions, total }) {
  const lost = byId("view").contains(document.activeElement);
  const held = Date.now() - touchedAt < HOLD_MS;
  table.update(sessions, held);
  if (lost && document.activeElement === document.body) byId("sessions").focus({ preventScroll: true });
  byId("view").hidden = byId("pager").hidden = total === 0;
  byId("empty").hidden = total > 0;
  write(byId("empty"), Object.keys(filter()).length
    ? "No session is as the filter wants it." : "No sessions yet. One appears here with its first request.");
  write(byId("held"), held ? "Rows stay in place while you work on them." : "");
  byId("previous").hidden = byId("next").hidden = total <= ROWS;
  byId("previous").disabled = offset === 0;
  byId("next").disabled = offset + ROWS >= total;
  write(byId("range"), `${count(offset + 1)}–${count(offset + sessions.length)} of ${plural(total, "session")}`);
  if (offset >= total && offset > 0) turnTo(0);
}

function turnTo(to) {
  offset = Math.max(0, to);
  touchedAt = 0;
  listen();
}

function sortBy(column) {
  const first = ["id", "state", "expected"].includes(column) ? "asc" : "desc";
  sorting.order = sorting.sort === column ? { asc: "desc", desc: "asc" }[sorting.order] : first;
  sorting.sort = column;
  table.sorted(sorting.sort, sorting.order);
  turnTo(0);
}

// -- steering -----------------------------------------------------------------------------------------

async function act(session, action) {
  const refused = action.refused(session);
  if (refused) return say(`${session.id} ${refused}.`);
  const isRelease = action.name === "release";
  if (isRelease && !(await confirmed(session))) return;
  const name = action.name === "pin" && session.pinned ? "unpin" : action.name;
  try {
    const found = await steer(session, name);
    if (isRelease) {
      touchedAt = 0;
      byId("life").close();
    }
    const now = `the session is ${found.state}${found.pinned ? " and pinned" : ""}`;
    say(`${session.id}${isRelease ? " is released." : `: ${name} is accepted, ${now}.`}`);
  } catch (error) {
    if (error.status === 401) return lock();
    say(error.message, true);
  }
  listen();
}

function say(what, isError = false) {
  clearTimeout(saidTimer);
  const line = document.querySelector("dialog[open] .said") ?? byId("said");
  write(line, what);
  line.classList.toggle("error", isError);
  saidTimer = setTimeout(() => write(line, ""), isError ? 2 * SAID_MS : SAID_MS);
}

function confirmed(session) {
  const dialog = byId("confirm");
  byId("confirm-title").replaceChildren("Release ", make("bdi", {}, session.id), "?");
  write(byId("confirm-text"), "What is kept of it is dropped, in the pool and in the cold store. "
    + `If the session returns, its ${plural(session.tokens, "token")} are computed again.`);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((settle) => dialog.addEventListener("close", () => settle(dialog.returnValue === "yes"), { once: true }));
}

// -- key and tenant -----------------------------------------------------------------------------------

function lock() {
  locked = true;
  write(byId("trouble"), "The server wants an API key.");
  write(byId("key-trouble"), credentials.key ? "The server does not take this key." : "");
  askForKey();
}

function askForKey() {
  if (byId("key-dialog").open) return;
  byId("key-button").hidden = false;
  byId("key-forget").hidden = !credentials.key;
  byId("key").value = "";
  byId("key-dialog").showModal();
}

function useKey(key) {
  credentials.key = key;
  locked = false;
  byId("key-dialog").close();
  start();
}

// Shows the field for a tenant if the server reads tenants from a header. A gateway that sets the header keeps the page
// from reading the configuration, so that the field stays hidden.
async function start() {
  credentials.header = "";
  const config = await get("config").catch(() => ({}));
  credentials.header = config["tenants.header"]?.value || "";
  byId("tenant-field").hidden = !credentials.header;
  byId("tenant-field").title = `Sent as ${credentials.header}`;
  listen();
}

// -- at the start -------------------------------------------------------------------------------------

const on = (id, event, does) => byId(id).addEventListener(event, does);
for (const event of ["pointermove", "pointerdown", "keydown"]) on("view", event, () => { touchedAt = Date.now(); });
for (const event of ["visibilitychange", "offline", "online"]) window.addEventListener(event, listen);
for (const form of ["filter", "controls", "key-form"]) on(form, "submit", (event) => event.preventDefault());
on("pause", "click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", paused);
  listen();
});
on("previous", "click", () => turnTo(offset - ROWS));
on("next", "click", () => turnTo(offset + ROWS));
on("filter", "input", () => turnTo(0));
on("tenant", "change", () => { credentials.tenant = byId("tenant").value.trim(); listen(); });
on("key-button", "click", askForKey);
on("key-form", "submit", () => useKey(byId("key").value.trim()));
on("key-forget", "click", () => useKey(""));
byId("states").append(...STATES.map((state) =>
  make("label", {}, make("input", { type: "checkbox", name: "state", value: state }), mark(state), ` ${state}`)));
byId("tenant").value = credentials.tenant;
byId("key-button").hidden = !credentials.key;
table.sorted(sorting.sort, sorting.order);
byId("view").append(table.element);
setInterval(() => {
  write(byId("age"), paused ? "Paused" : answeredAt ? `updated ${ago((Date.now() - answeredAt) / 1000)}` : "");
}, 1000);
holdLoad();
start();
