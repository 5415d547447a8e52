// Markdown's blocks as plain data: {kind, source, ...}. Time is linear in the text, and nesting is bounded, whatever a
// model writes.

const DEPTH = 8; // of nested quotes and lists; deeper ones are read as paragraphs
const TABLE_CELLS = 4000; // maximum of a table; a larger one is drawn as code
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:\*[ \t]*){3,}$|^ {0,3}(?:-[ \t]*){3,}$|^ {0,3}(?:_[ \t]*){3,}$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:[ \t](.*))?$/;

// The blocks of a text. A fence that is not closed yet reaches to the end.
export function blocksOf(text) {
  return parse(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function parse(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at++;
      continue;
    }
    const begin = at;
    const [block, end] = next(lines, at, depth);
    at = end;
    block.source = `${block.kind}\n${lines.slice(begin, end).join("\n")}`;
    blocks.push(block);
  }
  return blocks;
}

function next(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    return [{ kind: "heading", level: heading[1].length, text: (heading[2] ?? "").replace(/[ \t]#+[ \t]*$/, "") },
      at + 1];
  }
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (depth < DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

function isBlank(line) {
  return line.trim() === "";
}

function indentation(line) {
  return line.length - line.trimStart().length;
}

function code(lines, at, [, fence, info]) {
  let end = at + 1;
  const closes = (line) => {
    const text = line.trim();
    return text.length >= fence.length && indentation(line) < 4 && text === fence[0].repeat(text.length);
  };
  while (end < lines.length && !closes(lines[end])) end++;
  const language = info.trim().split(/\s/)[0].slice(0, 40);
  const block = { kind: "code", language, text: lines.slice(at + 1, end).join("\n"), closed: end < lines.length };
  return [block, Math.min(end + 1, lines.length)];
}

function quote(lines, at, depth) {
  const inner = [];
  let end = at;
  for (; end < lines.length; end++) {
    const match = QUOTE.exec(lines[end]);
    if (!match && (isBlank(lines[end]) || begins(lines, end))) break;
    inner.push(match ? match[1] : lines[end]);
  }
  return [{ kind: "quote", blocks: parse(inner, depth + 1) }, end];
}

// Whether a block other than a paragraph begins here.
function begins(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function list(lines, at, depth) {
  const [, space, marker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(marker);
  const items = [];
  let end = at, loose = false, body = null, inset = 0;
  while (end < lines.length) {
    const line = lines[end];
    if (isBlank(line)) {
      let after = end;
      while (after < lines.length && isBlank(lines[after])) after++;
      if (after === lines.length) break;
      const item = ITEM.exec(lines[after]);
      const isNext = item && Math.abs(item[1].length - space.length) < 2 && /\d/.test(item[2]) === ordered;
      if (!isNext && indentation(lines[after]) <= space.length) break;
      body.push("");
      loose = true;
      end = after;
      continue;
    }
    const item = RULE.test(line) ? null : ITEM.exec(line);
    if (item && Math.abs(item[1].length - space.length) < 2) {
      if (/\d/.test(item[2]) !== ordered) break;
      body = [item[3] ?? ""];
      inset = item[1].length + item[2].length + 1;
      items.push(body);
    } else if (indentation(line) > space.length) {
      body.push(line.slice(Math.min(indentation(line), inset)));
    } else if (isBlank(lines[end - 1]) || begins(lines, end)) {
      break;
    } else {
      body.push(line);
    }
    end++;
  }
  const first = ordered ? Number.parseInt(marker, 10) : null;
  return [{ kind: "list", first, loose, items: items.map((item) => task(item, depth)) }, end];
}

// One item of a list, with `checked` if it is a task.
function task(lines, depth) {
  const match = /^\[([ xX])\][ \t]+(.*)$/.exec(lines[0]);
  if (!match) return { checked: null, blocks: parse(lines, depth + 1) };
  return { checked: match[1] !== " ", blocks: parse([match[2], ...lines.slice(1)], depth + 1) };
}

// The cells of a row. A pipe after a backslash is a pipe.
function cells(line) {
  const found = [];
  let cell = "";
  for (let i = 0; i < line.length; i++) {
    if (line[i] === "\\" && line[i + 1] === "|") cell += line[++i];
    else if (line[i] === "|") {
      found.push(cell.trim());
      cell = "";
    } else cell += line[i];
  }
  found.push(cell.trim());
  if (found[0] === "") found.shift();
  if (found.length && found.at(-1) === "") found.pop();
  return found;
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return false;
  if (!/^[\s|:-]+$/.test(lines[at + 1])) return false;
  const under = cells(lines[at + 1]);
  return under.length === cells(lines[at]).length && under.every((cell) => /^:?-+:?$/.test(cell));
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && !isBlank(lines[end])) end++;
  const head = cells(lines[at]);
  if (head.length * (end - at) > TABLE_CELLS) {
    return [{ kind: "code", language: "table", text: lines.slice(at, end).join("\n"), closed: true }, end];
  }
  const align = cells(lines[at + 1]).map((cell) => {
    if (!cell.endsWith(":")) return "start";
    return cell.startsWith(":") ? "center" : "end";
  });
  const rows = lines.slice(at + 2, end).map((line) => {
    const row = cells(line).slice(0, head.length);
    return row.concat(Array(head.length - row.length).fill(""));
  });
  return [{ kind: "table", head, align, rows }, end];
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !(begins(lines, end) && depth < DEPTH) && !isTable(lines, end)) {
    end++;
  }
  return [{ kind: "paragraph", text: lines.slice(at, end).map((line) => line.trim()).join("\n") }, end];
}
