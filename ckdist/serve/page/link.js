// The server's state, from one stream of events. It is opened again whenever it ends, and closed while the page is
// hidden.

import { byId } from "./dom.js";

const SOONEST = 500, LATEST = 8000; // ms between two attempts

const TEXTS = {
  loading: "The model is loading. Answers come once it is loaded.",
  draining: "The server is shutting down.",
  failed: "The engine has failed. The server’s log says why.",
  stale: "The engine gives no sign of life.",
  lost: "The server does not answer. Trying again …",
};

export class Link {
  // Calls `heard(event)`, `returned()` after the server was lost, and `refused()` without a valid key.
  constructor(server, { heard, returned, refused }) {
    Object.assign(this, { server, heard, returned, refused });
    this.state = "ready";
    this.controller = null;
    this.timer = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
    addEventListener("online", () => this.open());
  }

  open() {
    this.close();
    this.wait = SOONEST;
    this.listen();
  }

  close() {
    clearTimeout(this.timer);
    this.controller?.abort();
  }

  async listen() {
    const controller = this.controller = new AbortController();
    try {
      for await (const event of this.server.machine(byId("model").value, controller.signal)) {
        this.wait = SOONEST;
        this.enter(event.state);
        this.heard(event);
      }
      this.enter("lost");
    } catch (error) {
      if (controller.signal.aborted) return;
      if (error.status === 401) return this.refused();
      this.enter(error.status === 0 || error.status >= 500 ? "lost" : this.state);
    }
    if (controller.signal.aborted) return;
    this.timer = setTimeout(() => this.listen(), this.wait);
    this.wait = Math.min(LATEST, this.wait * 2);
  }

  enter(state) {
    if (state === this.state) return;
    const was = this.state;
    this.state = state;
    const banner = byId("banner");
    banner.textContent = TEXTS[state] ?? "";
    banner.hidden = !(state in TEXTS);
    if (was === "lost") this.returned();
  }
}
