// System prompt, sampling options and tools, kept over a reload.
import { byId } from "./dom.js";
import { keep, kept } from "./store.js";

const NUMBERS = { max_tokens: "max-tokens", temperature: "temperature", top_p: "top-p", top_k: "top-k", min_p: "min-p", seed: "seed" };
const PENALTIES = { frequency_penalty: "frequency-penalty", presence_penalty: "presence-penalty", repetition_penalty: "repetition-penalty" };
const FIELDS = { ...NUMBERS, ...PENALTIES };
const IDS = [...Object.values(FIELDS), "system", "stop", "tools", "adapter"];

export const systemPrompt = () => byId("system").value.trim();

/** The name of a LoRA adapter, empty for none. */
export const chosenAdapter = () => byId("adapter").value;

export function maxTokens() {
  const { value } = byId("max-tokens");
  return value === "" ? undefined : Number(value);
}

/** What a request has beside its messages; a field that is empty is left to the server. Throws a sentence. */
export function samplingOptions() {
  const options = {};
  for (const [name, id] of Object.entries(FIELDS)) {
    const { value, validity } = byId(id);
    if (validity.badInput) throw new Error(`${name} is not a number: write one, or leave it empty.`);
    if (value !== "" && name !== "max_tokens") options[name] = Number(value);
  }
  const stop = byId("stop").value.split("\n").filter(Boolean);
  if (stop.length) options.stop = stop;
  return options;
}

/** The tools of a request, undefined for none. Throws a sentence. */
export function tools() {
  const text = byId("tools").value.trim();
  if (!text) return undefined;
  try {
    const found = JSON.parse(text);
    return Array.isArray(found) ? found : [found];
  } catch (error) {
    throw new Error(`The tools in the settings are no JSON (${error.message}): write a list of functions.`);
  }
}

function save() {
  keep("settings", Object.fromEntries(IDS.map((id) => [id, byId(id).value]).filter(([, value]) => value !== "")));
}

const last = kept("settings", {});
for (const id of IDS) {
  if (typeof last[id] === "string" && id !== "adapter") byId(id).value = last[id];
}
byId("settings").addEventListener("input", save);
byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("settings-reset").addEventListener("click", () => {
  for (const id of IDS) byId(id).value = "";
  save();
});

/** Shows or hides the settings. */
export function toggleSettings() {
  const settings = byId("settings");
  settings.hidden = !settings.hidden;
  byId("settings-toggle").setAttribute("aria-expanded", String(!settings.hidden));
}
byId("settings-toggle").addEventListener("click", toggleSettings);
