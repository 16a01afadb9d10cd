/**
 * @file The picture of the chunk tree: boxes over an axis of tokens, zoomed by d3-zoom and by choosing a chunk.
 *
 * What is in sight is a window into the layout (`zoomTo` sets it), and d3's transform on top of that. Boxes are elements, so
 * that they carry text, a role and a colour of the theme; there are never more than fit, because flat ones are bundled.
 */

import { counted, whole } from "../core/format.js";
import { boxes, viewOf } from "../core/tree.js";
import { fastest, tiersOf, TIER_TEXT } from "../core/tiers.js";
import { h, keyed } from "../dom.js";

/**
 * @typedef {import("../core/tree.js").Part} Part
 * @typedef {import("../core/tree.js").Box} Box
 * @typedef {import("../core/tree.js").Layout} Layout
 * @typedef {import("../core/tree.js").View} View
 */

const TICK_PIXELS = 90;

export class Picture {
  /** @type {Layout} */
  #layout = { roots: [], parts: [], rows: 0, far: 0 };
  /** The part zoomed to, by key; "": all. */
  #window = "";
  #chunkSize = 64;
  /** @type {ReadonlySet<string>} */
  #found = new Set();
  #searching = false;
  #marked = "";
  #transform;
  #zoom;
  #d3 = /** @type {any} */ (window).d3;
  #axis = h("div.axis", { "aria-hidden": "true" });
  #chunks = h("div.chunks", { role: "tree", tabindex: "0", "aria-label": "Chunk tree. Arrow keys move, Enter zooms, Backspace zooms out." });
  #handlers;
  #resized = new ResizeObserver(() => this.#draw());

