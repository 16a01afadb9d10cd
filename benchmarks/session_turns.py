"""Turns of a conversation whose history is cached, against computing all of it again (CachedAttention §4.3).

    python benchmarks/session_turns.py [--quick] [--json PATH] [--parts turns,preload,saving] [--folder PATH]

Small model, bfloat16, one rank with two threads, engine, rank and tiers in one process (tiered_loop.py).

- turns: time to the first token and prefill throughput of a prompt of 1,000 and of 2,000 tokens, half to nine
  tenths of which are history that lies on the device, in host memory, on disk, in a Redis server or nowhere
  (`recompute`). `speedup` is that over `recompute`. Disk and remote times hold everything: the look-up, the reads
  with their checksums, the load and the computation.
- preload: the prefill of 100 tokens behind a history of 1,024 in host memory, behind an emulated link on which
  loading takes 1.56 times as long as computing, as in the paper's figure 20 (LLaMA-13B, PCIe 4). `whole`: loaded,
  then computed. `layerwise`: layer by layer at the same time, with a read buffer of so many layers: these were
  loaded while another job ran, which is not counted. `saved` is the time saved against `whole`.
  `trace`: when each layer was loaded and computed, without a buffer.
- saving: `decode`: tokens/s of eight streams whose chunks are saved to host memory, or to host memory and disk,
  against a rank without any tier. `turn`: a prompt of 1,024 tokens and twenty more, saved over the same
  link as in `preload`: `beside` the computation, layer by layer, or behind the prefill while all waits. `waited`:
  time in which steps waited for copies.

The cases of a part take turns in one process, so that a noisy machine hits all; each figure is the median of the
runs, ratios are medians of each run's ratio.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from report import Report, argument_parser
from small_model import VOCABULARY, small_model
from tiered_loop import HeldLoading, TieredLoop, forget_all, redis_server

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.tiers.costs import Preloads
from trunkline.kvstore.tier import TierKind
from trunkline.worker.tiers.copy_lane import COMPUTE, LOAD, CopyOptions, LayerSpan

PARTS: Final = ("turns", "preload", "saving")
CHUNK: Final = 64
LAYERS: Final = 12
BLOCK_BYTES: Final = LAYERS * 2 * 4 * CHUNK * 64 * 2
LOAD_PER_COMPUTE: Final = 1.56
"""The paper's figure 20: a prefill that does not wait saves 61 % of one that loads, then computes."""
STREAMS: Final = 8
TURN_TOKENS: Final = 20
"""Decoded behind a prompt that is being saved, as in the paper."""
ATTEMPTS_MAX: Final = 4
"""Reads that take far longer than before (others use the disk) are given up, and what they cost is learnt."""


@contextmanager
def tiered_loop(
    arguments: argparse.Namespace,
    blocks: int,
    copying: CopyOptions = CopyOptions(),  # noqa: B008
    /,
    **worker: Any,
) -> Iterator[TieredLoop]:
    """A rank with so many device blocks, and an engine for it."""
    config = EngineConfig(num_blocks=blocks, chunk_size=CHUNK, dtype="bfloat16", max_context=4096)
    loop = TieredLoop(
        small_model(), config, {"dtype": "bfloat16", "threads": arguments.threads, **worker}, copying
    )
    try:
        yield loop
    finally:
        loop.close()


class Texts:
    """Random prompts, no two alike."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def draw(self, tokens: int) -> list[int]:
        return list(self._rng.integers(2, VOCABULARY, tokens).tolist())


class Runs:
    """Times of cases by run, and what they come to."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self._found.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return median(self._found[name])

    def ratio(self, name: str, of: str) -> float:
        """Median over the runs of how much of `of` it is."""
        return median(a / b for a, b in zip(self._found[name], self._found[of], strict=True))


# --- turns


