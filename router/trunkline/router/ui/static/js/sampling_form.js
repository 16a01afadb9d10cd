/** @file Settings of a request: what is left empty is the model's own default. */

import { h } from "./dom.js";

/** @type {{name: string, title: string, hint: string, attributes: Record<string, string>}[]} */
const FIELDS = [
  { name: "temperature", title: "Temperature", hint: "0 takes the likeliest token", attributes: { min: "0", max: "2", step: "0.1" } },
  { name: "top_p", title: "Top p", hint: "above 0, to 1", attributes: { min: "0.01", max: "1", step: "0.01" } },
  { name: "top_k", title: "Top k", hint: "0: all", attributes: { min: "0", step: "1" } },
  { name: "max_tokens", title: "Most tokens", hint: "of the answer", attributes: { min: "1", step: "1" } },
  { name: "seed", title: "Seed", hint: "the same seed, the same answer", attributes: { step: "1" } },
];

/** @param {Record<string, string>} [start] values at first */
export function samplingForm(start = {}) {
  const inputs = new Map(FIELDS.map(({ name, attributes }) => [name, h("input", { type: "number", id: `set-${name}`, placeholder: "default", value: start[name] ?? "", ...attributes })]));
  const element = h("div.settings", null, FIELDS.map(({ name, title, hint }) => h("label", { for: `set-${name}`, title: hint }, h("span", null, title), inputs.get(name))));
  return {
    element,
    /** @returns {Record<string, number>} */
    values: () => Object.fromEntries([...inputs].filter(([, input]) => input.value !== "").map(([name, input]) => [name, Number(input.value)])),
  };
}
