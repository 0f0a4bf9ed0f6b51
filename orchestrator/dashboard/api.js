// The service: requests with the key, and server-sent events that are taken up again where they broke off.

const KEY_ITEM = "longprefill.key";
const ANSWER_MS = 90_000; // the service itself waits up to a minute for a controller that comes back
const SILENCE_MS = 40_000; // its streams say something at least every 15 s
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10_000;

/** The API key of this tab. It is never put into an address or a lasting store. */
export const key = {
  get: () => sessionStorage.getItem(KEY_ITEM),
  set: (value) => sessionStorage.setItem(KEY_ITEM, value),
  forget: () => sessionStorage.removeItem(KEY_ITEM),
};

/** The service answered, and said no. */
export class Refusal extends Error {
  constructor(status, body) {
    super(typeof body?.error?.message === "string" ? body.error.message : `HTTP ${status}`);
    this.status = status;
    this.body = body;
  }

  /** Whether asking again may help. */
  get isPassing() {
    return this.status === 429 || this.status >= 500;
  }
}

/** Nothing answered. */
export class Unreachable extends Error {}

/** A response with status 2xx. Raises Refusal or Unreachable, and AbortError when `signal` says so. */
export async function ask(path, { method = "GET", headers = {}, signal = null } = {}) {
  const late = new AbortController();
  const timer = setTimeout(() => late.abort(), ANSWER_MS);
  const known = key.get();
  let response;
  try {
    response = await fetch(path, {
      method,
      headers: { ...(known === null ? {} : { authorization: `Bearer ${known}` }), ...headers },
      signal: signal === null ? late.signal : AbortSignal.any([signal, late.signal]),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Unreachable("the service does not answer");
  } finally {
    clearTimeout(timer);
  }
  if (response.ok) return response;
  throw new Refusal(response.status, await bodyOf(response));
}

/** The JSON of an answer, which is whole in time. */
export async function askJson(path, options) {
  return JSON.parse(await askText(path, options));
}

export async function askText(path, { signal = null, ...options } = {}) {
  const limit = AbortSignal.timeout(ANSWER_MS);
  const response = await ask(path, { ...options, signal: signal === null ? limit : AbortSignal.any([signal, limit]) });
  try {
    return await response.text();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Unreachable("the service broke off its answer");
  }
}

/** The JSON that comes with a refusal; null when it is not from the service itself. */
async function bodyOf(response) {
  try {
    return await response.json();
  } catch {
    return null;
  }
}

export const jobPath = (job, tail = "") => `/v1/prefill/jobs/${encodeURIComponent(job)}${tail}`;

/**
 * Follows a stream of events until it has ended (returns) or `signal` is aborted. After a break it asks again with
 * Last-Event-ID, so nothing is missed or repeated. `onEvent(data, name)`, `onOpen()`, `onLost(error, pause_ms)`.
 * Raises Refusal when the service will not let it follow.
 */
export async function follow(path, { onEvent, onOpen, onLost, signal }) {
  let last = null;
  let pause_ms = FIRST_PAUSE_MS;
  while (!signal.aborted) {
    try {
      const response = await ask(path, { headers: last === null ? {} : { "last-event-id": last }, signal });
      if (response.status === 204) return;
      onOpen();
      for await (const message of messages(response.body, signal)) {
        if (message.data === null) continue; // the other side is there
        pause_ms = FIRST_PAUSE_MS;
        if (message.name === "error") throw new Refusal(503, JSON.parse(message.data));
        if (message.id !== null) last = message.id;
        onEvent(JSON.parse(message.data), message.name);
      }
      if (signal.aborted) return;
      pause_ms = FIRST_PAUSE_MS; // it was closed in order: the next answer says whether more follows
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refusal && !error.isPassing) throw error;
      onLost(error, pause_ms);
    }
    await pause(pause_ms, signal);
    pause_ms = Math.min(2 * pause_ms, LONGEST_PAUSE_MS);
  }
}

/** Messages of a text/event-stream as they come; comments are messages with data null. */
export async function* messages(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let message = { id: null, name: null, data: null };
  try {
    while (true) {
      const { value, done } = await withinSilence(reader.read());
      if (done) return;
      text += value;
      const lines = text.split(/\r\n|\n|\r(?!$)/);
      text = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (message.data !== null) yield message;
          message = { id: null, name: null, data: null };
        } else if (line.startsWith(":")) {
          yield { id: null, name: null, data: null };
        } else {
          const colon = line.indexOf(":");
          const field = colon < 0 ? line : line.slice(0, colon);
          const given = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
          if (field === "data") message.data = message.data === null ? given : `${message.data}\n${given}`;
          else if (field === "id") message.id = given;
          else if (field === "event") message.name = given;
        }
      }
    }
  } catch (error) {
    if (signal.aborted || error instanceof Unreachable) throw error;
    throw new Unreachable("the connection broke off");
  } finally {
    reader.cancel().catch(() => {}); // it has ended or failed already
  }
}

async function withinSilence(reading) {
  let timer;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Unreachable("the connection went silent")), SILENCE_MS);
  });
  try {
    return await Promise.race([reading, silence]);
  } finally {
    clearTimeout(timer);
  }
}

/** Waits, at most until `signal` is aborted. */
export function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end); // a page polls for days
      resolve();
    };
    const timer = setTimeout(end, milliseconds);
    signal.addEventListener("abort", end);
  });
}
