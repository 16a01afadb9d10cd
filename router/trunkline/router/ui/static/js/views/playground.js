/** @file Talk to the model and see, for each prompt, which tokens were in the cache. */

import { call } from "../api.js";
import { Conversation } from "../conversation.js";
import { h } from "../dom.js";
import { samplingForm } from "../sampling_form.js";
import { errorBox, legend, segmented } from "../widgets.js";

/** @type {import("../main.js").View} */
export const playground = {
  id: "playground",
  title: "Playground",
  icon: "M4 5h16v11H10l-5 4v-4H4z",
  mount: (root) => new Playground(root),
};

/** What was said survives a look at another view. @type {{role: string, content: string}[]} */
let said = [];
/** @type {HTMLElement | null} */
let kept = null;
/** @type {Playground | null} */
let instance = null;
let session = "";

class Playground {
  #mode = session ? "stored" : "plain";
  #system = h("textarea", { id: "system", rows: "3", placeholder: "Answer in one sentence." });
  #question = h("textarea", {
    id: "question", rows: "2", placeholder: "Ask something", "aria-label": "Message",
    onkeydown: (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      void this.#send();
    },
  });
  #go = h("button.primary", { type: "submit" }, "Send");
  #stop = h("button", { type: "button", hidden: true, onclick: () => this.#conversation.stop() }, "Stop");
  #settings = samplingForm({ max_tokens: "120" });
  #sessionNote = h("p.muted.note");
  #problem = h("div");
  #conversation = new Conversation((running) => {
    this.#go.hidden = running;
    this.#stop.hidden = !running;
  });

  /** @param {HTMLElement} root */
  constructor(root) {
    if (instance && kept) {
      root.append(kept);
      return instance;
    }
    const form = h("form.composer", { onsubmit: (/** @type {Event} */ event) => {
      event.preventDefault();
      void this.#send();
    } }, this.#question, this.#go, this.#stop);
    const page = h("div.playground", null,
      h("h1.sr", null, "Playground"),
      h("section.card.talk", null,
        h("div.row.head", null, h("h2", null, "Conversation"), h("span.grow"), legend(["device", "device"], ["host", "host"], ["disk", "disk"], ["remote", "remote"], ["peer", "another group"], ["new", "computed"])),
        this.#conversation.element, this.#problem, form),
      h("aside.card.side", { "aria-label": "Settings" },
        h("h3", null, "Kept as"),
        segmented("Kept as", [["plain", "Plain"], ["stored", "Stored session"]], this.#mode, (mode) => {
          this.#mode = mode;
          this.#restart();
        }),
        this.#sessionNote,
        h("label.block", { for: "system" }, h("span", null, "System message"), this.#system),
        h("h3", null, "Sampling"),
        this.#settings.element,
        h("button", { type: "button", onclick: () => this.#restart() }, "New conversation")),
    );
    instance = this;
    kept = page;
    root.append(page);
    this.#describe();
  }

  close() {} // an answer goes on while another view is open

  /** @param {string} key */
  onKey(key) {
    if (key === "/") this.#question.focus();
    return key === "/";
  }

  #restart() {
    this.#conversation.clear();
    this.#problem.replaceChildren();
    said = [];
    session = "";
    this.#describe();
    this.#question.focus();
  }

  #describe() {
    this.#sessionNote.textContent = this.#mode === "plain"
      ? "Each request has the whole conversation; the cache finds what it knows of it."
      : session ? `The cluster keeps it: ${session}` : "The cluster keeps the conversation; requests have only what is new.";
  }

  async #send() {
    const content = this.#question.value.trim();
    if (!content || this.#conversation.running) return;
    this.#question.value = "";
    this.#problem.replaceChildren();
    const message = { role: "user", content };
    const system = this.#system.value.trim();
    const first = system && !said.length ? [{ role: "system", content: system }] : [];
    try {
      if (this.#mode === "stored" && !session) {
        ({ id: session } = await call("v1/sessions", { body: first.length ? { messages: first } : {} }));
        this.#describe();
      }
    } catch (error) {
      this.#problem.replaceChildren(errorBox(error));
      this.#question.value = content;
      return;
    }
    const asked = this.#mode === "stored" ? { session_id: session, messages: [message] } : { messages: [...first, ...said, message] };
    const { text, complete } = await this.#conversation.ask(content, { ...asked, ...this.#settings.values() });
    // A turn that was stopped, or failed, was not said: the next one goes on from before it.
    if (complete) said = [...first, ...said, message, { role: "assistant", content: text }];
  }
}
