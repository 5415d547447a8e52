// The machine at work: speeds, requests, the cache, and every rank.

import { drawing, element } from "./dom.js";
import { bytes, count, expertLoads, rate, share, slowestOf, speeds, stepsOf } from "./figures.js";
import { RankView } from "./rank_view.js";

const KEPT = 120; // events: a minute
const OVER = 4; // events between the two that give a speed
const WIDTH = 160, HEIGHT = 36; // of a curve

export class MachineView {
  constructor(root) {
    this.events = [];
    this.curves = { prefill: [], decode: [] };
    this.ranks = [];
    this.shown = false;
    this.prefill = speedTile("Prefill", "Prompt tokens per second of their steps; pale: the last speed");
    this.decode = speedTile("Decode", "Generated tokens per second, of all requests; pale: the last speed");
    this.packing = meter("Weights packed", "packing");
    this.requests = line("Requests");
    this.cache = meter("Cache blocks", "cache");
    this.hits = line("Prompts found in the cache");
    this.drafts = line("Drafted tokens that were right");
    this.list = element("ol", { class: "ranks" });
    this.experts = element("div", { class: "experts", role: "img" });
    this.busiest = line("Busiest expert");
    this.expertsSection = element("section", { hidden: true }, element("h3", {}, "Experts"),
      element("dl", { class: "lines" }, this.busiest.node), this.experts);
    this.body = element("div", {}, element("div", { class: "tiles" }, this.prefill.node, this.decode.node),
      this.packing.node, element("dl", { class: "lines" }, this.requests.node, this.hits.node, this.drafts.node),
      this.cache.node,
      element("h3", {}, "Ranks"), this.list, legend(), this.expertsSection);
    root.append(this.body);
  }

  // Called when the view is opened or closed.
  show(shown) {
    this.shown = shown;
    if (shown) this.draw();
  }

  take(event) {
    if (this.events.length && event.clock < this.events.at(-1).clock) this.events = []; // restarted, or another server
    if (event.clock === this.events.at(-1)?.clock) return;
    this.events = [...this.events.slice(-OVER), event];
    const { prefill, decode } = speeds(this.events[0], event);
    for (const [curve, value] of [[this.curves.prefill, prefill], [this.curves.decode, decode]]) {
      curve.push(value);
      if (curve.length > KEPT) curve.shift();
    }
    if (this.shown) this.draw();
  }

  draw() {
    const event = this.events.at(-1);
    if (!event) return;
    const { stats } = event;
    this.prefill.draw(this.curves.prefill);
    this.decode.draw(this.curves.decode);
    const packed = stats.weights_packed_ratio ?? 1;
    this.packing.node.hidden = packed >= 1;
    this.packing.draw([packed], `${share(packed, 1)} of ${bytes(stats.weights_bytes ?? 0)}`);
    this.requests.draw(`${count(stats.requests_running ?? 0)} of ${count(event.most_running)} running, ` +
      `${count(stats.requests_waiting ?? 0)} waiting`);
    const { blocks = 0, blocks_used: used = 0, blocks_cached: idle = 0 } = stats;
    this.cache.draw([used / blocks || 0, idle / blocks || 0],
      `${count(used)} used, ${count(idle)} reusable, of ${count(blocks)}`);
    this.hits.draw(share(stats.cached_tokens_total ?? 0, stats.prompt_tokens_total ?? 0));
    this.drafts.draw(share(stats.draft_accepted_tokens_total ?? 0, stats.draft_tokens_total ?? 0));
    this.drawRanks(event);
    this.drawExperts(event);
  }

  drawRanks({ ranks }) {
    if (ranks.length !== this.ranks.length) {
      this.ranks = ranks.map(() => new RankView());
      this.list.replaceChildren(...this.ranks.map(({ node }) => node));
    }
    const since = this.events.find((event) => event.ranks.length === ranks.length && event.ranks[0]?.steps_total >= 0);
    const steps = ranks.map((rank, i) => (since ? stepsOf(since.ranks[i], rank) : null));
    const slowest = slowestOf(steps);
    const several = new Set(ranks.map(({ host }) => host)).size > 1;
    this.ranks.forEach((view, i) => view.draw(ranks[i], steps[i], i === slowest, several));
  }

  // The imbalance of each layer's experts since the start, if the model has experts.
  drawExperts({ stats }) {
    const loads = expertLoads(stats);
    this.expertsSection.hidden = !loads.length;
    if (!loads.length) return;
    const worst = loads.reduce((a, b) => (a.times > b.times ? a : b));
    this.busiest.draw(`${rate(worst.times)} times the mean, in layer ${worst.layer}`);
    while (this.experts.children.length < loads.length) this.experts.append(element("span"));
    loads.forEach(({ layer, expert, times }, i) => {
      this.experts.children[i].style.setProperty("--load", times / worst.times);
      this.experts.children[i].title = `Layer ${layer}: expert ${expert} has ${rate(times)} times the mean`;
    });
    this.experts.setAttribute("aria-label", `Load of the busiest expert in each of ${loads.length} layers`);
  }
}

function speedTile(name, title) {
  const value = element("span", { class: "value" }, "0");
  const path = drawing("path", { class: "curve" }), under = drawing("path", { class: "under" });
  const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  const curve = drawing("svg", box, under, path);
  const node = element("div", { class: "tile", title }, element("p", { class: "name" }, name),
    element("p", {}, value, element("span", { class: "unit" }, " tokens/s")), curve);
  const draw = (values) => {
    const last = values.findLast((speed) => speed > 0) ?? 0;
    value.textContent = rate(last);
    node.classList.toggle("resting", values.at(-1) === 0);
    const most = Math.max(1, ...values);
    const points = values.map((v, i) => {
      const x = WIDTH - (values.length - 1 - i) * (WIDTH / (KEPT - 1)), y = HEIGHT - 2 - (v / most) * (HEIGHT - 4);
      return `${x.toFixed(1)} ${y.toFixed(1)}`;
    });
    path.setAttribute("d", `M${points.join("L")}`);
    under.setAttribute("d", `M${points[0].split(" ")[0]} ${HEIGHT}L${points.join("L")}L${WIDTH} ${HEIGHT}Z`);
  };
  return { node, draw };
}

function line(name) {
  const value = element("dd");
  return { node: element("div", {}, element("dt", {}, name), value), draw: (text) => {
    value.textContent = text;
  } };
}

// A bar of one or two parts, with its text.
function meter(name, kind) {
  const value = element("span", { class: "figure" }), bar = element("span", { class: `bar-of ${kind}` },
    element("span"), element("span"));
  const node = element("div", { class: "meter" }, element("p", {}, element("span", {}, name), value), bar);
  const draw = (parts, text) => {
    value.textContent = text;
    parts.forEach((part, i) => bar.children[i].style.setProperty("--part", Math.min(1, part)));
  };
  return { node, draw };
}

function legend() {
  const entry = (kind, text) => element("span", { class: kind }, text);
  return element("p", { class: "legend" }, entry("compute", "compute"), entry("wait", "wait for its own threads"),
    entry("exchange", "exchange with other ranks, including waits"));
}
