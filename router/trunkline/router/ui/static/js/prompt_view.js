/** @file A prompt in colours: where the KV of each part came from. */

import { coloured, missText, sums, tokensOf } from "./core/pieces.js";
import { counted, duration, known, short, whole } from "./core/format.js";
import { TIER_TEXT } from "./core/tiers.js";
import { fill, h } from "./dom.js";
import { bar, legend } from "./widgets.js";

export class PromptView {
  /** @type {import("./core/pieces.js").Piece[]} */
  #pieces = [];
  #tokens = 0;
  /** @type {import("./answer.js").End | null} */
  #end = null;
  #wasThere;
  #summary = h("summary", null, "Prompt");
  #body = h("div.pieces");
  #foot = h("div.piecefoot");

  /** @param {(module: string) => boolean} [wasThere] whether a module had KV before the request */
  constructor(wasThere) {
    this.#wasThere = wasThere;
    this.element = h("details.prompt", { open: true }, this.#summary, this.#body, this.#foot);
  }

  /** @param {{tokens: number, pieces: import("./core/pieces.js").Piece[]}} prompt */
  show({ tokens, pieces }) {
    this.#pieces = pieces;
    this.#tokens = tokens ?? tokensOf(pieces);
    this.#draw();
  }

  /** @param {import("./answer.js").End} end */
  finish(end) {
    this.#end = end;
    this.#draw();
  }

  fold() {
    this.element.open = false;
  }

  #draw() {
    const end = this.#end;
    const shown = coloured(this.#pieces, end?.cache, this.#wasThere);
    fill(this.#body, shown.map((piece) => h(
      "span.piece", {
        dataset: { source: piece.source, module: piece.module ?? "", kind: piece.kind, tokens: String(piece.tokens) },
        title: `${counted(piece.tokens, "token")}, ${TITLE[piece.kind] ?? piece.kind}${piece.module ? ` ${piece.module}` : ""}${piece.source ? `: ${sourceText(piece.source)}` : ""}`,
      },
      piece.kind === "module" && piece.module ? h("sup.tag", null, piece.module) : null,
      piece.text,
    )));
    fill(this.#summary, h("b", null, "Prompt"), h("span.figure", null, counted(this.#tokens, "token")), ...this.#bar());
    fill(this.#foot, ...this.#note());
  }

  #bar() {
    const end = this.#end;
    if (!end?.usage) return [];
    const parts = sums(end.usage, end.cache);
    const all = end.usage.prompt_tokens;
    const text = parts.map(({ name, tokens }) => `${whole(tokens)} ${sourceText(name)}`).join(", ");
    return [bar(parts.map(({ name, tokens }) => ({ part: tokens / all, name, title: `${sourceText(name)}: ${whole(tokens)}` })), text)];
  }

  #note() {
    const end = this.#end;
    if (!end) return [];
    if (!end.usage) return [h("p.muted", null, end.stopped ? "Stopped." : "")];
    const { usage, cache } = end;
    const parts = sums(usage, cache);
    const modules = usage.prompt_tokens_details?.module_tokens ?? 0;
    const speed = usage.completion_tokens > 1 ? (usage.completion_tokens - 1) / (end.seconds - end.ttft) : NaN;
    return [
      legend(.../** @type {[string, string][]} */ (parts.map(({ name, tokens }) => [name, `${whole(tokens)} ${sourceText(name)}`]))),
      modules ? h("span.legend", null, h("span", null, h("i.swatch.modular"), `${whole(modules)} in modules`)) : null,
      h("span.muted", null, [
        counted(usage.completion_tokens, "token"), `first after ${duration(end.ttft)}`, known(speed) ? `${short(speed)} tokens/s` : "", end.finish === "length" ? "cut off by its length" : "",
      ].filter(Boolean).join(" · ")),
      missText(cache) ? h("p.muted", null, missText(cache)) : null,
    ].filter(Boolean);
  }
}

/** @type {Record<string, string>} */
const TITLE = { template: "chat template", message: "message", module: "module", argument: "argument", text: "text" };

/** @param {string} name */
function sourceText(name) {
  if (name === "dropped") return "not seen, it was cut off";
  return name === "new" ? "computed" : `from ${TIER_TEXT[name] ?? name}`;
}
