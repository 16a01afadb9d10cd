"""Time to the first token of prompts made of cached modules (Prompt Cache §5.2, §5.4).

    python benchmarks/prompt_cache.py [--quick] [--json PATH] [--parts goals,growth] [--dtype bfloat16]

Small model, one rank with two threads, engine and rank in one process (module_loop.py). A prompt is a root text of
40 tokens or a few more and eight of twelve documents, together n tokens, and u tokens of its own behind them.
Documents are modules that see the root and themselves. `impl` is one of

- full: nothing of the prompt is cached; all of it is computed.
- prefix: the same prompt was there before, but for its own tokens: the best case of an exact-prefix cache.
- prefix_varied: earlier prompts (as many as runs before) had other documents, or the same in another order: only
  the head that the prompt has in common with one of them is found.
- device: the modules are on the device, at the places at which they were computed.
- device_varied: the documents of `prefix_varied` in its order: modules act at other places by a shift.
- host: as `device`, but the modules are in host memory only, and loaded while the prefill goes on, layer by layer.
- first_use: no module was ever there; all are encoded first.
- memcpy: the limit of `host`: as many bytes as its modules' chunks have, copied with all threads.

Metrics: `ttft` from the submission to the first token; `speedup` is how many times longer `full` took; `cached`:
tokens of the prompt that were not computed for it; `copied` from host memory, in whole chunks, and `copy` the time
that this took beside the prefill. Parts: `goals`: n = 5,000, u = 250, 100 and 50. `growth`: n from 1,000 to 7,900,
u = 100, and a polynomial of n through the medians: `fixed` + `linear` per 1,000 tokens + `quadratic` per 1,000
tokens squared; `share` is the quadratic term's at the largest n.

A run times all cases in turn, so that a noisy machine hits all; figures are medians of runs, speed-ups medians of
each run's.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from module_loop import ModuleLoop, ModulePrompt, Placed, packed
from report import Report, argument_parser
from small_model import VOCABULARY, small_model

from trunkline.controller.engine_config import EngineConfig
from trunkline.kvstore.chunks import blocks_for
from trunkline.kvstore.tier import TierKind
from trunkline.worker.model.families import read_model_config

PARTS: Final = ("goals", "growth")
CHUNK: Final = 64
ROOT: Final = 40
DOCUMENTS: Final = 12
CHOSEN: Final = 8
MAX_CONTEXT: Final = 8192
FITTED: Final = ("full", "device", "device_varied", "host")


class Grid(NamedTuple):
    """What a part measures."""

    lengths: tuple[int, ...]
    owns: tuple[int, ...]
    runs: int


GRIDS: Final = {
    "goals": Grid((5000,), (250, 100, 50), 5),
    "growth": Grid((1000, 2000, 4000, 6000, 7900), (100,), 3),
}
QUICK_GRIDS: Final = {"goals": Grid((600,), (50,), 1), "growth": Grid((200, 400, 600), (50,), 1)}


class Sample(NamedTuple):
    """One run of one case."""

    seconds: float
    cached: int = 0
    copied_bytes: int = 0
    copy_seconds: float = 0.0


Cases = dict[tuple[int, str], list[Sample]]
"""Runs by u and `impl`."""


class Library:
    """Documents for prompts of n cached tokens."""

    def __init__(self, rng: np.random.Generator, n: int) -> None:
        self._rng = rng
        size, rest = divmod(n - ROOT, CHOSEN)
        self.root = self.draw(ROOT + rest)
        """Takes what equal documents leave of n."""
        self.documents = [self.draw(size) for _ in range(DOCUMENTS)]

    def draw(self, tokens: int) -> list[int]:
        """Tokens that nobody has seen."""
        return list(self._rng.integers(2, VOCABULARY, tokens).tolist())

    def prompt(self, chosen: list[int], own: int) -> ModulePrompt:
        """These documents in this order, and new tokens behind them."""
        placed = packed([self.documents[index] for index in chosen], len(self.root))
        return ModulePrompt(self.root, placed, Placed(placed[-1].end, self.draw(own)))

    def usual(self, own: int) -> ModulePrompt:
        """The first documents, in their order."""
        return self.prompt(list(range(CHOSEN)), own)

    def varied(self, own: int) -> ModulePrompt:
        """A selection and an order that hardly ever come again."""
        return self.prompt(self._rng.permutation(DOCUMENTS)[:CHOSEN].tolist(), own)

    def encode_in(self, loop: ModuleLoop) -> None:
        """Have all documents computed, the first ones where `usual` has them."""
        loop.ask(self.usual(1), 1)
        loop.ask(self.prompt(list(range(DOCUMENTS - CHOSEN, DOCUMENTS)), 1), 1)
        loop.run()


class Bench:
    """A loop without and one with host memory, and how the cases are timed on them."""

    def __init__(self, arguments: argparse.Namespace, grid: Grid) -> None:
        self._grid = grid
        self._rng = np.random.default_rng(0)
        self._block_bytes = read_model_config(small_model()).chunk_format(CHUNK, arguments.dtype).chunk_bytes
        # Texts end within a chunk. A run leaves the blocks of three prompts that are not found again and of one
        # that is, for each u: nothing that a case shall find may be evicted before.
        longest = blocks_for(max(grid.lengths) + max(grid.owns), CHUNK) + DOCUMENTS + 2
        worker = {"dtype": arguments.dtype, "threads": arguments.threads}
        self._device = make_loop(longest * (4 * (grid.runs + 1) * len(grid.owns) + 4), worker)
        host_bytes = 8 * longest * self._block_bytes
        self._host = make_loop(4 * longest, {**worker, "host_memory_bytes": host_bytes})

    def close(self) -> None:
        self._device.close()
        self._host.close()

    def measure(self, n: int) -> Cases:
        """What comes first is slow: one run more than the grid has is made, and not counted."""
        library = Library(self._rng, n)
        for loop in (self._device, self._host):
            loop.settle()
            loop.flush_cache()
            library.encode_in(loop)
        self._device.time_first(library.usual(1).plain())
        found: Cases = {}
        for run in range(self._grid.runs + 1):
            for own in self._grid.owns:
                for impl, sample in self._run(library, n, own).items():
                    if run:
                        found.setdefault((own, impl), []).append(sample)
        return found

    def _run(self, library: Library, n: int, own: int) -> dict[str, Sample]:
        device, varied, new = self._device, library.varied(own), Library(self._rng, n)
        samples = {
            "full": timed(device, new.usual(own).plain(), 0),
            "prefix": timed(device, library.usual(own).plain(), n - CHUNK),
            "prefix_varied": timed(device, varied.plain(), 0),
            "device": timed(device, library.usual(own), n),
            "device_varied": timed(device, varied._replace(own=library.usual(own).own), n),
            "host": self._from_host(library.usual(own), n),
            "first_use": timed(device, new.usual(own), 0),
        }
        samples["memcpy"] = copied(samples["host"].copied_bytes)
        return samples

    def _from_host(self, prompt: ModulePrompt, n: int) -> Sample:
        """The modules were pushed out of the device by others."""
        self._host.settle()
        self._host.sink(TierKind.HOST)
        copier = self._host.runner.copier
        assert copier is not None
        before_ns, before = copier.loads.moved
        sample = timed(self._host, prompt, n)
        spent_ns, blocks = copier.loads.moved
        return sample._replace(
            copied_bytes=(blocks - before) * self._block_bytes, copy_seconds=(spent_ns - before_ns) / 1e9
        )


def make_loop(blocks: int, worker: dict[str, Any]) -> ModuleLoop:
    """An engine for a rank with so many blocks."""
    config = EngineConfig(num_blocks=blocks, chunk_size=CHUNK, dtype=worker["dtype"], max_context=MAX_CONTEXT)
    return ModuleLoop(small_model(), config, worker)


def timed(loop: ModuleLoop, prompt: ModulePrompt | list[int], cached_min: int) -> Sample:
    """Time to the first token.

    Raises:
        SystemExit: less was found than the case is about.
    """
    seconds, started = loop.time_first(prompt)
    loop.run()
    if started.cached_tokens < cached_min:
        raise SystemExit(f"{started.cached_tokens} tokens were found, not {cached_min}; was there room for them?")
    return Sample(seconds, started.cached_tokens)


def copied(count: int) -> Sample:
    """A copy of so many bytes between two plain buffers; the best of three, as it is a limit."""
    source, target = torch.ones(count, dtype=torch.uint8), torch.zeros(count, dtype=torch.uint8)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return Sample(min(seconds), copied_bytes=count, copy_seconds=min(seconds))


def add_cases(report: Report, part: str, n: int, cases: Cases) -> None:
    """Medians of all metrics."""
    for (own, impl), samples in cases.items():
        case = {"part": part, "n": n, "u": own, "impl": impl}
        runs = len(samples)
        if impl != "memcpy":
            full = cases[own, "full"]
            ratios = [other.seconds / sample.seconds for other, sample in zip(full, samples, strict=True)]
            report.add(case, "ttft", 1e3 * median(sample.seconds for sample in samples), "ms", runs)
            report.add(case, "speedup", median(ratios), "x", runs)
            report.add(case, "cached", median(sample.cached for sample in samples), "tokens", runs)
        if samples[0].copied_bytes:
            report.add(case, "copied", median(sample.copied_bytes for sample in samples) / 1e6, "MB", runs)
            report.add(case, "copy", 1e3 * median(sample.copy_seconds for sample in samples), "ms", runs)


def add_fit(report: Report, by_length: dict[int, Cases]) -> None:
    """How the times grow with n."""
    lengths = np.array(list(by_length)) / 1e3
    own = next(iter(by_length.values()))
    for u in {key[0] for key in own}:
        for impl in FITTED:
            values = [1e3 * median(s.seconds for s in cases[u, impl]) for cases in by_length.values()]
            quadratic, linear, fixed = np.polyfit(lengths, values, 2).tolist()
            case = {"part": "fit", "u": u, "impl": impl}
            runs = len(lengths)
            report.add(case, "fixed", fixed, "ms", runs)
            report.add(case, "linear", linear, "ms/1K", runs)
            report.add(case, "quadratic", quadratic, "ms/1K²", runs)
            report.add(case, "share", 100 * quadratic * lengths[-1] ** 2 / values[-1], "%", runs)


def main() -> None:
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV")
    parser.add_argument("--runs", type=int, default=0, help="instead of 5 (goals) and 3 (growth)")
    arguments = parser.parse_args()
    wanted = arguments.parts
    report = Report("prompt_cache")
    for part in (part for part in PARTS if part in wanted):
        grid = (QUICK_GRIDS if arguments.quick else GRIDS)[part]
        bench = Bench(arguments, grid._replace(runs=arguments.runs or grid.runs))
        by_length = {}
        for n in grid.lengths:
            by_length[n] = bench.measure(n)
            add_cases(report, part, n, by_length[n])
        bench.close()
        if part == "growth":
            add_fit(report, by_length)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
