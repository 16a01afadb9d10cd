/** @file Rows of a table: which, in which order. Pure. */

/**
 * @template T
 * @param {readonly T[]} rows
 * @param {(row: T) => unknown} value what to sort by; what is not known comes last either way
 * @param {boolean} descending
 * @returns {T[]} equal ones stay in their order
 */
export function sorted(rows, value, descending) {
  const sign = descending ? -1 : 1;
  return rows
    .map((row) => /** @type {[any, T]} */ ([value(row), row]))
    .sort(([a], [b]) => {
      const missing = Number(a === null || a === undefined) - Number(b === null || b === undefined);
      if (missing) return missing;
      if (typeof a === "string" && typeof b === "string") return sign * a.localeCompare(b, "en", { numeric: true });
      return a < b ? -sign : a > b ? sign : 0;
    })
    .map(([, row]) => row);
}

/**
 * Rows in which each word occurs somewhere, whatever its case.
 *
 * @template T
 * @param {readonly T[]} rows
 * @param {string} words
 * @param {(row: T) => readonly unknown[]} fields
 * @returns {T[]}
 */
export function filtered(rows, words, fields) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length) return [...rows];
  return rows.filter((row) => {
    const text = fields(row).map((field) => String(field ?? "")).join("\n").toLowerCase();
    return wanted.every((word) => text.includes(word));
  });
}
