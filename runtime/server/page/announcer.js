// Tells a screen reader what streams, in whole sentences and not too often.
import { byId } from "./dom.js";

const EVERY_MS = 3000;
const SENTENCE = /^[\s\S]*[.!?:\n](?=\s|$)/;

export class Announcer {
  #waiting = "";
  #last = performance.now();

  /** Text that came; told once a sentence is whole and the last one was told a while ago. */
  add(text) {
    this.#waiting += text;
    if (performance.now() - this.#last < EVERY_MS) return;
    const ready = SENTENCE.exec(this.#waiting)?.[0];
    if (ready) this.#tell(ready);
  }

  /** The answer is over: what is left is told. */
  end(note = "") {
    this.#tell(`${this.#waiting} ${note}`);
  }

  #tell(text) {
    this.#waiting = this.#waiting.slice(text.length);
    this.#last = performance.now();
    byId("announcer").textContent = text.replace(/[*_`#>|~]+/g, " ").trim();
  }
}
