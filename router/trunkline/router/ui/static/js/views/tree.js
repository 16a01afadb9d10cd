/** @file The chunk tree of a group, live: the panel around the picture (`tree_picture.js`). */

import { counted, duration, percent, share, short, whole } from "../core/format.js";
import { layOut, neighbour, pathOf, search, totals } from "../core/tree.js";
import { fastest, TIER_TEXT, tiersOf } from "../core/tiers.js";
import { fill, h, setText } from "../dom.js";
import { Poll } from "../poll.js";
import { badge, legend, tierBadge } from "../widgets.js";
import { Picture } from "./tree_picture.js";

/** @typedef {import("../core/tree.js").Part} Part */

/** @type {import("../main.js").View} */
export const tree = {
  id: "tree",
  title: "Tree",
  icon: "M3 5h5v14H3zM8 5h6v6H8zm0 6h6v8H8zm6-6h7v3h-7zm0 6h7v4h-7z",
  mount: (root) => new TreeView(root),
};

const NODES_MAX = 3000;
/** @type {Record<string, string>} */
const KINDS = { module: "Module", own: "Behind modules", cut: "Behind a cut" };

class TreeView {
  /** @type {any} */
  #data = null;
  /** @type {import("../core/tree.js").Layout} */
  #layout = { roots: [], parts: [], rows: 0, far: 0 };
  /** Where parts are, by key. @type {Map<string, number>} */
  #places = new Map();
  /** What the keyboard is at. @type {string} */
  #at = "";
  /** @type {Part[]} */
  #found = [];
  #group = "0";
  #details = h("aside.card.details", { "aria-label": "Chunk", "aria-live": "polite" });
  #path = h("nav.path", { "aria-label": "Zoomed to" });
  #summary = h("p.muted.summary");
  #empty = h("p.empty", { hidden: true }, "Nothing is cached in this group yet.");
  #matches = h("span.muted", { role: "status" });
  #search = h("input.filter", { type: "search", placeholder: "Text or session", "aria-label": "Search the tree", oninput: () => this.#onSearch(), onkeydown: (/** @type {KeyboardEvent} */ event) => event.key === "Enter" && this.#nextFound() });
  #pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.#setPaused(!this.#poll.paused) }, "Pause");
  #chooser = h("select", { "aria-label": "Group", onchange: () => this.#choose() }, h("option", { value: "0" }, "Group 0"));