def turns(arguments: argparse.Namespace, report: Report) -> None:
    totals = (1000,) if arguments.quick else (1000, 2000)
    shares = (0.9, 0.5) if arguments.quick else (0.9, 0.8, 0.7, 0.6, 0.5)
    runs = 3 if arguments.quick else 5
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, redis_server(Path(folder)) as url:
        worker = {
            "host_memory_bytes": 512 * BLOCK_BYTES,
            "disk_path": str(Path(folder) / "slab"),
            "disk_bytes": 512 * (BLOCK_BYTES + 8192),
            "remote_url": url,
        }
        tiers = [TierKind.DEVICE, TierKind.HOST, TierKind.DISK, *([TierKind.REMOTE] if url else [])]
        with tiered_loop(arguments, 96, **worker) as loop:
            texts, found = Texts(), {total: Runs() for total in totals}
            all_turns(loop, texts, 640, (0.9,), tiers)  # what comes first is slow
            for _ in range(runs):
                for total, times in found.items():
                    forget_all(url)
                    for name, seconds in all_turns(loop, texts, total, shares, tiers).items():
                        times.add(name, seconds)
    for total, times in found.items():
        for share in shares:
            history = round(total * share)
            for impl in ("recompute", *(tier.name.lower() for tier in tiers)):
                name = impl if impl == "recompute" else f"{impl} {share}"
                case = {"part": "turns", "impl": impl, "history": history, "new": total - history}
                report.add(case, "ttft", 1e3 * times.median(name), "ms", runs)
                report.add(case, "prefill_rate", total / times.median(name), "tokens/s", runs)
                report.add(case, "speedup", times.ratio("recompute", name), "x", runs)


def all_turns(
    loop: TieredLoop, texts: Texts, total: int, shares: tuple[float, ...], tiers: list[TierKind]
) -> dict[str, float]:
    """Seconds to the first token without and with a cached history, by where that is and its share.

    Args:
        shares: the largest first: the others are its beginning.
        tiers: the remote one last, for what is there only is not written to disk again.
    """
    text = texts.draw(round(total * shares[0]))
    found = {"recompute": loop.first_token(texts.draw(total))}
    loop.first_token(text)
    for tier in tiers:
        for share in shares:
            history = text[: round(total * share)]
            found[f"{tier.name.lower()} {share}"] = one_turn(loop, texts, history, total - len(history), tier)
    loop.settle()
    loop.flush_cache()
    return found


def one_turn(loop: TieredLoop, texts: Texts, history: list[int], new: int, tier: TierKind) -> float:
    """Seconds to the first token of new tokens behind a history in a tier.

    Raises:
        SystemExit: the engine rather computes the history, again and again.
    """
    for _ in range(ATTEMPTS_MAX):
        loop.settle()
        loop.sink(tier)
        before = loop.engine.counters.tier_tokens[tier]
        seconds = loop.first_token(history + texts.draw(new))
        if loop.engine.counters.tier_tokens[tier] - before > len(history) - CHUNK:
            return seconds
        print(f"a history on {tier.name.lower()} was computed again; once more", file=sys.stderr)
    raise SystemExit(f"histories on {tier.name.lower()} are not used; is the machine busy?")


# --- preload

HISTORY: Final = 1024
NEW: Final = 100


