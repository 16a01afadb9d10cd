/** @file The key: from the address once, then in this tab's storage only; never in an address that is sent. */

const STORED = "trunkline.key";

/** Takes `#key=…` out of the address, whatever view is named beside it. */
export function takeKeyFromAddress() {
  const parts = location.hash.slice(1).split("&");
  const found = parts.find((part) => part.startsWith("key="));
  if (found === undefined) return;
  setKey(decodeURIComponent(found.slice(4)));
  const rest = parts.filter((part) => part !== found).join("&");
  history.replaceState(null, "", location.pathname + location.search + (rest ? `#${rest}` : ""));
}

/** @returns {string} "" if there is none */
export function currentKey() {
  return sessionStorage.getItem(STORED) ?? "";
}

/** @param {string} key "" forgets it */
export function setKey(key) {
  if (key) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
}
