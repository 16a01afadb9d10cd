/** @file The router's history, as charts want it. Pure. */

/** @typedef {{t: number[], series: Record<string, (number | null)[]>}} History */

/** A series, or nulls where the router has none. @param {History} history @param {string} name */
export function column(history, name) {
  return history.series[name] ?? history.t.map(() => null);
}

/**
 * The series of all groups together: known where any is.
 *
 * @param {History} history
 * @param {string} suffix as ".running"
 */
export function overGroups(history, suffix) {
  const names = Object.keys(history.series).filter((name) => /^group\.\d+\./.test(name) && name.endsWith(suffix));
  return history.t.map((_, at) => {
    const values = names.map((name) => history.series[name][at]).filter((value) => value !== null && value !== undefined);
    return values.length ? values.reduce((a, b) => a + b, 0) : null;
  });
}

/** One series as a part of another. @param {readonly (number | null)[]} parts @param {readonly (number | null)[]} wholes */
export function ratio(parts, wholes) {
  return parts.map((part, at) => {
    const all = wholes[at];
    return part === null || all === null || !all ? null : part / all;
  });
}

/** The last value that is known. @param {readonly (number | null | undefined)[]} values */
export function latest(values) {
  for (let at = values.length - 1; at >= 0; at -= 1) {
    const value = values[at];
    if (value !== null && value !== undefined) return value;
  }
  return null;
}
