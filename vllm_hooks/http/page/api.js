// The API below /manthan, called with the key and as the tenant that this tab was given.

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
  header: "", // that names tenants here; empty where none does
  get key() { return sessionStorage.getItem(KEY) ?? ""; },
  set key(value) { value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY); },
  get tenant() { return sessionStorage.getItem(TENANT) ?? ""; },
  set tenant(value) { value ? sessionStorage.setItem(TENANT, value) : sessionStorage.removeItem(TENANT); },
};

let ahead = 0; // seconds that the server's clock is ahead of this machine's

export const serverNow = () => Date.now() / 1000 + ahead;

export const get = (path, query = {}) => call("GET", `${path}?${new URLSearchParams(query)}`);

export const steer = (session, action, body = {}) =>
  call("POST", `sessions/${encodeURIComponent(session.id)}/${action}`, body);

export const show = (session) => call("GET", `sessions/${encodeURIComponent(session.id)}`);

async function call(method, path, body) {
  const options = { method, headers: headers(), signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" };
  if (body) {
    options.body = JSON.stringify(body);
    options.headers.set("Content-Type", "application/json");
  }
  let response;
  let found;
  try {
    response = await fetch(new URL(path, document.baseURI), options);
    found = await response.json().catch(() => null);
  } catch {
    throw new ApiError("The server does not answer.", 0);
  }
  if (found?.now) ahead = found.now - Date.now() / 1000;
  if (response.ok && found) return found;
  throw new ApiError(sentence(found) ?? `The server answered with status ${response.status}.`, response.status);
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

const sentence = (found) => found?.error?.message ?? (typeof found?.error === "string" ? found.error : null);
