// The API below /manthan. Each call has the API key and the tenant of this tab.

const KEY = "manthan-key";
const TENANT = "manthan-tenant";
const PATIENCE_MS = 10_000;

export class ApiError extends Error {
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

export const credentials = {
  header: "", // name of the header with the tenant; empty if the server reads none
  get key() { return sessionStorage.getItem(KEY) ?? ""; },
  set key(value) { value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY); },
  get tenant() { return sessionStorage.getItem(TENANT) ?? ""; },
  set tenant(value) { value ? sessionStorage.setItem(TENANT, value) : sessionStorage.removeItem(TENANT); },
};

let ahead = 0; // seconds that the server's clock is ahead of this machine's

export const serverNow = () => Date.now() / 1000 + ahead;
export const get = (path) => call("GET", path);
export const show = (session) => get(`sessions/${encodeURIComponent(session.id)}`);
export const steer = (session, action) => call("POST", `sessions/${encodeURIComponent(session.id)}/${action}`);

// Server-sent events, [name, data] each, until the signal ends them. EventSource would send no key.
export async function* changes(query, signal) {
  const patience = new AbortController();
  let timer = 0;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => patience.abort(), PATIENCE_MS);
  };
  try {
    wait();
    const response = await request("GET", `changes?${new URLSearchParams(query)}`, AbortSignal.any([signal, patience.signal]));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      wait();
      const events = (text + part.value).split("\n\n");
      text = events.pop();
      for (const [, name, data] of events.map((event) => event.match(/^event: (.*)\ndata: (.*)$/))) {
        const found = JSON.parse(data);
        if (name === "error") throw new ApiError(found, 503);
        if (name === "now") ahead = found - Date.now() / 1000;
        yield [name, found];
      }
    }
    throw new Error("the stream has ended");
  } catch (error) {
    if (!signal.aborted) throw said(error);
  } finally {
    clearTimeout(timer);
  }
}

async function call(method, path) {
  try {
    return await (await request(method, path, AbortSignal.timeout(PATIENCE_MS))).json();
  } catch (error) {
    throw said(error);
  }
}

async function request(method, path, signal) {
  const response = await fetch(new URL(path, document.baseURI), { method, signal, headers: headers(), cache: "no-store" });
  if (response.ok) return response;
  const error = (await response.json().catch(() => null))?.error; // of vLLM's own answers, a text
  throw new ApiError(error?.message ?? error ?? `The server answered with status ${response.status}.`, response.status);
}

const said = (error) => (error instanceof ApiError ? error : new ApiError("The server does not answer.", 0));

function headers() {
  try {
    const found = new Headers();
    if (credentials.key) found.set("Authorization", `Bearer ${credentials.key}`);
    // Names of tenants are UTF-8; a header's value is given as one character a byte.
    const name = String.fromCharCode(...new TextEncoder().encode(credentials.tenant));
    if (credentials.header && name) found.set(credentials.header, name);
    return found;
  } catch {
    throw new ApiError("The API key or the tenant's name has characters that cannot be sent.", 0);
  }
}
