// What stands inside a line of Markdown: code, links, stress. Returns nodes; markup in the text stays text.
import { element } from "./dom.js";

const PIECE = new RegExp(
  [
    /\\(?<escaped>[\\`*_{}[\]()#+\-.!|~<>])/,
    /(?<ticks>`+)(?<code>.+?)\k<ticks>(?!`)/,
    /(?<image>!?)\[(?<label>(?:[^[\]\\]|\\.)*)\]\(\s*<?(?<target>[^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/,
    /(?<address>https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_])/,
    /(?<stars>\*\*|__)(?=\S)(?<strong>.+?)(?<=\S)\k<stars>/,
    /~~(?=\S)(?<struck>.+?)(?<=\S)~~/,
    /(?<![\w*])(?<star>[*_])(?=[^\s*_])(?<stress>.+?)(?<=[^\s*_])\k<star>(?![\w*])/,
  ]
    .map((one) => one.source)
    .join("|"),
  "s",
);
const SAFE = /^(?:https?:|mailto:)/i;
const MAX_DEPTH = 6;

export function inline(text, depth = 0) {
  const nodes = [];
  let rest = text;
  for (let match; rest && (match = PIECE.exec(rest)); rest = rest.slice(match.index + match[0].length)) {
    nodes.push(rest.slice(0, match.index), piece(match, depth));
  }
  nodes.push(rest);
  return nodes.filter((node) => node !== "");
}

function piece(match, depth) {
  const [whole] = match;
  const { escaped, code, image, label, target, address, strong, struck, stress } = match.groups;
  const within = (text) => (depth < MAX_DEPTH ? inline(text, depth + 1) : [text]);
  if (escaped !== undefined) return escaped;
  if (code !== undefined) return element("code", { text: code.length > 2 ? code.replace(/^ (.+) $/s, "$1") : code });
  if (target !== undefined) return link(target, image ? [label || "image"] : within(label), whole);
  if (address !== undefined) return link(address, [address], whole);
  if (strong !== undefined) return element("strong", {}, ...within(strong));
  if (struck !== undefined) return element("del", {}, ...within(struck));
  if (stress !== undefined) return element("em", {}, ...within(stress));
  return whole;
}

/** A link to elsewhere, which learns nothing of this page; an address of another kind stays text. */
function link(target, nodes, whole) {
  if (!SAFE.test(target)) return whole;
  const node = element("a", {}, ...nodes);
  node.href = target;
  node.rel = "noopener noreferrer nofollow";
  node.target = "_blank";
  return node;
}
