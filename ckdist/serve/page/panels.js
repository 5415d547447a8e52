// The two columns next to the chat. On narrow screens they open over it on demand.

import { byId } from "./dom.js";
import { keep, recall } from "./kept.js";

const all = [];

export class Panel {
  // `id`: the column's id. `room`: a media query for screens with room for the column. Calls `changed(isOpen)`.
  constructor(id, room, changed = () => {}) {
    this.node = byId(id);
    this.button = byId(`open-${id}`);
    this.room = matchMedia(room);
    this.changed = changed;
    this.button.addEventListener("click", () => this.toggle(!this.isOpen));
    this.node.querySelector(".close").addEventListener("click", () => this.toggle(false));
    this.node.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.isOver) this.toggle(false);
    });
    this.room.addEventListener("change", () => this.set(this.rests));
    all.push(this);
    this.set(this.rests);
  }

  // Whether it is open by default.
  get rests() {
    return this.room.matches && recall(`ckdist.${this.node.id}`) !== "closed";
  }

  get isOpen() {
    return !this.node.hidden;
  }

  get isOver() {
    return this.isOpen && !this.room.matches;
  }

  toggle(open) {
    if (this.room.matches) keep(`ckdist.${this.node.id}`, open ? null : "closed");
    if (open && !this.room.matches) for (const other of all) if (other !== this && other.isOver) other.set(false);
    this.set(open);
    if (this.isOver) this.node.querySelector("button:not([hidden])").focus();
    else this.button.focus();
  }

  // Closes it if it covers the chat.
  away() {
    if (this.isOver) this.set(false);
  }

  set(open) {
    this.node.hidden = !open;
    this.button.setAttribute("aria-expanded", String(open));
    this.node.classList.toggle("over", this.isOver);
    const covered = all.some((panel) => panel.isOver);
    byId("main").inert = covered;
    this.changed(open);
  }
}