  /** @param {HTMLElement} root */
  constructor(root) {
    this.picture = new Picture({
      onFocus: (part) => this.#focus(part),
      onZoom: (part) => this.#drawPath(part),
      onKey: (event) => this.#onPictureKey(event),
    });
    root.append(
      h("h1.sr", null, "Chunk tree"),
      h("div.row.toolbar", null, this.#chooser, this.#search, this.#matches, h("span.grow"),
        h("div.segmented", { role: "group", "aria-label": "Zoom" },
          h("button", { type: "button", "aria-label": "Zoom out", onclick: () => this.picture.scale(1 / 1.6) }, "−"),
          h("button", { type: "button", "aria-label": "Zoom in", onclick: () => this.picture.scale(1.6) }, "+"),
          h("button", { type: "button", onclick: () => this.picture.zoomTo(null) }, "All")),
        this.#pause),
      h("div.treewrap", null,
        h("section.card.stage", null, this.#path, this.picture.element, this.#empty,
          h("div.row.foot", null,
            legend(["device", "device"], ["host", "host"], ["disk", "disk"], ["remote", "remote"], ["peer", "another group"]),
            h("div.legend", null, h("span", null, h("i.swatch.weak"), "idle"), h("span", null, h("i.swatch.strong"), "in use now"), h("span", null, h("i.swatch.modular"), "module"), h("span", null, h("i.swatch.bundled"), "many small ones")),
            h("span.grow"), this.#summary)),
        this.#details),
    );
    this.#poll = new Poll(() => `ui/api/tree?group=${this.#group}&nodes=${NODES_MAX}`, 1, (data) => this.#show(data));
    this.#groups = new Poll(() => "ui/api/overview", 10, ({ groups }) => this.#offer(groups));
    this.#drawDetails(null);
    this.#drawPath(null);
  }

  #poll;
  #groups;

  close() {
    this.#poll.stop();
    this.#groups.stop();
    this.picture.close();
  }

  /** @param {string} key */
  onKey(key) {
    if (key === "/") this.#search.focus();
    else if (key === "p") this.#setPaused(!this.#poll.paused);
    else if (key === "0") this.picture.zoomTo(null);
    else if (key === "n") this.#nextFound();
    else if (key.startsWith("Arrow") && this.#layout.parts.length) {
      this.picture.element.querySelector(".chunks").focus();
      this.#focus(this.#part(this.#at) ?? this.#layout.roots[0]);
    } else return false;
    return true;
  }

  /** @param {any[]} groups */
  #offer(groups) {
    if (this.#chooser.children.length === groups.length) return;
    fill(this.#chooser, groups.map(({ group }) => h("option", { value: String(group) }, `Group ${group}`)));
    this.#chooser.value = this.#group;
  }

  #choose() {
    this.#group = this.#chooser.value;
    this.#at = "";
    this.#places.clear();
    this.picture.zoomTo(null);
    this.#drawDetails(null);
    this.#poll.now();
  }

  /** @param {boolean} paused */
  #setPaused(paused) {
    this.#poll.paused = paused;
    this.#pause.setAttribute("aria-pressed", String(paused));
    setText(this.#pause, paused ? "Go on" : "Pause");
  }

  /** @param {any} data */
  #show(data) {
    this.#data = data;
    this.#layout = layOut(data.nodes, /** @type {any} */ (window).d3, this.#places);
    this.#empty.hidden = data.nodes.length > 0;
    this.#found = search(this.#layout, this.#search.value);
    this.#showMatches();
    this.picture.show(this.#layout, data.chunk_size, new Set(this.#found.map(({ key }) => key)), this.#search.value !== "");
    const sum = totals(data.nodes);
    setText(this.#summary, [
      counted(sum.chunks, "chunk"), counted(sum.tokens, "token"), `${percent(share(sum.onDevice, sum.tokens))} on the device`,
      `${short(sum.inUse)} in use`, sum.shared ? `${short(sum.shared)} saved by sharing now` : "", data.truncated ? "cut short: the largest are shown" : "",
    ].filter(Boolean).join(" · "));
    if (this.#at) this.#drawDetails(this.#part(this.#at));
  }

  /** @param {string} key */
  #part(key) {
    return this.#layout.parts.find((part) => part.key === key) ?? null;
  }

  /** @param {Part | null} part */
  #focus(part) {
    this.#at = part?.key ?? "";
    this.picture.mark(this.#at);
    this.#drawDetails(part);
  }

  /** @param {KeyboardEvent} event */
  #onPictureKey(event) {
    const part = this.#part(this.#at);
    if (event.key.startsWith("Arrow")) {
      const next = part ? neighbour(this.#layout, part, event.key) : this.#layout.roots[0];
      if (next) {
        this.#focus(next);
        this.picture.reveal(next);
      }
    } else if (event.key === "Enter" && part) this.picture.zoomTo(part);
    else if (event.key === "Backspace") this.picture.zoomOut();
    else if (event.key === "+" || event.key === "-") this.picture.scale(event.key === "+" ? 1.6 : 1 / 1.6);
    else return;
    event.preventDefault();
  }

  #onSearch() {
    if (this.#data) this.#show(this.#data);
  }

  #showMatches() {
    setText(this.#matches, this.#search.value.trim() ? `${this.#found.length} found` : "");
  }

  #nextFound() {
    if (!this.#found.length) return;
    const at = this.#found.findIndex(({ key }) => key === this.#at);
    const next = this.#found[(at + 1) % this.#found.length];
    this.picture.zoomTo(next);
    this.#focus(next);
  }

  /** @param {Part | null} part what is zoomed to */
  #drawPath(part) {
    const path = part ? pathOf(part) : [];
    fill(this.#path,
      h("button", { type: "button", disabled: !part, onclick: () => this.picture.zoomTo(null) }, "Whole tree"),
      path.slice(-6).map((one) => [h("span", { "aria-hidden": "true" }, "›"), h("button", { type: "button", disabled: one === part, onclick: () => this.picture.zoomTo(one) }, one.text.trim().slice(0, 24) || `token ${one.x0}`)]).flat());
  }

  /** @param {Part | null} part */
  #drawDetails(part) {
    if (!part) {
      fill(this.#details, h("h2", null, "Chunks"), h("p.muted", null,
        "From left to right the tokens of prompts, from their first on. What prompts have in common is there once, as tall as all that goes on from it. Point at a chunk to see who uses it; click to zoom."));
      return;
    }
    const { node } = part;
    fill(this.#details,
      h("h2", null, KINDS[node.kind] ?? counted(part.chunks, "chunk"), " ", node.users ? badge(`in use by ${node.users}`, "good") : null),
      h("blockquote", null, part.text.trim() || "(no text)"),
      h("dl.pairs", null,
        row("Tokens", `${whole(part.x0)} – ${whole(part.x1)}`),
        row("Length", counted(part.tokens, "token")),
        row("Copies", tiersOf(node.tiers).map((name) => tierBadge(name))),
        row("Last used", node.users ? "now" : `${duration(node.age_s)} ago`),
        row("Goes on in", part.children.length || part.hidden ? `${counted(part.children.length + part.hidden, "way")}, ${counted(part.below, "chunk")}` : "nothing"),
        node.salted ? row("Salt", "only requests of one salt") : null),
      h("h3", null, part.sessions.length ? counted(part.sessions.length, "session") : "Sessions"),
      part.sessions.length ? h("ul.plain", null, part.sessions.slice(0, 12).map((session) => h("li", null, h("code", null, session)))) : h("p.muted", null, "none known"),
    );
    this.#details.dataset.tier = fastest(node.tiers);
    this.#details.title = TIER_TEXT[fastest(node.tiers)];
  }
}

/** @param {string} title @param {any} value */
function row(title, value) {
  return h("div", null, h("dt", null, title), h("dd", null, value));
}
