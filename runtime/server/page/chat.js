// The chat panel: one conversation, streamed.
import { Announcer } from "./announcer.js";
import { answerOf, sentence, summary } from "./answer.js";
import { Conversation, download } from "./conversation.js";
import { byId } from "./dom.js";
import { editInPlace, Message, note } from "./message.js";
import { Reasoning } from "./reasoning.js";
import { chosenAdapter, systemPrompt } from "./settings.js";
import { takeCall } from "./tool_calls.js";

const messages = byId("messages");
const input = byId("input");
const send = byId("send");

let model = "";
let hasTemplate = true;
let conversation = Conversation.last();
let running = null; // AbortController of the answer that streams

/** Tells which model answers, and whether it has a chat template; without one, text is continued instead. */
export function setModel(name, chat) {
  model = name;
  if (chat === hasTemplate) return;
  hasTemplate = chat;
  byId("chat-title").textContent = chat ? "Chat" : "Completion";
  byId("system-field").hidden = byId("tools-field").hidden = !chat;
  input.placeholder = chat ? "Write a message" : "Write the beginning of a text";
  input.setAttribute("aria-label", input.placeholder);
  if (!running) redraw();
}

function offer(message, index) {
  const { role } = conversation.turns[index];
  message.offer(
    role === "user"
      ? { edit: () => !running && editInPlace(message, (text) => goBack(index, text)) }
      : { again: () => !running && goBack(index - 1, conversation.turns[index - 1].content) },
  );
}

/** Draws the whole conversation, as after a reload. */
function redraw() {
  messages.replaceChildren();
  conversation.turns.forEach((turn, index) => {
    const message = new Message(turn.role, { plain: turn.role === "user" || !hasTemplate });
    message.setText(turn.content);
    message.draw();
    if (turn.reasoning) Reasoning.folded(turn.reasoning, message.body);
    if (turn.tool_calls) message.setCalls(turn.tool_calls, () => conversation.save());
    message.meta.textContent = turn.meta ?? "";
    offer(message, index);
  });
  byId("welcome").hidden = conversation.turns.length > 0;
}

/** Asks anew at turn `index`, which and all behind it are left out. */
function goBack(index, text) {
  conversation.cut(index);
  redraw();
  ask(text);
}

/** Takes one event into the answer. */
function take(event, answer) {
  answer.usage = event.usage ?? answer.usage;
  const choice = event.choices?.[0];
  if (!choice) return;
  answer.finish = choice.finish_reason ?? answer.finish;
  const { message, calls } = answer;
  // The second is what other servers call it.
  const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
  const delta = choice.delta?.content ?? choice.text ?? "";
  const called = choice.delta?.tool_calls ?? [];
  if (!thought && !delta && !called.length) return;
  answer.first ??= performance.now();
  if (thought) message.reasoning.append(thought, message.body);
  if (delta) {
    message.reasoning.end(true);
    answer.text += delta;
    message.setText(answer.text);
    answer.announcer.add(delta);
  }
  for (const piece of called) takeCall(calls, piece);
  if (called.length) message.setCalls(calls, () => conversation.save());
}

async function ask(text) {
  const asked = conversation; // "New chat" begins another one
  const { turns } = asked;
  byId("welcome").hidden = true;
  const question = new Message("user");
  question.setText(text);
  turns.push({ role: "user", content: text });
  offer(question, turns.length - 1);
  const message = new Message("assistant", { plain: !hasTemplate, live: true });
  const answer = { message, calls: [], text: "", first: null, finish: null, usage: null, announcer: new Announcer() };
  const forgot = (number) =>
    note("aside", `The context is full: the oldest ${number} messages are no longer sent.`, message.node);
  const controller = new AbortController();
  running = controller;
  setRunning(true);
  const start = performance.now();
  let failure = null;
  try {
    const request = { model: chosenAdapter() || model, chat: hasTemplate, conversation: asked, forgot };
    for await (const event of answerOf(request, controller.signal)) take(event, answer);
  } catch (error) {
    answer.finish = error.name === "AbortError" ? "stopped" : null;
    if (answer.finish === null) failure = sentence(error);
  }
  if (running === controller) {
    running = null;
    setRunning(false);
  }
  if (asked !== conversation) return;
  end(answer, start, failure);
}

function end(answer, start, failure) {
  const { message, calls, text, finish } = answer;
  const { turns } = conversation;
  message.end();
  message.reasoning.end(false);
  message.meta.textContent = summary({ ...answer, start, end: performance.now() });
  if (text || calls.length) {
    const turn = { role: "assistant", content: text, meta: message.meta.textContent };
    if (message.reasoning.begun) turn.reasoning = message.reasoning.text;
    if (calls.length) turn.tool_calls = calls;
    turns.push(turn);
    offer(message, turns.length - 1);
  } else {
    // What failed or was stopped before a word is no turn of the conversation.
    const { content } = turns.pop();
    if (failure && !input.value) input.value = content;
    if (message.reasoning.begun && finish === "length") message.meta.append(", within the reasoning: allow more of them");
    if (!message.reasoning.begun && finish === null) message.node.remove();
  }
  if (failure) note("error", failure);
  answer.announcer.end(finish === "stopped" ? "Stopped." : "");
  conversation.save();
}

function setRunning(on) {
  send.textContent = on ? "Stop" : "Send";
  send.className = on ? "stop" : "primary";
  messages.setAttribute("aria-busy", String(on));
}

/** Ends the answer that streams; whether there was one. */
export function stop() {
  running?.abort();
  return running !== null;
}

export function newChat() {
  stop();
  conversation = new Conversation();
  conversation.save();
  redraw();
  input.focus();
}

/** Puts the last message of the reader into an editor. */
function editLast() {
  [...messages.querySelectorAll(".message.user .edit")].at(-1)?.click();
}

function grow() {
  input.rows = Math.min(10, Math.max(2, input.value.split("\n").length));
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (stop()) return;
  const text = input.value;
  if (!text.trim()) return;
  input.value = "";
  grow();
  ask(text);
});

input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) byId("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !input.value) {
    event.preventDefault();
    editLast();
  }
});

byId("clear").addEventListener("click", newChat);
function save(form) {
  const name = `conversation-${new Date().toISOString().slice(0, 10)}`;
  if (form === "json") download(`${name}.json`, conversation.toJson(model, systemPrompt()), "application/json");
  else download(`${name}.md`, conversation.toMarkdown(systemPrompt()), "text/markdown");
  byId("export").open = false;
}

for (const button of byId("export").querySelectorAll("button")) {
  button.addEventListener("click", () => save(button.dataset.form));
}

redraw();
