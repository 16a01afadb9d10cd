/** @file Running and waiting requests; sessions with their tier and age. */

import { ago, duration, percent, share, short, shortId, UNKNOWN, whole } from "../core/format.js";
import { h } from "../dom.js";
import { Poll } from "../poll.js";
import { Table } from "../table.js";
import { badge, bar, tierBadge } from "../widgets.js";

/** @type {import("../main.js").View} */
export const requests = {
  id: "requests",
  title: "Requests",
  icon: "M4 6h16M4 12h16M4 18h10",
  mount,
};

const STATES = /** @type {Record<string, string>} */ ({ running: "good", waiting: "warn", resuming: "warn" });

/** Answers may be lists, or lists in an object. @param {any} data @param {string} name @returns {any[]} */
function listOf(data, name) {
  return Array.isArray(data) ? data : (data[name] ?? []);
}

/** @param {HTMLElement} root @returns {import("../main.js").Mounted} */
function mount(root) {
  let now = Date.now() / 1000;
  const live = new Table({ title: "Requests", key: (row) => String(row.id), empty: "No request is running or waiting.", sort: 8, descending: true, columns: requestColumns() });
  const kept = new Table({ title: "Sessions", key: (row) => `${row.id} ${row.group}`, empty: "No session is kept.", sort: 6, descending: true, columns: sessionColumns(() => now) });
  root.append(h("h1.sr", null, "Requests and sessions"), live.element, kept.element);
  const first = new Poll(() => "ui/api/requests", 1, (data) => live.show(listOf(data, "requests")));
  const second = new Poll(() => "ui/api/sessions?limit=200", 2, (data) => {
    now = data.now ?? Date.now() / 1000;
    kept.show(listOf(data, "sessions"));
  });
  return {
    close() {
      first.stop();
      second.stop();
    },
    onKey(key) {
      if (key === "/") live.filter.focus();
      return key === "/";
    },
  };
}

/** @param {string | null | undefined} id */
function idCell(id) {
  return h("code", { title: id ?? "" }, shortId(id));
}

/** @param {any} row */
function cachedCell(row) {
  const part = share(row.cached_tokens, row.prompt_tokens);
  return h("span.withbar", null, whole(row.cached_tokens), bar([{ part: part ?? 0, name: "cached", title: percent(part) }], `${percent(part)} cached`));
}

/** @returns {import("../table.js").Column<any>[]} */
function requestColumns() {
  return [
    { title: "Request", value: (row) => row.id, cell: (row) => idCell(row.id) },
    { title: "State", value: (row) => row.state, cell: (row) => badge(row.state, STATES[row.state]) },
    { title: "Group", value: (row) => row.group, figure: true },
    { title: "Tenant", value: (row) => row.tenant, rank: "minor" },
    { title: "Session", value: (row) => row.session, cell: (row) => idCell(row.session), rank: "minor" },
    { title: "Prompt", value: (row) => row.prompt_tokens, cell: (row) => whole(row.prompt_tokens), figure: true, hint: "Prompt tokens" },
    { title: "Cached", value: (row) => row.cached_tokens, cell: cachedCell, figure: true, hint: "Prompt tokens that were not computed again" },
    { title: "Output", value: (row) => row.output_tokens, cell: (row) => whole(row.output_tokens), figure: true, hint: "Output tokens so far" },
    { title: "Age", value: (row) => row.age_s, cell: (row) => duration(row.age_s), figure: true },
    { title: "First token", value: (row) => row.ttft_s, cell: (row) => duration(row.ttft_s), figure: true, rank: "minor", hint: "Time to the first token" },
    { title: "Modules", value: (row) => row.module_tokens, cell: (row) => whole(row.module_tokens), figure: true, rank: "minor", hint: "Prompt tokens that are modules'" },
  ];
}

/** @param {() => number} now @returns {import("../table.js").Column<any>[]} */
function sessionColumns(now) {
  return [
    { title: "Session", value: (row) => row.id, cell: (row) => idCell(row.id) },
    { title: "Kind", value: (row) => (row.stored ? "stored" : "label"), cell: (row) => badge(row.stored ? "stored" : "label"), hint: "Stored by the cluster, or a label of requests" },
    { title: "Tier", value: (row) => row.tier, cell: (row) => tierBadge(row.tier), hint: "The slowest tier that part of its KV is in" },
    { title: "Group", value: (row) => row.group, figure: true },
    { title: "Turns", value: (row) => row.turns, figure: true },
    { title: "Tokens", value: (row) => row.tokens, cell: (row) => short(row.tokens), figure: true },
    { title: "Used", value: (row) => row.used, cell: (row) => ago(row.used, now()), figure: true },
    { title: "Created", value: (row) => row.created, cell: (row) => ago(row.created, now()), figure: true, rank: "minor" },
    { title: "Expires", value: (row) => row.expires, cell: (row) => (row.expires ? ago(row.expires, now()) : row.stored ? "never" : UNKNOWN), figure: true, rank: "minor" },
    { title: "Tenant", value: (row) => row.tenant, rank: "minor" },
  ];
}
