// How an answer came about, above it: open while it streams, folded once the answer starts.
import { duration, element } from "./dom.js";

export class Reasoning {
  #details = element("details", { className: "reasoning" });
  #summary = element("summary", { text: "Thinking …" });
  #body = element("div", { className: "text plain" });
  #touched = false;
  #start = null;
  text = "";

  constructor() {
    this.#details.open = true;
    this.#body.tabIndex = 0; // it may scroll
    this.#summary.addEventListener("click", () => (this.#touched = true));
    this.#details.append(this.#summary, this.#body);
  }

  /** One of a conversation that was kept. */
  static folded(text, before) {
    const reasoning = new Reasoning();
    reasoning.append(text, before);
    reasoning.end(true);
    reasoning.#summary.textContent = "Reasoning";
  }

  get begun() {
    return this.#start !== null;
  }

  append(text, body) {
    if (!this.begun) {
      this.#start = performance.now();
      body.before(this.#details);
    }
    this.text += text;
    this.#body.append(text);
    this.#body.scrollTop = this.#body.scrollHeight;
  }

  /** fold: the answer starts; without one the reasoning stays open, so that no answer is blank. */
  end(fold) {
    if (!this.begun || this.#summary.dataset.done) return;
    this.#summary.dataset.done = "yes";
    this.#summary.textContent = `Thought for ${duration((performance.now() - this.#start) / 1000)}`;
    if (fold && !this.#touched) this.#details.open = false;
  }
}
