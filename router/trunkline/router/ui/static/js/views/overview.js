/** @file Groups and their load, tiers and hit rates over time, and what to look at. */

import { alertsOf } from "../core/alerts.js";
import { counted, duration, known, percent, share, short, UNKNOWN, whole } from "../core/format.js";
import { column, latest, overGroups, ratio } from "../core/series.js";
import { TIERS, TIER_TEXT } from "../core/tiers.js";
import { Chart } from "../chart.js";
import { fill, h, keyed, setText } from "../dom.js";
import { Poll } from "../poll.js";
import { bar, legend, segmented } from "../widgets.js";

const RANGES = /** @type {[string, string][]} */ ([["300", "5 min"], ["900", "15 min"], ["3600", "1 h"], ["21600", "6 h"]]);

/** @type {import("../main.js").View} */
export const overview = {
  id: "overview",
  title: "Overview",
  icon: "M4 13h7V4H4zm9 7h7v-9h-7zM4 20h7v-5H4zm9-16v5h7V4z",
  mount,
};

/** @param {HTMLElement} root @returns {import("../main.js").Mounted} */
function mount(root) {
  let seconds = "900";
  const alerts = h("div.alerts", { role: "status", "aria-label": "Alerts" });
  const figures = new Figures();
  const groups = h("div.groups");
  const summary = h("span.muted");
  const charts = new Charts();
  root.append(
    h("h1.sr", null, "Overview"),
    alerts,
    figures.element,
    h("div.row.head", null, h("h2", null, "Over time"), h("span.grow"), segmented("Time span", RANGES, seconds, (value) => {
      seconds = value;
      history.now();
    })),
    charts.element,
    h("div.row.head", null, h("h2", null, "Groups"), summary, h("span.grow"),
      legend(["used", "in use"], ["cached", "cached"], ["host", "host"], ["disk", "disk"], ["remote", "remote"], ["peer", "another group"])),
    groups,
  );
  const now = new Poll(() => "ui/api/overview", 1, (data) => {
    showAlerts(alerts, alertsOf(data));
    figures.showNow(data);
    setText(summary, [counted(data.groups.length, "group"), `router ${data.router?.name ?? UNKNOWN} of ${data.router?.routers ?? 1}`, `version ${data.version}`, ...handedOver(data.router?.handovers)].join(" · "));
    keyed(groups, data.groups, (group) => String(group.group), makeGroup, showGroup);
  });
  const history = new Poll(() => `ui/api/history?seconds=${seconds}`, 2, (data) => {
    charts.show(data);
    figures.showHistory(data);
  });
  return {
    close() {
      now.stop();
      history.stop();
      charts.close();
    },
  };
}

/** @param {HTMLElement} place @param {import("../core/alerts.js").Alert[]} alerts */
function showAlerts(place, alerts) {
  keyed(place, alerts, ({ text }) => text, ({ level }) => h("p.alert", { dataset: { level } }, h("b"), h("span")), (element, { text, detail }) => {
    setText(element.children[0], text);
    setText(element.children[1], detail);
  });
}

/** The row of big figures. */
class Figures {
  #cells = new Map();

  constructor() {
    this.element = h("div.figures", { "aria-label": "Figures" },
      [["running", "Running"], ["waiting", "Waiting"], ["hit", "Prompt tokens cached"], ["rate", "Output tokens/s"], ["device", "Device KV in use"], ["saved", "Tokens not computed"]]
        .map(([name, title]) => this.#cell(name, title)));
  }

  /** @param {string} name @param {string} title */
  #cell(name, title) {
    const value = h("b", null, UNKNOWN);
    const note = h("small");
    this.#cells.set(name, [value, note]);
    return h("div.card.cell", { dataset: { figure: name } }, h("span", null, title), value, note);
  }

  /** @param {string} name @param {string} text @param {string} note */
  #put(name, text, note) {
    const [value, small] = this.#cells.get(name);
    setText(value, text);
    setText(small, note);
  }

