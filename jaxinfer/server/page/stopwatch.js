// How many tokens an answer has, and how fast they come.

export class Stopwatch {
  #start = performance.now();
  #first = null; // {tokens, ms}
  #last = null;

  /** Notes that there are `tokens` by now. */
  count(tokens) {
    if (tokens === 0 || tokens === this.#last?.tokens) return;
    this.#last = { tokens, ms: performance.now() };
    this.#first ??= this.#last;
  }

  /** Returns what is known: tokens, tokens a second after the first, seconds until the first. */
  report() {
    if (!this.#first) return [];
    const { tokens, ms } = this.#last;
    const parts = [tokens === 1 ? "1 token" : `${tokens.toLocaleString("en")} tokens`];
    if (ms > this.#first.ms) {
      const rate = (1000 * (tokens - this.#first.tokens)) / (ms - this.#first.ms);
      parts.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tok/s`);
    }
    parts.push(`first after ${((this.#first.ms - this.#start) / 1000).toFixed(2)} s`);
    return parts.map((part) => part.replaceAll(" ", "\u00a0")); // breaks between parts only
  }
}
