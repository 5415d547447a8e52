// A model's text as nodes. Only the changed part of a growing text is drawn again.

import { blocksOf } from "./blocks.js";
import { copyFrom, element, iconButton } from "./dom.js";
import { highlight } from "./highlight.js";
import { inline } from "./inline.js";

const MOST = 400_000; // characters; a longer text is shown as it is

// Draws texts into `root`. A text mostly begins like the one before it.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.drawn = []; // sources of the blocks in `root`
  }

  draw(text) {
    const blocks = text.length > MOST ? [{ kind: "code", language: "", text, source: text }] : blocksOf(text);
    blocks.forEach((block, index) => {
      if (this.drawn[index] === block.source) return;
      const node = nodeOf(block);
      if (index < this.drawn.length) this.root.children[index].replaceWith(node);
      else this.root.append(node);
      this.drawn[index] = block.source;
    });
    while (this.drawn.length > blocks.length) {
      this.root.lastElementChild.remove();
      this.drawn.pop();
    }
  }
}

function nodeOf(block) {
  return MAKERS[block.kind](block);
}

const MAKERS = {
  paragraph: ({ text }) => element("p", { dir: "auto" }, ...inline(text)),
  // The page's own heading is h1.
  heading: ({ level, text }) => element(`h${Math.min(6, level + 1)}`, { dir: "auto" }, ...inline(text)),
  rule: () => element("hr"),
  quote: ({ blocks }) => element("blockquote", {}, ...blocks.map(nodeOf)),
  list: ({ first, loose, items }) => {
    const start = first === null || first === 1 ? null : first;
    return element(first === null ? "ul" : "ol", { start, dir: "auto" }, ...items.map((item) => listItem(item, loose)));
  },
  table: ({ head, align, rows }) => {
    const row = (name, cells) => element("tr", {}, ...cells.map((cell, i) =>
      element(name, { class: align[i], dir: "auto", scope: name === "th" ? "col" : null }, ...inline(cell))));
    const body = element("tbody", {}, ...rows.map((cells) => row("td", cells)));
    const table = element("table", {}, element("thead", {}, row("th", head)), body);
    return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, table);
  },
  code: ({ language, text }) => {
    const name = language || "text";
    const copy = iconButton("copy", "Copy code", () => copyFrom(copy, text));
    const shown = element("pre", { tabindex: "0", role: "region", "aria-label": `Code, ${name}`, dir: "ltr" },
      element("code", {}, ...highlight(text, language)));
    return element("div", { class: "code" }, element("div", { class: "code-head" }, element("span", {}, name), copy),
      shown);
  },
};

function listItem({ checked, blocks }, loose) {
  const nodes = blocks.flatMap((block, i) =>
    !loose && i === 0 && block.kind === "paragraph" ? inline(block.text) : [nodeOf(block)]);
  if (checked === null) return element("li", { dir: "auto" }, ...nodes);
  const box = element("span", { role: "img", "aria-label": checked ? "Done:" : "To do:", class: "task" },
    checked ? "☑" : "☐");
  return element("li", { class: "has-task", dir: "auto" }, box, " ", ...nodes);
}
