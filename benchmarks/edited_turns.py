"""Time to the first token of edited turns beside that of plain hits, on the real engine and a real rank.

    python benchmarks/edited_turns.py [--quick] [--json PATH] [--models demo,small,none]

Two clients with histories of the same length take turns: `plain` sends its history and 32 new tokens; `edited`
does so, too, and with each turn clears one more range of its history (`ranges`: how many it had cleared before).
`again`: the turn behind an edited one, with the same ranges. Both go on with cached KV; the edited turns' was
computed before the edit. One output token a turn. `ttft`: median, from the request to its token, in CPU time of
one thread, without sockets; `ratio`: to `plain`; `planning`: of that in the engine; `computed`: tokens of the
prompt that were computed, largest number. The model `none` is an engine whose workers answer at once, for
histories that are too long to compute here; `first`: the turn that clears all but the later ranges at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from control_plane import Loop
from cut_texts import DEMO_MODEL
from engine_loop import Done, EngineLoop
from report import Report, argument_parser, commit
from small_model import small_model

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Sampling

CHUNK: Final = 64
NEW: Final = 32
"""Tokens of a turn."""
CLEARED: Final = 16
"""Tokens of a cleared range."""
TURNS: Final = 12
MODELS: Final[dict[str, tuple[Callable[[], Path], int]]] = {
    "demo": (lambda: DEMO_MODEL, 2048),
    "small": (small_model, 8192),
}
"""What gives the model's folder, and its context."""


class Spent(NamedTuple):
    """What a turn took."""

    total_s: float
    planning_s: float
    computed: int


class TimedLoop(EngineLoop):
    """Also measures how long the engine plans."""

    def __init__(self, model: Path, context: int, blocks: int) -> None:
        config = EngineConfig(num_blocks=blocks, chunk_size=CHUNK, max_context=context)
        super().__init__(model, config, {"threads": 1})
        self.executing_s = 0.0
        execute = self.runner.execute

        def timed(plan: object) -> object:
            start = time.process_time()
            result = execute(plan)  # type: ignore[arg-type]
            self.executing_s += time.process_time() - start
            return result

        self.runner.execute = timed  # type: ignore[method-assign, assignment]

    def ask(self, history: list[int], ranges: list[tuple[int, int]]) -> Spent:
        """A turn with one token of output."""
        number = len(self.requests) + 1
        packed = pack_int32([end for span in ranges for end in span])
        start, executing, prefilled = time.process_time(), self.executing_s, self.prefilled
        submit = Submit(number, pack_int32(history), len(history), 1, Sampling(temperature=0), drops=packed)
        self.requests[number] = Done(start)
        self.receive(Request.of(number, submit), time.perf_counter())
        self.run()
        total = time.process_time() - start
        return Spent(total, total - (self.executing_s - executing), self.prefilled - prefilled)


class BareLoop(Loop):
    """An engine whose workers answer at once."""

    def __init__(self, tokens: int) -> None:
        self._number = 0
        super().__init__(1, CHUNK, 0)
        self.inflight.clear()
        config = EngineConfig(
            num_blocks=3 * tokens // CHUNK, max_context=2 * tokens, token_budget=8192, max_rows=2
        )
        self.engine = Engine(config)

    def ask(self, history: list[int], ranges: list[tuple[int, int]]) -> Spent:
        """A turn with one token of output."""
        self._number += 1
        packed, drops = pack_int32(history), pack_int32([end for span in ranges for end in span])
        start = time.process_time()
        submit = Submit(self._number, packed, len(history), 1, Sampling(), drops=drops)
        self.engine.receive(Request.of(self._number, submit), 1.0)
        while not self.engine.is_idle:
            self.turn()
        spent = time.process_time() - start
        return Spent(spent, spent, 0)


class Client:
    """A history that grows, and the ranges that are cleared of it."""

    def __init__(self, loop: TimedLoop | BareLoop, seed: int, tokens: int, ranges: int) -> None:
        self._loop = loop
        self._rng = np.random.default_rng(seed)
        self._history: list[int] = self._rng.integers(6, 4000, tokens).tolist()
        step = tokens // (ranges + TURNS + 2)
        if step <= CLEARED:
            raise ValueError(f"{ranges + TURNS} ranges of {CLEARED} tokens do not fit into {tokens}")
        self._all = [(at, at + CLEARED) for at in range(step, step * (ranges + TURNS + 1), step)]
        self._count = ranges
        loop.ask(self._history, [])
        self.first = self.turn(0)
        """The first turn that clears ranges."""

    def turn(self, more: int) -> Spent:
        """Clear so many more ranges, and ask."""
        self._count += more
        self._history += self._rng.integers(6, 4000, NEW).tolist()
        return self._loop.ask(self._history, self._all[: self._count])


def measure(name: str, lengths: tuple[int, ...], counts: tuple[int, ...], turns: int, report: Report) -> None:
    """All lengths of a model, each with its own engine."""
    made, context = MODELS[name]
    model = made()
    for length in lengths:
        loop = TimedLoop(model, context, 4 * context // CHUNK)
        for ranges in counts:
            loop.flush_cache()
            plain, edited = Client(loop, 1, length, 0), Client(loop, 2, length, ranges)
            found: dict[str, list[Spent]] = {"plain": [], "edited": [], "again": []}
            for _ in range(turns):
                found["plain"].append(plain.turn(0))
                found["edited"].append(edited.turn(1))
                found["plain"].append(plain.turn(0))
                found["again"].append(edited.turn(0))
            add(report, {"model": name, "history": length, "ranges": ranges}, found)
        loop.close()


def plan(lengths: tuple[int, ...], counts: tuple[int, ...], turns: int, report: Report) -> None:
    """The controller alone."""
    for length in lengths:
        for ranges in counts:
            loop = BareLoop(length)
            plain, edited = Client(loop, 1, length, 0), Client(loop, 2, length, ranges)
            found: dict[str, list[Spent]] = {"plain": [], "first": [edited.first], "edited": [], "again": []}
            for _ in range(turns):
                found["plain"].append(plain.turn(0))
                found["edited"].append(edited.turn(1))
                found["again"].append(edited.turn(0))
            add(report, {"model": "none", "history": length, "ranges": ranges}, found)


def add(report: Report, case: dict[str, object], found: dict[str, list[Spent]]) -> None:
    plain = median(spent.total_s for spent in found["plain"])
    for impl, spent in found.items():
        own = {**case, "impl": impl}
        ttft = median(each.total_s for each in spent)
        report.add(own, "ttft", 1e3 * ttft, "ms", len(spent))
        report.add(own, "ratio", ttft / plain, "", len(spent))
        report.add(own, "planning", 1e3 * median(each.planning_s for each in spent), "ms", len(spent))
        report.add(own, "computed", max(each.computed for each in spent), "", len(spent))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", default="demo,small,none", help="some of demo, small, none")
    arguments = parser.parse_args()
    print(f"# commit {commit()}", flush=True)
    report = Report(Path(__file__).stem)
    for name in arguments.models.split(","):
        if name == "none":
            plan((20_000 if arguments.quick else 100_000,), (1, 63, 200, 1000), TURNS, report)
        elif arguments.quick:
            measure(name, (1024,), (0, 16), 4, report)
        else:
            lengths = (512, 1024) if name == "demo" else (1024, 4096)
            measure(name, lengths, (0, 16) if name == "demo" else (0, 32), TURNS, report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
