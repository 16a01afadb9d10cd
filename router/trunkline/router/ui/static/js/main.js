/** @file The page around the views: tabs, the key, the connection, the keyboard. */

import { byId, fill, h, setText, svg } from "./dom.js";
import { currentKey, setKey, takeKeyFromAddress } from "./key.js";
import { connection, Poll } from "./poll.js";
import { toggleTheme } from "./theme.js";
import { showHelp } from "./help.js";
import { modules } from "./views/modules.js";
import { overview } from "./views/overview.js";
import { playground } from "./views/playground.js";
import { requests } from "./views/requests.js";
import { routing } from "./views/routing.js";
import { tree } from "./views/tree.js";

/**
 * @typedef {object} Mounted
 * @property {() => void} close stops all that the view asks for
 * @property {(key: string) => boolean} [onKey] a key that nobody took; true: taken
 *
 * @typedef {{id: string, title: string, icon: string, mount: (root: HTMLElement) => Mounted}} View
 */

/** @type {View[]} */
export const VIEWS = [overview, tree, requests, routing, playground, modules];

const root = byId("view");
/** @type {Mounted | null} */
let mounted = null;
/** @type {View | null} */
let current = null;

function drawTabs() {
  fill(
    byId("tabs"),
    VIEWS.map((view, at) => {
      const icon = svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: view.icon }));
      return h(
        "button.tab", { type: "button", role: "tab", id: `tab-${view.id}`, "aria-controls": "view", title: `${view.title} (${at + 1})`, onclick: () => go(view.id) },
        icon, h("span", null, view.title),
      );
    }),
  );
}

/** @param {string} id */
function go(id) {
  if (location.hash === `#${id}`) return;
  location.hash = id;
}

/** Shows the view that the address names. */
function route() {
  const name = location.hash.slice(1).split("/")[0];
  const view = VIEWS.find(({ id }) => id === name) ?? VIEWS[0];
  if (view === current) return;
  open(view);
}

/** @param {View} view */
function open(view) {
  mounted?.close();
  root.replaceChildren();
  current = view;
  document.title = `${view.title} · Trunkline`;
  root.dataset.view = view.id;
  root.setAttribute("aria-labelledby", `tab-${view.id}`);
  for (const { id } of VIEWS) {
    const tab = byId(`tab-${id}`);
    tab.setAttribute("aria-selected", String(id === view.id));
    tab.tabIndex = id === view.id ? 0 : -1;
  }
  mounted = view.mount(root);
}

/** Arrow keys within the tabs, as tabs everywhere. @param {KeyboardEvent} event */
function onTabKey(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step || !current) return;
  event.preventDefault();
  const next = VIEWS[(VIEWS.indexOf(current) + step + VIEWS.length) % VIEWS.length];
  go(next.id);
  byId(`tab-${next.id}`).focus();
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  const target = /** @type {HTMLElement} */ (event.target);
  const typing = target.matches("input, textarea, select") || target.isContentEditable;
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (typing) {
    if (event.key === "Escape") target.blur();
    return;
  }
  const number = Number(event.key);
  if (number >= 1 && number <= VIEWS.length) go(VIEWS[number - 1].id);
  else if (event.key === "?") showHelp(VIEWS);
  else if (event.key === "d") toggleTheme();
  else if (!mounted?.onKey?.(event.key)) return;
  event.preventDefault();
}

// -- the connection and the key

const LIVE_TEXT = { connecting: "connecting", live: "live", lost: "reconnecting", locked: "key needed", error: "error", asleep: "asleep" };

function showConnection() {
  const { state, message } = connection;
  byId("live").dataset.state = state;
  byId("live").title = message;
  setText(byId("live-text"), LIVE_TEXT[state]);
  const banner = byId("banner");
  banner.hidden = state !== "lost" && state !== "error";
  setText(banner, state === "lost" ? `${message} Trying again…` : message);
  if (state === "locked") askForKey(message);
}

/** What the header says of the cluster; and that there is a connection, in views that ask for nothing by themselves. */
function greet() {
  return new Poll(() => "ui/api/overview", 5, ({ model, version }) => {
    setText(byId("model"), model ?? "");
    byId("model").title = `Trunkline ${version}`;
  });
}

/** @param {string} reason */
function askForKey(reason) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("key-dialog"));
  setText(byId("key-reason"), currentKey() && connection.state === "locked" ? `This key was refused. ${reason}` : reason);
  byId("key-forget").hidden = !currentKey();
  if (dialog.open) return;
  byId("key-input").value = "";
  dialog.showModal();
}

/** @param {string} key */
function useKey(key) {
  setKey(key);
  byId("key-dialog").close();
  connection.set("connecting");
  heartbeat.now();
  if (current) open(current);
}

function bindHeader() {
  byId("theme-button").addEventListener("click", toggleTheme);
  byId("help-button").addEventListener("click", () => showHelp(VIEWS));
  byId("key-button").addEventListener("click", () => askForKey(currentKey() ? "A key is in use." : "No key is in use."));
  byId("key-form").addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    useKey(byId("key-input").value.trim());
  });
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
  byId("key-forget").addEventListener("click", () => useKey(""));
  byId("tabs").addEventListener("keydown", onTabKey);
  byId("skip").addEventListener("click", (/** @type {Event} */ event) => {
    event.preventDefault();
    root.focus();
  });
}

takeKeyFromAddress();
drawTabs();
bindHeader();
document.addEventListener("keydown", onKey);
addEventListener("hashchange", () => {
  const before = currentKey();
  takeKeyFromAddress();
  if (currentKey() !== before) useKey(currentKey());
  route();
});
connection.addEventListener("change", showConnection);
route();
const heartbeat = greet();
