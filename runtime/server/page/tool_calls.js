// Calls of tools in an answer, with a place for what the tool said: the page runs none itself.
import { element } from "./dom.js";

/** Adds a piece of a stream to the calls so far. */
export function takeCall(calls, { index = calls.length, id, type, function: called }) {
  const call = (calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  if (id) call.id = id;
  if (type) call.type = type;
  if (called?.name) call.function.name += called.name;
  if (called?.arguments) call.function.arguments += called.arguments;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it still streams, or the model wrote no JSON
  }
}

/** Shows the calls in `parent`; onResult is called when the reader has changed one. */
export function showCalls(parent, calls, onResult) {
  calls.forEach((call, index) => {
    let node = parent.children[index];
    if (!node) {
      node = callNode(call, onResult);
      parent.append(node);
    }
    node.querySelector("summary").textContent = `Calls ${call.function.name || "a tool"}`;
    node.querySelector("code").textContent = pretty(call.function.arguments);
  });
}

function callNode(call, onResult) {
  const result = element("textarea");
  result.rows = 2;
  result.placeholder = "What the tool answers; sent with your next message";
  result.value = call.result ?? "";
  result.addEventListener("input", () => {
    call.result = result.value;
    onResult();
  });
  const pre = element("pre", {}, element("code"));
  pre.tabIndex = 0;
  const node = element("details", { className: "tool-call" }, element("summary"), pre);
  node.open = true;
  node.append(element("label", {}, "Result", result));
  return node;
}
