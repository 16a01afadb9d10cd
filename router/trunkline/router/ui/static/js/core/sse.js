/** @file Server-sent events, as far as completions use them: `data` lines, each event one. Pure. */

export class SseParser {
  #rest = "";

  /** @param {string} text what came next @returns {string[]} the data of events that are complete now */
  feed(text) {
    const events = (this.#rest + text).split(/\r?\n\r?\n/);
    this.#rest = /** @type {string} */ (events.pop());
    return events
      .map((event) =>
        event
          .split(/\r?\n/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).replace(/^ /, ""))
          .join("\n"),
      )
      .filter((data) => data !== "");
  }
}
