// Tables that some servers have: adapters, and the replicas of a router.
import { getJson } from "./api.js";
import { byId, count, element } from "./dom.js";

let routes = null; // whether this is a router; null: not known yet
let shownAdapters = "";

const row = (...cells) => element("tr", {}, ...cells);
const text = (value) => element("td", { text: value, title: value });
const number = (value) => element("td", { className: "n", text: count(value) });

/** Shows adapters with their requests, and offers them as models of the chat. */
export function showAdapters(adapters = []) {
  byId("adapters").hidden = byId("adapter-field").hidden = adapters.length === 0;
  byId("adapter-rows").replaceChildren(...adapters.map((one) => row(text(one.name), number(one.requests))));
  const names = JSON.stringify(adapters.map((one) => one.name));
  if (names === shownAdapters) return;
  shownAdapters = names;
  const select = byId("adapter");
  const { value } = select;
  const options = adapters.map((one) => new Option(one.name, one.name));
  select.replaceChildren(new Option("none", ""), ...options);
  select.value = adapters.some((one) => one.name === value) ? value : "";
}

/** Shows the replicas where this server is a router, which its health tells. */
export async function showReplicas(signal) {
  routes ??= "replicas" in (await getJson("health", signal));
  byId("replicas").hidden = !routes;
  if (!routes) return;
  const { data } = await getJson("v1/llmc/replicas", signal);
  byId("replica-rows").replaceChildren(
    ...data.map((one) => row(text(one.name), text(one.state), number(one.active_requests), number(one.requests), number(one.times_lost))),
  );
}
