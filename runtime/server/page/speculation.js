// The panel of guesses: how many of the last second were right, and what they gained.
import { drawRate, NUM_SAMPLES } from "./chart.js";
import { byId, count, percent } from "./dom.js";

const values = { right: [], gain: [] };

function push(name, value) {
  values[name].push(value);
  if (values[name].length > NUM_SAMPLES) values[name].shift();
}

/** previous: the state before, null if the counters do not go on from it. */
export function showSpeculation({ speculate, engine }, previous) {
  byId("speculation").hidden = speculate === "off";
  if (speculate === "off") return;
  if (previous === null) {
    values.right.length = values.gain.length = 0;
  } else {
    const since = (key) => engine[key] - previous.engine[key];
    push("right", since("drafted_tokens") ? (100 * since("accepted_tokens")) / since("drafted_tokens") : 0);
    push("gain", since("speculative_steps") ? since("accepted_tokens") / since("speculative_steps") : 0);
  }
  byId("guesses-right").textContent = values.right.length ? percent(values.right.at(-1) / 100) : "–";
  byId("guesses-gain").textContent = values.gain.length ? `+${values.gain.at(-1).toFixed(2)}` : "–";
  drawRate(byId("guesses-right-chart"), values.right);
  drawRate(byId("guesses-gain-chart"), values.gain);
  byId("speculation-summary").textContent =
    `${speculate}, ${count(engine.accepted_tokens)} of ${count(engine.drafted_tokens)} guesses right in ${count(engine.speculative_steps)} steps`;
}
