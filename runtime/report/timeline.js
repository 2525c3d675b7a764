"use strict";
// The timeline of a profile: step, layers, commands, then what each thread did. One mark can be reached by the Tab key,
// arrows go on from there.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const ROW = 22, GAP = 3, AXIS = 22, LEAST = 0.4, OWN = 20, NEAR = 5, ZOOM = 1.6, MAX_THREADS = 16;
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.getElementById("timeline");
  const details = document.getElementById("timeline-details");
  const total = data.replay.us;
  const threads = Math.min(data.threads, MAX_THREADS);

  const number = (value, digits = 3) => value.toLocaleString("en", { maximumSignificantDigits: digits });
  const micros = (us) => us >= 1000 ? `${number(us / 1000)} ms` : `${number(us)} µs`;
  const bytes = (count) => {
    for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
      if (count >= size) return `${number(count / size)} ${unit}`;
    }
    return `${count} bytes`;
  };
  const share = (us) => `${number(100 * us / total)} % of the step`;
  const make = (name, attributes, text) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // ---- what there is to draw ----------------------------------------------------------------------------------------

  const rows = [[], [], [], ...Array.from({ length: threads }, () => [])];
  const add = (row, from, to, label, kind, facts, parent) => {
    const node = { row, from, to, label, kind, facts, parent, place: rows[row].length, children: [] };
    rows[row].push(node);
    if (parent) parent.children.push(node);
    return node;
  };
  const facts = (command) => [
    ["command", `${command.index}: ${command.name}`],
    ["kernel", command.symbol],
    ["family", command.family],
    ["time", `${micros(command.us)} in the kernel, mean of ${data.threads} threads; ${share(command.us)}`],
    ["moves", `${bytes(command.bytes)}, ${bytes(command.memory_bytes)} of them weights and KV cache, `
      + `${bytes(command.written_bytes)} written`
      + (command.gb_per_s === null ? "" : `; ${number(command.gb_per_s)} GB/s`)],
    ["computes", command.flops ? `${number(command.flops / 1e6)} MFLOP; ${number(command.gflop_per_s)} GFLOP/s` : "–"],
    ["limit", command.of_limit === null ? "none" : `${number(100 * command.of_limit)} % of ${command.limit}`],
  ];
  const step = add(0, 0, total, data.bucket, "step", [
    ["bucket", data.bucket], ["time", micros(total)], ["commands", `${data.commands.length}`],
  ]);
  const ends = (command) => command.start_us_per_thread.map((start, t) => start + command.us_per_thread[t]);
  let group = null;
  for (const command of data.commands) {
    const from = Math.min(...command.start_us_per_thread), to = Math.max(...ends(command));
    if (group === null || group.label !== command.group) group = add(1, from, to, command.group, "layer", [], step);
    group.to = Math.max(group.to, to);
    const node = add(2, from, to, command.op, command.family, facts(command), group);
    for (let t = 0; t < threads; t++) {
      const start = command.start_us_per_thread[t], end = start + command.us_per_thread[t];
      const wait = command.imbalance_us_per_thread[t] + command.sync_us_per_thread[t];
      const bar = add(3 + t, start, end, command.op, command.family, [
        ["thread", `${t}`], ["kernel time", micros(end - start)],
        ["wait behind it", `${micros(wait)}, ${micros(command.imbalance_us_per_thread[t])} of it for the last thread`],
        ...facts(command).slice(0, 3),
      ], node);
      bar.wait = wait;
    }
  }
  for (const layer of rows[1]) {
    const us = layer.children.reduce((sum, node) => sum + data.commands[node.place].us, 0);
    layer.facts = [["layer", layer.label], ["commands", `${layer.children.length}`],
      ["time", `${micros(layer.to - layer.from)} from first to last; ${micros(us)} in kernels, ${share(us)}`]];
  }

  // ---- drawing ------------------------------------------------------------------------------------------------------

  const names = ["step", "layers", "commands", ...Array.from({ length: threads }, (_, t) => `thread ${t}`)];
  const left = 74;
  const svg = make("svg", { role: "group", "aria-label": "Timeline of one replay", "data-from": 0, "data-to": total });
  root.append(svg);
  let view = [0, total], current = step, width = 0;

  const draw = () => {
    const focused = svg.contains(document.activeElement);
    width = Math.max(root.clientWidth, 300);
    const height = AXIS + rows.length * (ROW + GAP) + 4;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.dataset.from = view[0];
    svg.dataset.to = view[1];
    const x = (us) => left + (us - view[0]) / (view[1] - view[0]) * (width - left - 2);
    const shapes = [];
    const rough = (view[1] - view[0]) / Math.max(4, Math.floor((width - left) / 110));
    const power = 10 ** Math.floor(Math.log10(rough));
    const unit = power * [1, 2, 5, 10].find((m) => power * m >= rough);
    for (let us = Math.ceil(view[0] / unit) * unit; us <= view[1]; us += unit) {
      shapes.push(make("line", { x1: x(us), x2: x(us), y1: AXIS - 6, y2: height, class: "rule" }));
      if (x(us) < width - 50) shapes.push(make("text", { x: x(us) + 3, y: 12, "font-size": 11 }, us ? micros(us) : "0"));
    }
    rows.forEach((nodes, row) => {
      const y = AXIS + row * (ROW + GAP);
      shapes.push(make("text", { x: 0, y: y + 15, "font-size": 11 }, names[row]));
      // Thousands of narrow bars: one path for those of a kind.
      const narrow = new Map(), own = [];
      let waits = "";
      for (const node of nodes) {
        if (node.wait && node.to + node.wait > view[0] && node.to < view[1]) {
          const from = Math.max(x(node.to), left), to = Math.min(x(node.to + node.wait), width - 2);
          if (to - from >= LEAST) waits += `M${from.toFixed(1)} ${y + ROW / 2}H${to.toFixed(1)}`;
        }
        const from = Math.max(x(node.from), left), size = Math.min(x(node.to), width - 2) - from;
        if (node === current) own.push(bar(node, from, y, Math.max(size, 3)));
        if (node === current || size < LEAST || node.to < view[0] || node.from > view[1]) continue;
        if (size >= OWN) own.push(bar(node, from, y, size));
        else {
          const shape = `M${from.toFixed(1)} ${y}h${size.toFixed(1)}v${ROW}h${(-size).toFixed(1)}z`;
          narrow.set(node.kind, (narrow.get(node.kind) ?? "") + shape);
        }
      }
      if (waits) shapes.push(make("path", { d: waits, class: "wait" }));
      for (const [kind, d] of narrow) shapes.push(make("path", { d, class: `bars ${kind}` }));
      shapes.push(...own);
    });
    svg.replaceChildren(...shapes);
    if (focused) svg.querySelector("[tabindex='0']").focus({ preventScroll: true });
  };

  const bar = (node, x, y, size) => {
    const selected = node === current;
    const mark = make("g", {
      class: `bar ${node.kind}`, role: "button", tabindex: selected ? 0 : -1, "data-row": node.row,
      "data-place": node.place, "aria-label": `${node.label}, ${names[node.row]}, ${micros(node.to - node.from)}`,
    });
    if (selected) mark.classList.add("current");
    mark.append(make("rect", { x, y, width: size, height: ROW, rx: size > 6 ? 3 : 0 }));
    // Of "layer 12" the number will do.
    const short = node.kind === "layer" ? node.label.split(" ").at(-1) : "";
    const fits = Math.floor((size - 8) / 6.6);
    const text = node.label.length <= fits ? node.label
      : short && short.length <= fits ? short : fits >= 3 ? `${node.label.slice(0, fits - 1)}…` : "";
    if (text) {
      mark.append(make("text", { x: x + 5, y: y + 15, "font-size": 11 }, text));
    }
    return mark;
  };

  const tell = (node) => details.replaceChildren(...node.facts.flatMap(([name, value]) => {
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name;
    text.textContent = value;
    return [term, text];
  }));

  // ---- moving -------------------------------------------------------------------------------------------------------

  const show = (from, to) => {
    const size = Math.min(Math.max(to - from, total / 1e5), total);
    const start = Math.min(Math.max(from, 0), total - size);
    view = [start, start + size];
    draw();
  };
  const zoom = (factor, at) => {
    const size = (view[1] - view[0]) / factor;
    const part = (at - view[0]) / (view[1] - view[0]);
    show(at - size * part, at + size * (1 - part));
  };
  const middle = () => {
    const at = (current.from + current.to) / 2;
    return at >= view[0] && at <= view[1] ? at : (view[0] + view[1]) / 2;
  };
  const select = (node, focus) => {
    current = node;
    tell(node);
    const size = view[1] - view[0];
    if (node.to > view[1] || node.from < view[0]) {
      if (node.to - node.from <= size) show((node.from + node.to - size) / 2, (node.from + node.to + size) / 2);
      else if (node.from > view[1] || node.to < view[0]) show(node.from, node.from + size);
      else draw();
    } else draw();
    if (focus) svg.querySelector("[tabindex='0']").focus({ preventScroll: true });
  };
  const all = () => show(0, total);
  const enter = (node) => {
    const room = (node.to - node.from) * 0.02;
    show(node.from - room, node.to + room);
  };

  svg.addEventListener("keydown", (event) => {
    const row = rows[current.row];
    const moves = {
      ArrowRight: () => row[current.place + 1], ArrowLeft: () => row[current.place - 1],
      ArrowDown: () => current.children[0] ?? below(), ArrowUp: () => above(),
      Home: () => row[0], End: () => row[row.length - 1],
    };
    const acts = {
      Enter: () => enter(current), " ": () => enter(current), Escape: all,
      "+": () => zoom(ZOOM, middle()), "=": () => zoom(ZOOM, middle()), "-": () => zoom(1 / ZOOM, middle()),
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (moves[event.key]) {
      const next = moves[event.key]();
      if (next) select(next, true);
    } else if (acts[event.key]) acts[event.key]();
    else return;
    event.preventDefault();
  });
  // From a thread to the same command on the next one.
  const below = () => current.row >= 3 ? rows[current.row + 1]?.[current.place] : undefined;
  const above = () => current.row > 3 ? rows[current.row - 1][current.place] : current.parent;

  // By place, for narrow bars are no elements of their own.
  const nodeAt = (event) => {
    const box = svg.getBoundingClientRect(), scale = width / box.width;
    const down = (event.clientY - box.top) * scale - AXIS, row = Math.floor(down / (ROW + GAP));
    const perPixel = (view[1] - view[0]) / (width - left - 2);
    const at = view[0] + ((event.clientX - box.left) * scale - left) * perPixel;
    let best = null, far = NEAR * perPixel;
    for (const node of down >= 0 && at >= view[0] - far ? rows[row] ?? [] : []) {
      const distance = Math.max(node.from - at, at - node.to, 0);
      if (distance < far) [best, far] = [node, distance];
    }
    return best;
  };
  let drag = null;
  svg.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, view: [...view], moved: false, node: nodeAt(event) };
  });
  window.addEventListener("pointermove", (event) => {
    if (drag === null) return;
    const pixels = event.clientX - drag.x;
    if (!drag.moved && Math.abs(pixels) < 5) return;
    drag.moved = true;
    const moved = pixels / (svg.clientWidth || width) * width / (width - left) * (drag.view[1] - drag.view[0]);
    show(drag.view[0] - moved, drag.view[1] - moved);
  });
  window.addEventListener("pointerup", () => {
    if (drag?.node && !drag.moved) {
      // A second click on the same mark looks closer.
      if (drag.node === current) enter(current);
      select(drag.node, true);
    }
    drag = null;
  });
  window.addEventListener("pointercancel", () => { drag = null; });
  svg.addEventListener("wheel", (event) => {
    // Without a key the wheel scrolls the page, as everywhere.
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    const part = ((event.clientX - box.left) / box.width * width - left) / (width - left);
    zoom((event.deltaY || event.deltaX) < 0 ? ZOOM : 1 / ZOOM,
      view[0] + Math.min(Math.max(part, 0), 1) * (view[1] - view[0]));
  }, { passive: false });
  document.getElementById("zoom-in").addEventListener("click", () => zoom(ZOOM, middle()));
  document.getElementById("zoom-out").addEventListener("click", () => zoom(1 / ZOOM, middle()));
  document.getElementById("zoom-all").addEventListener("click", all);
  new ResizeObserver(() => { if (Math.max(root.clientWidth, 300) !== width) draw(); }).observe(root);
  select(step, false);
})();
