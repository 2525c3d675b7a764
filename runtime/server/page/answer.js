// The events of one answer, from a request that fits the model's context.
import { streamEvents } from "./api.js";
import { fitContext, laterStart } from "./context.js";
import { messagesOf } from "./conversation.js";
import { count, duration, rate } from "./dom.js";
import { maxTokens, samplingOptions, systemPrompt, tools } from "./settings.js";

/**
 * The chunks of an answer to `conversation`; leaves out its oldest turns where the context is full, and tells how many
 * in forgot(number). chat: the model has a template; else the last message is continued as a text.
 */
export async function* answerOf({ model, chat, conversation, forgot }, signal) {
  const { turns } = conversation;
  const promptOf = (first) =>
    chat ? { messages: messagesOf(turns.slice(first), systemPrompt()) } : { prompt: turns.at(-1).content };
  const options = { model, stream: true, stream_options: { include_usage: true }, ...samplingOptions() };
  const offered = chat ? tools() : undefined;
  if (offered) options.tools = offered;
  const fitted = chat ? turns : [];
  const fit = await fitContext({ model, turns: fitted, first: conversation.first, promptOf, maxTokens: maxTokens() }, signal);
  const forget = (first) => {
    if (first > conversation.first) forgot(first - conversation.first);
    conversation.first = first;
  };
  forget(fit.first);
  for (let answered = false; ; ) {
    try {
      const body = { ...options, max_tokens: maxTokens() ?? fit.room, ...promptOf(conversation.first) };
      for await (const event of streamEvents(chat ? "v1/chat/completions" : "v1/completions", body, signal)) {
        answered = true;
        yield event;
      }
      return;
    } catch (error) {
      const later = chat ? laterStart(turns, conversation.first) : null;
      const hopeless = fit.room !== undefined || answered || later === null;
      if (hopeless || error.code !== "context_length_exceeded") throw error;
      forget(later);
    }
  }
}

/** How an answer came about, in a line. Times: of performance.now(). */
export function summary({ finish, usage, start, first, end }) {
  const parts = [];
  if (usage) parts.push(`${count(usage.completion_tokens)} tokens`);
  if (usage?.completion_tokens > 1 && first !== null && end > first) {
    parts.push(`${rate((1000 * (usage.completion_tokens - 1)) / (end - first))} tokens/s`);
  }
  if (first !== null) parts.push(`first after ${duration((first - start) / 1000)}`);
  if (finish === "length") parts.push("ended by the limit of tokens");
  else if (finish === "tool_calls") parts.push("waits for its tools");
  else if (finish && finish !== "stop") parts.push(finish);
  return parts.join(" · ");
}

/** An error as one sentence for the reader. */
export function sentence(error) {
  if (error instanceof TypeError) return "The server cannot be reached: see whether it still runs, then send again.";
  return error.message;
}
