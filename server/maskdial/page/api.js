/** Requests to the server that this page came from. */

import { askForKey, authorization } from "./key.js";

/** What the server, or the way to it, said went wrong. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The absolute address of a route, below whatever prefix a proxy puts before it. */
export function address(path) {
  return new URL(path.replace(/^\//, ""), document.baseURI).href;
}

/**
 * Sends JSON and reads JSON.
 *
 * @returns {Promise<{content: any, headers: Headers, seconds: number}>}
 */
export async function post(path, body, signal) {
  const started = performance.now();
  const reply = await send(path, { method: "POST", body: JSON.stringify(body), signal });
  const content = await reply.json();
  return { content, headers: reply.headers, seconds: (performance.now() - started) / 1e3 };
}

/** Sends JSON to a route for administrators, and asks for their key where it has to. */
export async function administer(path, body) {
  const options = { method: "POST", body: JSON.stringify(body), kind: "admin" };
  return (await send(path, options)).json();
}

/** The JSON at a route. */
export async function get(path, signal) {
  return (await send(path, { signal })).json();
}

/** The JSON at a route, without asking for a key. */
export async function peek(path) {
  return (await checked(await attempt(path, {}))).json();
}

/** The text at a route. Does not ask for a key: `/metrics` may have one of its own. */
export async function getText(path) {
  return (await checked(await attempt(path, {}))).text();
}

/**
 * Sends JSON and reads server-sent events.
 *
 * @yields {any} each event's data; OpenAI's closing `[DONE]` is left out
 * @throws {ApiError} also where the stream says that it failed
 */
export async function* stream(path, body, signal, headers = {}) {
  const reply = await send(path, { method: "POST", body: JSON.stringify(body), signal, headers });
  for await (const data of eventData(reply.body)) {
    if (data === "[DONE]") continue;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(sentence(event));
    yield event;
  }
}

async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const lines = event.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

async function send(path, options) {
  for (;;) {
    const reply = await attempt(path, options);
    if (reply.ok) return reply;
    const error = new ApiError(await reason(reply), reply.status);
    if (reply.status !== 401 || !(await askForKey(error.message, options.kind ?? "ask"))) throw error;
  }
}

async function checked(reply) {
  if (!reply.ok) throw new ApiError(await reason(reply), reply.status);
  return reply;
}

async function attempt(path, { kind, ...options }) {
  const headers = { ...options.headers, ...authorization(kind) };
  if (options.body) headers["content-type"] = "application/json";
  try {
    return await fetch(address(path), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server does not answer; is it still running?");
  }
}

async function reason(reply) {
  try {
    return sentence(await reply.json());
  } catch {
    return `the server answered with status ${reply.status}`;
  }
}

/** The sentence of an error in any dialect. */
function sentence(content) {
  const { error } = content;
  return typeof error === "string" ? error : error.message;
}