  /** @param {{onFocus: (part: Part | null) => void, onZoom: (part: Part | null) => void, onKey: (event: KeyboardEvent) => void}} handlers */
  constructor(handlers) {
    this.#handlers = handlers;
    this.element = h("div.picture", null, this.#axis, this.#chunks);
    this.#transform = this.#d3.zoomIdentity;
    this.#zoom = this.#d3.zoom()
      .scaleExtent([1, 400])
      .filter((/** @type {any} */ event) => !event.button && (event.type !== "wheel" || event.ctrlKey || event.deltaY < 0 || this.#transform.k > 1) && (!event.touches || event.touches.length > 1 || this.#transform.k > 1))
      .on("start", () => this.#chunks.classList.add("moving"))
      .on("zoom", (/** @type {any} */ event) => {
        this.#transform = event.transform;
        this.#draw();
      })
      .on("end", () => this.#chunks.classList.remove("moving"));
    this.#d3.select(this.#chunks).call(this.#zoom).on("dblclick.zoom", null);
    this.#chunks.addEventListener("click", (/** @type {MouseEvent} */ event) => this.#onClick(event));
    this.#chunks.addEventListener("pointerover", (/** @type {PointerEvent} */ event) => {
      const part = this.#partAt(event);
      if (part) this.#handlers.onFocus(part);
    });
    this.#chunks.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.#handlers.onKey(event));
    this.#resized.observe(this.#chunks);
  }

  close() {
    this.#resized.disconnect();
  }

  /** @param {Layout} layout @param {number} chunkSize @param {ReadonlySet<string>} found keys @param {boolean} searching */
  show(layout, chunkSize, found, searching) {
    this.#layout = layout;
    this.#chunkSize = chunkSize || 64;
    this.#found = found;
    this.#searching = searching;
    if (this.#window && !this.#zoomed()) this.zoomTo(null); // it was evicted
    else this.#draw();
  }

  /** @param {string} key the part that the keyboard or the pointer is at */
  mark(key) {
    this.#marked = key;
    for (const element of this.#chunks.children) element.classList.toggle("marked", element.dataset.key === key);
    const element = [...this.#chunks.children].find((one) => one.dataset.key === key);
    if (element) this.#chunks.setAttribute("aria-activedescendant", element.id);
    else this.#chunks.removeAttribute("aria-activedescendant");
  }

  /** @param {Part | null} part null: the whole tree */
  zoomTo(part) {
    this.#window = part?.key ?? "";
    this.#handlers.onZoom(part);
    this.#reset();
  }

  /** To what is around: first the gesture's zoom, then the window's. */
  zoomOut() {
    if (this.#transform.k > 1) this.#reset();
    else this.zoomTo(this.#zoomed()?.parent ?? null);
  }

  /** @param {number} factor */
  scale(factor) {
    if (factor < 1 && this.#transform.k <= 1) this.zoomOut();
    else this.#d3.select(this.#chunks).call(this.#zoom.scaleBy, factor);
  }

  /** Widen the window if the part is not in it. @param {Part} part */
  reveal(part) {
    const view = this.#view();
    const inside = part.x0 < view.x1 && part.x1 > view.x0 && part.y0 < view.y1 && part.y1 > view.y0;
    if (!inside) this.zoomTo(part.parent);
    this.mark(part.key);
  }

  /** @returns {Part | null} */
  #zoomed() {
    return this.#layout.parts.find(({ key }) => key === this.#window) ?? null;
  }

  #reset() {
    this.#d3.select(this.#chunks).call(this.#zoom.transform, this.#d3.zoomIdentity);
  }

  /** @param {Event} event */
  #partAt(event) {
    const key = /** @type {HTMLElement} */ (event.target).closest(".chunk")?.getAttribute("data-part");
    return this.#layout.parts.find((part) => part.key === key) ?? null;
  }

  /** @param {MouseEvent} event */
  #onClick(event) {
    const part = this.#partAt(event);
    if (!part) return;
    const bundled = /** @type {HTMLElement} */ (event.target).closest(".bundle");
    this.#handlers.onFocus(part);
    if (bundled) {
      const above = part.parent;
      if (above && above.key !== this.#window) this.zoomTo(above);
      else this.#d3.select(this.#chunks).call(this.#zoom.scaleBy, 4, this.#d3.pointer(event, this.#chunks));
    } else this.zoomTo(part.key === this.#window ? part.parent : part);
  }

  /** @returns {View} what is in sight */
  #view() {
    const base = viewOf(this.#layout, this.#zoomed());
    const { k, x, y } = this.#transform;
    const width = this.#chunks.clientWidth, height = this.#chunks.clientHeight;
    const across = (/** @type {number} */ pixel) => base.x0 + ((pixel - x) / k / width) * (base.x1 - base.x0);
    const down = (/** @type {number} */ pixel) => base.y0 + ((pixel - y) / k / height) * (base.y1 - base.y0);
    return { x0: across(0), x1: across(width), y0: down(0), y1: down(height) };
  }

  #draw() {
    const width = this.#chunks.clientWidth, height = this.#chunks.clientHeight;
    if (!width || !height) return;
    this.#zoom.translateExtent([[0, 0], [width, height]]).extent([[0, 0], [width, height]]);
    const view = this.#view();
    const chunkPixels = (this.#chunkSize * width) / (view.x1 - view.x0);
    const shown = boxes(this.#layout, view, width, height);
    keyed(this.#chunks, shown, ({ key }) => key, make, (element, box) => this.#place(element, box, view, chunkPixels));
    this.mark(this.#marked);
    this.#drawAxis(view, width);
  }

  /** @param {HTMLElement} element @param {Box} box @param {View} view @param {number} chunkPixels */
  #place(element, box, view, chunkPixels) {
    const { part } = box;
    const { node } = part;
    const { style, dataset, classList } = element;
    style.transform = `translate(${box.x.toFixed(1)}px, ${box.y.toFixed(1)}px)`;
    style.width = `${Math.max(box.w - 1, 1).toFixed(1)}px`;
    style.height = `${Math.max(box.h - 1, 1).toFixed(1)}px`;
    dataset.part = part.key;
    dataset.tier = fastest(node.tiers);
    const copies = tiersOf(node.tiers).slice(1);
    style.setProperty("--copies", copies.length ? stripes(copies) : "none");
    classList.toggle("used", node.users > 0 && !box.bundle);
    classList.toggle("module", node.kind === "module");
    classList.toggle("bundle", box.bundle > 0);
    classList.toggle("found", this.#found.has(part.key));
    classList.toggle("dim", this.#searching && !this.#found.has(part.key));
    classList.toggle("ticked", chunkPixels > 14 && part.chunks > 1 && !box.bundle);
    style.setProperty("--tick", `${chunkPixels.toFixed(2)}px`);
    const label = /** @type {HTMLElement} */ (element.firstElementChild);
    const text = box.bundle ? `${box.bundle} more` : part.text.trim();
    const room = box.h >= 13 && box.w >= 34;
    if (label.textContent !== (room ? text : "")) label.textContent = room ? text : "";
    label.style.setProperty("-webkit-line-clamp", String(Math.max(1, Math.floor((box.h - 4) / 15))));
    element.setAttribute("aria-label", describe(box));
    element.setAttribute("aria-level", String(depth(part)));
  }

  /** @param {View} view @param {number} width */
  #drawAxis(view, width) {
    const span = view.x1 - view.x0;
    const step = tickStep((span * TICK_PIXELS) / width, this.#chunkSize);
    const ticks = [];
    for (let at = Math.ceil(view.x0 / step) * step; at <= view.x1; at += step) ticks.push(at);
    keyed(this.#axis, ticks, String, () => h("span"), (element, at) => {
      element.style.transform = `translateX(${(((at - view.x0) / span) * width).toFixed(1)}px)`;
      if (!element.textContent) element.textContent = whole(at);
    });
  }
}

/** A stripe along the lower edge for each copy below the fastest. @param {string[]} tiers */
function stripes(tiers) {
  const stops = tiers.map((name, at) => `var(--${name}) ${(at * 100) / tiers.length}% ${((at + 1) * 100) / tiers.length}%`);
  return `linear-gradient(90deg, ${stops.join(", ")})`;
}

let made = 0;

function make() {
  made += 1;
  return h("div.chunk", { role: "treeitem", id: `chunk-${made}` }, h("span.label"));
}

/** @param {Box} box */
function describe({ part, bundle }) {
  if (bundle) return `${counted(bundle, "small branch", "small branches")} from token ${part.x0} on`;
  const { node } = part;
  const copies = tiersOf(node.tiers).map((name) => TIER_TEXT[name]).join(", ");
  return `${part.text.trim().slice(0, 60) || "no text"}: tokens ${part.x0} to ${part.x1}, ${copies || "no copy"}${node.users ? `, in use by ${node.users}` : ""}`;
}

/** @param {Part} part */
function depth(part) {
  let levels = 1;
  for (let at = part.parent; at; at = at.parent) levels += 1;
  return levels;
}

/** Multiples of a chunk, doubled until they are far enough from each other. @param {number} least tokens @param {number} chunk */
function tickStep(least, chunk) {
  let step = chunk;
  while (step < least) step *= 2;
  while (step / 2 >= least && step > 1) step /= 2;
  return Math.max(1, Math.round(step));
}
