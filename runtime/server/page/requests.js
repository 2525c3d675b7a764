// The requests view: a line for each request from its arrival to its end, all on one scale; details on demand.
import { getJson } from "./api.js";
import { byId, count, duration, element } from "./dom.js";
import { onView, view } from "./views.js";

const PERIOD_MS = 1000;
const NAMES = { queued: "queued", prefill: "prefill", decode: "decode", preempted: "preempted" };
const STATES = { queued: "waits", prefill: "computes its prompt", decode: "draws tokens", preempted: "preempted, waits" };
const REASONS = {
  stop: "finished: the model ended it, or a stop text",
  length: "finished: the limit of tokens",
  tool_calls: "finished: calls tools",
  cancelled: "cancelled: the client left or stopped it",
  timeout: "ended: out of time",
  error: "failed",
};

const list = byId("timelines");
const rows = new Map(); // key → {node, …}
let looking = false;

function ending(one) {
  if (one.error) return one.error;
  const reasons = [...new Set(one.finish_reasons)].map((reason) => REASONS[reason] ?? reason);
  return reasons.join(", ");
}

const words = (span) => {
  const chunk = span.tokens ? `, tokens ${count(span.start)} to ${count(span.start + span.tokens)} in ${span.bucket}` : "";
  return `${NAMES[span.kind]} from ${duration(span.begin_s)} for ${duration(span.end_s - span.begin_s)}${chunk}`;
};

function bar(span, whole) {
  const node = element("i", { className: span.kind, title: words(span) });
  node.style.setProperty("--from", `${((100 * span.begin_s) / whole).toFixed(3)}%`);
  node.style.setProperty("--long", `${((100 * (span.end_s - span.begin_s)) / whole).toFixed(3)}%`);
  return node;
}

function makeRow() {
  const row = {
    node: element("details", { className: "timeline" }),
    name: element("span", { className: "name" }),
    facts: element("span", { className: "facts" }),
    track: element("span", { className: "track" }),
    why: element("p", { className: "why" }),
    steps: element("ol", { className: "steps" }),
  };
  row.track.setAttribute("aria-hidden", "true"); // the steps below say the same
  row.node.append(element("summary", {}, row.name, row.facts, row.track), row.why, row.steps);
  row.node.addEventListener("toggle", () => row.one && fill(row));
  return row;
}

const lasts = (one) => Math.max(0.001, ...one.spans.map((span) => span.end_s));

function fill(row) {
  const { one } = row;
  const live = one.state !== "finished";
  row.node.dataset.state = live ? one.state : one.error ? "failed" : "finished";
  row.name.textContent = row.name.title = one.id;
  const state = live ? STATES[one.state] : one.error ? "failed" : [...new Set(one.finish_reasons)].join(", ");
  row.facts.textContent =
    `${count(one.prompt_tokens)} + ${count(one.output_tokens)} tokens · ${duration(lasts(one))} · ${state}`;
  row.track.replaceChildren(...one.spans.map((span) => bar(span, row.whole)));
  if (!row.node.open) return;
  const cached = one.cached_tokens ? ` ${count(one.cached_tokens)} of its prompt came from the prefix cache.` : "";
  row.why.textContent = `${live ? `This request ${STATES[one.state]}.` : `${ending(one)}.`.replace("..", ".")}${cached}`;
  const ordered = [...one.spans].sort((a, b) => a.begin_s - b.begin_s);
  row.steps.replaceChildren(...ordered.map((span) => element("li", { text: words(span) })));
}

function show({ complete, requests }) {
  const whole = Math.max(0.001, ...requests.map(lasts));
  const seen = new Set();
  const times = new Map();
  let before = list.firstChild;
  for (const one of requests) {
    // Several prompts of one HTTP request share its id.
    const nth = times.get(one.id) ?? 0;
    times.set(one.id, nth + 1);
    const key = `${one.id} ${nth}`;
    seen.add(key);
    const row = rows.get(key) ?? makeRow();
    rows.set(key, row);
    Object.assign(row, { one, whole });
    fill(row);
    if (row.node === before) before = before.nextSibling;
    else list.insertBefore(row.node, before);
  }
  for (const [key, row] of rows) {
    if (seen.has(key)) continue;
    row.node.remove();
    rows.delete(key);
  }
  byId("no-requests").hidden = requests.length > 0;
  byId("timeline-scale").textContent = requests.length ? `the whole width is ${duration(whole)}` : "";
  byId("timeline-note").hidden = complete || !requests.length;
}

async function look() {
  if (looking) return;
  looking = true;
  while (view() === "requests" && !document.hidden) {
    try {
      const found = await getJson("v1/llmc/requests", AbortSignal.timeout(5000));
      if (!byId("hold").checked) show(found);
    } catch {
      // The status in the bar says what is wrong.
    }
    await new Promise((done) => setTimeout(done, PERIOD_MS));
  }
  looking = false;
}

onView(look);
document.addEventListener("visibilitychange", look);
look();
