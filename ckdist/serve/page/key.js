// Asks for the server's API key.

import { byId } from "./dom.js";

let asked = null; // the answer to the dialog

// True once the user has given a key that the server accepts.
export function askKey(server) {
  asked ??= ask(server).finally(() => {
    asked = null;
  });
  return asked;
}

function ask(server) {
  const dialog = byId("key"), field = byId("key-field"), problem = byId("key-problem");
  problem.hidden = !server.key;
  field.value = "";
  return new Promise((resolve) => {
    byId("key-form").onsubmit = async (event) => {
      event.preventDefault();
      server.key = field.value.trim();
      try {
        await server.models();
      } catch (error) {
        problem.hidden = error.status !== 401;
        if (error.status === 401) return field.select();
      }
      dialog.close();
      resolve(true);
    };
    dialog.oncancel = () => resolve(false);
    dialog.showModal();
  });
}
