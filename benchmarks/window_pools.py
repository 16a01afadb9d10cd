"""What pools per kind of window would save, and which hits they would keep: arithmetic on recorded conversations.

    python benchmarks/window_pools.py [TRACES] [--quick] [--json PATH] [--conversations 100] [--step-tokens 1024]

TRACES is a file of recorded conversations (agent_traces.py); without one, conversations are drawn from a seed.

`while it runs`: KV that a request holds at its longest (prompt and answer), in percent of what one pool for all
layers holds, over all requests. Layers without a window hold all chunks; layers with one hold those of the window
and of a step (docs/decisions/0021-windows.md): where all layers have one, and with --window-share where some do.

`kept`: what stays of a prompt when its request has ended, if all chunks behind the window leave at once, likewise.
`hits`: tokens that the next prompts find then, in percent of the prefix tokens that they find if nothing leaves.
Windowed KV is kept at the ends of prompts and answers only: a prompt that leaves an earlier one midway falls back
to the longest end before that. Chunks that leave only when their blocks are needed find more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from agent_traces import BLOCK, NONE, Conversation, Request, read_traces, synthetic
from report import Report, argument_parser

from trunkline.kvstore.windows import chunks_behind, window_blocks


class Layers(NamedTuple):
    """The layers of a model, by what they see."""

    whole: int
    windowed: int
    window: int

    def running(self, blocks: int, step_tokens: int) -> int:
        """Blocks of a request at its longest, one layer of a chunk counted as one."""
        return self.whole * blocks + self.windowed * min(blocks, window_blocks(self.window, step_tokens, BLOCK))

    def kept(self, blocks: int) -> int:
        """Those that a query behind it sees."""
        return self.whole * blocks + self.windowed * (blocks - chunks_behind(blocks * BLOCK, self.window, BLOCK))


MODELS: Final = {
    "Mistral 7B v0.1": Layers(0, 32, 4096),
    "OLMo 3 7B": Layers(8, 24, 4096),
    "Gemma 3 27B": Layers(10, 52, 1024),
    "gpt-oss 20B": Layers(12, 12, 128),
}
"""Layers as published."""


def found_of(requests: tuple[Request, ...], request: Request) -> tuple[int, int]:
    """Blocks of a request's prompt that earlier ones brought, and those up to the last end among them."""
    shared, end = request.keep, 0
    at = request
    while at.base != NONE and shared > end:
        at = requests[at.base]
        end = max([end, *(each for each in (at.blocks, at.all_blocks) if each <= shared)])
        shared = min(shared, at.keep)
    return request.keep, end


def run(conversations: list[Conversation], report: Report, step_tokens: int) -> None:
    for name, layers in MODELS.items():
        case = {"model": name, "layers with a window": f"{layers.windowed} of {layers.windowed + layers.whole}"}
        case["window"] = str(layers.window)
        whole = running = kept = ideal = found = count = 0
        for conversation in conversations:
            for request in conversation.requests:
                count += 1
                whole += (layers.whole + layers.windowed) * request.all_blocks
                running += layers.running(request.all_blocks, step_tokens)
                kept += layers.kept(request.all_blocks)
                shared, at_end = found_of(conversation.requests, request)
                ideal, found = ideal + shared, found + at_end
        report.add(case, "while it runs", 100 * running / whole, "%", 1)
        report.add(case, "kept", 100 * kept / whole, "%", 1)
        report.add(case, "hits", 100 * found / max(ideal, 1), "%", 1)
        report.add(case, "requests", count, "", 1)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("traces", nargs="?", type=Path)
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--step-tokens", type=int, default=1024)
    arguments = parser.parse_args()
    count = min(arguments.conversations, 12) if arguments.quick else arguments.conversations
    conversations = read_traces(arguments.traces, count) if arguments.traces else synthetic(count)
    report = Report("window_pools")
    run(conversations, report, arguments.step_tokens)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
