// The server's API. The key is stored until the tab is closed.

import { eventsOf } from "./events.js";
import { keep, recall } from "./kept.js";

const KEY = "ckdist.key";

// A failed request: HTTP's `status`, or 0 if the server could not be reached.
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Server {
  get key() {
    return recall(KEY, "sessionStorage") ?? "";
  }

  set key(key) {
    keep(KEY, key || null, "sessionStorage");
  }

  // The answer of `path`. Throws ServerError for all but 2xx.
  async fetch(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError(0, "The server does not answer.");
    }
    if (!response.ok) throw new ServerError(response.status, await reason(response));
    return response;
  }

  async models() {
    return (await (await this.fetch("v1/models")).json()).data;
  }

  // 200 once requests are answered; ServerError 503 while the model loads.
  async health() {
    await this.fetch("health");
  }

  // Yields the chunks of an answer to a chat.
  async *chat(body, signal) {
    const headers = { "Content-Type": "application/json" };
    const response = await this.fetch("v1/chat/completions",
      { method: "POST", headers, body: JSON.stringify({ ...body, stream: true }), signal });
    for await (const data of this.guarded(eventsOf(response.body))) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.code ?? 500, chunk.error.message);
      yield chunk;
    }
    throw new ServerError(0, "The server was lost in the middle of the answer.");
  }

  // Yields events with the state of the machine as `model` uses it, twice a second, until the server ends them.
  async *machine(model, signal) {
    const response = await this.fetch(`v1/machine?model=${encodeURIComponent(model)}`, { signal });
    for await (const data of this.guarded(eventsOf(response.body))) yield JSON.parse(data);
  }

  // A connection that ends in the middle means that the server was lost.
  async *guarded(events) {
    try {
      yield* events;
    } catch (error) {
      if (error.name === "AbortError" || error instanceof ServerError) throw error;
      throw new ServerError(0, "The server was lost in the middle of the answer.");
    }
  }
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}
