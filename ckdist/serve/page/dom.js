// Builds nodes. Texts are always set as texts: nothing in this page makes HTML of a string.

const SVG = "http://www.w3.org/2000/svg";

// A new element. `on` holds listeners by event; `hidden`, `value` and the like are set as properties, all else as
// attributes; null and false leave an attribute out. Children are nodes or texts.
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function drawing(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

const PROPERTIES = new Set(["hidden", "value", "checked", "disabled", "open", "tabIndex"]);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listen] of Object.entries(value)) node.addEventListener(event, listen);
    else if (PROPERTIES.has(name)) node[name] = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// The element with this id, which must exist.
export function byId(id) {
  return document.getElementById(id);
}

// One of the page's icons, hidden from screen readers.
const PATHS = {
  copy: "M6 6V3h7v7h-3M3 6h7v7H3z",
  edit: "M3 13l.7-3L10.5 3.2l2.3 2.3L6 12.3zM9.3 4.5l2.2 2.2",
  again: "M13 8a5 5 0 1 1-1.5-3.5M13 2.5v3h-3",
  left: "M10 3L5 8l5 5",
  right: "M6 3l5 5-5 5",
  remove: "M4 4l8 8M12 4l-8 8",
  file: "M4 2h5l3 3v9H4zM9 2v3h3",
};

export function icon(name) {
  const path = drawing("path", { d: PATHS[name] });
  return drawing("svg", { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true", focusable: "false" }, path);
}

// A button with an icon and the name `label`.
export function iconButton(name, label, click) {
  return element("button", { type: "button", class: "quiet", "aria-label": label, title: label, on: { click } },
    icon(name));
}

// Makes screen readers say `text` once.
export function say(text) {
  byId("announcer").textContent = text;
}

// Copies `text`, and confirms that on `button` for a moment.
export async function copyFrom(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied");
    button.classList.add("done");
    setTimeout(() => button.classList.remove("done"), 1200);
  } catch {
    say("The browser does not let this page copy");
  }
}
