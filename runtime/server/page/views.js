// Which part of the page is in front. A wide window shows the chat beside the others, a phone one of them alone.
import { byId } from "./dom.js";
import { keep, kept } from "./store.js";

const VIEWS = ["chat", "overview", "requests"];
const wide = matchMedia("(min-width: 901px)");
const listeners = [];

export const onView = (listener) => listeners.push(listener);
export const view = () => document.body.dataset.view;

/** Shows a view; in a wide window the chat is there already, and gets the focus. */
export function showView(name, { focus = false } = {}) {
  if (name === "chat" && wide.matches) {
    byId("input").focus();
    return;
  }
  document.body.dataset.view = name;
  for (const button of document.querySelectorAll("#views button")) {
    if (button.dataset.view === name) button.setAttribute("aria-current", "page");
    else button.removeAttribute("aria-current");
  }
  keep("view", name);
  if (focus && name === "chat") byId("input").focus();
  for (const listener of listeners) listener(name);
}

function start() {
  const last = kept("view", null);
  let name = VIEWS.includes(last) ? last : "chat";
  if (wide.matches && name === "chat") name = "overview";
  showView(name);
}

for (const button of document.querySelectorAll("#views button")) {
  button.addEventListener("click", () => showView(button.dataset.view, { focus: true }));
}
wide.addEventListener("change", () => {
  if (wide.matches && view() === "chat") showView("overview");
});
start();
