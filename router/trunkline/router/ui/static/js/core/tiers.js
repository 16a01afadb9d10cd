/** @file The tiers of KV, fastest first: names, bits, colours. Pure. */

export const TIERS = /** @type {const} */ (["device", "host", "disk", "remote", "peer"]);

/** @type {Record<string, string>} */
export const TIER_TEXT = {
  device: "device",
  host: "host memory",
  disk: "disk",
  remote: "remote",
  peer: "another group",
  none: "gone",
};

/** @param {number} bits as the tree has them @returns {string[]} fastest first */
export function tiersOf(bits) {
  return TIERS.filter((_, index) => bits & (1 << index));
}

/** @param {number} bits @returns {string} the fastest tier, or "none" */
export function fastest(bits) {
  return tiersOf(bits)[0] ?? "none";
}
