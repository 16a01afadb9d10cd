/** @file Requests to the router that served this page, with the key, and errors as the router says them. */

import { currentKey } from "./key.js";
import { SseParser } from "./core/sse.js";

/** Behind a proxy with a prefix, too: `/prefix/ui` asks `/prefix/v1/…`. */
const BASE = new URL(".", document.baseURI);

/** What the router refused or failed at, or that it did not answer (status 0). */
export class ApiError extends Error {
  /** @param {number} status @param {string} message @param {Record<string, any>} [details] the `error` object */
  constructor(status, message, details = {}) {
    super(message);
    this.status = status;
    this.details = details;
  }
}

/** @param {Response} response @returns {Promise<ApiError>} */
async function errorOf(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new ApiError(response.status, error.message, error);
  } catch {
    return new ApiError(response.status, `${response.status} ${response.statusText}: ${text.slice(0, 200)}`);
  }
}

/**
 * @param {string} path relative, without a slash at its beginning
 * @param {{method?: string, body?: unknown, signal?: AbortSignal}} [options]
 * @returns {Promise<Response>} with a status below 400
 */
async function send(path, { method, body, signal } = {}) {
  const key = currentKey();
  /** @type {Record<string, string>} */
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, BASE), {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "same-origin",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The router does not answer.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/**
 * The JSON answer of a call.
 *
 * @param {string} path
 * @param {{method?: string, body?: unknown, signal?: AbortSignal}} [options]
 * @returns {Promise<any>}
 */
export async function call(path, options) {
  return (await send(path, options)).json();
}

/**
 * The events of a streamed answer, parsed; ends at `[DONE]`. An error in the stream is thrown.
 *
 * @param {string} path
 * @param {unknown} body
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<any>}
 */
export async function* stream(path, body, signal) {
  const response = await send(path, { body, signal });
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  const parser = new SseParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError(0, "The stream ended before the answer did.");
      for (const data of parser.feed(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(500, event.error.message, event.error);
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError(0, "The connection was lost during the answer.");
  } finally {
    reader.cancel().catch(() => {}); // it may be broken already, and then there is nothing left to cancel
  }
}
