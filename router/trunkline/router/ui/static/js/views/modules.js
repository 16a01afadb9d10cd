/** @file Prompts made of modules: edit a schema, have it checked and kept, choose modules, and see what was computed. */

import { call } from "../api.js";
import { Conversation } from "../conversation.js";
import { counted, whole } from "../core/format.js";
import { outline, selection } from "../core/pml.js";
import { fill, h } from "../dom.js";
import { Editor } from "../editor.js";
import { samplingForm } from "../sampling_form.js";
import { badge, errorBox, tierBadge } from "../widgets.js";

/** @type {import("../main.js").View} */
export const modules = {
  id: "modules",
  title: "Modules",
  icon: "M4 4h7v7H4zm9 0h7v7h-7zM4 13h7v7H4zm12.5 0v7M13 16.5h7",
  mount: (root) => new ModulesView(root),
};

const EXAMPLE = `<schema name="example">
  <system>
    Use these notes.
    <module name="rules"> Be exact. <param name="days" len="4" default="two"/> days are left.</module>
    <union default="rome">
      <module name="rome"> Rome is warm in May. The price of Marble Gate is 48.</module>
      <module name="oslo"> Oslo lies at the end of a long fjord. The price of Glacier Tower is 93.</module>
    </union>
    <module name="end"> Answer in one sentence.</module>
  </system>
</schema>
`;
/** What is being edited survives a look at another view. */
let draft = EXAMPLE;

