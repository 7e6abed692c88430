// Owns the calls of the REST API: the token, errors as one text, event streams. Must not draw anything.
import { createParser, signal } from "../vendor/vendor.js";

const KEY = "penstock-token";
const RETRY_MS = [1000, 2000, 5000, 10000, 30000];

/** The token of this tab, "" if it is not signed in. It is never stored beyond the tab. */
export const token = signal(sessionStorage.getItem(KEY) ?? "");

export function signIn(text) {
  token.value = text.trim();
  if (token.value) sessionStorage.setItem(KEY, token.value);
  else sessionStorage.removeItem(KEY);
}

/** Signs in if the API accepts the token. Throws ApiError. */
export async function checkedSignIn(text) {
  await send("GET", "/v1/whoami", { headers: { Authorization: `Bearer ${text.trim()}` } });
  signIn(text);
}

export const signOut = () => signIn("");

/** An answer that is an error. `status`: 0 if there was no answer. */
export class ApiError extends Error {
  constructor(status, detail, faults = []) {
    super(detail);
    this.status = status;
    this.faults = faults;
  }
}

const query = (params) => {
  const given = Object.entries(params ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `?${new URLSearchParams(given)}` : "";
};

async function send(method, path, { body, params, headers, signal: abort } = {}) {
  const sent = { Accept: "application/json", ...headers };
  if (token.value && !sent.Authorization) sent.Authorization = `Bearer ${token.value}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path + query(params), {
      method, headers: sent, signal: abort, redirect: "error", cache: "no-store", credentials: "omit",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The API does not answer. Is the platform running?");
  }
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => ({}));
  if (answer.status === 401) signOut();
  throw new ApiError(answer.status, String(found.detail ?? found.title ?? `status ${answer.status}`), found.errors ?? []);
}

/** The JSON answer of a call. Throws ApiError. */
export async function call(method, path, options) {
  const answer = await send(method, path, options);
  return answer.status === 204 ? null : answer.json();
}

export const get = (path, params, options) => call("GET", path, { params, ...options });
/** A JSON answer and its entity tag, by which a change can say what it was made from. Throws ApiError. */
export async function getTagged(path, options) {
  const answer = await send("GET", path, options);
  return { value: await answer.json(), tag: answer.headers.get("ETag") };
}

export const runPath = (run, rest = "") => `/v1/runs/${encodeURIComponent(run)}${rest}`;

/** A file, saved by the browser under `name`. */
export async function download(path, name, params) {
  const answer = await send("GET", path, { params, headers: { Accept: "*/*" } });
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(await answer.blob()), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const sleep = (ms, abort) => new Promise((done) => {
  const timer = setTimeout(done, ms);
  abort.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
});

/** Calls `take(event)` for each server-sent event until `abort`; connects again where it was cut off.
 *  `status(text)`: "" while connected, else why not. */
export async function stream(path, take, abort, status = () => {}) {
  let last = "", failures = 0;
  while (!abort.aborted) {
    try {
      const headers = { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) };
      const answer = await send("GET", path, { headers, signal: abort });
      status("");
      const parser = createParser({ onEvent: (event) => { last = event.id ?? last; failures = 0; take(event); } });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader.read(); !part.done; part = await reader.read()) parser.feed(part.value);
      if (failures === 0) failures = 1;
    } catch (error) {
      if (abort.aborted || error.status === 401 || error.status === 404) return;
      failures += 1;
      status(error.message);
    }
    await sleep(RETRY_MS[Math.min(failures, RETRY_MS.length) - 1], abort);
  }
}