  /** @param {any} data */
  showNow({ groups }) {
    const sum = (/** @type {(group: any) => number | undefined} */ of) =>
      groups.reduce((/** @type {number} */ all, /** @type {any} */ group) => all + (of(group) ?? 0), 0);
    const ready = groups.filter((/** @type {any} */ group) => group.status === "ready").length;
    this.#put("running", whole(sum((g) => g.running)), `${ready} of ${counted(groups.length, "group")} ready`);
    this.#put("waiting", whole(sum((g) => g.waiting)), `${short(sum((g) => g.queued_tokens))} tokens queued`);
    const total = sum((g) => g.blocks?.total), free = sum((g) => g.blocks?.free), cached = sum((g) => g.blocks?.cached);
    this.#put("device", percent(share(total - free - cached, total)), `${percent(share(cached, total))} more cached`);
    const prompt = sum((g) => g.prompt_tokens), found = sum((g) => g.cached_tokens);
    this.#put("saved", short(found), `of ${short(prompt)} prompt tokens`);
    this.overall = share(found, prompt);
  }

  /** @type {number | null} */
  overall = null;

  /** @param {any} data */
  showHistory(data) {
    this.#put("hit", percent(latest(column(data, "hit_rate")) ?? this.overall), `${percent(this.overall)} since the start`);
    const speeds = column(data, "tokens_per_s");
    const most = Math.max(0, ...speeds.map((value) => value ?? 0));
    this.#put("rate", short(latest(speeds)), `${short(most)} at most`);
  }
}

class Charts {
  constructor() {
    this.hits = new Chart({ title: "Prompt tokens cached", figure: percent, top: 1 }, [{ label: "cached", colour: "--device", filled: true }]);
    this.speed = new Chart({ title: "Output tokens per second" }, [{ label: "tokens/s", colour: "--accent-2", filled: true }]);
    this.load = new Chart({ title: "Requests", top: 4 }, [
      { label: "running", colour: "--device", filled: true },
      { label: "waiting", colour: "--disk", dash: [5, 3] },
    ]);
    this.tiers = new Chart({ title: "Tiers, filled", figure: percent, top: 1 }, tierLines(TIERS.slice(0, -1)));
    this.element = h("div.charts", null, this.hits.element, this.speed.element, this.load.element, this.tiers.element);
  }

  /** @param {any} data */
  show(data) {
    this.hits.show(data.t, column(data, "hit_rate"));
    this.speed.show(data.t, column(data, "tokens_per_s"));
    this.load.show(data.t, overGroups(data, ".running"), overGroups(data, ".waiting"));
    const there = TIERS.filter((name) => name !== "peer" && column(data, `tier.${name}.used`).some((value) => value !== null));
    this.tiers.setLines(tierLines(there));
    this.tiers.show(data.t, ...there.map((name) => ratio(column(data, `tier.${name}.used`), column(data, `tier.${name}.slots`))));
  }

  close() {
    for (const chart of [this.hits, this.speed, this.load, this.tiers]) chart.close();
  }
}

/** @param {readonly string[]} names */
function tierLines(names) {
  const dashes = /** @type {Record<string, number[] | undefined>} */ ({ host: [6, 3], disk: [2, 3], remote: [8, 3, 2, 3], peer: [1, 3] });
  return names.map((name) => ({ label: TIER_TEXT[name], colour: `--${name}`, dash: dashes[name] }));
}

function makeGroup() {
  return h("article.card.group");
}

