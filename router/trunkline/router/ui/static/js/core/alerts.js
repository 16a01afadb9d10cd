/** @file What an operator should look at, from the overview. Pure. */

/** @typedef {{level: "bad" | "warn", text: string, detail: string}} Alert */

/** @param {any} overview @returns {Alert[]} the worst first */
export function alertsOf(overview) {
  /** @type {Alert[]} */
  const alerts = [];
  const groups = overview.groups ?? [];
  const ready = groups.filter((/** @type {any} */ group) => group.status === "ready").length;
  if (groups.length && !ready) {
    alerts.push({ level: "bad", text: "No group is ready", detail: "Requests wait until one is." });
  }
  for (const group of groups) {
    if (group.status !== "ready") {
      alerts.push({ level: "bad", text: `Group ${group.name ?? group.group} is not ready`, detail: [group.status, group.detail].filter(Boolean).join(": ") });
    }
    for (const tier of group.tiers ?? []) {
      if (tier.problem) {
        alerts.push({ level: "warn", text: `Group ${group.group}: ${tier.name} tier`, detail: tier.problem });
      }
    }
  }
  return alerts.sort((a, b) => Number(a.level === "warn") - Number(b.level === "warn"));
}
