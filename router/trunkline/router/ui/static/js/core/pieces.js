/**
 * @file A prompt's pieces, and what the answer said of them: where each token's KV came from. Pure.
 *
 * The router's answer says how many tokens were found in which tier, not which. For a prompt without modules that is enough:
 * what is cached is its beginning, and the tiers come in order, because a chunk never leaves a tier before those behind it.
 * With modules, the schema said before the request which of them had KV; the others were computed for it.
 */

import { TIERS } from "./tiers.js";

/**
 * @typedef {{text: string, tokens: number, kind: string, module?: string | null, cached?: boolean, session?: boolean, dropped?: boolean}} Piece
 *   `cached`: part of a schema; `session`: a stored session's own tokens; `dropped`: cut off, the model does not see it
 * @typedef {Piece & {source: string}} Coloured `source`: a tier, "new" or "dropped"
 * @typedef {{name: string, tokens: number}} Sum
 */

/** @param {readonly Piece[]} pieces */
export function tokensOf(pieces) {
  return pieces.reduce((sum, piece) => sum + (piece.dropped ? 0 : piece.tokens), 0);
}

/** How many tokens a tier has left to give. @param {Record<string, number> | undefined} tiers */
function supply(tiers) {
  return TIERS.map((name) => ({ name: /** @type {string} */ (name), tokens: tiers?.[name] ?? 0 })).filter(({ tokens }) => tokens > 0);
}

/**
 * Cut a piece's text at a share of it. Only roughly at the token's border: the router sends the piece's text as a whole.
 *
 * @param {string} text @param {number} at between 0 and 1
 */
function cut(text, at) {
  const place = Math.round(text.length * at);
  return [text.slice(0, place), text.slice(place)];
}

/**
 * @param {readonly Piece[]} pieces in the order of positions
 * @param {{tiers?: Record<string, number>} | null | undefined} cache of the answer; null: not known yet
 * @param {(module: string) => boolean} wasThere whether a module had KV before the request
 * @returns {Coloured[]} the same tokens in all; source "" while nothing is known
 */
export function coloured(pieces, cache, wasThere = () => true) {
  if (!cache) return pieces.map((piece) => ({ ...piece, source: "" }));
  const left = supply(cache.tiers);
  const modular = pieces.some((piece) => piece.cached);
  /** @param {Piece} piece */
  const likely = (piece) => !modular || piece.session || (!!piece.cached && wasThere(piece.module ?? ""));
  /** @type {Coloured[]} */
  const first = pieces.flatMap((piece) => {
    if (piece.dropped) return [{ ...piece, source: "dropped" }];
    return likely(piece) ? give(piece, left) : [{ ...piece, source: "new" }];
  });
  // What was found beyond what seemed likely (a module came from another schema, say) is somewhere in the rest.
  return left.length ? first.flatMap((piece) => (piece.source === "new" ? give(piece, left) : [piece])) : first;
}

/** @param {Piece} piece @param {Sum[]} left @returns {Coloured[]} */
function give(piece, left) {
  /** @type {Coloured[]} */
  const found = [];
  let { text, tokens } = piece;
  while (tokens > 0 || !found.length) {
    const first = left[0];
    const taken = first ? Math.min(first.tokens, tokens) : tokens;
    const [head, tail] = tokens > taken ? cut(text, taken / tokens) : [text, ""];
    found.push({ ...piece, text: head, tokens: taken, source: first ? first.name : "new" });
    if (first) {
      first.tokens -= taken;
      if (!first.tokens) left.shift();
    }
    tokens -= taken;
    text = tail;
  }
  return found;
}

/**
 * The prompt in figures, as the router gave them: found, by tier, and computed. They add up to the prompt's tokens.
 *
 * @param {{prompt_tokens: number}} usage
 * @param {{tiers?: Record<string, number>} | null | undefined} cache
 * @returns {Sum[]} without what is zero
 */
export function sums(usage, cache) {
  const found = supply(cache?.tiers);
  const cached = found.reduce((sum, { tokens }) => sum + tokens, 0);
  return [...found, { name: "new", tokens: usage.prompt_tokens - cached }].filter(({ tokens }) => tokens > 0);
}

/** @type {Record<string, string>} */
const REASONS = {
  new: "never seen before, or gone for longer than is remembered",
  diverged: "other prompts agree up to there",
  evicted: "its KV had to make room",
  ttl: "its KV was not used for too long",
  salt: "its KV belongs to another salt",
  slow: "computing was faster than loading",
  lost: "a tier could not give it back whole",
  off: "prefix caching is off",
};

/** Why the rest was computed. @param {any} cache @returns {string} "" if nothing was missing */
export function missText(cache) {
  if (!cache?.reason) return "";
  return `From token ${cache.miss_token} on: ${cache.reason} (${REASONS[cache.reason] ?? "see the API's documentation"}).`;
}
