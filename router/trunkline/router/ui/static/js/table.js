/** @file A table that sorts and filters; rows stay the same elements while their figures change. */

import { filtered, sorted } from "./core/sorting.js";
import { fill, h, keyed } from "./dom.js";

/**
 * @template T
 * @typedef {object} Column
 * @property {string} title
 * @property {(row: T) => unknown} value what sorts
 * @property {(row: T) => any} [cell] a node or a text; without: the value
 * @property {boolean} [figure] right-aligned
 * @property {string} [hint]
 * @property {"minor"} [rank] left out on narrow screens
 */

/** @template T */
export class Table {
  #columns;
  #key;
  #body = h("tbody");
  #head = h("tr");
  #count = h("span.muted");
  #empty = h("p.empty");
  #by = 0;
  #descending = false;
  #words = "";
  #emptyText;
  #caption;
  /** @type {readonly T[]} */
  #rows = [];

  /**
   * @param {{title: string, columns: Column<T>[], key: (row: T) => string, empty: string, sort?: number, descending?: boolean}} options
   */
  constructor({ title, columns, key, empty, sort = 0, descending = false }) {
    this.#columns = columns;
    this.#key = key;
    this.#emptyText = empty;
    this.#caption = title;
    this.#by = sort;
    this.#descending = descending;
    this.filter = h("input.filter", {
      type: "search", placeholder: "Filter", "aria-label": `Filter ${title.toLowerCase()}`,
      oninput: () => {
        this.#words = this.filter.value;
        this.#draw();
      },
    });
    this.element = h(
      "section.card.list", { "aria-label": title },
      h("div.row.head", null, h("h2", null, title), this.#count, h("span.grow"), this.filter),
      h("div.scroll", { tabindex: "0", role: "region", "aria-label": `${title}, table` }, h("table", null, h("thead", null, this.#head), this.#body), this.#empty),
    );
    this.#drawHead();
  }

  /** @param {readonly T[]} rows */
  show(rows) {
    this.#rows = rows;
    this.#draw();
  }

  /** @param {number} column */
  #sortBy(column) {
    this.#descending = this.#by === column ? !this.#descending : !!this.#columns[column].figure;
    this.#by = column;
    this.#drawHead();
    this.#draw();
    this.#head.children[column].querySelector("button")?.focus();
  }

  #drawHead() {
    fill(
      this.#head,
      this.#columns.map((column, at) =>
        h(
          "th", {
            scope: "col", class: classes(column),
            "aria-sort": at === this.#by ? (this.#descending ? "descending" : "ascending") : "none",
          },
          h("button", { type: "button", title: column.hint, onclick: () => this.#sortBy(at) }, column.title),
        ),
      ),
    );
  }

  #draw() {
    const columns = this.#columns;
    const fields = (/** @type {T} */ row) => columns.map((column) => column.value(row));
    const chosen = filtered(this.#rows, this.#words, fields);
    const ordered = sorted(chosen, columns[this.#by].value, this.#descending);
    keyed(
      this.#body, ordered, this.#key,
      () => h("tr", null, columns.map((column, at) => h(at ? "td" : "th", { class: classes(column), scope: at ? null : "row" }))),
      (element, row) => columns.forEach((column, at) => put(/** @type {HTMLElement} */ (element.children[at]), column.cell ? column.cell(row) : column.value(row))),
    );
    const all = this.#rows.length;
    this.#count.textContent = chosen.length === all ? String(all) : `${chosen.length} of ${all}`;
    this.#empty.hidden = chosen.length > 0;
    this.#empty.textContent = all ? `No ${this.#caption.toLowerCase()} match.` : this.#emptyText;
  }
}

/** @param {Column<any>} column */
function classes(column) {
  return [column.figure ? "figure" : "", column.rank ?? ""].join(" ").trim() || null;
}

/** @param {HTMLElement} cell @param {any} content */
function put(cell, content) {
  if (content instanceof HTMLElement) {
    if (!cell.firstElementChild || !cell.firstElementChild.isEqualNode(content)) cell.replaceChildren(content);
    return;
  }
  const text = content === null || content === undefined || content === "" ? "–" : String(content);
  if (cell.textContent !== text || cell.firstElementChild) cell.textContent = text;
}
