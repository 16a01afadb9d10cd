/** @file Small things that several views show. */

import { UNKNOWN } from "./core/format.js";
import { TIERS, TIER_TEXT } from "./core/tiers.js";
import { h } from "./dom.js";

/** @param {string | null | undefined} tier */
export function tierBadge(tier) {
  if (!tier) return h("span.muted", null, UNKNOWN);
  const name = tier;
  return h("span.badge.tier", { dataset: { tier: name } }, h("i.swatch", null), TIER_TEXT[name] ?? name);
}

/** @param {string} text @param {string} [kind] */
export function badge(text, kind = "") {
  return h("span.badge", { dataset: { kind } }, text);
}

/**
 * A bar of parts of a whole.
 *
 * @param {{part: number, name: string, title: string}[]} parts `part` of 1; `name`: a colour ("device", "new", …)
 * @param {string} label what it shows, for who does not see it
 */
export function bar(parts, label) {
  return h(
    "div.meter", { role: "img", "aria-label": label },
    parts.filter(({ part }) => part > 0).map(({ part, name, title }) =>
      h("i", { title, dataset: { fill: name }, style: { width: `${Math.min(part, 1) * 100}%` } })),
  );
}

/** @param {...[string, string]} entries colour and text */
export function legend(...entries) {
  return h("div.legend", null, entries.map(([name, text]) => h("span", null, h("i.swatch", { dataset: { fill: name } }), text)));
}

/** The legend of tiers that are in use. @param {Iterable<string>} [names] */
export function tierLegend(names = TIERS) {
  return legend(.../** @type {[string, string][]} */ ([...names].map((name) => [name, TIER_TEXT[name]])));
}

/** A choice among a few. @param {string} label @param {[string, string][]} options value and text @param {string} chosen @param {(value: string) => void} onChange */
export function segmented(label, options, chosen, onChange) {
  const group = h("div.segmented", { role: "group", "aria-label": label });
  for (const [value, text] of options) {
    const button = h("button", {
      type: "button", "aria-pressed": String(value === chosen),
      onclick: () => {
        for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
        onChange(value);
      },
    }, text);
    group.append(button);
  }
  return group;
}

/** What went wrong, as the router says it. @param {unknown} error */
export function errorBox(error) {
  const { message, details } = /** @type {any} */ (error);
  return h("p.error", { role: "alert" }, details?.code ? h("code", null, details.code) : null, " ", message);
}
