// One conversation: its turns, kept over a reload, and as a file to take along.
import { drop, keep, kept } from "./store.js";

/**
 * Turns are {role, content} without the system prompt; those of the assistant may have reasoning, meta (how it came
 * about) and tool_calls, each with the `result` that the reader gave.
 */
export class Conversation {
  turns;
  first; // the first turn that is still sent

  constructor({ turns = [], first = 0 } = {}) {
    this.turns = turns;
    this.first = first;
  }

  static last() {
    const found = kept("conversation", null);
    return Array.isArray(found?.turns) ? new Conversation(found) : new Conversation();
  }

  save() {
    if (this.turns.length) keep("conversation", { turns: this.turns, first: this.first });
    else drop("conversation");
  }

  /** Leaves out turn `index` and all behind it. */
  cut(index) {
    this.turns.length = index;
    this.first = Math.min(this.first, index);
  }

  toMarkdown(system) {
    const parts = system ? [`## System\n\n${system}`] : [];
    for (const turn of this.turns) {
      const calls = (turn.tool_calls ?? []).map(({ function: one }) => `Calls \`${one.name}(${one.arguments})\``);
      parts.push([`## ${turn.role === "user" ? "You" : "Model"}`, turn.content, ...calls].filter(Boolean).join("\n\n"));
    }
    return `${parts.join("\n\n")}\n`;
  }

  toJson(model, system) {
    return `${JSON.stringify({ model, messages: messagesOf(this.turns, system) }, null, 2)}\n`;
  }
}

/** Turns as a request has them. */
export function messagesOf(turns, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { role, content, tool_calls: calls } of turns) {
    if (!calls?.length) {
      messages.push({ role, content });
      continue;
    }
    const bare = calls.map(({ id, type, function: called }) => ({ id, type, function: called }));
    messages.push({ role, content: content || null, tool_calls: bare });
    for (const call of calls) messages.push({ role: "tool", tool_call_id: call.id, content: call.result ?? "" });
  }
  return messages;
}

/** Hands the reader a file. */
export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
