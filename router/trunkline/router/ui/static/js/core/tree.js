/**
 * @file The chunk tree as a picture: x is the position in tokens, so each chunk is as wide as it has tokens; y are
 * rows, one for each place where the tree ends, so what many share is tall. Pure.
 *
 *     ┌──────────────┬────────────┐
 *     │              │ user A     │      one row
 *     │ shared by    ├──────┬─────┤
 *     │ three        │ user │ B1  │
 *     │              │ B    ├─────┴──┐
 *     │              │      │ B2     │
 *     └──────────────┴──────┴────────┘
 *     0             128    192      256   tokens
 */

/**
 * @typedef {object} TreeNode as the router says it
 * @property {number | string} id
 * @property {number} parent index, -1: a root
 * @property {number} tokens
 * @property {number} [chunks] how many chunks the router has joined in it
 * @property {number} tiers bits
 * @property {number} users
 * @property {number | null} age_s
 * @property {string} kind
 * @property {number} children_hidden
 * @property {string} text
 * @property {boolean} salted
 * @property {string[]} sessions
 *
 * @typedef {object} Part a run of chunks that are alike and have no branches between them
 * @property {string} key
 * @property {TreeNode} node the first
 * @property {number} chunks
 * @property {number} tokens
 * @property {Part | null} parent
 * @property {Part[]} children
 * @property {number} hidden children that the router left out
 * @property {number} x0 @property {number} x1 tokens
 * @property {number} y0 @property {number} y1 rows
 * @property {number} far the end of the longest path through it, in tokens
 * @property {number} below chunks in all parts below it
 * @property {string} text
 * @property {string[]} sessions
 *
 * @typedef {{roots: Part[], parts: Part[], rows: number, far: number}} Layout
 * @typedef {{x0: number, x1: number, y0: number, y1: number}} View
 * @typedef {{key: string, part: Part, bundle: number, x: number, y: number, w: number, h: number}} Box `bundle`: how
 *   many parts too flat to draw it stands for, 0: `part` itself
 */

/** @param {TreeNode} a @param {TreeNode} b */
function alike(a, b) {
  return a.tiers === b.tiers && a.users === b.users && a.kind === b.kind && !!a.salted === !!b.salted;
}

/** @param {readonly TreeNode[]} nodes in preorder @returns {Part[]} roots; without places yet */
function joined(nodes) {
  /** @type {Set<string>} */
  const keys = new Set();
  /** @param {TreeNode} node a chunk may be there twice, behind a cut */
  const keyOf = (node) => {
    let key = String(node.id);
    while (keys.has(key)) key += "'";
    keys.add(key);
    return key;
  };
  /** @type {Part[]} */
  const roots = [];
  /** @type {Part[]} */
  const owner = [];
  const children = nodes.map(() => 0);
  for (const node of nodes) if (node.parent >= 0) children[node.parent] += 1;
  nodes.forEach((node, index) => {
    const above = node.parent >= 0 ? owner[node.parent] : null;
    const only = above && children[node.parent] === 1 && !nodes[node.parent].children_hidden;
    if (above && only && alike(nodes[node.parent], node)) {
      above.chunks += node.chunks ?? 1;
      above.tokens += node.tokens;
      above.hidden = node.children_hidden ?? 0;
      above.text += node.text ? ` ${node.text}` : "";
      for (const session of node.sessions ?? []) if (!above.sessions.includes(session)) above.sessions.push(session);
      owner[index] = above;
      return;
    }
    const part = {
      key: keyOf(node), node, chunks: node.chunks ?? 1, tokens: node.tokens, parent: above, children: [], hidden: node.children_hidden ?? 0,
      x0: 0, x1: 0, y0: 0, y1: 0, far: 0, below: 0, text: node.text ?? "", sessions: [...(node.sessions ?? [])],
    };
    (above ? above.children : roots).push(part);
    owner[index] = part;
  });
  return roots;
}

/**
 * @param {readonly TreeNode[]} nodes in preorder
 * @param {any} d3 with `hierarchy` and `partition`
 * @param {Map<string, number>} places in which order parts were first seen, by key; brought up to date, so that what is
 *   there stays where it is while the router's order (what was used last comes first) changes
 * @returns {Layout}
 */
export function layOut(nodes, d3, places = new Map()) {
  const roots = joined(nodes);
  if (!roots.length) return { roots, parts: [], rows: 0, far: 0 };
  arrange(roots, places);
  const hierarchy = d3.hierarchy({ children: roots }).count();
  const rows = hierarchy.value;
  d3.partition().size([rows, 1])(hierarchy);
  /** @type {Part[]} */
  const parts = [];
  hierarchy.eachBefore((/** @type {any} */ place) => {
    if (!place.depth) return;
    const part = /** @type {Part} */ (place.data);
    part.y0 = place.x0;
    part.y1 = place.x1;
    part.x0 = part.parent ? part.parent.x1 : 0;
    part.x1 = part.x0 + part.tokens;
    parts.push(part);
  });
  for (let at = parts.length - 1; at >= 0; at -= 1) {
    const part = parts[at];
    part.far = Math.max(part.far, part.x1);
    if (part.parent) {
      part.parent.far = Math.max(part.parent.far, part.far);
      part.parent.below += part.chunks + part.below;
    }
  }
  return { roots, parts, rows, far: Math.max(...roots.map((root) => root.far)) };
}

