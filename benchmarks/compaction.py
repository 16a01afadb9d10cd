"""What a compaction costs, and what of it keeping KV behind a cut would save, on the real engine and a real rank.

    python benchmarks/compaction.py [--quick] [--json PATH] [--models demo,small]

A history is cached. `summary`: the model is asked for a summary behind it (150 new tokens), and writes it.
`anew`: the next turn has the history's beginning (instructions and tools), the summary, what the user had said,
and 32 new tokens; it is served from the beginning's KV, as `/v1/responses` does it. `cut`: the turn that it would
be if the summary stayed where it was written and all between was cut out: KV of what the user had said and of the
summary is kept. CPU time of one thread, medians; `computed`: tokens of the prompt that were computed. `share`:
what of `summary` and `anew` together `cut` would save.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from edited_turns import CHUNK, MODELS, NEW, TimedLoop
from engine_loop import Done
from report import Report, argument_parser

from trunkline.controller.engine.events import EngineOutputs
from trunkline.controller.messages import Submit
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Sampling

ASKED: Final = 150
"""Tokens of the request for a summary."""


class Case(NamedTuple):
    """Lengths in tokens."""

    history: int
    begins: int
    """Instructions and tools."""
    users: int
    """What the user has said, in one piece behind the beginning."""
    summary: int


CASES: Final[dict[str, tuple[Case, ...]]] = {
    "demo": (Case(1500, 512, 64, 128),),
    "small": (Case(4096, 1024, 128, 256), Case(4096, 1024, 512, 512)),
}


class WritingLoop(TimedLoop):
    """Also gives what is written."""

    def __init__(self, model: Path, context: int, blocks: int) -> None:
        self.written: list[int] = []
        super().__init__(model, context, blocks)

    def _count(self, outputs: EngineOutputs) -> None:
        super()._count(outputs)
        for tokens in outputs.tokens:
            self.written += tokens.tolist()

    def write(self, prompt: list[int], count: int, spans: list[tuple[int, int]]) -> tuple[float, int]:
        """Let a prompt without `spans` go on; return seconds of CPU, and how many of its tokens were computed."""
        self.written = []
        before, start = self.prefilled, time.process_time()
        number, drops = len(self.requests) + 1, pack_int32([end for span in spans for end in span])
        sampling = Sampling(temperature=0)
        submit = Submit(number, pack_int32(prompt), len(prompt), count, sampling, drops=drops)
        self.requests[number] = Done(start)
        self.receive(Request.of(number, submit), time.perf_counter())
        self.run()
        return time.process_time() - start, self.prefilled - before


def measure(name: str, repeats: int, report: Report) -> None:
    """All cases of a model; each repetition has a history of its own."""
    made, context = MODELS[name]
    loop, rng = WritingLoop(made(), context, 4 * context // CHUNK), np.random.default_rng(1)
    for case in CASES[name]:
        found: dict[str, list[tuple[float, int]]] = {"summary": [], "anew": [], "cut": []}
        for _ in range(repeats):
            loop.flush_cache()
            history: list[int] = rng.integers(6, 4000, case.history).tolist()
            new: list[int] = rng.integers(6, 4000, NEW).tolist()
            asked = history + rng.integers(6, 4000, ASKED).tolist()
            loop.write(history, 1, [])
            found["summary"].append(loop.write(asked, case.summary, []))
            summary, users = loop.written, history[case.begins : case.begins + case.users]
            found["anew"].append(loop.write(history[: case.begins] + summary + users + new, 1, []))
            between = [(case.begins + case.users, len(asked))]
            found["cut"].append(loop.write(asked + summary + new, 1, between))
        of = {"model": name, **case._asdict()}
        took = {way: median(seconds for seconds, _ in each) for way, each in found.items()}
        for way, each in found.items():
            report.add({**of, "impl": way}, "cpu", 1e3 * took[way], "ms", repeats)
            report.add({**of, "impl": way}, "computed", max(computed for _, computed in each), "", repeats)
        share = (took["anew"] - took["cut"]) / (took["summary"] + took["anew"])
        report.add({**of, "impl": "cut"}, "share", share, "", repeats)
    loop.close()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", default="demo,small", help="some of demo, small")
    arguments = parser.parse_args()
    report = Report(Path(__file__).stem)
    for name in arguments.models.split(","):
        measure(name, 1 if arguments.quick else 5, report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