def preload(arguments: argparse.Namespace, report: Report) -> None:
    runs = 5 if arguments.quick else 9
    buffers = (0, 6, 12) if arguments.quick else (0, 1, 3, 6, 9, 12)
    link = link_rate(arguments)
    memory = 512 * BLOCK_BYTES
    times, texts = Runs(), Texts()
    history = texts.draw(HISTORY)
    with (
        tiered_loop(arguments, 64, CopyOptions(link), host_memory_bytes=memory) as layerwise,
        tiered_loop(arguments, 64, CopyOptions(link, is_layerwise=False), host_memory_bytes=memory) as whole,
    ):
        layerwise.first_token(history)
        whole.first_token(history)
        for run in range(runs + 1):
            seconds = {"device": behind(layerwise, history, texts, TierKind.DEVICE)}
            seconds["whole"] = behind(whole, history, texts, TierKind.HOST)
            for layers in buffers:
                seconds[f"layerwise {layers}"] = behind(layerwise, history, texts, TierKind.HOST, layers)
            for name, value in seconds.items():
                if run:  # what comes first is slow
                    times.add(name, value)
        for name in seconds:
            impl, _, buffer = name.partition(" ")
            case = {"part": "preload", "impl": impl, "buffer": buffer or "-"}
            report.add(case, "prefill", 1e3 * times.median(name), "ms", runs)
            report.add(case, "saved", 100 * (1 - times.ratio(name, "whole")), "%", runs)
        report.add({"part": "link", "bytes": HISTORY // CHUNK * BLOCK_BYTES}, "rate", link / 1e6, "MB/s", 1)
        trace(layerwise, history, texts, report)


def link_rate(arguments: argparse.Namespace) -> float:
    """Bytes per second with which loading the history takes `LOAD_PER_COMPUTE` times the prefill behind it."""
    texts = Texts()
    history = texts.draw(HISTORY)
    with tiered_loop(arguments, 64, host_memory_bytes=512 * BLOCK_BYTES) as loop:
        loop.first_token(history)
        seconds = [behind(loop, history, texts, TierKind.DEVICE) for _ in range(8)]
    return HISTORY // CHUNK * BLOCK_BYTES / (LOAD_PER_COMPUTE * median(seconds[1:]))


def behind(loop: TieredLoop, history: list[int], texts: Texts, tier: TierKind, buffer: int = 0) -> float:
    """Seconds of the prefill of new tokens behind a history in a tier; from when the buffer is filled."""
    loop.settle()
    loop.sink(tier)
    copier = loop.runner.copier
    assert copier is not None
    before = loop.engine.counters.tier_tokens[tier]
    started = time.perf_counter()
    request = loop.submit(history + texts.draw(NEW), 1)
    if buffer:
        loop.engine.scheduler.preloads = HeldLoading(loop, buffer)
        layers = copier.loads.submitted * copier.host.layers + buffer
        loop.step()  # the loads are ordered
        copier.loads.gate.wait(layers)
        started = time.perf_counter()
    while not loop.requests[request].tokens:
        loop.step()
    seconds = time.perf_counter() - started
    loop.engine.scheduler.preloads = Preloads()
    if loop.engine.counters.tier_tokens[tier] - before != len(history):
        raise SystemExit(f"the history was not found in {tier.name.lower()} memory")
    return seconds


def trace(loop: TieredLoop, history: list[int], texts: Texts, report: Report) -> None:
    """When each layer was loaded and computed in one turn without a buffer; time 0 is the first load's start."""
    record = loop.runner.trace_layers()
    behind(loop, history, texts, TierKind.HOST)
    loads = [span for span in record if span.kind == LOAD]
    computed = [s for s in record if s.kind == COMPUTE and s.step == loads[0].step]
    begin = loads[0].start_ns
    for span in (*loads, *computed):
        case = {"part": "trace", "kind": span.kind, "layer": span.layers.start}
        report.add(case, "start", (span.start_ns - begin) / 1e6, "ms", 1)
        report.add(case, "stop", (span.stop_ns - begin) / 1e6, "ms", 1)
    share = 100 * overlap(loads, computed)
    report.add({"part": "overlap", "history": HISTORY, "new": NEW}, "share", share, "% of the computation", 1)


def overlap(loads: list[LayerSpan], computed: list[LayerSpan]) -> float:
    """Share of the computation's time in which a layer was being loaded."""
    shared = sum(max(0, min(a.stop_ns, b.stop_ns) - max(a.start_ns, b.start_ns)) for a in loads for b in computed)
    return shared / sum(span.stop_ns - span.start_ns for span in computed)


# --- saving


def saving(arguments: argparse.Namespace, report: Report) -> None:
    decode_beside_saves(arguments, report)
    turn_beside_saves(arguments, report)


def decode_beside_saves(arguments: argparse.Namespace, report: Report) -> None:
    """Every stream fills a chunk within each stretch, so that each stretch saves as much as it computes."""
    rounds = 4 if arguments.quick else 10
    blocks = STREAMS * (4 + rounds + 2)
    host = {"host_memory_bytes": 2 * blocks * BLOCK_BYTES}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        disk = {"disk_path": str(Path(folder) / "slab"), "disk_bytes": 2 * blocks * (BLOCK_BYTES + 8192)}
        with (
            tiered_loop(arguments, blocks) as none,
            tiered_loop(arguments, blocks, **host) as to_host,
            tiered_loop(arguments, blocks, **host, **disk) as to_disk,
        ):
            loops = {"off": none, "host": to_host, "host+disk": to_disk}
            for loop in loops.values():
                texts = Texts()
                for stream in range(STREAMS):  # they fill their chunks at different times
                    loop.submit(texts.draw(128 + stream * CHUNK // STREAMS), (rounds + 2) * CHUNK)
                decode(loop, CHUNK)
                loop.waited_seconds = 0.0
            times = Runs()
            for index in range(rounds):
                order = list(loops.items())
                for name, loop in order[index % 3 :] + order[: index % 3]:
                    times.add(name, decode(loop, CHUNK))
            saved = to_host.engine.scheduler.kv.tree.totals.tiers[TierKind.DEVICE].reads
            if saved < STREAMS * rounds:
                raise SystemExit(f"only {saved} chunks were saved")
    for name in loops:
        case = {"part": "saving", "impl": name, "what": "decode"}
        waited = loops[name].waited_seconds
        report.add(case, "waited_per_step", 1e3 * waited / rounds / CHUNK, "ms", rounds)
        report.add(case, "rate", STREAMS * CHUNK / times.median(name), "tokens/s", rounds)
        report.add(case, "cost", 100 * (times.ratio(name, "off") - 1), "%", rounds)


def decode(loop: TieredLoop, steps: int) -> float:
    """Seconds of so many steps. What is still being saved then counts, for nobody else may pay for it."""
    started = time.perf_counter()
    for _ in range(steps):
        loop.step()
    if loop.runner.copier is not None:
        loop.runner.copier.saves.wait_for(loop.runner.copier.saves.submitted)
    return time.perf_counter() - started


def turn_beside_saves(arguments: argparse.Namespace, report: Report) -> None:
    runs = 3 if arguments.quick else 7
    memory, link = 64 * BLOCK_BYTES, link_rate(arguments)
    waiting = CopyOptions(link, is_layerwise=False, saves_beside=False)
    times, waits, texts = Runs(), Runs(), Texts()
    with (
        tiered_loop(arguments, 64, CopyOptions(link), host_memory_bytes=memory) as beside,
        tiered_loop(arguments, 64, waiting, host_memory_bytes=memory) as before,
        tiered_loop(arguments, 64) as none,
    ):
        loops = {"beside": beside, "waiting": before, "off": none}
        for run in range(runs + 1):
            for name, loop in loops.items():
                waited, started = loop.waited_seconds, time.perf_counter()
                loop.submit(texts.draw(HISTORY), TURN_TOKENS)
                loop.run()
                if run:
                    times.add(name, time.perf_counter() - started)
                    waits.add(name, loop.waited_seconds - waited)
                loop.settle()
                loop.flush_cache()
    for name in loops:
        case = {"part": "saving", "impl": name, "what": "turn"}
        report.add(case, "time", 1e3 * times.median(name), "ms", runs)
        report.add(case, "waited", 1e3 * waits.median(name), "ms", runs)
        report.add(case, "cost", 100 * (times.ratio(name, "off") - 1), "%", runs)


def main() -> None:
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for the slab; a file system with direct I/O")
    arguments = parser.parse_args()
    report = Report("session_turns")
    for name, part in (("turns", turns), ("preload", preload), ("saving", saving)):
        if name in arguments.parts:
            part(arguments, report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
