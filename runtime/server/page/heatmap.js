// The ladder as grids, a phase each: batch down, length across, coloured by how often a graph was replayed.
import { count, duration, element, percent } from "./dom.js";

const NAMES = {
  prefill: ["Prefill", "prompt tokens of a step"],
  decode: ["Decode", "context tokens"],
  mixed: ["Mixed", "tokens of a step"],
};
const MAX_LABELS = 8;
const DENSE = 40; // columns from which on a grid takes the whole width

/** Keeps the grids in `parent`, and the words about the cell under the pointer in `detail`. */
export class HeatMap {
  #parent;
  #detail;
  #hint;
  #cells = [];
  #ladder = "";
  #pointed = null; // under the pointer
  #chosen = null; // by keyboard or touch

  constructor(parent, detail) {
    this.#parent = parent;
    this.#detail = detail;
    this.#hint = detail.textContent;
    parent.addEventListener("pointerover", (event) => {
      this.#pointed = event.target.closest(".cell:not(.none)");
      this.#describe();
    });
    parent.addEventListener("pointerleave", () => {
      this.#pointed = null;
      this.#describe();
    });
    // A touch has no hover; the keyboard has arrows, and one tab stop a grid.
    parent.addEventListener("focusin", (event) => this.#choose(event.target.closest(".cell")));
    parent.addEventListener("focusout", () => this.#choose(null));
    parent.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Shows the buckets of a state; the grid is built anew only when the ladder changed. */
  show(buckets) {
    const ladder = buckets.map((bucket) => `${bucket.phase},${bucket.batch},${bucket.seq}`).join(";");
    if (ladder !== this.#ladder) {
      this.#ladder = ladder;
      this.#build(buckets);
    }
    const most = Math.max(1, ...buckets.map((bucket) => bucket.replays));
    buckets.forEach((bucket, index) => {
      const cell = this.#cells[index];
      cell.bucket = bucket;
      // By the root: a few buckets take most of the steps, and the others should still show.
      const heat = bucket.replays ? 12 + 88 * Math.sqrt(bucket.replays / most) : 0;
      cell.style.setProperty("--heat", `${heat.toFixed(0)}%`);
      cell.setAttribute("aria-label", words(bucket));
    });
    this.#describe();
  }

  #choose(cell) {
    this.#chosen = cell;
    if (cell) {
      for (const other of cell.closest(".grid").querySelectorAll('.cell[tabindex="0"]')) other.tabIndex = -1;
      cell.tabIndex = 0;
    }
    this.#describe();
  }

  /** An arrow goes to the next bucket that way, over holes in the ladder. */
  #move(event) {
    const from = event.target.closest(".cell");
    const way = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!from || !way) return;
    event.preventDefault();
    const grid = from.closest(".grid");
    const at = (row, column) => grid.querySelector(`[data-row="${row}"][data-column="${column}"]`);
    let [row, column] = [Number(from.dataset.row) + way[0], Number(from.dataset.column) + way[1]];
    for (let cell; (cell = at(row, column)); [row, column] = [row + way[0], column + way[1]]) {
      if (!cell.bucket) continue;
      cell.focus();
      return;
    }
  }

  #build(buckets) {
    this.#chosen = this.#pointed = null;
    this.#cells = new Array(buckets.length);
    const grids = Object.keys(NAMES)
      .filter((phase) => buckets.some((bucket) => bucket.phase === phase))
      .map((phase) => this.#grid(phase, buckets));
    this.#parent.replaceChildren(...grids);
  }

  #grid(phase, buckets) {
    const [name, axis] = NAMES[phase];
    const sorted = (key) =>
      [...new Set(buckets.filter((one) => one.phase === phase).map((one) => one[key]))].sort((a, b) => a - b);
    const batches = sorted("batch");
    const lengths = sorted("seq");
    const grid = element("div", { className: "grid" }, element("div", { className: "name", text: name }));
    grid.classList.toggle("dense", lengths.length > DENSE);
    grid.style.gridTemplateColumns = `auto repeat(${lengths.length}, minmax(0, 1fr))`;
    grid.setAttribute("role", "group");
    grid.setAttribute("aria-label", `${name} buckets, ${axis} across`);
    batches.forEach((batch, row) => {
      grid.append(element("div", { className: "row", text: count(batch), title: `batch ${batch}` }));
      lengths.forEach((length, column) => {
        const index = buckets.findIndex((one) => one.phase === phase && one.batch === batch && one.seq === length);
        const cell = element(index < 0 ? "div" : "button", { className: index < 0 ? "cell none" : "cell" });
        Object.assign(cell.dataset, { row, column });
        if (index >= 0) {
          cell.type = "button";
          cell.tabIndex = grid.querySelector("button") ? -1 : 0;
          this.#cells[index] = cell;
        }
        grid.append(cell);
      });
    });
    const every = Math.ceil(lengths.length / MAX_LABELS);
    grid.append(element("div"));
    lengths.forEach((length, i) => {
      grid.append(element("div", { className: "column", text: i % every === 0 ? length : "" }));
    });
    grid.append(element("div", { className: "axis", text: `batch ↓  ${axis} →` }));
    return grid;
  }

  #describe() {
    const { bucket } = this.#pointed ?? this.#chosen ?? {};
    this.#detail.textContent = bucket ? words(bucket) : this.#hint;
  }
}

function words(bucket) {
  const rows = bucket.tokens + bucket.padding_tokens;
  const padding = rows ? `, ${percent(bucket.padding_tokens / rows)} padding` : "";
  const time = bucket.replays ? `, ${duration(bucket.replay_s / bucket.replays)} a replay` : "";
  return (
    `${bucket.phase} ${bucket.batch} × ${bucket.seq}: ${count(bucket.replays)} replays, ` +
    `${count(bucket.tokens)} tokens${padding}${time}`
  );
}
