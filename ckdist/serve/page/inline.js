// Markdown inside a line, as nodes: emphasis, code, links. All else, HTML too, is text.

import { element } from "./dom.js";

const FRAMES = 16; // emphases inside one another
const LINK_TEXT = 400; // characters
const MARKS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };
const BARE = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const ANGLE = /<(https?:\/\/[^\s<>]{1,2000})>/y;
const WORD = /[\p{L}\p{N}]/u;
const PUNCTUATION = /[!-/:-@[-`{-~]/;

// The nodes of `text`.
export function inline(text) {
  return new Reader(text).read();
}

// A link to `address` that opens in a new tab without a referrer; plain nodes if it is not a web address.
export function link(address, nodes) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    return nodes;
  }
  if (url.protocol !== "https:" && url.protocol !== "http:") return nodes;
  const shown = { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow", dir: "auto" };
  return [element("a", shown, ...nodes)];
}

class Reader {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.plain = "";
    this.frames = [{ mark: "", nodes: [] }];
    this.unclosed = new Set(); // lengths of runs of backticks that nothing closes
    this.lastBracket = text.lastIndexOf("](");
  }

  read() {
    while (this.at < this.text.length) {
      const char = this.text[this.at];
      if (char === "\\" && PUNCTUATION.test(this.text[this.at + 1] ?? "")) {
        this.plain += this.text[this.at + 1];
        this.at += 2;
      } else if (char === "\n") {
        this.add(element("br"));
        this.at++;
      } else if (!this.special(char)) {
        this.plain += char;
        this.at++;
      }
    }
    while (this.frames.length > 1) this.flatten();
    this.flush();
    return this.frames[0].nodes;
  }

  // Reads the markup that begins with `char`; false if it is text.
  special(char) {
    if (char === "`") return this.code();
    if (char === "*" || char === "_" || char === "~") return this.emphasis(char);
    if (char === "[" || (char === "!" && this.text[this.at + 1] === "[")) return this.bracket();
    if (char === "<") return this.address(ANGLE);
    if (char === "h" && !WORD.test(this.text[this.at - 1] ?? " ")) return this.address(BARE);
    return false;
  }

  flush() {
    if (this.plain) this.frames.at(-1).nodes.push(document.createTextNode(this.plain));
    this.plain = "";
  }

  add(...nodes) {
    this.flush();
    this.frames.at(-1).nodes.push(...nodes);
  }

  // The innermost emphasis has no end: its mark is text.
  flatten() {
    this.flush();
    const { mark, nodes } = this.frames.pop();
    this.frames.at(-1).nodes.push(document.createTextNode(mark), ...nodes);
  }

  run(char) {
    let end = this.at;
    while (this.text[end] === char) end++;
    return end - this.at;
  }

  code() {
    const length = this.run("`");
    let end = this.unclosed.has(length) ? -1 : this.at + length;
    const fence = "`".repeat(length);
    while (end >= 0) {
      end = this.text.indexOf(fence, end);
      if (end < 0) break;
      let after = end;
      while (this.text[after] === "`") after++;
      if (after - end === length) break;
      end = after;
    }
    if (end < 0) {
      this.unclosed.add(length);
      this.plain += fence;
      this.at += length;
      return true;
    }
    const inside = this.text.slice(this.at + length, end).replace(/\n/g, " ");
    const padded = inside.length > 2 && inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
    this.add(element("code", { dir: "ltr" }, ...shown(padded ? inside.slice(1, -1) : inside)));
    this.at = end + length;
    return true;
  }

  emphasis(char) {
    let left = this.run(char);
    const before = this.text[this.at - 1] ?? " ", after = this.text[this.at + left] ?? " ";
    const inWord = char === "_" && WORD.test(before) && WORD.test(after);
    const closes = !/\s/.test(before) && !inWord, opens = !/\s/.test(after) && !inWord;
    if (char === "~" && left !== 2) return false;
    if (left > 3) return this.literal(char, left);
    this.at += left;
    while (left > 0) {
      const open = closes ? this.frames.findLastIndex((f) => f.mark[0] === char && f.mark.length <= left) : -1;
      if (open > 0) {
        while (this.frames.length > open + 1) this.flatten();
        this.flush();
        const { mark, nodes } = this.frames.pop();
        this.frames.at(-1).nodes.push(element(MARKS[mark], {}, ...nodes));
        left -= mark.length;
      } else {
        const mark = char.repeat(left >= 2 ? 2 : 1);
        left -= mark.length;
        this.flush();
        if (opens && this.frames.length < FRAMES) this.frames.push({ mark, nodes: [] });
        else this.plain += mark;
      }
    }
    return true;
  }

  literal(char, length) {
    this.plain += char.repeat(length);
    this.at += length;
    return true;
  }

  // [text](address "title"), or a picture, which is not fetched: its address is a link.
  bracket() {
    if (this.at > this.lastBracket) return false;
    const begin = this.at + (this.text[this.at] === "!" ? 2 : 1);
    let depth = 1, end = begin;
    for (; end < this.text.length && end - begin < LINK_TEXT; end++) {
      if (this.text[end] === "\\") end++;
      else if (this.text[end] === "[") depth++;
      else if (this.text[end] === "]" && --depth === 0) break;
    }
    if (depth || this.text[end + 1] !== "(") return false;
    const target = /\(\s*<?((?:[^\s()<>]|\([^\s()<>]{0,500}\)){1,2000})>?(?:\s+["'][^"'\n]{0,200}["'])?\s*\)/y;
    target.lastIndex = end + 1;
    const found = target.exec(this.text);
    if (!found) return false;
    const inside = this.text.slice(begin, end);
    const nodes = inside ? new Reader(inside).withoutLinks() : [document.createTextNode(found[1])];
    this.add(...link(found[1], nodes));
    this.at = target.lastIndex;
    return true;
  }

  withoutLinks() {
    this.bracket = () => false;
    this.address = () => false;
    return this.read();
  }

  address(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (!found) return false;
    let address = found[1] ?? found[0];
    if (pattern === BARE) {
      const closing = (address.match(/\)/g) ?? []).length > (address.match(/\(/g) ?? []).length;
      address = address.replace(closing ? /[).,;:!?*_~\]]+$/ : /[.,;:!?*_~\]]+$/, "");
    }
    this.add(...link(address, [document.createTextNode(address)]));
    this.at += pattern === BARE ? address.length : found[0].length;
    return true;
  }
}

// Characters that change the direction or the position of others, and so disguise a text.
const HIDDEN = /([\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069])/;

// The nodes of a piece of code, in which such characters are shown by their numbers.
export function shown(text) {
  return text.split(HIDDEN).filter(Boolean).map((part) => {
    if (!HIDDEN.test(part)) return document.createTextNode(part);
    const number = `U+${part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    return element("span", { class: "hidden-character", title: "changes the direction of text" }, number);
  });
}
