// A rate over the last two minutes, as an area under a curve.
import { rate } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
export const NUM_SAMPLES = 120;

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** Draws `values`, oldest first, the last one at the right edge. */
export function drawRate(svg, values) {
  const width = svg.clientWidth || 300;
  const height = svg.clientHeight || 72;
  const top = niceCeiling(Math.max(...values, 0));
  const step = width / (NUM_SAMPLES - 1);
  const x = (i) => (width - (values.length - 1 - i) * step).toFixed(1);
  const y = (value) => (height - (height - 14) * (value / top)).toFixed(1);
  const points = values.map((value, i) => `${x(i)},${y(value)}`);
  const label = shape("text", { x: 0, y: 9 });
  label.textContent = values.length ? rate(top) : "";
  const since = shape("text", { x: width, y: 9, "text-anchor": "end" });
  since.textContent = "last 2 min";
  const nodes = [
    shape("line", { class: "rule", x1: 0, x2: width, y1: 14, y2: 14 }),
    shape("line", { class: "rule", x1: 0, x2: width, y1: height, y2: height }),
    label,
    since,
  ];
  if (points.length > 1) {
    const curve = `M${points.join("L")}`;
    nodes.push(
      shape("path", { class: "area", d: `${curve}L${width},${height}L${x(0)},${height}Z` }),
      shape("path", { class: "curve", d: curve }),
    );
  }
  svg.replaceChildren(...nodes);
}

/** The least round number that is not below `value`. */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((top) => top >= value);
}
