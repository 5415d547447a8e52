// One answer under way: requests it, adds its parts to its message, and stores the message now and then.

import { messagesFor } from "./conversation.js";

const KEEP_MS = 1000;

export class Generation {
  // `changed(message)` is called whenever the message has grown or ended.
  constructor(server, store, conversation, message, changed) {
    Object.assign(this, { server, store, conversation, message, changed });
    this.controller = new AbortController();
    this.keptAt = 0;
  }

  stop() {
    this.controller.abort();
  }

  // Runs until the answer has ended or failed. Throws only ServerError 401.
  async run(instructions, fields) {
    const { message, conversation } = this;
    const messages = messagesFor(conversation, message.id, instructions);
    const body = { ...fields, model: message.model, messages, stream_options: { include_usage: true } };
    let refused = null;
    try {
      for await (const chunk of this.server.chat(body, this.controller.signal)) this.take(chunk);
      message.state = "done";
    } catch (error) {
      if (error.name === "AbortError") message.state = "stopped";
      else this.fail(error);
      refused = error.status === 401 ? error : null;
    }
    if (message.thoughtSeconds === undefined && message.reasoning) this.endThought();
    conversation.updated = Date.now();
    this.changed(message);
    await this.store.save(conversation).catch(() => {});
    if (refused) throw refused;
  }

  fail(error) {
    this.message.state = "failed";
    this.message.error = error.message;
  }

  take(chunk) {
    const { message } = this;
    const choice = chunk.choices?.[0];
    const reasoning = choice?.delta.reasoning_content ?? "", text = choice?.delta.content ?? "";
    if (reasoning && !message.reasoning) this.thoughtAt = performance.now();
    if (text && message.reasoning && message.thoughtSeconds === undefined) this.endThought();
    message.reasoning += reasoning;
    message.text += text;
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    if (chunk.timings) message.figures = figuresOf(chunk.timings);
    if (reasoning || text) this.changed(message);
    if (performance.now() - this.keptAt > KEEP_MS) {
      this.keptAt = performance.now();
      this.store.save(this.conversation).catch(() => {});
    }
  }

  endThought() {
    this.message.thoughtSeconds = Math.round((performance.now() - this.thoughtAt) / 1000);
  }
}

function figuresOf(timings) {
  return { prompt: timings.prompt_n + timings.cache_n, cached: timings.cache_n, tokens: timings.predicted_n,
    speed: timings.predicted_per_second };
}
