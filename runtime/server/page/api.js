// Requests to the server that this page came from. Paths are relative, so that a proxy may serve it under a prefix.

// The key lives in this variable only: it is not stored, and never part of an address.
let apiKey = "";

export function setApiKey(key) {
  apiKey = key.trim();
}

export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function request(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "omit",
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, String(error.message), error.code);
  } catch {
    return new ApiError(response.status, `the server answered ${response.status} ${response.statusText}`.trim());
  }
}

export async function postJson(path, body, signal) {
  return (await request(path, { body, signal })).json();
}

export async function getJson(path, signal) {
  return (await request(path, { signal })).json();
}

/** The JSON objects of a stream of server-sent events, up to [DONE]. */
export async function* streamEvents(path, body, signal) {
  const response = await request(path, { body, signal });
  let rest = "";
  for await (const text of textOf(response.body)) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(response.status, String(event.error.message));
      yield event;
    }
  }
}

async function* textOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