class ModulesView {
  /** @type {import("../core/pml.js").Outline | null} */
  #outline = null;
  #chosen = new Set(/** @type {string[]} */ ([]));
  #given = new Map();
  /** As the router keeps it. @type {any} */
  #schema = null;
  #said = h("div.said", { role: "status" });
  #list = h("div.modulelist");
  #names = h("select", { "aria-label": "Schemas of this cluster", onchange: () => void this.#load(this.#names.value) });
  #editor = new Editor(() => this.#edited());
  #question = h("textarea", { id: "module-question", rows: "2", placeholder: "What is the price of Glacier Tower?" });
  #settings = samplingForm({ max_tokens: "60" });
  #run = h("button.primary", { type: "submit" }, "Run");
  #stop = h("button", { type: "button", hidden: true, onclick: () => this.#conversation.stop() }, "Stop");
  #conversation = new Conversation((running) => {
    this.#run.hidden = running;
    this.#stop.hidden = !running;
  });

  /** @param {HTMLElement} root */
  constructor(root) {
    root.append(
      h("h1.sr", null, "Prompt modules"),
      h("div.workbench", null,
        h("section.card.source", { "aria-label": "Schema" },
          h("div.row.head", null, h("h2", null, "Schema"), this.#names, h("span.grow"),
            h("button", { type: "button", onclick: () => void this.#check() }, "Check"),
            h("button.primary", { type: "button", onclick: () => void this.#keep() }, "Keep"),
            h("button", { type: "button", onclick: () => void this.#forget() }, "Delete")),
          this.#editor.element, this.#said),
        h("section.card.choice", { "aria-label": "Prompt" },
          h("div.row.head", null, h("h2", null, "Modules of the prompt")),
          this.#list,
          h("form", { onsubmit: (/** @type {Event} */ event) => {
            event.preventDefault();
            void this.#ask();
          } },
          h("label.block", { for: "module-question" }, h("span", null, "Question"), this.#question),
          h("details.more", null, h("summary", null, "Sampling"), this.#settings.element),
          h("div.row", null, this.#run, this.#stop)),
          this.#conversation.element)),
    );
    this.#editor.text = draft;
    void this.#refresh();
  }

  close() {
    this.#conversation.stop();
  }

  #edited() {
    draft = this.#editor.text;
    const found = outline(draft);
    if (!found) return; // half a word: the choice stays as it was
    if (found.name !== this.#outline?.name) {
      this.#chosen = new Set(found.modules.filter(({ isDefault }) => isDefault).map(({ path }) => path));
      this.#schema = null;
    }
    this.#outline = found;
    this.#drawModules();
  }

  /** Which schemas there are, and what is known of the one that is edited. */
  async #refresh() {
    try {
      const { data } = await call("v1/schemas?limit=100");
      fill(this.#names, h("option", { value: "" }, data.length ? counted(data.length, "schema") : "none kept"), data.map((/** @type {any} */ { name }) => h("option", { value: name }, name)));
      const name = this.#outline?.name;
      if (name && data.some((/** @type {any} */ one) => one.name === name)) this.#schema = await call(`v1/schemas/${encodeURIComponent(name)}`);
      this.#drawModules();
    } catch (error) {
      this.#fail(error);
    }
  }

  /** @param {string} name */
  async #load(name) {
    if (!name) return;
    await this.#try(async () => {
      this.#schema = await call(`v1/schemas/${encodeURIComponent(name)}?include=pml`);
      this.#editor.text = this.#schema.pml;
      return [`Version ${this.#schema.version}, ${this.#schema.status}.`];
    });
  }

  async #check() {
    await this.#try(async () => {
      // Kept for a moment under a salt of its own: nothing is computed, and nobody else's schema of this name is touched.
      const salt = `check-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
      const { name, extent, usage, warnings } = await call("v1/schemas", { body: { pml: this.#editor.text, warm: false, ttl: 60, cache_salt: salt } });
      await call(`v1/schemas/${encodeURIComponent(name)}?cache_salt=${salt}`, { method: "DELETE" });
      return [`“${name}” is fine: ${counted(usage.tokens, "token")} over ${counted(extent, "position")}.`, ...warnings];
    });
  }

  async #keep() {
    await this.#try(async () => {
      this.#schema = await call("v1/schemas", { body: { pml: this.#editor.text } });
      const { name, version, usage, warnings } = this.#schema;
      return [`Kept “${name}”, version ${version}: ${whole(usage.computed_tokens)} of ${counted(usage.tokens, "token")} computed.`, ...warnings];
    });
    await this.#refresh();
  }

  async #forget() {
    const name = this.#outline?.name ?? "";
    await this.#try(async () => {
      await call(`v1/schemas/${encodeURIComponent(name)}`, { method: "DELETE" });
      this.#schema = null;
      return [`“${name}” is forgotten.`];
    });
    await this.#refresh();
  }

  /** @param {() => Promise<string[]>} work what it did, in words, and warnings */
  async #try(work) {
    this.#editor.mark(0);
    fill(this.#said, h("p.muted", null, "…"));
    try {
      const [done, ...warnings] = await work();
      fill(this.#said, h("p.good", null, done), h("ul.plain.muted", null, warnings.map((text) => h("li", null, text))));
      this.#drawModules();
    } catch (error) {
      this.#fail(error);
    }
  }

  /** @param {unknown} error */
  #fail(error) {
    const { line, column } = /** @type {any} */ (error).details ?? {};
    const box = errorBox(error);
    if (line) box.prepend(h("button.where", { type: "button", onclick: () => this.#editor.mark(line, column ?? 1) }, `line ${line}${column ? `, column ${column}` : ""}`));
    fill(this.#said, box);
    if (line) this.#editor.mark(line, column ?? 1);
  }

  #drawModules() {
    const found = this.#outline;
    if (!found) return;
    fill(this.#list, found.modules.length ? found.modules.map((module) => this.#moduleLine(module)) : h("p.empty", null, "The schema has no modules."));
  }

  /** @param {import("../core/pml.js").Module} module */
  #moduleLine(module) {
    const { path, depth, params, union } = module;
    const state = this.#schema?.modules.find((/** @type {any} */ one) => one.path === path);
    const box = h("input", { type: "checkbox", id: `module-${path}`, onchange: () => this.#choose(module, box.checked) });
    box.checked = this.#chosen.has(path);
    return h("div.moduleline", { style: { "--depth": String(depth) }, dataset: { path } },
      h("label", { for: `module-${path}` }, box, h("span", null, path.split("/").pop() ?? ""), union ? badge(`choice ${union}`, "union") : null),
      h("span.grow"),
      state ? h("span.figure.muted", null, counted(state.tokens, "token")) : null,
      state ? tierBadge(state.tier ?? "none") : badge("not kept"),
      box.checked && params.length ? h("div.params", null, params.map((param) => this.#paramField(path, param))) : null);
  }

  /** @param {string} path @param {import("../core/pml.js").Param} param */
  #paramField(path, { name, length, fallback, required }) {
    const key = `${path} ${name}`;
    return h("label", null, h("span", null, name, required ? " *" : ""), h("input", {
      type: "text", value: this.#given.get(key) ?? "", placeholder: fallback || (required ? "required" : "nothing"), title: `at most ${counted(length, "token")}`,
      oninput: (/** @type {InputEvent} */ event) => this.#given.set(key, /** @type {HTMLInputElement} */ (event.target).value),
    }));
  }

  /** Also what has to be, or cannot be, with it. @param {import("../core/pml.js").Module} module @param {boolean} on */
  #choose({ path, union }, on) {
    const all = this.#outline?.modules ?? [];
    if (!on) for (const other of all) if (other.path === path || other.path.startsWith(`${path}/`)) this.#chosen.delete(other.path);
    if (on) {
      if (union) for (const other of all) if (other.union === union) this.#chosen.delete(other.path);
      for (const other of all) if (path === other.path || path.startsWith(`${other.path}/`)) this.#chosen.add(other.path);
    }
    this.#drawModules();
    /** @type {HTMLElement | null} */ (document.getElementById(`module-${path}`))?.focus();
  }

  async #ask() {
    if (!this.#outline || this.#conversation.running) return;
    const question = this.#question.value.trim() || this.#question.placeholder;
    let before;
    try {
      before = await call(`v1/schemas/${encodeURIComponent(this.#outline.name)}`);
    } catch (error) {
      this.#fail(error);
      return;
    }
    const there = new Set(before.modules.filter((/** @type {any} */ module) => module.tier).map((/** @type {any} */ module) => module.path));
    const body = { prompt: selection(this.#outline, this.#chosen, this.#given), messages: [{ role: "user", content: question }], ...this.#settings.values() };
    await this.#conversation.ask(question, body, (path) => there.has(path));
    await this.#refresh();
  }
}
