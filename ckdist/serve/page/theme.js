// Dark or light: as in the system, until the switch is used.

import { byId } from "./dom.js";
import { keep, recall } from "./kept.js";

const KEPT = "ckdist.theme";

export function followTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement, button = byId("theme");
  const apply = () => {
    const kept = recall(KEPT);
    const dark = kept ? kept === "dark" : system.matches;
    root.dataset.theme = dark ? "dark" : "light";
    button.setAttribute("aria-pressed", String(dark));
  };
  system.addEventListener("change", apply);
  button.addEventListener("click", () => {
    const dark = root.dataset.theme !== "dark";
    keep(KEPT, dark === system.matches ? null : dark ? "dark" : "light");
    apply();
  });
  apply();
}
