// One rank: its place, its memory, its read speed, and the parts of a step's time.

import { element } from "./dom.js";
import { bytes, milliseconds, rate, share } from "./figures.js";

export class RankView {
  constructor() {
    this.name = element("b");
    this.mark = element("span", { class: "slowest", hidden: true,
      title: "It computes longest in each step; the others wait for it" }, "slowest");
    this.place = element("span");
    this.memory = element("p", { class: "place" });
    this.reading = element("span", { class: "figure" });
    this.readBar = element("span", { class: "bar-of read" }, element("span"));
    this.readMeter = element("div", { class: "meter" },
      element("p", {}, element("span", {}, "Reads, decoding"), this.reading), this.readBar);
    this.step = element("span", { class: "figure" });
    this.stepBar = element("span", { class: "bar-of steps", role: "img" }, element("span", { class: "compute" }),
      element("span", { class: "wait" }), element("span", { class: "exchange" }));
    this.split = element("p", { class: "split" });
    const stepMeter = element("div", { class: "meter" }, element("p", {}, element("span", {}, "A step"), this.step),
      this.stepBar, this.split);
    this.node = element("li", {}, element("p", { class: "rank-head" }, this.name, this.mark, this.place), this.memory,
      this.readMeter, stepMeter);
    this.last = null;
  }

  // `steps`: its latest work; null: none, so its last work stays, in pale. `several`: there are several hosts.
  draw(rank, steps, isSlowest, several) {
    this.last = steps ?? this.last;
    this.node.classList.toggle("resting", !steps);
    this.name.textContent = `Rank ${rank.rank}`;
    this.mark.hidden = !isSlowest;
    const threads = rank.threads === 1 ? "1 thread" : `${rank.threads} threads`;
    const nodes = /[-,]/.test(rank.nodes) ? `nodes ${rank.nodes}` : `node ${rank.nodes}`;
    const cpus = /[-,]/.test(rank.cpus) ? `CPUs ${rank.cpus}` : `CPU ${rank.cpus}`;
    this.place.textContent = several ? `${nodes} of ${rank.host}` : nodes;
    const sizes = `${bytes(rank.weights_bytes)} weights${packedText(rank)}, ${bytes(rank.cache_bytes)} cache`;
    this.memory.textContent = `${threads} on ${cpus} · ${sizes}`;
    this.drawReading(rank.bandwidth);
    this.drawStep();
  }

  drawReading(bandwidth) {
    const read = this.last?.read ?? null;
    const limit = bandwidth ? ` of ${rate(bandwidth / 1e9)}` : "";
    const cached = bandwidth && read > bandwidth ? ", from caches too" : "";
    this.reading.textContent = read === null ? (limit ? `–${limit} GB/s` : "–") :
      `${rate(read / 1e9)}${limit} GB/s${cached}`;
    this.readBar.hidden = !bandwidth;
    this.readBar.firstChild.style.setProperty("--part", bandwidth && read ? Math.min(1, read / bandwidth) : 0);
  }

  drawStep() {
    const steps = this.last;
    if (!steps) {
      this.step.textContent = "–";
      this.stepBar.setAttribute("aria-label", "No step yet");
      return;
    }
    const parts = ["compute", "wait", "exchange"];
    this.step.textContent = `${milliseconds(steps.seconds)} ms`;
    const texts = parts.map((name) => `${name} ${share(steps[name], steps.seconds)}`);
    this.stepBar.setAttribute("aria-label", texts.join(", "));
    this.split.textContent = parts.map((name) => `${name} ${milliseconds(steps[name])}`).join(" · ");
    parts.forEach((name, i) => this.stepBar.children[i].style.setProperty("--part", steps[name] / steps.seconds));
  }
}

function packedText({ packed_bytes: packed, packing_bytes: all }) {
  return packed === null || packed === undefined || packed >= all ? "" : ` (${share(packed, all)} packed)`;
}
