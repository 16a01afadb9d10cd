/** @file Figures as people read them. Pure; "–" stands for what is not known. */

export const UNKNOWN = "–";

/** @param {unknown} value @returns {value is number} */
export function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** With thousands' separators. @param {number | null | undefined} value */
export function whole(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : UNKNOWN;
}

/** At most four characters and a unit: 950, 12.3k, 4.57M. @param {number | null | undefined} value */
export function short(value) {
  if (!known(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size < 10 && !Number.isInteger(value)) return value.toFixed(1);
  if (size < 10_000) return Math.round(value).toLocaleString("en-US");
  for (const [limit, unit, by] of /** @type {[number, string, number][]} */ ([
    [999_500, "k", 1e3],
    [999_500_000, "M", 1e6],
    [Infinity, "G", 1e9],
  ])) {
    if (size < limit) return `${(value / by).toPrecision(3)}${unit}`;
  }
  return UNKNOWN;
}

/** @param {number | null | undefined} part between 0 and 1 */
export function percent(part) {
  if (!known(part)) return UNKNOWN;
  const value = part * 100;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} %`;
}

/** @param {number | null | undefined} seconds a length of time */
export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  if (seconds < 5970) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

/** How long ago, or how far ahead. @param {number | null | undefined} time @param {number} now both in seconds since the epoch */
export function ago(time, now) {
  if (!known(time)) return UNKNOWN;
  return time > now + 1 ? `in ${duration(time - now)}` : `${duration(Math.max(now - time, 0))} ago`;
}

/** @param {number | null | undefined} time in seconds since the epoch; here, 24 hours */
export function clock(time) {
  if (!known(time)) return UNKNOWN;
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}

/** @param {number | null | undefined} count @param {string} one @param {string} [many] */
export function counted(count, one, many = `${one}s`) {
  return `${whole(count)} ${count === 1 ? one : many}`;
}

/** The part of a whole, or null if there is none. @param {number | undefined} part @param {number | undefined} all */
export function share(part, all) {
  return known(part) && known(all) && all > 0 ? part / all : null;
}

/** An id that fits into a table: its beginning and its end. @param {string | null | undefined} id */
export function shortId(id) {
  if (!id) return UNKNOWN;
  return id.length > 22 ? `${id.slice(0, 13)}…${id.slice(-6)}` : id;
}
