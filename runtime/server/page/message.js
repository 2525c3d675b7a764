// How messages look: the reader's, the model's, notes and errors, with what can be done about each.
import { copyFrom } from "./clipboard.js";
import { byId, element } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { Reasoning } from "./reasoning.js";
import { showCalls } from "./tool_calls.js";

const messages = byId("messages");
const AUTHORS = { user: "You", assistant: "Model" };

/** Follows the text unless the reader has scrolled up. */
export function scrollDown(always = false) {
  const distance = messages.scrollHeight - messages.scrollTop - messages.clientHeight;
  if (always || distance < 80) messages.scrollTop = messages.scrollHeight;
}

export function note(className, text, before = null) {
  const node = element("div", { className: `message ${className}` }, element("div", { className: "text", text }));
  if (className === "error") node.setAttribute("role", "alert");
  messages.insertBefore(node, before);
  scrollDown(true);
  return node;
}

function action(name, label, work) {
  const button = element("button", { className: `action ${name}`, text: label });
  button.type = "button";
  button.addEventListener("click", () => work(button));
  return button;
}

/** One turn as it is seen. plain: its text is shown as it is, with every line break. */
export class Message {
  constructor(role, { plain = role === "user", live = false } = {}) {
    this.plain = plain;
    this.raw = "";
    this.body = element("div", { className: plain ? "text plain" : "text" });
    this.calls = element("div", { className: "tool-calls" });
    this.meta = element("div", { className: "meta" });
    this.actions = element("div", { className: "actions" });
    this.node = element("article", { className: `message ${role}${live ? " live" : ""}` });
    this.node.setAttribute("aria-label", AUTHORS[role]);
    this.node.append(this.body, this.calls, this.meta, this.actions);
    this.reasoning = new Reasoning();
    messages.append(this.node);
    scrollDown(true);
  }

  /** The whole text so far; drawn at the next frame. */
  setText(text) {
    this.raw = text;
    if (this.plain) {
      this.body.textContent = text;
      return;
    }
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = undefined;
    if (!this.plain) renderMarkdown(this.body, this.raw);
    scrollDown();
  }

  setCalls(calls, onResult) {
    showCalls(this.calls, calls, onResult);
    scrollDown();
  }

  end() {
    this.draw();
    this.node.classList.remove("live");
  }

  /** What the reader may do: {edit} of an own message, {again} of an answer; each is a function. */
  offer({ edit, again }) {
    this.actions.replaceChildren(action("copy", "Copy", (button) => copyFrom(button, this.raw)));
    if (edit) this.actions.append(action("edit", "Edit", edit));
    if (again) this.actions.append(action("again", "Regenerate", again));
  }
}

/** Puts a field in place of a message's text; send(text) or, where the reader thinks better of it, nothing. */
export function editInPlace(message, send) {
  if (message.node.querySelector(".editor")) return;
  const field = element("textarea");
  field.value = message.raw;
  field.rows = Math.min(12, message.raw.split("\n").length + 1);
  field.setAttribute("aria-label", "Edit the message");
  const close = () => {
    editor.remove();
    message.body.hidden = message.actions.hidden = false;
  };
  const done = () => {
    if (!field.value.trim()) return;
    close();
    send(field.value);
  };
  const resend = action("primary", "Send again", done);
  const cancel = action("", "Cancel", close);
  const editor = element("div", { className: "editor" }, field, element("div", { className: "actions" }, resend, cancel));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      done();
    }
  });
  message.body.hidden = message.actions.hidden = true;
  message.body.before(editor);
  field.focus();
}

messages.addEventListener("click", (event) => {
  const button = event.target.closest(".copy-code");
  if (button) copyFrom(button, button.closest(".code").querySelector("code").textContent);
});
