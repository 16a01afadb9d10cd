/** @file One request of the playground: its prompt in pieces, its answer as it streams, what was found of it. */

import { ApiError, call, stream } from "./api.js";

/**
 * @typedef {object} Watcher what the page does with what comes
 * @property {(prompt: {tokens: number, pieces: import("./core/pieces.js").Piece[]}) => void} onPrompt
 * @property {(text: string) => void} onText
 * @property {(end: End) => void} onEnd
 * @property {(error: unknown) => void} onError
 *
 * @typedef {{usage: any, cache: any, truncation: any, finish: string, ttft: number, seconds: number, stopped: boolean}} End
 */

/**
 * Sends a chat completion and tells a watcher what comes of it. The prompt's pieces are asked for first, because afterwards a
 * session's history would have this turn in it.
 *
 * @param {Record<string, any>} body without `stream`
 * @param {Watcher} watcher
 * @param {AbortSignal} signal stops it
 * @returns {Promise<string>} the text, "" if nothing came
 */
export async function ask(body, watcher, signal) {
  let text = "";
  /** @type {End} */
  const end = { usage: null, cache: null, truncation: null, finish: "", ttft: NaN, seconds: NaN, stopped: false };
  const began = performance.now();
  const seconds = () => (performance.now() - began) / 1000;
  try {
    watcher.onPrompt(await call("ui/api/prompt", { body, signal }));
    const sent = seconds();
    for await (const event of stream("v1/chat/completions", { ...body, stream: true, stream_options: { include_usage: true } }, signal)) {
      const choice = event.choices?.[0];
      const piece = choice?.delta?.content ?? "";
      if (piece) {
        if (!text) end.ttft = seconds() - sent;
        text += piece;
        watcher.onText(text);
      }
      if (choice?.finish_reason) end.finish = choice.finish_reason;
      for (const field of /** @type {const} */ (["usage", "cache", "truncation"])) if (event[field]) end[field] = event[field];
    }
    end.seconds = seconds() - sent;
  } catch (error) {
    if (!signal.aborted) {
      watcher.onError(error instanceof ApiError ? error : new ApiError(0, String(error)));
      return text;
    }
    end.stopped = true;
  }
  watcher.onEnd(end);
  return text;
}
