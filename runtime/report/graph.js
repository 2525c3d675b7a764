"use strict";
// The graph of a bucket: a tree of layers and commands, arrows beside it, and what the chosen command reads and writes.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const LANE = 9, FIRST = 12;
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const tree = document.getElementById("graph");
  const gutter = document.getElementById("graph-edges");
  const details = document.getElementById("graph-details");
  const items = [...tree.querySelectorAll("[role=treeitem]")];
  const ofCommand = new Map(items.filter((item) => item.dataset.command).map((item) => [+item.dataset.command, item]));
  const parentOf = (item) => item.parentElement.closest("[role=treeitem]");
  const isShown = (item) => parentOf(item)?.getAttribute("aria-expanded") !== "false";
  const shown = () => items.filter(isShown);
  const isOpen = (item) => item.getAttribute("aria-expanded") === "true";
  let current = items[0];

  // ---- arrows: from the command that writes a value to those that read it -------------------------------------------

  const edges = [];
  const writers = new Map();
  for (const command of data.commands) {
    for (const operand of command.operands) {
      if (!operand.written && writers.has(operand.name)) {
        edges.push({ from: writers.get(operand.name), to: command.index, pool: operand.kind.endsWith("_pool") });
      }
    }
    for (const operand of command.operands) if (operand.written) writers.set(operand.name, command.index);
  }
  const make = (name, attributes) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const visible = (index) => {
    const item = ofCommand.get(index);
    return isShown(item) ? item : parentOf(item);
  };
  const drawEdges = () => {
    const rows = shown();
    const place = new Map(rows.map((item, n) => [item, n]));
    const unique = new Map();
    for (const edge of edges) {
      const from = place.get(visible(edge.from)), to = place.get(visible(edge.to));
      if (from !== to) unique.set(`${from} ${to} ${edge.pool}`, { from, to, pool: edge.pool });
    }
    // The short ones inside: each takes the first lane that is free on its way.
    const lanes = [];
    const sorted = [...unique.values()].sort((a, b) => (a.to - a.from) - (b.to - b.from) || a.from - b.from);
    for (const edge of sorted) {
      edge.lane = 0;
      while (lanes[edge.lane]?.some((other) => other.from < edge.to && edge.from < other.to)) edge.lane++;
      (lanes[edge.lane] ??= []).push(edge);
    }
    const width = FIRST + 6 + LANE * Math.max(1, lanes.length);
    tree.parentElement.style.setProperty("--gutter", `${width}px`);
    const zero = gutter.parentElement.getBoundingClientRect();
    const boxes = rows.map((item) => {
      const box = item.querySelector(".node").getBoundingClientRect();
      return { top: box.top - zero.top, bottom: box.bottom - zero.top, left: box.left - zero.left };
    });
    const height = boxes.at(-1).bottom + 4, most = Math.max(...boxes.map((box) => box.left));
    gutter.setAttribute("viewBox", `0 0 ${most} ${height}`);
    gutter.setAttribute("width", most);
    gutter.setAttribute("height", height);
    const here = place.get(isShown(current) ? current : parentOf(current));
    const paths = sorted.map((edge) => {
      const from = boxes[edge.from], to = boxes[edge.to];
      const y0 = from.bottom - 9, y1 = to.top + 9, x = width - FIRST - LANE * edge.lane;
      const bend = Math.min(6, Math.abs(y1 - y0) / 2);
      const touches = edge.from === here || edge.to === here;
      return make("path", {
        d: `M${from.left} ${y0} H${x + bend} Q${x} ${y0} ${x} ${y0 + bend} V${y1 - bend} Q${x} ${y1} ${x + bend} ${y1} `
          + `H${to.left - 2} M${to.left - 6} ${y1 - 3.5} L${to.left - 1} ${y1} L${to.left - 6} ${y1 + 3.5}`,
        class: `edge${edge.pool ? " pool" : ""}${touches ? " here" : ""}`,
      });
    });
    paths.sort((a, b) => a.classList.contains("here") - b.classList.contains("here"));
    gutter.replaceChildren(...paths);
  };

  // ---- what the chosen one is ---------------------------------------------------------------------------------------

  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const count = (value) => value.toLocaleString("en");
  const list = (facts) => {
    const made = element("dl", undefined, "facts");
    for (const [name, value] of facts) made.append(element("dt", name), element("dd", value));
    return made;
  };
  const operands = (command) => {
    const table = element("table"), head = element("tr"), body = element("tbody");
    table.append(element("caption", "Operands, in the order of the kernel's arguments"));
    for (const name of ["name", "kind", "type", "bytes", "access"]) {
      const cell = element("th", name, name === "bytes" ? "" : "words");
      cell.scope = "col";
      head.append(cell);
    }
    table.append(element("thead"), body);
    table.tHead.append(head);
    for (const operand of command.operands) {
      const row = element("tr"), name = element("th", operand.name);
      name.scope = "row";
      const where = operand.kind === "arena" ? ` at ${count(operand.offset)}` : "";
      const size = count(operand.bytes) + (operand.kind.endsWith("_pool") ? " a block" : "");
      row.append(name, element("td", operand.kind + where, "words"),
        element("td", `${operand.dtype}[${operand.shape.join(", ")}]`, "words mono"), element("td", size),
        element("td", operand.written ? "written" : "read", "words"));
      body.append(row);
    }
    const scroll = element("div", undefined, "scroll");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "Operands");
    scroll.append(table);
    return scroll;
  };
  const tell = (item) => {
    const commands = item.dataset.command
      ? [data.commands[item.dataset.command]]
      : data.commands.filter((command) => command.group === item.dataset.group);
    const sum = (key) => commands.reduce((total, command) => total + command[key], 0);
    const moved = [["reads", `${count(sum("read_bytes"))} bytes`], ["writes", `${count(sum("written_bytes"))} bytes`],
      ["computes", `${count(sum("flops"))} FLOPs`]];
    if (commands[0].us !== undefined) moved.push(["time", `${count(Math.round(sum("us") * 1000) / 1000)} µs`]);
    const title = element("h3", item.dataset.title);
    if (!item.dataset.command) {
      details.replaceChildren(title, list([["commands", `${commands.length}`], ...moved]));
      return;
    }
    const [command] = commands;
    details.replaceChildren(title, list([
      ["op", command.op], ["kernel", command.kernel], ["family", command.family],
      ["barrier behind", command.barrier ? "yes" : "no"], ...moved,
      ["arena in use", `${count(command.arena_live_bytes)} of ${count(data.arena_bytes)} bytes`],
    ]), operands(command));
  };

  // ---- moving, as in every tree -------------------------------------------------------------------------------------

  const select = (item, focus) => {
    for (const other of items) {
      other.tabIndex = other === item ? 0 : -1;
      other.setAttribute("aria-selected", other === item);
    }
    current = item;
    tell(item);
    drawEdges();
    if (focus) {
      item.focus({ preventScroll: true });
      item.querySelector(".node").scrollIntoView({ block: "nearest" });
    }
  };
  const open = (item, on) => {
    item.setAttribute("aria-expanded", on);
    if (!on && item !== current && item.contains(current)) select(item, false);
    drawEdges();
  };
  const openAll = (on) => {
    for (const item of items) if (item.hasAttribute("aria-expanded")) item.setAttribute("aria-expanded", on);
    select(isShown(current) ? current : parentOf(current), false);
  };
  tree.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const rows = shown(), at = rows.indexOf(current), folds = current.hasAttribute("aria-expanded");
    const acts = {
      ArrowDown: () => rows[at + 1], ArrowUp: () => rows[at - 1], Home: () => rows[0], End: () => rows.at(-1),
      ArrowRight: () => folds && isOpen(current) ? rows[at + 1] : folds ? open(current, true) : undefined,
      ArrowLeft: () => folds && isOpen(current) ? open(current, false) : parentOf(current),
      Enter: () => folds ? open(current, !isOpen(current)) : undefined,
      " ": () => folds ? open(current, !isOpen(current)) : undefined,
      "*": () => openAll(true),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    const next = acts[event.key]();
    if (next) select(next, true);
  });
  tree.addEventListener("click", (event) => {
    const item = event.target.closest(".node")?.parentElement;
    if (!item) return;
    if (item.hasAttribute("aria-expanded")) open(item, !isOpen(item));
    select(item, true);
  });
  document.getElementById("unfold-all").addEventListener("click", () => openAll(true));
  document.getElementById("fold-all").addEventListener("click", () => openAll(false));

  // Without this script everything is unfolded.
  let unfolded = false;
  for (const item of items) {
    if (!item.hasAttribute("aria-expanded")) continue;
    const isLayer = item.dataset.group.startsWith("layer ");
    if (isLayer && unfolded) item.setAttribute("aria-expanded", "false");
    unfolded ||= isLayer;
  }
  new ResizeObserver(drawEdges).observe(tree);
  window.addEventListener("beforeprint", drawEdges);
  select(items[0], false);
})();