/** @param {Part[]} roots @param {Map<string, number>} places */
function arrange(roots, places) {
  const before = new Map(places);
  places.clear();
  let next = Math.max(0, ...before.values()) + 1;
  /** @param {Part[]} family */
  const visit = (family) => {
    for (const { key } of family) places.set(key, before.get(key) ?? next++);
    family.sort((a, b) => (places.get(a.key) ?? 0) - (places.get(b.key) ?? 0));
    for (const part of family) visit(part.children);
  };
  visit(roots);
}

/** What is in sight when a part is looked at, with a little of what stands before it. @param {Layout} layout @param {Part | null} part @returns {View} */
export function viewOf(layout, part) {
  if (!part) return { x0: 0, x1: Math.max(layout.far, 1), y0: 0, y1: Math.max(layout.rows, 1) };
  const x0 = Math.max(0, part.x0 - (part.far - part.x0) * 0.04);
  return { x0, x1: part.far, y0: part.y0, y1: part.y1 };
}

/**
 * What to draw: parts in sight that are high enough, and one bundle for each run of flatter ones beside each other.
 *
 * @param {Layout} layout
 * @param {View} view
 * @param {number} width pixels
 * @param {number} height pixels
 * @param {number} flat parts lower than so many pixels are bundled
 * @returns {Box[]} in preorder
 */
export function boxes(layout, view, width, height, flat = 4) {
  const perToken = width / (view.x1 - view.x0);
  const perRow = height / (view.y1 - view.y0);
  /** @type {Box[]} */
  const found = [];
  /** @param {Part[]} parts */
  const visit = (parts) => {
    let at = 0;
    while (at < parts.length) {
      const part = parts[at];
      if ((part.y1 - part.y0) * perRow < flat) {
        let end = at;
        while (end < parts.length && (parts[end].y1 - parts[end].y0) * perRow < flat) end += 1;
        bundle(parts.slice(at, end));
        at = end;
        continue;
      }
      place(part, 0, part.x0, part.x1, part.y0, part.y1);
      if ((part.y1 - view.y0) * perRow > 0 && (part.y0 - view.y1) * perRow < 0) visit(part.children);
      at += 1;
    }
  };
  /** @param {Part[]} run */
  const bundle = (run) => {
    const far = Math.max(...run.map((part) => part.far));
    place(run[0], run.length, run[0].x0, far, run[0].y0, run[run.length - 1].y1);
  };
  /** @param {Part} part @param {number} count @param {number} x0 @param {number} x1 @param {number} y0 @param {number} y1 */
  const place = (part, count, x0, x1, y0, y1) => {
    const left = Math.max((x0 - view.x0) * perToken, -4);
    const right = Math.min((x1 - view.x0) * perToken, width + 4);
    const top = Math.max((y0 - view.y0) * perRow, -4);
    const bottom = Math.min((y1 - view.y0) * perRow, height + 4);
    if (right - left < 0.5 || bottom - top < 0.5) return;
    const key = count ? `${part.key}+` : part.key;
    found.push({ key, part, bundle: count, x: left, y: top, w: right - left, h: bottom - top });
  };
  visit(layout.roots);
  return found;
}

/** The parts whose own text has the words. @param {Layout} layout @param {string} words @returns {Part[]} */
export function search(layout, words) {
  const wanted = words.trim().toLowerCase();
  if (!wanted) return [];
  return layout.parts.filter((part) => part.text.toLowerCase().includes(wanted) || part.sessions.some((s) => s.toLowerCase().includes(wanted)));
}

/** Where a key of the keyboard leads. @param {Layout} layout @param {Part} part @param {string} key */
export function neighbour(layout, part, key) {
  if (key === "ArrowLeft") return part.parent;
  if (key === "ArrowRight") return part.children[0] ?? null;
  const siblings = part.parent ? part.parent.children : layout.roots;
  const at = siblings.indexOf(part);
  const next = siblings[key === "ArrowDown" ? at + 1 : at - 1];
  if (next) return next;
  // Past the last of a family: the next one at the same side of the picture.
  const row = key === "ArrowDown" ? part.y1 + 0.5 : part.y0 - 0.5;
  if (row < 0 || row > layout.rows) return null;
  const inRow = layout.parts.filter((other) => other.y0 <= row && other.y1 > row && other.x0 <= part.x0);
  return inRow[inRow.length - 1] ?? null;
}

/** The path from a root. @param {Part} part */
export function pathOf(part) {
  const path = [];
  for (let at = /** @type {Part | null} */ (part); at; at = at.parent) path.unshift(at);
  return path;
}

/** What the whole tree is. @param {readonly TreeNode[]} nodes */
export function totals(nodes) {
  let chunks = 0, tokens = 0, inUse = 0, onDevice = 0, shared = 0;
  for (const node of nodes) {
    chunks += node.chunks ?? 1;
    tokens += node.tokens;
    if (node.users) inUse += node.tokens;
    if (node.users > 1) shared += node.tokens * (node.users - 1);
    if (node.tiers & 1) onDevice += node.tokens;
  }
  return { chunks, tokens, inUse, onDevice, shared };
}
