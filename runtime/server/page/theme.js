// Light, dark, or as the system has it; kept over a reload.
import { byId } from "./dom.js";
import { keep, kept } from "./store.js";

const THEMES = ["system", "light", "dark"];
const select = byId("theme");

function apply(theme) {
  const { dataset } = document.documentElement;
  if (theme === "system") delete dataset.theme;
  else dataset.theme = theme;
  select.value = theme;
}

function choose(theme) {
  keep("theme", theme);
  apply(theme);
}

export function nextTheme() {
  choose(THEMES[(THEMES.indexOf(select.value) + 1) % THEMES.length]);
}

const first = kept("theme", "system");
apply(THEMES.includes(first) ? first : "system");
select.addEventListener("change", () => choose(select.value));