/** @param {HTMLElement} element @param {any} group */
function showGroup(element, group) {
  element.setAttribute("aria-label", `Group ${group.group}`);
  const blocks = group.blocks ?? {};
  const used = known(blocks.total) ? blocks.total - blocks.free - blocks.cached : null;
  fill(
    element,
    h("header", null,
      h("h3", null, `Group ${group.group}`),
      h("span.badge", { dataset: { kind: group.status === "ready" ? "good" : "bad" } }, group.status),
      h("code.muted", null, group.endpoint ?? "")),
    group.status !== "ready" && group.detail ? h("p.muted", null, group.detail) : null,
    h("dl.pairs", null,
      pair("Running", whole(group.running)), pair("Waiting", whole(group.waiting)), pair("Queued tokens", short(group.queued_tokens)),
      pair("Cached", percent(share(group.cached_tokens, group.prompt_tokens))), pair("Output", short(group.output_tokens)), pair("Prefill", perToken(group.prefill_us))),
    h("div.stack", null,
      line("device", [
        { part: share(used ?? 0, blocks.total) ?? 0, name: "used", title: `in use: ${whole(used)} blocks` },
        { part: share(blocks.cached, blocks.total) ?? 0, name: "cached", title: `cached: ${whole(blocks.cached)} blocks` },
      ], known(used) ? `${short(used + blocks.cached)} / ${short(blocks.total)}` : UNKNOWN),
      (group.tiers ?? []).filter((/** @type {any} */ tier) => tier.name !== "device").map((/** @type {any} */ tier) =>
        line(tier.name, [{ part: share(tier.used, tier.slots) ?? 0, name: tier.name, title: `${whole(tier.used)} of ${whole(tier.slots)} slots` }],
          known(tier.slots) && tier.slots > 0 ? `${short(tier.used)} / ${short(tier.slots)}` : short(tier.used), tier.name === "peer" && group.pulls ? pullNote(group.pulls) : tierNote(tier), tier.problem))),
    misses(group.misses),
  );
}

/** @param {number | null | undefined} micros */
function perToken(micros) {
  return known(micros) && micros > 0 ? `${micros < 10 ? micros.toFixed(1) : whole(micros)} µs/token` : UNKNOWN;
}

/** @param {any} tier */
function tierNote(tier) {
  return [`${short(tier.hit_tokens)} tokens hit`, `${short(tier.reads)} reads`, `${short(tier.writes)} writes`, `${short(tier.evictions)} evicted`, tier.failures ? `${short(tier.failures)} failures` : ""].filter(Boolean).join(" · ");
}

/** What this router has had moved between groups. @param {Record<string, {count: number, chunks: number}> | undefined} handovers */
function handedOver(handovers) {
  const said = /** @type {[string, string][]} */ ([["drain", "handed over by groups that left"], ["warm_up", "brought to new groups"]]);
  return said.filter(([occasion]) => handovers?.[occasion]?.chunks).map(([occasion, text]) => `${short(handovers?.[occasion].chunks)} chunks ${text}`);
}

/** What a group has taken from others. @param {any} pulls */
function pullNote({ tokens, chunks, bytes, saved_s: saved, given_up: givenUp }) {
  const given = Object.entries(givenUp).filter(([, count]) => count > 0).map(([reason, count]) => `${short(count)} ${reason}`);
  return [`${short(tokens)} tokens hit`, `${short(chunks)} chunks pulled (${short(bytes).replace(/[kMG]?$/, " $&B")})`, saved > 0 ? `about ${duration(saved)} saved` : "",
    given.length ? `given up: ${given.join(", ")}` : ""].filter(Boolean).join(" · ");
}

/** @param {string} title @param {string} value */
function pair(title, value) {
  return h("div", null, h("dt", null, title), h("dd", null, value));
}

/** @param {string} name @param {{part: number, name: string, title: string}[]} parts @param {string} figure @param {string} [note] @param {string} [problem] */
function line(name, parts, figure, note, problem) {
  return h("div.tierline", { dataset: { tier: name } },
    h("span", null, TIER_TEXT[name] ?? name), bar(parts, `${name}: ${parts.map(({ title }) => title).join(", ")}`), h("span.figure", null, figure),
    note ? h("small.muted", null, note) : null, problem ? h("small.problem", null, problem) : null);
}

/** @param {Record<string, number> | undefined} counts */
function misses(counts) {
  const entries = Object.entries(counts ?? {}).filter(([, count]) => count > 0).sort(([, a], [, b]) => b - a);
  if (!entries.length) return null;
  return h("p.misses.muted", null, "Not cached because ", entries.map(([reason, count]) => h("span", null, h("b", null, reason), ` ${short(count)}`)));
}

