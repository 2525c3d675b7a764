// What the server would do about its buckets, and did: hidden unless it was started to tell.
import { byId, count, duration, element, percent } from "./dom.js";

function change(one) {
  const saved = one.saved_s_per_step === null ? "–" : duration(one.saved_s_per_step);
  return element(
    "tr",
    {},
    element("td", { text: `${one.action} ${one.bucket}` }),
    element("td", { className: "n", text: count(one.steps) }),
    element("td", { className: "n", text: saved }),
    element("td", { className: "n", text: count(one.saved_tokens_per_step) }),
  );
}

function decision(one) {
  const buckets = [...one.added.map((name) => `+${name}`), ...one.retired.map((name) => `-${name}`)].join(" ");
  return element(
    "tr",
    {},
    element("td", { text: new Date(1000 * one.time).toLocaleTimeString() }),
    element("td", { text: `${one.kind} ${buckets}` }),
    element("td", { text: one.reason, title: one.reason }),
  );
}

/** Shows the part of the server's state about this; null hides the panel. */
export function showReplan(state) {
  byId("replan").hidden = !state;
  if (!state) return;
  const { trial } = state;
  byId("replan-summary").textContent = trial
    ? `on trial: ${[...trial.added, ...trial.retired].join(", ")}, ${percent(trial.saving ?? 0)} of step time saved so far`
    : `${state.mode}: ${state.line ?? "not enough steps yet"}`;
  byId("replan-contexts").textContent = state.contexts?.line ?? "";
  byId("replan-changes").tBodies[0].replaceChildren(...state.changes.map(change));
  byId("replan-changes").hidden = state.changes.length === 0;
  byId("replan-decisions").tBodies[0].replaceChildren(...state.decisions.map(decision).reverse());
  byId("replan-decisions").hidden = state.decisions.length === 0;
}
