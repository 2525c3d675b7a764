// The live page: reads the server's state once a second while somebody looks.
import { getJson, setApiKey } from "./api.js";
import { drawRate, NUM_SAMPLES } from "./chart.js";
import { setModel } from "./chat.js";
import { byId, count, duration, element, percent, rate } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { showReplan } from "./replan.js";
import "./requests.js";
import "./shortcuts.js";
import { showSpeculation } from "./speculation.js";
import { showAdapters, showReplicas } from "./tables.js";
import "./theme.js";
import { onView } from "./views.js";

const PERIOD_MS = 1000;
const MAX_ROWS = 50;

const heat = new HeatMap(byId("heat"), byId("heat-detail"));
const rates = { generation: [], prompt: [] };
let previous = null;

function setStatus(state, text) {
  byId("status").dataset.state = state;
  byId("status").textContent = text;
}

function showRates(state) {
  const { engine } = state;
  if (previous === null) {
    // There is no rate yet.
    rates.generation.length = rates.prompt.length = 0;
  } else {
    const seconds = state.uptime_s - previous.uptime_s;
    push(rates.generation, (engine.generation_tokens - previous.engine.generation_tokens) / seconds);
    push(rates.prompt, (engine.prompt_tokens - previous.engine.prompt_tokens) / seconds);
  }
  drawRates();
}

function drawRates() {
  for (const [name, values] of Object.entries(rates)) {
    byId(name).textContent = values.length ? rate(values.at(-1)) : "–";
    drawRate(byId(`${name}-chart`), values);
  }
}

function push(values, value) {
  values.push(Math.max(0, value));
  if (values.length > NUM_SAMPLES) values.shift();
}

const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
const share = (part, whole) => (whole ? part / whole : 0);

function showTiles({ engine, latency }) {
  const ahead = (name) => `p95 ${duration(latency[name]?.p95)}`;
  const hits = share(engine.prefix_hit_tokens, engine.prefix_query_tokens);
  const rows = engine.scheduled_tokens + engine.padding_tokens;
  const tiles = [
    ["First token", duration(latency.ttft?.p50), ahead("ttft")],
    ["Per token", duration(latency.tpot?.p50), ahead("tpot")],
    ["Whole request", duration(latency.total?.p50), ahead("total")],
    ["Running", count(engine.running), `${count(engine.waiting)} waiting`],
    [
      "KV cache",
      percent(share(engine.kv_blocks_used, engine.kv_blocks)),
      `${count(engine.kv_blocks_used)} of ${count(engine.kv_blocks)} blocks`,
      share(engine.kv_blocks_used, engine.kv_blocks),
    ],
    ...(engine.states
      ? [
          [
            "States",
            percent(share(engine.states_used, engine.states)),
            `${count(engine.states_used)} of ${count(engine.states)}, ${count(engine.states_kept)} kept`,
            share(engine.states_used, engine.states),
          ],
        ]
      : []),
    ["Prefix hits", percent(hits), `${count(engine.prefix_hit_tokens)} tokens`, hits],
    [
      "Padding",
      percent(share(engine.padding_tokens, rows)),
      `${count(engine.padding_tokens)} tokens`,
      share(engine.padding_tokens, rows),
    ],
    ["Preemptions", count(engine.preemptions), `${count(engine.bucket_misses)} bucket misses`],
  ];
  byId("tiles").replaceChildren(...tiles.map(tile));
}

function tile([name, value, note, portion]) {
  const node = element(
    "div",
    { className: "tile" },
    element("h2", { text: name }),
    element("b", { text: value }),
    element("span", { className: "note", text: note, title: note }),
  );
  if (portion !== undefined) node.append(meter(portion));
  return node;
}

function meter(portion) {
  const node = element("div", { className: "meter" }, element("i"));
  node.style.setProperty("--share", `${(100 * Math.min(1, portion)).toFixed(1)}%`);
  return node;
}

function showRequests({ requests, num_requests }) {
  const rows = requests.slice(0, MAX_ROWS).map((one) => {
    const progress = element(
      "div",
      { className: "progress" },
      meter(share(one.output_tokens, one.max_tokens)),
      element("span", { text: `${count(one.output_tokens)} / ${count(one.max_tokens)}` }),
    );
    return element(
      "tr",
      {},
      element("td", { text: one.id, title: one.id }),
      element("td", { className: "n", text: duration(one.age_s) }),
      element("td", { className: "n", text: count(one.prompt_tokens) }),
      element("td", { className: "n", text: count(one.cached_tokens) }),
      element("td", {}, progress),
      element("td", { text: one.output_tokens ? "generating" : "prompt" }),
    );
  });
  byId("requests").tBodies[0].replaceChildren(...rows);
  byId("requests").hidden = rows.length === 0;
  byId("idle").hidden = rows.length > 0;
  byId("request-summary").textContent =
    num_requests > rows.length ? `${count(rows.length)} of ${count(num_requests)}, oldest first` : "";
}

function showBuckets({ buckets, engine }) {
  heat.show(buckets);
  const used = buckets.filter((bucket) => bucket.replays > 0).length;
  const sum = (key) => buckets.reduce((total, bucket) => total + bucket[key], 0);
  const padding = share(sum("padding_s"), sum("replay_s"));
  byId("bucket-summary").textContent =
    `${used} of ${buckets.length} in use, ${count(engine.steps)} steps, at most ${percent(padding)} of their time is padding`;
}

/** Whether the counters go on from the state before: not those of a server that started again, nor the sums of a router
 * that now has other replicas. */
const goesOn = (state) =>
  previous !== null && state.uptime_s > previous.uptime_s && String(state.replicas) === String(previous.replicas);

function show(state) {
  if (!goesOn(state)) previous = null;
  document.title = `${state.model} · llmc`;
  byId("model").textContent = state.model;
  byId("facts").textContent =
    `llmc ${state.version} · ${plural(state.engine.threads, "thread")} · up ${duration(state.uptime_s)}`;
  setStatus(state.ready ? "ok" : "wait", state.ready ? "ready" : "warming up");
  showAdapters(state.adapters);
  setModel(state.model, state.chat);
  showRates(state);
  showTiles(state);
  showSpeculation(state, previous);
  showBuckets(state);
  showReplan(state.replan);
  showRequests(state);
  previous = state;
}

async function poll() {
  if (!document.hidden) {
    try {
      show(await getJson("v1/llmc/state", AbortSignal.timeout(5000)));
      await showReplicas(AbortSignal.timeout(5000));
    } catch (error) {
      if (error.status === 401) byId("key-field").hidden = false;
      setStatus("bad", error.status === 401 ? "needs an API key" : "no answer from the server");
    }
  }
  setTimeout(poll, PERIOD_MS);
}

onView(() => previous && drawRates()); // a chart that was hidden had no width

byId("key").addEventListener("input", (event) => setApiKey(event.currentTarget.value));

poll();
