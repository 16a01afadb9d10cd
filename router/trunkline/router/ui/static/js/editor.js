/** @file A text field with colours and lines: the field above, its coloured copy beneath, both with the same metrics. */

import { highlight } from "./core/pml.js";
import { fill, h } from "./dom.js";

export class Editor {
  #field = h("textarea", { spellcheck: "false", autocapitalize: "off", autocomplete: "off", wrap: "off", "aria-label": "PML source", oninput: () => this.#changed(), onscroll: () => this.#scrolled() });
  #copy = h("pre", { "aria-hidden": "true" });
  #lines = h("div.lines", { "aria-hidden": "true" });
  #wrong = 0;
  #onChange;

  /** @param {() => void} onChange */
  constructor(onChange) {
    this.#onChange = onChange;
    this.element = h("div.editor", null, this.#lines, h("div.code", null, this.#copy, this.#field));
    this.#field.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.#onKey(event));
  }

  get text() {
    return this.#field.value;
  }

  set text(text) {
    this.#field.value = text;
    this.#changed();
  }

  /** Show that a line is wrong, and go there. @param {number} line from 1; 0: none @param {number} [column] from 1 */
  mark(line, column = 1) {
    this.#wrong = line;
    this.#draw();
    if (!line) return;
    const before = this.text.split("\n").slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
    this.#field.focus();
    this.#field.setSelectionRange(before + column - 1, before + column - 1);
    this.#lines.querySelector(".wrong")?.scrollIntoView({ block: "nearest" });
  }

  #changed() {
    this.#wrong = 0;
    this.#draw();
    this.#onChange();
  }

  #draw() {
    fill(this.#copy, highlight(this.text).map(({ text, kind }) => (kind ? h("span", { class: `pml-${kind}` }, text) : text)), "\n");
    const count = this.text.split("\n").length;
    fill(this.#lines, Array.from({ length: count }, (_, at) => h("div", { class: at + 1 === this.#wrong ? "wrong" : null }, String(at + 1))));
    this.#field.setAttribute("aria-invalid", String(this.#wrong > 0));
    this.#scrolled();
  }

  #scrolled() {
    this.#copy.scrollTop = this.#field.scrollTop;
    this.#copy.scrollLeft = this.#field.scrollLeft;
    this.#lines.scrollTop = this.#field.scrollTop;
  }

  /** Two blanks for Tab, unless Escape was pressed before: the keyboard must get out, too. @param {KeyboardEvent} event */
  #onKey(event) {
    if (event.key !== "Tab" || event.shiftKey) return;
    event.preventDefault();
    const { selectionStart: from, selectionEnd: to } = this.#field;
    this.#field.setRangeText("  ", from, to, "end");
    this.#changed();
  }
}
