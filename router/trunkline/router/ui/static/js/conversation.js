/** @file A list of questions and answers, with what was found of each prompt. */

import { ask } from "./answer.js";
import { h } from "./dom.js";
import { PromptView } from "./prompt_view.js";
import { errorBox } from "./widgets.js";

export class Conversation {
  #list = h("div.turns", { role: "log", "aria-label": "Conversation" });
  /** @type {AbortController | null} */
  #running = null;
  /** @type {PromptView | null} */
  #last = null;
  #onChange;

  /** @param {(running: boolean) => void} onChange */
  constructor(onChange) {
    this.#onChange = onChange;
    this.element = this.#list;
  }

  get running() {
    return this.#running !== null;
  }

  clear() {
    this.stop();
    this.#list.replaceChildren();
    this.#last = null;
  }

  stop() {
    this.#running?.abort();
  }

  /**
   * @param {string} question as the page shows it
   * @param {Record<string, any>} body of the request
   * @param {(module: string) => boolean} [wasThere]
   * @returns {Promise<{text: string, complete: boolean}>}
   */
  async ask(question, body, wasThere) {
    this.#last?.fold();
    const prompt = new PromptView(wasThere);
    this.#last = prompt;
    const text = h("div.text", { "aria-busy": "true" });
    const turn = h("article.turn", null, question ? h("div.question", null, question) : null, h("div.answer", null, text, prompt.element));
    this.#list.append(turn);
    this.#follow();
    const running = new AbortController();
    this.#running = running;
    this.#onChange(true);
    let complete = false;
    const answer = await ask(body, {
      onPrompt: (found) => prompt.show(found),
      onText: (all) => {
        text.textContent = all;
        this.#follow();
      },
      onEnd: (end) => {
        prompt.finish(end);
        complete = !end.stopped;
      },
      onError: (error) => turn.append(errorBox(error)),
    }, running.signal);
    text.setAttribute("aria-busy", "false");
    if (this.#running === running) this.#running = null;
    this.#onChange(false);
    this.#follow();
    return { text: answer, complete };
  }

  #follow() {
    this.#list.scrollTop = this.#list.scrollHeight;
  }
}
