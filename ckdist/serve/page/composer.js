// The user's input: a text, text files, and the button that sends or stops.

import { isSend, sizeOf } from "./chat_view.js";
import { byId, element, icon, iconButton, say } from "./dom.js";

const MOST_BYTES = 1 << 20; // of one file
const MOST_FILES = 8;

export class Composer {
  // `send({text, files})` and `stop()` are called.
  constructor(send, stop) {
    this.files = [];
    this.field = byId("text");
    this.busy = false;
    const act = () => (this.busy ? stop() : this.send(send));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      act();
    });
    this.field.addEventListener("input", () => this.fit());
    this.field.addEventListener("keydown", (event) => {
      if (!isSend(event)) return;
      event.preventDefault();
      if (!this.busy) act();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.busy && !document.querySelector("dialog[open]")) stop();
    });
    const chooser = byId("chooser");
    byId("attach").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", () => {
      this.attach([...chooser.files]);
      chooser.value = "";
    });
    const main = byId("main");
    main.addEventListener("dragover", (event) => event.preventDefault());
    main.addEventListener("drop", (event) => {
      event.preventDefault();
      this.attach([...event.dataTransfer.files]);
    });
  }

  send(send) {
    const text = this.field.value.trim();
    if (!text && !this.files.length) return;
    const files = this.files;
    this.field.value = "";
    this.files = [];
    this.fit();
    this.drawFiles();
    send({ text, files });
  }

  // The button stops while an answer comes.
  set answering(busy) {
    this.busy = busy;
    const button = byId("send");
    button.textContent = busy ? "Stop" : "Send";
    button.classList.toggle("stop", busy);
  }

  // On a touch screen this would open the keyboard over the conversation.
  focus() {
    if (matchMedia("(hover: hover)").matches) this.field.focus();
  }

  fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  async attach(files) {
    this.complain("");
    for (const file of files) {
      if (this.files.length >= MOST_FILES) return this.complain(`A message may have at most ${MOST_FILES} files.`);
      if (file.size > MOST_BYTES) {
        this.complain(`${file.name} has ${(file.size / 1e6).toFixed(1)} MB; files may have 1 MB.`);
        continue;
      }
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new TypeError("binary");
        this.files.push({ name: file.name, text });
        say(`${file.name} is attached`);
      } catch {
        this.complain(`${file.name} is not UTF-8 text.`);
      }
    }
    this.drawFiles();
    this.focus();
  }

  complain(text) {
    const place = byId("composer-problem");
    place.textContent = text;
    place.hidden = !text;
    if (text) say(text);
  }

  drawFiles() {
    const list = byId("attached");
    list.hidden = !this.files.length;
    list.replaceChildren(...this.files.map((file) => element("li", { class: "chip", dir: "auto" }, icon("file"),
      `${file.name} (${sizeOf(file.text)})`, iconButton("remove", `Remove ${file.name}`, () => {
        this.files = this.files.filter((other) => other !== file);
        this.drawFiles();
        this.focus();
      }))));
  }
}
