/** @file What the keyboard does. */

import { byId, fill, h } from "./dom.js";

/** @param {readonly {title: string}[]} views */
export function showHelp(views) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("help-dialog"));
  const rows = /** @type {[string, string][]} */ ([
    [`1 – ${views.length}`, views.map(({ title }) => title).join(", ")],
    ["← →", "in the tabs: the view beside"],
    ["d", "dark or light"],
    ["/", "search or filter"],
    ["p", "tree, routing: pause, go on"],
    ["?", "this help"],
    ["Esc", "leave a field, close a dialog"],
  ]);
  const inTree = /** @type {[string, string][]} */ ([
    ["← → ↑ ↓", "to the chunk before, behind, above, below"],
    ["Enter", "zoom to it"],
    ["Backspace", "zoom out a step"],
    ["0", "the whole tree"],
    ["+ −", "zoom; also with the wheel or two fingers, drag to move"],
    ["n", "the next chunk that was found"],
  ]);
  fill(
    dialog,
    h("h2", { id: "help-title" }, "Keyboard"),
    list(rows),
    h("h3", null, "In the tree"),
    list(inTree),
    h("div.row.end", null, h("button.primary", { type: "button", autofocus: true, onclick: () => dialog.close() }, "Close")),
  );
  dialog.showModal();
}

/** @param {[string, string][]} rows */
function list(rows) {
  return h("dl.keys", null, rows.flatMap(([keys, text]) => [h("dt", null, keys.split(" ").map((key) => (/^[–−]$/.test(key) && keys.includes("1") ? key : h("kbd", null, key)))), h("dd", null, text)]));
}
