/** @file Asking again and again: one question at a time, none while nobody looks, slower while nobody answers. */

import { ApiError, call } from "./api.js";

const SECONDS_MAX = 10;

/** What is known of the connection, for the whole page. Events "change". */
class Connection extends EventTarget {
  /** @type {"connecting" | "live" | "lost" | "locked" | "error" | "asleep"} */
  state = "connecting";
  message = "";

  /** @param {Connection["state"]} state @param {string} [message] */
  set(state, message = "") {
    if (state === this.state && message === this.message) return;
    this.state = state;
    this.message = message;
    this.dispatchEvent(new Event("change"));
  }
}

export const connection = new Connection();

/** @param {unknown} error */
function note(error) {
  if (!(error instanceof ApiError)) throw error;
  if (error.status === 0) connection.set("lost", error.message);
  else if (error.status === 401 || error.status === 403) connection.set("locked", error.message);
  else connection.set("error", error.message);
}

/** One question that is asked every `seconds`, until `stop`. */
export class Poll {
  #path;
  #seconds;
  #onData;
  #failures = 0;
  #stopped = false;
  paused = false;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  #abort = new AbortController();

  /**
   * @param {() => string} path asked for each time
   * @param {number} seconds between an answer and the next question
   * @param {(data: any) => void} onData
   */
  constructor(path, seconds, onData) {
    this.#path = path;
    this.#seconds = seconds;
    this.#onData = onData;
    document.addEventListener("visibilitychange", this.#onVisibility);
    this.now();
  }

  #onVisibility = () => {
    if (document.hidden) connection.set("asleep");
    else this.now();
  };

  /** Ask at once, whatever was asked before. */
  now() {
    clearTimeout(this.#timer);
    this.#abort.abort();
    this.#abort = new AbortController();
    void this.#ask(this.#abort.signal);
  }

  /** @param {AbortSignal} signal */
  async #ask(signal) {
    if (this.#stopped || document.hidden) return;
    if (!this.paused) {
      try {
        const data = await call(this.#path(), { signal });
        if (signal.aborted) return;
        this.#failures = 0;
        connection.set("live");
        this.#onData(data);
      } catch (error) {
        if (signal.aborted) return;
        this.#failures += 1;
        note(error);
        if (connection.state === "locked") return; // until there is another key
      }
    }
    const wait = Math.min(this.#seconds * 2 ** Math.max(this.#failures - 1, 0), SECONDS_MAX);
    this.#timer = setTimeout(() => void this.#ask(signal), wait * 1000);
  }

  stop() {
    this.#stopped = true;
    clearTimeout(this.#timer);
    this.#abort.abort();
    document.removeEventListener("visibilitychange", this.#onVisibility);
  }
}
