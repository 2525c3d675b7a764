// Which turns of a conversation the model still takes: the oldest are left out where its context is full.
import { ApiError, postJson } from "./api.js";

// Tokens kept free for an answer whose length nobody set: this share of the context, at most so many.
const ROOM_SHARE = 4;
const MOST_ROOM = 1024;

const questions = (turns, first) => turns.flatMap((turn, i) => (turn.role === "user" && i >= first ? [i] : []));

/**
 * Where a request starts, and how many tokens its answer may have: {first, room}. promptOf(first) is a request's prompt
 * or messages that start with turn `first`; maxTokens is what the user set, if anything.
 *
 * Once prompt and answer no longer fit, turns are left out until half the context is free: a prompt with a new start is
 * computed anew, which should happen rarely. A server behind a proxy that hides its count of tokens gives a room of
 * undefined.
 */
export async function fitContext({ model, turns, first, promptOf, maxTokens }, signal) {
  const count = async (start) => postJson("tokenize", { model, ...promptOf(start) }, signal);
  let told;
  try {
    told = await count(first);
  } catch (error) {
    if (!(error instanceof ApiError) || ![403, 404, 405].includes(error.status)) throw error;
    return { first, room: undefined };
  }
  const limit = told.max_model_len;
  const wanted = maxTokens ?? Math.min(Math.floor(limit / ROOM_SHARE), MOST_ROOM);
  const starts = questions(turns, first);
  if (told.count + wanted <= limit || starts.length < 2) return { first, room: limit - told.count };
  const most = Math.min(Math.floor(limit / 2), limit - wanted);
  // The first of the later starts that leaves enough, else the last question alone.
  let [low, high] = [1, starts.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((await count(starts[middle])).count <= most) high = middle;
    else low = middle + 1;
  }
  told = await count(starts[low]);
  // Where not even the last question fits, the server says so, and nothing is forgotten for it.
  if (told.count + (maxTokens ?? 1) > limit) return { first, room: maxTokens };
  return { first: starts[low], room: limit - told.count };
}

/** A later start for a conversation that the server refused as too long: the newer half of its questions. */
export function laterStart(turns, first) {
  const starts = questions(turns, first);
  return starts.length < 2 ? null : starts[starts.length >> 1];
}
