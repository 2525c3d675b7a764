// What the page keeps in this browser: the theme, settings and the conversation. Never an API key.

const PREFIX = "llmc.";

/** What was kept under a name, or `fallback`: also where the browser keeps nothing, as in a private window. */
export function kept(name, fallback) {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

/** Keeps a value of plain JSON; false where there is no room for it. */
export function keep(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function drop(name) {
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // Nothing is kept, then.
  }
}
