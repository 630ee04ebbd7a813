// How figures are written, and elements made of text: no code of the page reads a string as HTML.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const TIMES = [[86400, "d"], [3600, "h"], [60, "min"]];

export const count = (number) => whole.format(number);

export function bytes(number) {
  let unit = 0;
  while (number >= 1000 && unit < UNITS.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit && number < 100 ? number.toFixed(number < 10 ? 2 : 1) : whole.format(number)} ${UNITS[unit]}`;
}

export function span(seconds) {
  for (const [size, unit] of TIMES) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  if (seconds >= 10 || Number.isInteger(seconds)) return `${Math.floor(seconds)} s`;
  return seconds >= 1 ? `${seconds.toFixed(1)} s` : `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}

export const ago = (seconds) => (seconds < 2 ? "now" : `${span(Math.floor(seconds))} ago`);
export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");
export const share = (part, all) => (all > 0 ? `${Math.min(100, (part / all) * 100).toFixed(0)}%` : "–");
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

// An element with attributes (functions: listeners of that event) and children, of which strings become text.
export function make(tag, attributes = {}, ...children) {
  const element = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Text that changes only where it must: what is selected or read aloud is left alone.
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const byId = (id) => document.getElementById(id);

// A list drawn anew if it says something else. The focus stays where it is, by index if not by element.
export function replaceList(list, lines, nothing) {
  const told = lines.length ? lines : [make("li", { class: "dim" }, nothing)];
  const says = (some) => some.map((line) => line.textContent).join("\n");
  if (says([...list.children]) === says(told)) return;
  const focused = [...list.children].findIndex((line) => line.contains(document.activeElement));
  list.replaceChildren(...told);
  if (focused >= 0) list.children[Math.min(focused, told.length - 1)].querySelector("button")?.focus({ preventScroll: true });
}
