/** @file The page about the API: each operation of openapi.json with the fields of its request. */

import { byId, fill, h } from "./dom.js";

/** @typedef {Record<string, any>} Schema */
/** @typedef {{method: string, path: string, summary: string, fields: Schema[]}} Operation */

const METHODS = ["get", "post", "patch", "delete"];

/** The schema that a reference stands for. @param {Schema} schema @param {Schema} document @returns {Schema} */
function resolved(schema, document) {
  const name = schema.$ref?.split("/").pop();
  return name ? (document.components.schemas[name] ?? {}) : schema;
}

/** A type in words. @param {Schema} schema @returns {string} */
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((/** @type {any} */ value) => JSON.stringify(value)).join(" | ");
  const parts = schema.anyOf ?? schema.oneOf;
  if (parts) return [...new Set(parts.map(typeOf))].filter((part) => part !== "null").join(" | ");
  if (schema.type === "array") return `${schema.items ? typeOf(schema.items) : "any"}[]`;
  const type = Array.isArray(schema.type) ? schema.type.join(" | ") : (schema.type ?? "any");
  const least = schema.minimum ?? schema.exclusiveMinimum;
  const most = schema.maximum ?? schema.exclusiveMaximum;
  return least === undefined && most === undefined ? type : `${type} ${least ?? ""}…${most ?? ""}`;
}

/** All operations of the document. @param {Schema} document @returns {Operation[]} */
export function operationsOf(document) {
  const found = [];
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const method of METHODS.filter((name) => name in methods)) {
      const operation = methods[method];
      const content = operation.requestBody?.content ?? {};
      const body = resolved(Object.values(content)[0]?.schema ?? {}, document);
      const fields = (operation.parameters ?? []).map((/** @type {Schema} */ each) => ({
        name: each.name,
        type: typeOf(each.schema ?? {}),
        required: Boolean(each.required),
        text: `in the ${each.in}`,
      }));
      for (const [name, schema] of Object.entries(body.properties ?? {})) {
        const allowed = schema["x-allowed"] ?? typeOf(schema);
        const text = schema.description ?? resolved(schema, document).description ?? "";
        fields.push({ name, type: allowed, required: (body.required ?? []).includes(name), text });
      }
      const summary = (operation.description ?? operation.summary ?? "").split("\n")[0];
      found.push({ method: method.toUpperCase(), path, summary, fields });
    }
  }
  return found;
}

/** @param {Operation} operation */
function shown(operation) {
  const rows = operation.fields.map((field) =>
    h("tr", null, h("td", null, h("code", null, field.name), field.required ? " *" : ""), h("td", null, field.type), h("td", null, field.text)),
  );
  const head = h("tr", null, h("th", null, "Field (* required)"), h("th", null, "Type"), h("th", null, "Meaning"));
  const table = rows.length ? h("table", null, h("thead", null, head), h("tbody", null, ...rows)) : h("p", null, "No fields.");
  const title = h("summary", null, h("code", null, h("b.method", null, operation.method), operation.path), h("span", null, operation.summary));
  return h("details", null, title, h("div.fields", null, table));
}

/** @param {Operation} operation @param {string} words */
function fits(operation, words) {
  const text = [operation.method, operation.path, operation.summary, ...operation.fields.map((field) => field.name)].join(" ");
  return text.toLowerCase().includes(words.toLowerCase());
}

async function main() {
  const answer = await fetch("openapi.json");
  const operations = operationsOf(await answer.json());
  const filter = byId("filter");
  const show = () => fill(byId("operations"), operations.filter((each) => fits(each, filter.value)).map(shown));
  filter.addEventListener("input", show);
  show();
}

if (globalThis.document?.getElementById("operations")) await main();
