// Code in colours: comments, texts, numbers and words that many languages share. It understands no language.

import { element } from "./dom.js";
import { shown } from "./inline.js";

const MOST = 40_000; // characters; longer code stays plain
const WORDS = new Set(
  ("abstract and as assert async await break case catch class const continue def default del do elif else enum " +
    "except export extends extern false False finally fn for from func function global if impl implements import " +
    "in interface is lambda let loop match mod module mut namespace new nil None nonlocal not null of or package " +
    "pass private protected pub public raise return select self static struct super switch template then this " +
    "throw trait true True try type typedef typename union unsafe use using var void volatile where while with " +
    "yield SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN LEFT RIGHT INNER ON GROUP BY " +
    "ORDER LIMIT AND OR NOT NULL AS echo fi done esac int float double bool char string str u8 u16 u32 u64 i32 i64 " +
    "usize").split(" "),
);
const HASHED = new Set(("python py sh bash shell zsh yaml yml toml ruby rb r perl make makefile dockerfile ini conf " +
  "elixir julia").split(" "));
const DASHED = new Set(["sql", "lua", "haskell", "hs"]);
const PLAIN = new Set(["", "text", "txt", "plain", "table", "markdown", "md", "diff", "output", "console"]);

const TEXTS = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?` +
  "|`(?:[^`\\\\]|\\\\[^])*`?";
const REST = String.raw`\b0[xX][\da-fA-F_]+\b|\b\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?\b|[A-Za-z_]\w*`;

function pattern(language) {
  let comments = String.raw`//[^\n]*|/\*[^]*?(?:\*/|$)`;
  if (HASHED.has(language)) comments = String.raw`#[^\n]*`;
  if (DASHED.has(language)) comments = String.raw`--[^\n]*`;
  if (language === "html" || language === "xml") comments = "<!--[^]*?(?:-->|$)";
  return new RegExp(`(${comments})|(${TEXTS})|(${REST})`, "g");
}

// The nodes of `text`, code in `language`.
export function highlight(text, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || text.length > MOST) return shown(text);
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(pattern(name))) {
    const kind = kindOf(found);
    if (!kind) continue;
    nodes.push(...shown(text.slice(end, found.index)), element("span", { class: kind }, ...shown(found[0])));
    end = found.index + found[0].length;
  }
  nodes.push(...shown(text.slice(end)));
  return nodes;
}

function kindOf([whole, comment, quoted]) {
  if (comment !== undefined) return "code-comment";
  if (quoted !== undefined) return "code-text";
  if (/^\d/.test(whole)) return "code-number";
  return WORDS.has(whole) ? "code-word" : null;
}
