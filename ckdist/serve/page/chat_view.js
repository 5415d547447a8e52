// The messages of a conversation on the screen.

import { branch, versions } from "./conversation.js";
import { byId, copyFrom, element, icon, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const NEAR_END = 80; // pixels from the end within which the view follows a growing answer
const REST = 5; // pause until the next drawing, as a multiple of the last one's time

export class ChatView {
  // `actions`: edit(message, text), again(message), show(message).
  constructor(actions) {
    this.actions = actions;
    this.list = byId("messages");
    this.scroller = byId("scroller");
    this.growing = new Map(); // messages on the screen: id -> function that draws it
    this.waiting = null;
    this.follows = true;
    const end = byId("to-end");
    end.addEventListener("click", () => this.toEnd());
    this.scroller.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.scroller;
      this.follows = scrollHeight - scrollTop - clientHeight < NEAR_END;
      end.hidden = this.follows;
    }, { passive: true });
  }

  // Shows a conversation; null: none.
  draw(conversation) {
    this.conversation = conversation;
    this.growing.clear();
    const messages = conversation ? branch(conversation) : [];
    this.list.replaceChildren(...messages.map((message) => this.node(message)));
    byId("welcome").hidden = messages.length > 0;
    this.toEnd();
  }

  toEnd() {
    this.follows = true;
    byId("to-end").hidden = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  // Draws a message that has grown, at the next frame or after the pause.
  update(message) {
    if (!this.growing.has(message.id) || this.waiting) return;
    const draw = () => {
      this.waiting = null;
      const begin = performance.now();
      this.growing.get(message.id)?.();
      if (this.follows) this.scroller.scrollTop = this.scroller.scrollHeight;
      this.restUntil = performance.now() + REST * (performance.now() - begin);
    };
    const rest = (this.restUntil ?? 0) - performance.now();
    this.waiting = rest > 16 ? setTimeout(draw, rest) : requestAnimationFrame(draw);
  }

  // Draws a message again when it is complete.
  finish(message) {
    const old = this.list.querySelector(`[data-id="${message.id}"]`);
    if (!old) return;
    const held = old.contains(document.activeElement);
    const open = old.querySelector("details")?.open;
    const node = this.node(message);
    if (open) node.querySelector("details").open = true;
    old.replaceWith(node);
    if (held) node.querySelector("button")?.focus();
    if (this.follows) this.toEnd();
  }

  node(message) {
    const mine = message.role === "user";
    const parts = mine ? this.userParts(message) : this.answerParts(message);
    const article = element("article", { "aria-label": mine ? "You" : "Answer" }, ...parts);
    return element("li", { class: `message ${mine ? "mine" : "theirs"}`, "data-id": message.id }, article);
  }

  userParts(message) {
    const files = message.files.map(({ name, text }) => element("li", { class: "chip", dir: "auto" }, icon("file"),
      `${name} (${sizeOf(text)})`));
    const text = element("p", { class: "said", dir: "auto" }, message.text);
    return [files.length ? element("ul", { class: "chips", "aria-label": "Files" }, ...files) : null,
      message.text ? text : null,
      this.bar(message, iconButton("edit", "Edit", () => this.edit(message)))];
  }

  answerParts(message) {
    const grows = message.state === "growing";
    const body = element("div", { class: "markdown" }), view = new MarkdownView(body);
    const summary = element("summary"), thought = element("div", { class: "markdown" });
    const reasoning = element("details", { class: "reasoning" }, summary, thought);
    const thoughtView = new MarkdownView(thought);
    const dots = element("p", { class: "dots" }, element("span", { class: "unseen" }, "The answer is coming"));
    const draw = () => {
      reasoning.hidden = !message.reasoning;
      summary.textContent = thoughtTitle(message);
      if (reasoning.open || !grows) thoughtView.draw(message.reasoning);
      view.draw(message.text);
      dots.hidden = message.state !== "growing" || message.text !== "" || message.reasoning !== "";
    };
    reasoning.addEventListener("toggle", () => thoughtView.draw(message.reasoning));
    draw();
    if (grows) this.growing.set(message.id, draw);
    const again = iconButton("again", "Ask again", () => this.actions.again(message));
    return [reasoning, body, dots, problemOf(message), grows ? null : this.bar(message, again, figuresOf(message))];
  }

  // The buttons of a message, and of its other versions.
  bar(message, ...more) {
    const copy = iconButton("copy", "Copy", () => copyFrom(copy, message.text));
    const all = versions(this.conversation, message), at = all.indexOf(message);
    const turn = (name, label, to) => {
      const button = iconButton(name, label, () => this.actions.show(all[to]));
      button.disabled = to < 0 || to >= all.length;
      return button;
    };
    const pager = all.length < 2 ? null : element("span", { class: "pager", role: "group", "aria-label": "Versions" },
      turn("left", "Earlier version", at - 1), element("span", {}, `${at + 1} of ${all.length}`),
      turn("right", "Later version", at + 1));
    return element("div", { class: "bar" }, copy, ...more, pager);
  }

  // Replaces a message of the user by a field.
  edit(message) {
    const item = this.list.querySelector(`[data-id="${message.id}"]`);
    const field = element("textarea", { "aria-label": "Edit your message", dir: "auto", value: message.text,
      rows: Math.min(12, message.text.split("\n").length + 1) });
    const end = () => {
      const node = this.node(message);
      form.replaceWith(node.firstElementChild);
      item.querySelector(".bar button:nth-of-type(2)")?.focus();
    };
    const send = () => {
      const text = field.value.trim();
      if (text || message.files.length) this.actions.edit(message, text);
    };
    const form = element("form", { class: "edit", on: { submit: (event) => {
      event.preventDefault();
      send();
    } } }, field, element("div", { class: "bar" }, element("button", { class: "main" }, "Send"),
      element("button", { type: "button", on: { click: end } }, "Cancel")));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") end();
      else if (isSend(event)) {
        event.preventDefault();
        send();
      }
    });
    item.firstElementChild.replaceWith(form);
    field.focus();
  }
}

// Enter sends; with Shift, or while characters are composed, it does not.
export function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

export function sizeOf(text) {
  const bytes = new Blob([text]).size;
  if (bytes < 1000) return `${bytes} B`;
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function thoughtTitle({ thoughtSeconds, state }) {
  if (thoughtSeconds === undefined) return state === "growing" ? "Thinking …" : "Reasoning";
  return thoughtSeconds < 1 ? "Reasoning" : `Reasoning, ${thoughtSeconds} s`;
}

function problemOf({ state, error, finish }) {
  if (state === "failed") return element("p", { class: "problem" }, error);
  if (state === "stopped") return element("p", { class: "note" }, "Stopped");
  if (finish === "length") return element("p", { class: "note" }, "Ended at the maximum number of tokens");
  return null;
}

function figuresOf({ figures }) {
  if (!figures?.tokens) return null;
  const cached = figures.cached ? `, ${figures.cached} of them from the cache` : "";
  const speed = figures.speed > 0 ? `${figures.speed.toFixed(figures.speed < 10 ? 1 : 0)} tokens/s` : "";
  const title = `${figures.prompt} tokens of prompt${cached}`;
  return element("span", { class: "figures", title }, [`${figures.tokens} tokens`, speed].filter(Boolean).join(", "));
}
