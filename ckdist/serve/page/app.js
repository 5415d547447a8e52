// The page: connects the conversations, the server and the views of both.

import { ChatView } from "./chat_view.js";
import { Composer } from "./composer.js";
import { append, newConversation, show } from "./conversation.js";
import { byId, element, say } from "./dom.js";
import { Generation } from "./generation.js";
import { askKey } from "./key.js";
import { Link } from "./link.js";
import { ListView } from "./list_view.js";
import { MachineView } from "./machine_view.js";
import { Panel } from "./panels.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { Store } from "./store.js";
import { followTheme } from "./theme.js";

class App {
  constructor(store) {
    this.store = store;
    this.server = new Server();
    this.settings = new Settings();
    this.conversations = [];
    this.current = null; // null: a conversation without messages yet
    this.generations = new Map(); // answers under way, by the conversation's id
    this.view = new ChatView({
      edit: (message, text) => this.ask(message.parent, { text, files: message.files }),
      again: (message) => this.answer(message.parent),
      show: (message) => this.turnTo(message),
    });
    this.list = new ListView({ open: (found) => this.open(found), remove: (found) => this.remove(found) });
    this.composer = new Composer((said) => this.ask(this.current?.leaf ?? null, said), () => this.stop());
    this.machine = new MachineView(byId("machine-view"));
    this.chats = new Panel("chats", "(min-width: 900px)");
    new Panel("machine", "(min-width: 1200px)", (open) => this.machine.show(open));
    this.link = new Link(this.server, {
      heard: (event) => this.machine.take(event),
      returned: () => this.loadModels(),
      refused: () => this.askKey(),
    });
    byId("model").addEventListener("change", () => this.link.open());
    byId("new-chat").addEventListener("click", () => this.open(null));
    byId("not-kept").hidden = store.keeps;
  }

  async start() {
    this.conversations = await this.store.all();
    for (const conversation of this.conversations) {
      for (const message of Object.values(conversation.messages)) {
        if (message.state !== "growing") continue;
        message.state = "failed";
        message.error = "The page was closed before the answer was whole.";
      }
    }
    this.open(this.conversations.find(({ id }) => `#${id}` === location.hash) ?? null);
    this.link.open();
    await this.loadModels();
  }

  async loadModels() {
    try {
      const models = await this.server.models();
      const chosen = byId("model").value;
      byId("model").replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
      if (models.some(({ id }) => id === chosen)) byId("model").value = chosen;
      byId("welcome-model").textContent = byId("model").value;
    } catch (error) {
      if (error.status === 401) this.askKey();
    }
  }

  async askKey() {
    if (!(await askKey(this.server))) return;
    this.link.open();
    await this.loadModels();
  }

  open(conversation) {
    this.current = conversation;
    history.replaceState(null, "", conversation ? `#${conversation.id}` : location.pathname + location.search);
    this.draw();
    this.chats.away();
    this.composer.focus();
  }

  draw() {
    this.view.draw(this.current);
    this.list.draw(this.conversations, this.current);
    this.composer.answering = this.generations.has(this.current?.id);
  }

  async remove(conversation) {
    this.generations.get(conversation.id)?.stop();
    this.conversations = this.conversations.filter((other) => other !== conversation);
    await this.store.remove(conversation.id);
    if (conversation === this.current) this.open(null);
    else this.draw();
  }

  turnTo(message) {
    if (this.generations.has(this.current.id)) return;
    show(this.current, message);
    this.store.save(this.current);
    this.view.draw(this.current);
  }

  stop() {
    this.generations.get(this.current?.id)?.stop();
  }

  // Adds the user's message after `parent`, and requests the answer.
  ask(parent, { text, files }) {
    if (this.generations.has(this.current?.id)) return;
    if (!this.current) {
      this.current = newConversation();
      history.replaceState(null, "", `#${this.current.id}`);
    }
    this.answer(append(this.current, parent, { role: "user", text, files }).id);
  }

  async answer(parent) {
    const conversation = this.current;
    if (this.generations.has(conversation.id)) return;
    const empty = { role: "assistant", text: "", reasoning: "", state: "growing", model: byId("model").value };
    const message = append(conversation, parent, empty);
    const generation = new Generation(this.server, this.store, conversation, message, (grown) => {
      if (conversation !== this.current) return;
      if (grown.state === "growing") this.view.update(grown);
      else this.view.finish(grown);
    });
    this.conversations = [conversation, ...this.conversations.filter((other) => other !== conversation)];
    this.generations.set(conversation.id, generation);
    this.draw();
    this.composer.focus();
    try {
      await generation.run(this.settings.instructions, this.settings.fields);
    } catch {
      this.askKey();
    }
    this.generations.delete(conversation.id);
    if (!this.conversations.includes(conversation)) await this.store.remove(conversation.id); // deleted meanwhile
    if (conversation !== this.current) return;
    this.composer.answering = false;
    say({ done: "The answer is complete", stopped: "Stopped", failed: `No answer: ${message.error}` }[message.state]);
  }
}

followTheme();
await new App(await Store.open()).start();
