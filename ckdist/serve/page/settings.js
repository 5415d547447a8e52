// Sampling settings, and instructions to the model. An empty field is not sent: the server's default applies.

import { byId } from "./dom.js";
import { keep, recall } from "./kept.js";

const KEPT = "ckdist.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repeat_penalty", "max_tokens", "seed"];

export class Settings {
  constructor() {
    this.values = read();
    const dialog = byId("settings"), form = byId("settings-form");
    byId("open-settings").addEventListener("click", () => {
      for (const field of form.elements) if (field.name) field.value = this.values[field.name] ?? "";
      dialog.showModal();
    });
    byId("close-settings").addEventListener("click", () => dialog.close());
    byId("reset-settings").addEventListener("click", () => form.reset());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const filled = [...new FormData(form)].filter(([, value]) => value.trim() !== "");
      this.values = Object.fromEntries(filled);
      keep(KEPT, JSON.stringify(this.values));
      dialog.close();
    });
  }

  get instructions() {
    return this.values.instructions ?? "";
  }

  // The fields of a request.
  get fields() {
    const set = NUMBERS.filter((name) => this.values[name] !== undefined);
    const numbers = Object.fromEntries(set.map((name) => [name, Number(this.values[name])]));
    const thinks = { on: true, off: false }[this.values.thinking];
    return thinks === undefined ? numbers : { ...numbers, chat_template_kwargs: { enable_thinking: thinks } };
  }
}

function read() {
  try {
    const found = JSON.parse(recall(KEPT) ?? "{}");
    return Object.fromEntries(Object.entries(found).filter(([, value]) => typeof value === "string"));
  } catch {
    return {};
  }
}
