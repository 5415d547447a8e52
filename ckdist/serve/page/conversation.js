// A conversation is a tree of messages: to edit one, or to ask again, adds a sibling, so nothing is lost. `leaf` is the
// last message of the branch that is shown.
//
// A message: {id, parent, role, text, at}, of the user's with {files: [{name, text}]}, of the assistant's with
// {reasoning, thoughtSeconds, model, state: "growing" | "done" | "stopped" | "failed", error, figures}.

export function newConversation() {
  const now = Date.now();
  return { id: crypto.randomUUID?.() ?? randomId(), title: "", created: now, updated: now, messages: {}, leaf: null };
}

// Off localhost a plain HTTP page has no randomUUID.
function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Adds a message after `parent`. It becomes the last one shown.
export function append(conversation, parent, message) {
  const id = randomId();
  conversation.messages[id] = { id, parent, at: Date.now(), ...message };
  conversation.leaf = id;
  conversation.updated = Date.now();
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message);
  return conversation.messages[id];
}

function titleOf({ text, files }) {
  const line = text.trim().split("\n")[0].trim() || files[0]?.name || "";
  return line.length > 80 ? `${line.slice(0, 79)}…` : line;
}

// The messages that are shown, first to last.
export function branch(conversation) {
  const found = [];
  for (let id = conversation.leaf; id; id = conversation.messages[id].parent) found.push(conversation.messages[id]);
  return found.reverse();
}

// The versions of a message, oldest first.
export function versions(conversation, message) {
  return Object.values(conversation.messages).filter((other) => other.parent === message.parent)
    .sort((a, b) => a.at - b.at);
}

// Shows another version of a message, with the messages that followed it last.
export function show(conversation, message) {
  let last = message;
  while (true) {
    const after = Object.values(conversation.messages).filter((other) => other.parent === last.id);
    if (!after.length) break;
    last = after.reduce((a, b) => (a.at > b.at ? a : b));
  }
  conversation.leaf = last.id;
}

// The messages for the server: texts with their files, and the user's instructions.
export function messagesFor(conversation, until, instructions) {
  const all = branch(conversation);
  const before = all.slice(0, all.findIndex((message) => message.id === until));
  const sent = before.map((message) => ({ role: message.role, content: contentOf(message) }))
    .filter((message) => message.content !== "" || message.role === "user");
  return instructions ? [{ role: "system", content: instructions }, ...sent] : sent;
}

function contentOf({ text, files = [] }) {
  const attached = files.map((file) => {
    const longest = Math.max(2, ...(file.text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${file.name}:\n${fence}\n${file.text}\n${fence}`;
  });
  return [...attached, text].filter(Boolean).join("\n\n");
}
