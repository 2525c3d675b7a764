// Keys for what is done often, and the dialog that lists them.
import { newChat, stop } from "./chat.js";
import { byId } from "./dom.js";
import { toggleSettings } from "./settings.js";
import { keep, kept } from "./store.js";
import { nextTheme } from "./theme.js";
import { showView } from "./views.js";

const dialog = byId("help");
const single = byId("single-keys");

const KEYS = {
  "?": () => dialog.showModal(),
  "/": () => showView("chat", { focus: true }),
  n: () => {
    showView("chat");
    newChat();
  },
  s: () => {
    showView("chat");
    toggleSettings();
  },
  t: nextTheme,
  1: () => showView("chat", { focus: true }),
  2: () => showView("overview"),
  3: () => showView("requests"),
};

const writes = (node) => node.closest("input, textarea, select, [contenteditable]") !== null;

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !dialog.open) {
    stop();
    return;
  }
  const work = KEYS[event.key];
  if (!work || !single.checked || dialog.open || event.ctrlKey || event.metaKey || event.altKey || writes(event.target)) return;
  event.preventDefault();
  work();
});

single.checked = kept("single-keys", true) === true;
single.addEventListener("change", () => keep("single-keys", single.checked));
byId("help-open").addEventListener("click", () => dialog.showModal());
byId("help-close").addEventListener("click", () => dialog.close());
