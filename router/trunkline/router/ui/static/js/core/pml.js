/** @file PML as the editor shows it: colours of its source, and its modules for choosing. Pure. */

/**
 * @typedef {{text: string, kind: "" | "tag" | "name" | "attr" | "value" | "comment"}} Token
 * @typedef {{name: string, length: number, fallback: string, required: boolean}} Param
 * @typedef {{path: string, depth: number, params: Param[], union: number, isDefault: boolean}} Module `union`: 0: in none; modules with
 *   the same number exclude each other
 * @typedef {{name: string, modules: Module[]}} Outline
 */

const PIECES = /(<!--[\s\S]*?(?:-->|$))|(<!\[CDATA\[[\s\S]*?(?:\]\]>|$))|(<\/?)([A-Za-z_][\w.-]*)((?:[^<>"']|"[^"]*"?|'[^']*'?)*)(>?)/g;
const ATTRIBUTE = /([\w.:-]+)(\s*=\s*)("[^"]*"?|'[^']*'?)/g;

/** @param {string} source however wrong @returns {Token[]} together the source, character by character */
export function highlight(source) {
  /** @type {Token[]} */
  const tokens = [];
  /** @param {string} text @param {Token["kind"]} kind */
  const add = (text, kind) => {
    if (text) tokens.push({ text, kind });
  };
  let done = 0;
  for (const match of source.matchAll(PIECES)) {
    add(source.slice(done, match.index), "");
    done = match.index + match[0].length;
    if (match[1]) add(match[1], "comment");
    else if (match[2]) add(match[2], "");
    else {
      add(match[3], "tag");
      add(match[4], "name");
      attributes(match[5], add);
      add(match[6], "tag");
    }
  }
  add(source.slice(done), "");
  return tokens;
}

/** @param {string} text @param {(text: string, kind: Token["kind"]) => void} add */
function attributes(text, add) {
  let done = 0;
  for (const match of text.matchAll(ATTRIBUTE)) {
    add(text.slice(done, match.index), "tag");
    add(match[1], "attr");
    add(match[2], "tag");
    add(match[3], "value");
    done = match.index + match[0].length;
  }
  add(text.slice(done), "tag");
}

/** @typedef {{name: string, attributes: Map<string, string>, children: Tag[]}} Tag */

/** @type {Record<string, string>} */
const ENTITIES = { lt: "<", gt: ">", amp: "&", quot: '"', apos: "'" };

/** @param {string} text @returns {Map<string, string>} */
function attributesOf(text) {
  const values = [...text.matchAll(ATTRIBUTE)].map(([, name, , value]) => /** @type {[string, string]} */ ([
    name, value.slice(1, -1).replace(/&(\w+);/g, (whole, entity) => ENTITIES[entity] ?? whole),
  ]));
  return new Map(values);
}

/**
 * The tags of a source, as a tree. Not by the browser's own parser: its report of an error has styles in it, which the
 * page's policy forbids, so that each wrong letter would be an error of the console.
 *
 * @param {string} source @returns {Tag | null} null unless all that is opened is closed
 */
function tagsOf(source) {
  /** @type {Tag} */
  const top = { name: "", attributes: new Map(), children: [] };
  const open = [top];
  for (const [, comment, data, begin, name, inside, end] of source.matchAll(PIECES)) {
    if (comment || data) continue;
    if (end !== ">") return null;
    if (begin === "</") {
      if (open.pop()?.name !== name || !open.length) return null;
      continue;
    }
    const tag = { name, attributes: attributesOf(inside), children: [] };
    open[open.length - 1].children.push(tag);
    if (!inside.endsWith("/")) open.push(tag);
  }
  return open.length === 1 && top.children.length === 1 ? top.children[0] : null;
}

/**
 * What can be chosen of a schema. What is half written has no outline; the router says what is wrong.
 *
 * @param {string} source
 * @returns {Outline | null}
 */
export function outline(source) {
  const root = tagsOf(source);
  if (root?.name !== "schema") return null;
  /** @type {Module[]} */
  const modules = [];
  let unions = 0;
  /** @param {Tag} tag @param {string} path @param {number} depth @param {number} union @param {string} fallback */
  const visit = (tag, path, depth, union, fallback) => {
    for (const child of tag.children) {
      const name = child.attributes.get("name") ?? "";
      if (child.name === "module") {
        const inner = path ? `${path}/${name}` : name;
        modules.push({ path: inner, depth, params: paramsOf(child), union, isDefault: union > 0 && fallback === name });
        visit(child, inner, depth + 1, 0, "");
      } else if (child.name === "union") {
        unions += 1;
        visit(child, path, depth, unions, child.attributes.get("default") ?? "");
      } else if (child.name !== "scaffold") visit(child, path, depth, union, fallback);
    }
  };
  visit(root, "", 0, 0, "");
  return { name: root.attributes.get("name") ?? "", modules };
}

/** @param {Tag} module @returns {Param[]} its own, also those in its roles */
function paramsOf(module) {
  return module.children.flatMap(({ name, attributes, children }) => {
    if (["system", "user", "assistant"].includes(name)) return paramsOf({ name, attributes, children });
    if (name !== "param" && name !== "parameter") return [];
    return [{
      name: attributes.get("name") ?? "",
      length: Number(attributes.get("len") ?? attributes.get("length")),
      fallback: attributes.get("default") ?? "",
      required: attributes.get("required") === "true",
    }];
  });
}

/**
 * The `prompt` of a request: chosen modules with their arguments. An inner module is named by its path alone.
 *
 * @param {Outline} outline
 * @param {ReadonlySet<string>} chosen paths
 * @param {ReadonlyMap<string, string>} given arguments, by "path parameter"; "" is left to the default
 */
export function selection(outline, chosen, given) {
  const modules = outline.modules
    .filter(({ path }) => chosen.has(path))
    .map(({ path, params }) => {
      const args = Object.fromEntries(
        params.map(({ name }) => [name, given.get(`${path} ${name}`) ?? ""]).filter(([, value]) => value !== ""),
      );
      return Object.keys(args).length ? { path, args } : path;
    });
  return { schema: outline.name, modules };
}
