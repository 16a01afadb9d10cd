/** @file Where requests went, and why: costs of all groups side by side. */

import { clock, counted, shortId, whole } from "../core/format.js";
import { filtered } from "../core/sorting.js";
import { fill, h, keyed } from "../dom.js";
import { Poll } from "../poll.js";
import { badge, bar, legend } from "../widgets.js";

/** @type {import("../main.js").View} */
export const routing = {
  id: "routing",
  title: "Routing",
  icon: "M4 12h6M10 12c3 0 3-6 6-6h4M10 12c3 0 3 6 6 6h4m-3-15 3 3-3 3m0 6 3 3-3 3",
  mount,
};

/** Kept in the page; the router keeps more. */
const KEPT_MAX = 500;
const SHOWN_MAX = 120;

const REASONS = /** @type {Record<string, string>} */ ({
  prefix: "more of its prompt is cached there than what its load costs",
  load: "nothing is cached anywhere: the cheapest by load",
  session: "its session is there, and no other is much cheaper",
  home: "the home of its schema",
  hash: "a new session: by its hash, among the cheapest",
  only: "no other group could take it",
  pinned: "it may run in this group only",
});

/** @param {HTMLElement} root @returns {import("../main.js").Mounted} */
function mount(root) {
  /** @type {any[]} */
  let decisions = [];
  let next = 0;
  const filter = h("input.filter", { type: "search", placeholder: "Session, request, reason", "aria-label": "Filter decisions", oninput: () => draw() });
  const count = h("span.muted");
  const pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => setPaused(!poll.paused) }, "Pause");
  const reasons = h("div.reasons", { "aria-label": "Reasons" });
  const list = h("ol.decisions");
  const empty = h("p.empty", null, "No request has been routed yet.");
  root.append(
    h("h1.sr", null, "Routing"),
    h("section.card.list", null,
      h("div.row.head", null, h("h2", null, "Decisions"), count, h("span.grow"), filter, pause),
      reasons,
      h("div.row", null, legend(["device", "cached on the device"], ["host", "host"], ["disk", "disk"], ["new", "to compute"]), h("span.grow"), h("small.muted", null, "The number is the cost: what is new, times the load. Lowest wins.")),
      list, empty),
  );
  const poll = new Poll(() => `ui/api/decisions?after=${next}`, 1, (data) => {
    // A router that was started again counts from the beginning.
    if (data.next < next) {
      decisions = [];
      next = 0;
      poll.now();
      return;
    }
    next = data.next;
    if (!data.decisions.length && decisions.length) return;
    decisions = [...decisions, ...data.decisions].slice(-KEPT_MAX);
    draw();
  });

  /** @param {boolean} paused */
  function setPaused(paused) {
    poll.paused = paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Go on" : "Pause";
  }

  function draw() {
    const chosen = filtered(decisions, filter.value, (row) => [row.session, row.request, row.reason, `group ${row.name ?? row.group}`]);
    count.textContent = chosen.length === decisions.length ? String(chosen.length) : `${chosen.length} of ${decisions.length}`;
    empty.hidden = chosen.length > 0;
    empty.textContent = decisions.length ? "No decisions match." : "No request has been routed yet.";
    drawReasons(reasons, chosen);
    keyed(list, chosen.slice(-SHOWN_MAX).reverse(), (row) => String(row.n), makeDecision, () => {});
  }

  return {
    close: () => poll.stop(),
    onKey(key) {
      if (key === "p") setPaused(!poll.paused);
      else if (key === "/") filter.focus();
      else return false;
      return true;
    },
  };
}

/** @param {HTMLElement} place @param {any[]} decisions */
function drawReasons(place, decisions) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const { reason } of decisions) counts.set(reason, (counts.get(reason) ?? 0) + 1);
  const entries = [...counts].sort(([, a], [, b]) => b - a);
  fill(place, entries.map(([reason, count]) => h("span.reason", { title: REASONS[reason] ?? "" }, badge(reason, "reason"), h("b", null, `${Math.round((100 * count) / decisions.length)} %`), h("small.muted", null, REASONS[reason] ?? ""))));
}

/** @param {any} row */
function makeDecision(row) {
  const match = row.match ?? [];
  const most = Math.max(1, ...match.map((/** @type {any} */ one) => one.cost ?? 0));
  return h("li.decision", { dataset: { session: row.session ?? "" } },
    h("div.what", null,
      h("time", null, clock(row.t)), h("b", null, `→ group ${row.name ?? row.group}`), badge(row.reason, "reason"), row.retried ? badge("again", "warn") : null,
      h("span.muted", null, counted(row.prompt_tokens, "token")),
      h("code.muted", { title: row.request ?? "" }, shortId(row.request)),
      row.session ? h("code.muted", { title: row.session }, shortId(row.session)) : null),
    h("div.costs", null, match.map((/** @type {any} */ one) => costLine(one, row, most))));
}

/** @param {any} one @param {any} row @param {number} most */
function costLine(one, row, most) {
  const prompt = Math.max(row.prompt_tokens ?? 0, 1);
  const found = ["device", "host", "disk"].map((name) => ({ name, tokens: one[name] ?? 0 }));
  const fresh = Math.max(prompt - found.reduce((sum, { tokens }) => sum + tokens, 0), 0);
  const scale = (one.cost ?? 0) / most;
  const parts = [...found, { name: "new", tokens: fresh }].map(({ name, tokens }) => ({ part: tokens / prompt, name, title: `${name}: ${whole(tokens)} tokens` }));
  return h("div.cost", { "aria-current": one.group === row.group ? "true" : null },
    h("span", null, `${one.name ?? one.group}`),
    bar(parts, `group ${one.name ?? one.group}: ${parts.map(({ title }) => title).join(", ")}`),
    h("span.weight", { style: { "--part": String(scale) } }, h("i", null), h("span.figure", null, whole(one.cost))));
}
