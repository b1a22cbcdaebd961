/* The server, as the page asks it. Every failure is an Error with one sentence, and a ``status`` where there was one. */

import { eventParser } from "../state/stream.js";

const ROOT = new URL("../../../", import.meta.url); // the server's, also behind a proxy with a path of its own
const url = (path) => new URL(path, ROOT);

/* An answer of the server, or an Error. */
async function asked(path, options = {}) {
  let response;
  try {
    response = await fetch(url(path), { credentials: "same-origin", cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw Object.assign(new Error("The server does not answer."), { status: 0 });
  }
  if (response.ok) return response;
  let said = `The server refused the request (status ${response.status}).`;
  try {
    const body = await response.json();
    said = body.error?.message ?? body.reason ?? said;
  } catch { /* a body that is not JSON has no sentence for a person */ }
  const seconds = Number(response.headers.get("retry-after"));
  throw Object.assign(new Error(said), { status: response.status, retryAfter: seconds > 0 ? seconds : null });
}

const posted = (path, body, more = {}) => asked(path, {
  method: more.method ?? "POST", headers: { "Content-Type": "application/json", ...more.headers }, body: JSON.stringify(body), signal: more.signal });

/* The models: their names, contexts, what is in force where a request says nothing, and whether they are loaded now. */
export async function models() {
  const found = (await (await asked("v1/models")).json()).data;
  return found.map((one) => ({ name: one.id, context: one.context_length ?? null, defaults: one.default_parameters ?? {}, isLoaded: one.loaded !== false }));
}

/* Buy a session with a key, which is then forgotten: a cookie that no script reads takes its place. */
export async function buySession(key) {
  await posted("session", {}, { headers: { "X-Api-Key": key } });
}

/* The dials of serving: {model, dials, may_change}. */
export async function dials() {
  return (await asked("v1/splitinfer/dials")).json();
}

/* Turn a model's dials; the same document, with what is in force then. */
export async function turn(model, changes) {
  return (await posted(`v1/splitinfer/dials?model=${encodeURIComponent(model)}`, changes, { method: "PATCH" })).json();
}

export async function endSession() {
  await asked("session", { method: "DELETE" });
}

/* The events of a stream; ``signal`` ends it. Yields lists of those that came together. */
export async function* events(path, options) {
  const response = await asked(path, { ...options, headers: { Accept: "text/event-stream", ...options.headers } });
  const reader = response.body.getReader(), decoder = new TextDecoder(), parser = eventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(ended);
      if (done) return;
      yield parser.feed(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/* A stream that was cut: by ourselves, or else. */
function ended(error) {
  if (error.name === "AbortError") throw error;
  throw Object.assign(new Error("The connection to the server was lost."), { status: 0 });
}

/* The stream of an answer. */
export function answer(body, signal) {
  return events("v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
}
