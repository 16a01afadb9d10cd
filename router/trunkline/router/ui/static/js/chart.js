/** @file Time series: uPlot in the page's colours, as wide as its place, drawn again when the theme changes. */

import { clock, short } from "./core/format.js";
import { h } from "./dom.js";
import { colour, theme } from "./theme.js";

/**
 * @typedef {object} Line
 * @property {string} label
 * @property {string} colour a custom property, as "--device"
 * @property {boolean} [filled]
 * @property {number[]} [dash]
 *
 * @typedef {object} Options
 * @property {string} title
 * @property {(value: number) => string} [figure] how a value is written
 * @property {number} [top] the axis reaches at least so far
 */

const HEIGHT = 150;
/** Charts of one view share their cursor. */
const SYNC = "trunkline";

export class Chart {
  #lines;
  #options;
  /** @type {any} uPlot's, once there is room for it */
  #plot;
  /** @type {(number | null)[][]} */
  #data = [[]];
  #place = h("div.plot");
  #readings = h("div.readings");
  #redraw = () => this.#draw();
  #resized = new ResizeObserver(() => {
    const width = this.#place.clientWidth;
    if (width > 0 && this.#plot) this.#plot.setSize({ width, height: HEIGHT });
  });

  /** @param {Options} options @param {Line[]} lines */
  constructor(options, lines) {
    this.#options = options;
    this.#lines = lines;
    this.element = h("figure.card.chart", null, h("figcaption", null, h("h3", null, options.title), this.#readings), this.#place);
    theme.addEventListener("change", this.#redraw);
    this.#resized.observe(this.#place);
  }

  /** @param {readonly number[]} times @param {...readonly (number | null)[]} columns one for each line */
  show(times, ...columns) {
    this.#data = [[...times], ...columns.map((column) => [...column])];
    if (!this.#plot) this.#draw();
    else this.#plot.setData(this.#data);
    this.#read(null);
    this.#place.setAttribute("aria-label", `${this.#options.title}: ${this.#spoken()}`);
  }

  /** Other lines, where it depends on the cluster how many there are. @param {Line[]} lines */
  setLines(lines) {
    if (JSON.stringify(lines) === JSON.stringify(this.#lines)) return;
    this.#lines = lines;
    this.#plot?.destroy();
    this.#plot = undefined;
  }

  close() {
    theme.removeEventListener("change", this.#redraw);
    this.#resized.disconnect();
    this.#plot?.destroy();
  }

  /** @param {number | null} at null: the newest */
  #value(/** @type {number} */ line, at) {
    const column = this.#data[line + 1] ?? [];
    const index = at ?? column.length - 1;
    // The newest sample may not be complete yet.
    return column[index] ?? (at === null ? column[index - 1] : null);
  }

  #spoken() {
    return this.#lines.map((line, at) => `${line.label} ${this.#write(this.#value(at, null))}`).join(", ");
  }

  /** @param {number | null | undefined} value */
  #write(value) {
    return value === null || value === undefined ? "–" : (this.#options.figure ?? short)(value);
  }

  /** @param {number | null} at */
  #read(at) {
    const time = at === null ? null : h("span.when", null, clock(this.#data[0][at]));
    this.#readings.replaceChildren(
      ...(time ? [time] : []),
      ...this.#lines.map((line, index) =>
        h("span", null, h("i.swatch", { style: { background: `var(${line.colour})` } }), `${line.label} `, h("b", null, this.#write(this.#value(index, at)))),
      ),
    );
  }

  #draw() {
    this.#plot?.destroy();
    const width = this.#place.clientWidth;
    if (!width) return;
    const axis = {
      stroke: colour("--muted"),
      font: `11px ${getComputedStyle(document.body).fontFamily}`,
      grid: { stroke: colour("--grid"), width: 1 },
      ticks: { show: false },
    };
    const top = this.#options.top ?? 1;
    this.#plot = new /** @type {any} */ (window).uPlot(
      {
        width,
        height: HEIGHT,
        legend: { show: false },
        padding: [8, 4, 0, 0],
        cursor: { sync: { key: SYNC }, points: { size: 6 }, drag: { x: false, y: false } },
        scales: { y: { range: (/** @type {any} */ _, /** @type {number} */ __, /** @type {number} */ most) => [0, Math.max((most ?? 0) * 1.08, top)] } },
        axes: [
          { ...axis, size: 24, space: 70, values: (/** @type {any} */ _, /** @type {number[]} */ splits) => splits.map((time) => clock(time).slice(0, splits[1] - splits[0] < 60 ? 8 : 5)) },
          { ...axis, size: 48, space: 28, values: (/** @type {any} */ _, /** @type {number[]} */ splits) => splits.map((value) => (this.#options.figure ?? short)(value)) },
        ],
        series: [{}, ...this.#lines.map((line) => this.#series(line))],
        hooks: { setCursor: [(/** @type {any} */ plot) => this.#read(plot.cursor.idx ?? null)] },
      },
      this.#data,
      this.#place,
    );
    this.#place.setAttribute("role", "img");
  }

  /** @param {Line} line */
  #series(line) {
    const stroke = colour(line.colour);
    return {
      label: line.label,
      stroke,
      width: 1.75,
      dash: line.dash,
      fill: line.filled ? `color-mix(in srgb, ${stroke} 14%, transparent)` : undefined,
      points: { show: false },
      spanGaps: false,
    };
  }
}
