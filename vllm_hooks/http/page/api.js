// The API below /manthan, called with the key and as the tenant that this tab was given.

const KEY = "manthan-key";
const TENANT = "manthan-tenant";
const PATIENCE_MS = 10_000;
const SILENT = "The server does not answer.";

export class ApiError extends Error {
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

export const credentials = {
  header: "", // that names tenants here; empty where none does
  get key() { return sessionStorage.getItem(KEY) ?? ""; },
  set key(value) { value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY); },
  get tenant() { return sessionStorage.getItem(TENANT) ?? ""; },
  set tenant(value) { value ? sessionStorage.setItem(TENANT, value) : sessionStorage.removeItem(TENANT); },
};

let ahead = 0; // seconds that the server's clock is ahead of this machine's

export const serverNow = () => Date.now() / 1000 + ahead;
export const get = (path) => call("GET", path);
export const steer = (session, action, body = {}) =>
  call("POST", `sessions/${encodeURIComponent(session.id)}/${action}`, body);
export const show = (session) => get(`sessions/${encodeURIComponent(session.id)}`);

// Server-sent events, [name, data] each, until the signal ends them. EventSource would send no key.
export async function* changes(query, signal) {
  const patience = new AbortController();
  let timer = setTimeout(() => patience.abort(), PATIENCE_MS);
  try {
    const options = { headers: headers(), signal: AbortSignal.any([signal, patience.signal]), cache: "no-store" };
    const response = await fetch(new URL(`changes?${new URLSearchParams(query)}`, document.baseURI), options);
    if (!response.ok) throw refusal(response, await response.json().catch(() => null));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      clearTimeout(timer);
      timer = setTimeout(() => patience.abort(), PATIENCE_MS);
      const events = (text + part.value).split("\n\n");
      text = events.pop();
      for (const [, name, data] of events.map((event) => event.match(/^event: (.*)\ndata: (.*)$/))) {
        if (name === "error") throw new ApiError(JSON.parse(data), 503);
        if (name === "now") ahead = JSON.parse(data) - Date.now() / 1000;
        yield [name, JSON.parse(data)];
      }
    }
    throw new Error("the stream has ended");
  } catch (error) {
    if (!signal.aborted) throw error instanceof ApiError ? error : new ApiError(SILENT, 0);
  } finally {
    clearTimeout(timer);
  }
}

async function call(method, path, body) {
  const options = { method, headers: headers(), signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" };
  if (body) {
    options.body = JSON.stringify(body);
    options.headers.set("Content-Type", "application/json");
  }
  const response = await fetch(new URL(path, document.baseURI), options).catch(() => { throw new ApiError(SILENT, 0); });
  const found = await response.json().catch(() => null);
  if (response.ok && found) return found;
  throw refusal(response, found);
}

function refusal(response, found) {
  const sentence = found?.error?.message ?? found?.error; // vLLM's own answers have a text there
  return new ApiError(sentence ?? `The server answered with status ${response.status}.`, response.status);
}

function headers() {
  const found = new Headers();
  try {
    if (credentials.key) found.set("Authorization", `Bearer ${credentials.key}`);
    // Names of tenants are UTF-8; a header's value is given as one character a byte.
    const name = String.fromCharCode(...new TextEncoder().encode(credentials.tenant));
    if (credentials.header && name) found.set(credentials.header, name);
  } catch {
    throw new ApiError("The API key or the tenant's name has characters that cannot be sent.", 0);
  }
  return found;
}
