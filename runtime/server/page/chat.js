// The chat panel: one conversation, streamed, kept in this page only.
import { streamEvents } from "./api.js";
import { byId, count, duration, element, rate } from "./dom.js";

const messages = byId("messages");
const input = byId("input");
const send = byId("send");

let model = "";
let hasTemplate = true;
let history = []; // {role, content}, without the system prompt
let running = null; // AbortController of the answer that streams

/** Tells which model answers, and whether it has a chat template; without one, text is continued instead. */
export function setModel(name, chat) {
  model = name;
  if (chat === hasTemplate) return;
  hasTemplate = chat;
  byId("chat-title").textContent = chat ? "Chat" : "Completion";
  byId("system-field").hidden = !chat;
  input.placeholder = chat ? "Write a message" : "Write the beginning of a text";
  input.setAttribute("aria-label", input.placeholder);
}

function show(role, text = "") {
  const body = element("div", { className: "text", text });
  const meta = element("div", { className: "meta" });
  const node = element("div", { className: `message ${role}` }, body, meta);
  messages.append(node);
  scrollDown(true);
  return { node, body, meta };
}

/** Follows the text unless the reader has scrolled up. */
function scrollDown(always = false) {
  const distance = messages.scrollHeight - messages.scrollTop - messages.clientHeight;
  if (always || distance < 60) messages.scrollTop = messages.scrollHeight;
}

function number(id) {
  const { value } = byId(id);
  return value === "" ? undefined : Number(value);
}

function requestBody(text, turns) {
  const options = {
    model,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    top_p: number("top-p"),
    seed: number("seed"),
  };
  if (!hasTemplate) return { ...options, prompt: text };
  const system = byId("system").value.trim();
  return { ...options, messages: [...(system ? [{ role: "system", content: system }] : []), ...turns] };
}

const deltaOf = (choice) => (hasTemplate ? choice.delta?.content : choice.text) ?? "";

async function ask(text) {
  const turns = history; // "Clear" begins another list
  turns.push({ role: "user", content: text });
  show("user", text);
  const answer = show("assistant live");
  running = new AbortController();
  setRunning(true);
  const start = performance.now();
  let first = null;
  let finish = null;
  let usage = null;
  try {
    const path = hasTemplate ? "v1/chat/completions" : "v1/completions";
    for await (const event of streamEvents(path, requestBody(text, turns), running.signal)) {
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      const delta = deltaOf(choice);
      if (!delta) continue;
      first ??= performance.now();
      answer.body.append(delta);
      scrollDown();
    }
  } catch (error) {
    finish = error.name === "AbortError" ? "stopped" : null;
    if (finish === null) show("error", error.message);
  }
  const now = performance.now();
  answer.node.classList.remove("live");
  answer.meta.textContent = summary(finish, usage, start, first, now);
  // What failed or was stopped before a word is no turn of the conversation.
  if (answer.body.textContent) {
    turns.push({ role: "assistant", content: answer.body.textContent });
  } else {
    turns.pop();
    if (finish === null) answer.node.remove();
  }
  running = null;
  setRunning(false);
  scrollDown();
}

function summary(finish, usage, start, first, end) {
  const parts = [];
  if (usage) parts.push(`${count(usage.completion_tokens)} tokens`);
  if (usage?.completion_tokens > 1 && first !== null && end > first) {
    parts.push(`${rate((1000 * (usage.completion_tokens - 1)) / (end - first))} tokens/s`);
  }
  if (first !== null) parts.push(`first after ${duration((first - start) / 1000)}`);
  if (finish && finish !== "stop") parts.push(finish);
  return parts.join(" · ");
}

function setRunning(on) {
  send.textContent = on ? "Stop" : "Send";
  send.className = on ? "stop" : "primary";
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const text = input.value;
  if (!text.trim()) return;
  input.value = "";
  ask(text);
});

input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) byId("composer").requestSubmit();
  }
});

byId("clear").addEventListener("click", () => {
  running?.abort();
  history = [];
  messages.replaceChildren();
  input.focus();
});

byId("settings-toggle").addEventListener("click", (event) => {
  const settings = byId("settings");
  settings.hidden = !settings.hidden;
  event.currentTarget.setAttribute("aria-expanded", String(!settings.hidden));
});
byId("settings").addEventListener("submit", (event) => event.preventDefault());
