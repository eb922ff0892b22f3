// Has screen readers read the answer: each block once, when it is complete.

const CLEAR_MS = 5000;

export class Speaker {
  #region;
  #numSaid = 0;
  #timer = null;

  /** `region` is an element with aria-live. */
  constructor(region) {
    this.#region = region;
  }

  start() {
    clearTimeout(this.#timer);
    this.#region.replaceChildren();
    this.#numSaid = 0;
  }

  /** Reads those of `blocks` that have not been read. */
  say(blocks) {
    for (const block of blocks.slice(this.#numSaid)) this.#add(block.textContent);
    this.#numSaid = Math.max(this.#numSaid, blocks.length);
  }

  /** Reads what is left, and how it ended; then leaves nothing that could be met twice. */
  finish(blocks, ending) {
    this.say(blocks);
    this.#add(ending);
    this.#timer = setTimeout(() => this.#region.replaceChildren(), CLEAR_MS);
  }

  #add(text) {
    const paragraph = document.createElement("p");
    paragraph.textContent = text;
    this.#region.append(paragraph);
  }
}
