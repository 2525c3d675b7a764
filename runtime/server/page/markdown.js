// Markdown as elements: every text enters as text, so markup in it stays text. Images become links: the page asks nobody
// else for anything.
import { element } from "./dom.js";
import { inline } from "./markdown_inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 8;

/** Shows `text` in `parent`; what an earlier call showed, and is the same, stays: text grows at its end. */
export function renderMarkdown(parent, text) {
  const blocks = blocksOf(text);
  const shown = parent.blocks ?? [];
  let same = 0;
  while (same < blocks.length && shown[same] === blocks[same].source) same += 1;
  while (parent.childElementCount > same) parent.lastElementChild.remove();
  for (const block of blocks.slice(same)) parent.append(block.build());
  parent.blocks = blocks.map((block) => block.source);
}

function starts(line, next) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || isTable(line, next);
}

const isTable = (line, next) => line.includes("|") && next !== undefined && next.includes("-") && DIVIDER.test(next);

function blocksOf(text, depth = 0) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const begin = at;
    let build;
    [build, at] = block(lines, at, depth);
    blocks.push({ source: lines.slice(begin, at).join("\n"), build });
  }
  return blocks;
}

/** [what makes the element, the line behind it] of the block that begins at a line. */
function block(lines, at, depth) {
  const line = lines[at];
  let match = FENCE.exec(line);
  if (match) return code(lines, at, match);
  match = HEADING.exec(line);
  if (match) {
    const [, marks, text] = match;
    // Below the headings of the page itself.
    return [() => element(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text)), at + 1];
  }
  if (RULE.test(line)) return [() => element("hr"), at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(line, lines[at + 1])) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !starts(lines[end], lines[end + 1])) end += 1;
  const text = lines.slice(at, end).join("\n").trim();
  return [() => element("p", {}, ...inline(text)), end];
}

function code(lines, at, [, fence, language]) {
  const closing = new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  const build = () => {
    const copy = element("button", { className: "copy-code", text: "Copy" });
    copy.type = "button";
    const bar = element("div", { className: "code-bar" }, element("span", { text: language }), copy);
    const pre = element("pre", {}, element("code", { text }));
    pre.tabIndex = 0; // it may scroll
    return element("div", { className: "code" }, bar, pre);
  };
  return [build, Math.min(end + 1, lines.length)];
}

function quote(lines, at, depth) {
  let end = at;
  const inner = [];
  for (let match; end < lines.length && (match = QUOTE.exec(lines[end])); end += 1) inner.push(match[1]);
  return [() => element("blockquote", {}, ...blocksOf(inner.join("\n"), depth + 1).map((one) => one.build())), end];
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    const deep = /^\s*/.exec(lines[end])[0].length > indent.length;
    if (match && match[1].length <= indent.length) {
      if (match[1].length < indent.length || /\d/.test(match[2]) !== ordered || RULE.test(lines[end])) break;
      items.push([match[3]]);
    } else if (!lines[end].trim()) {
      const next = lines[end + 1];
      if (next === undefined || !(ITEM.test(next) || /^\s{2,}\S/.test(next))) break;
      items.at(-1).push("");
    } else if (deep) {
      items.at(-1).push(lines[end].replace(new RegExp(`^\\s{0,${indent.length + mark.length + 1}}`), ""));
    } else if (lines[end - 1].trim() && !starts(lines[end], lines[end + 1])) {
      items.at(-1).push(lines[end]);
    } else break;
    end += 1;
  }
  const build = () => {
    const node = element(ordered ? "ol" : "ul");
    if (ordered && Number.parseInt(mark, 10) !== 1) node.start = Number.parseInt(mark, 10);
    for (const item of items) node.append(listItem(item.join("\n"), depth));
    return node;
  };
  return [build, end];
}

function listItem(text, depth) {
  const nodes = blocksOf(text, depth + 1).map((one) => one.build());
  // A single line needs no paragraph.
  if (nodes[0]?.tagName === "P") nodes.splice(0, 1, ...nodes[0].childNodes);
  return element("li", {}, ...nodes);
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function table(lines, at) {
  const head = cells(lines[at]);
  const sides = cells(lines[at + 1]).map((mark) => (/^-+:$/.test(mark) ? "right" : /^:-+:$/.test(mark) ? "middle" : ""));
  let end = at + 2;
  const rows = [];
  for (; end < lines.length && lines[end].includes("|"); end += 1) rows.push(cells(lines[end]));
  const row = (tag, values) =>
    element("tr", {}, ...head.map((_, i) => element(tag, { className: sides[i] || undefined }, ...inline(values[i] ?? ""))));
  const build = () => {
    const body = element("tbody", {}, ...rows.map((values) => row("td", values)));
    const node = element("div", { className: "wide-table" }, element("table", {}, element("thead", {}, row("th", head)), body));
    node.tabIndex = 0;
    return node;
  };
  return [build, end];
}
