// The list of conversations, with the one that is shown and buttons to remove them.

import { byId, element, iconButton, say } from "./dom.js";

const DAY = 86_400_000;

export class ListView {
  // `actions`: open(conversation), remove(conversation).
  constructor(actions) {
    this.actions = actions;
  }

  draw(conversations, current) {
    const groups = new Map();
    for (const conversation of conversations) {
      const when = dayOf(conversation.updated);
      if (!groups.has(when)) groups.set(when, []);
      groups.get(when).push(conversation);
    }
    const sections = [...groups].map(([when, members]) => element("section", { "aria-label": when },
      element("h2", {}, when), element("ul", {}, ...members.map((member) => this.item(member, member === current)))));
    byId("conversations").replaceChildren(...sections);
  }

  item(conversation, isCurrent) {
    const title = conversation.title || "New chat";
    const open = element("button", { type: "button", class: "open", "aria-current": isCurrent ? "page" : null, title,
      on: { click: () => this.actions.open(conversation) } }, element("bdi", {}, title));
    return element("li", {}, open, iconButton("remove", `Delete ${title}`, () => this.ask(conversation, title)));
  }

  ask(conversation, title) {
    const dialog = byId("removal");
    byId("removal-title").textContent = title;
    dialog.returnValue = "";
    dialog.onclose = () => {
      if (dialog.returnValue !== "yes") return;
      this.actions.remove(conversation);
      say("Deleted");
    };
    dialog.showModal();
  }
}

function dayOf(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  if (time >= today - 7 * DAY) return "This week";
  return new Date(time).toLocaleDateString(undefined, { month: "long", year: "numeric" });
}
