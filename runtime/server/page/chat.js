// The chat panel: one conversation, streamed, kept in this page only.
import { streamEvents } from "./api.js";
import { fitContext, laterStart } from "./context.js";
import { byId, count, duration, element, rate } from "./dom.js";

const messages = byId("messages");
const input = byId("input");
const send = byId("send");

let model = "";
let hasTemplate = true;
let history = { turns: [], first: 0 }; // {role, content} without the system prompt; the first one still sent
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

/** Shows how an answer came about, greyed above it: open while it streams, folded once the answer starts. */
class Reasoning {
  #details = element("details", { className: "reasoning" });
  #summary = element("summary", { text: "Thinking …" });
  #text = element("div", { className: "text" });
  #touched = false;
  #start = null;

  constructor() {
    this.#details.open = true;
    this.#summary.addEventListener("click", () => (this.#touched = true));
    this.#details.append(this.#summary, this.#text);
  }

  get begun() {
    return this.#start !== null;
  }

  append(text, body) {
    if (!this.begun) {
      this.#start = performance.now();
      body.before(this.#details);
    }
    this.#text.append(text);
    this.#text.scrollTop = this.#text.scrollHeight;
  }

  /** fold: the answer starts; without one the reasoning stays open, so that no answer is blank. */
  end(fold) {
    if (!this.begun || this.#summary.dataset.done) return;
    this.#summary.dataset.done = "yes";
    this.#summary.textContent = `Thought for ${duration((performance.now() - this.#start) / 1000)}`;
    if (fold && !this.#touched) this.#details.open = false;
  }
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

function promptOf(turns, first) {
  // Without a template a message is a text of its own.
  if (!hasTemplate) return { prompt: turns.at(-1).content };
  const system = byId("system").value.trim();
  return { messages: [...(system ? [{ role: "system", content: system }] : []), ...turns.slice(first)] };
}

function requestOptions(room) {
  return {
    model,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: number("max-tokens") ?? room,
    temperature: number("temperature"),
    top_p: number("top-p"),
    seed: number("seed"),
  };
}

/** Tells that the conversation now starts at turn `first`. */
function forget(conversation, first, answer) {
  const num = first - conversation.first;
  if (num <= 0) return;
  conversation.first = first;
  const text = `The context is full: the oldest ${num} messages are no longer sent.`;
  answer.node.before(element("div", { className: "message aside", text }));
}

/** The events of an answer; leaves out the oldest turns where the context is full. */
async function* answerOf(conversation, answer, signal) {
  const path = hasTemplate ? "v1/chat/completions" : "v1/completions";
  const { turns } = conversation;
  const maxTokens = number("max-tokens");
  const fit = await fitContext(
    { model, turns: hasTemplate ? turns : [], first: conversation.first, promptOf: (first) => promptOf(turns, first), maxTokens },
    signal,
  );
  forget(conversation, fit.first, answer);
  for (let answered = false; ; ) {
    try {
      const body = { ...requestOptions(fit.room), ...promptOf(turns, conversation.first) };
      for await (const event of streamEvents(path, body, signal)) {
        answered = true;
        yield event;
      }
      return;
    } catch (error) {
      const later = hasTemplate ? laterStart(turns, conversation.first) : null;
      const hopeless = fit.room !== undefined || answered || later === null;
      if (hopeless || error.code !== "context_length_exceeded") throw error;
      forget(conversation, later, answer);
    }
  }
}

async function ask(text) {
  const conversation = history; // "Clear" begins another one
  const { turns } = conversation;
  turns.push({ role: "user", content: text });
  show("user", text);
  const answer = show("assistant live");
  const reasoning = new Reasoning();
  running = new AbortController();
  setRunning(true);
  const start = performance.now();
  let first = null;
  let finish = null;
  let usage = null;
  try {
    for await (const event of answerOf(conversation, answer, running.signal)) {
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      // The second is what other servers call it.
      const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
      const delta = choice.delta?.content ?? choice.text ?? "";
      if (!thought && !delta) continue;
      first ??= performance.now();
      if (thought) reasoning.append(thought, answer.body);
      if (delta) {
        reasoning.end(true);
        answer.body.append(delta);
      }
      scrollDown();
    }
  } catch (error) {
    finish = error.name === "AbortError" ? "stopped" : null;
    if (finish === null) show("error", error.message);
  }
  const now = performance.now();
  answer.node.classList.remove("live");
  reasoning.end(false);
  answer.meta.textContent = summary(finish, usage, start, first, now);
  // What failed or was stopped before a word is no turn of the conversation.
  if (answer.body.textContent) {
    turns.push({ role: "assistant", content: answer.body.textContent });
  } else {
    turns.pop();
    if (reasoning.begun && finish === "length") answer.meta.append(", within the reasoning: allow more of them");
    if (!reasoning.begun && finish === null) answer.node.remove();
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
  if (finish === "length") parts.push("ended by the limit of tokens");
  else if (finish && finish !== "stop") parts.push(finish);
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
  history = { turns: [], first: 0 };
  messages.replaceChildren();
  input.focus();
});

byId("settings-toggle").addEventListener("click", (event) => {
  const settings = byId("settings");
  settings.hidden = !settings.hidden;
  event.currentTarget.setAttribute("aria-expanded", String(!settings.hidden));
});
byId("settings").addEventListener("submit", (event) => event.preventDefault());
