"""How many turns find the KV of their session again (CachedAttention §4.2, 4.3.3, 4.3.4, 4.3.6), in simulation.

    python benchmarks/hit_rate.py [--quick] [--json PATH] [--parts policies,…] [--sessions 9000] [--chunk 1024]

The real directory with simulated sessions, jobs and disk (session_sim.py, session_model.py): 24 places, 20 ms per
output token, 8,000 prefilled tokens per second, one session per second, thinking a minute in the mean; LLaMA-13B's
0.78 MB of KV per token, 128 GB of DRAM, a disk that reads 5 GB/s and writes 3. Contexts are cut at 4,096 tokens.
As in the paper, the first 10,000 of 52,000 turns (or that share) are not counted, and `hit_rate` is the share of
all turns, first ones too, whose whole history was found; `history_found` counts parts of a history, too.

- policies: all tiers (C) against the peak footprint of the sessions under way (F), by policy; the queue saturated.
- unsaturated: the same at 0.3 sessions per second, where the queue is short and there is nothing to look ahead to.
- overflow: cutting a context leaves the kept KV valid (`shift`), or voids all (`invalidate`).
- capacity: a TTL of one hour; RCC / CCpUT is the capacity over that of all sessions of an hour at full length.
- rates: device time and its cost at the paper's prices, against computing all history again.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import cache
from typing import Any, Final

from report import Report, argument_parser
from session_model import Conversation, conversations
from session_sim import Figures, Overflow, Setting, Simulation

from trunkline.kvstore.tier_policy import EvictionPolicy

PARTS: Final = ("policies", "unsaturated", "overflow", "capacity", "rates")
DRAM_TOKENS: Final = 164_000
DRAM_GB: Final = 128
DISK_GB: Final = 10_000
WINDOW: Final = 4096
GPU_DOLLARS: Final = 2 * 5.0
"""Per hour, two A100s; DRAM and SSD per hour and GB."""
DRAM_DOLLARS: Final = 0.0088
SSD_DOLLARS: Final = 0.000082
ALL_SESSIONS: Final = 9000
WARMUP_TURNS: Final = 10_000
TTL_S: Final = 3600.0


class Bench:
    """Settings that all parts share."""

    def __init__(self, arguments: argparse.Namespace, report: Report) -> None:
        self.report = report
        self.quick: bool = arguments.quick
        self.sessions: int = 300 if arguments.quick else arguments.sessions
        self.base = Setting(
            chunk_tokens=arguments.chunk,
            overflow=Overflow.SHIFT,
            window=WINDOW,
        )

    def run(self, sessions: int, rate: float, **changes: Any) -> Figures:
        setting = replace(self.base, warmup_turns=WARMUP_TURNS * sessions // ALL_SESSIONS, **changes)
        start = time.perf_counter()
        figures = Simulation(setting).run(workload(sessions, rate))
        print(f"# {rate}/s {changes}: {time.perf_counter() - start:.0f} s", flush=True)
        return figures

    def footprint(self, sessions: int, rate: float, **changes: Any) -> float:
        """Tokens of the sessions under way, at most, all tails rounded up to chunks."""
        figures = self.run(sessions, rate, policy=None, **changes)
        return float(figures.live_chunks_max * self.base.chunk_tokens)

    def add(self, case: dict[str, Any], figures: Figures) -> None:
        rates = {
            "hit_rate": figures.hit_rate,
            "history_found": figures.found_share / figures.turns,
            "host_share": figures.host_share,
            "ceiling": 1 - figures.first_turns / figures.turns,
        }
        for metric, value in rates.items():
            self.report.add(case, metric, 100 * value, "%", 1)


@cache
def workload(sessions: int, rate: float) -> list[Conversation]:
    return conversations(sessions, rate)


def tiers(tokens: float) -> dict[str, float]:
    """A capacity as DRAM and disk; where there is less than twice the DRAM, half of each."""
    host = min(DRAM_TOKENS, tokens / 2)
    return {"host_tokens": host, "disk_tokens": tokens - host}


def policies(bench: Bench) -> None:
    footprint = bench.footprint(bench.sessions, 1.0)
    for share in (0.23, 0.82) if bench.quick else (0.12, 0.23, 0.42, 0.62, 0.82, 1.23):
        for policy in EvictionPolicy:
            figures = bench.run(bench.sessions, 1.0, policy=policy, **tiers(share * footprint))
            case = {"part": "policies", "policy": policy.value, "c_over_f": share, "queue": "saturated"}
            bench.add({**case, "sessions": bench.sessions}, figures)


def unsaturated(bench: Bench) -> None:
    sessions, rate = bench.sessions // 3, 0.3
    footprint = bench.footprint(sessions, rate)
    for share in (0.62,) if bench.quick else (0.42, 0.82, 1.23):
        for policy in EvictionPolicy:
            figures = bench.run(sessions, rate, policy=policy, **tiers(share * footprint))
            case = {"part": "unsaturated", "policy": policy.value, "c_over_f": share, "queue": "unsaturated"}
            bench.add({**case, "sessions": sessions}, figures)


def overflow(bench: Bench) -> None:
    sessions = bench.sessions // 3
    for window in (2048, 4096):
        for kind in (Overflow.SHIFT, Overflow.INVALIDATE):
            changes = {"window": window, "overflow": kind, "chunk_tokens": min(bench.base.chunk_tokens, 512)}
            figures = bench.run(sessions, 1.0, **changes, **tiers(1.23 * 1.5 * sessions * window))
            case = {"part": "overflow", "window": window, "cut": kind.name.lower(), "sessions": sessions}
            bench.add(case, figures)


def capacity(bench: Bench) -> None:
    """The sessions of an hour: those that come in it and those that are there, as far as slots can serve them."""
    sessions = bench.sessions // 3
    whole = sessions_in_an_hour(workload(sessions, 1.0)) * WINDOW
    for ratio in (0.25,) if bench.quick else (0.05, 0.1, 0.15, 0.25, 0.5, 1.0):
        figures = bench.run(sessions, 1.0, ttl_s=TTL_S, **tiers(ratio * whole))
        case = {"part": "capacity", "rcc_over_ccput": ratio, "ttl_s": TTL_S, "sessions": sessions}
        bench.add(case, figures)
        bench.report.add(case, "hit_rate_of_later_turns", 100 * figures.later_hit_rate, "%", 1)


def sessions_in_an_hour(found: list[Conversation]) -> int:
    """Most distinct sessions that begin within an hour: DSpUT without those that are there already."""
    starts = [conversation.arrival_s for conversation in found]
    most, first = 0, 0
    for last, start in enumerate(starts):
        while starts[first] <= start - TTL_S:
            first += 1
        most = max(most, last - first + 1)
    return most


def rates(bench: Bench) -> None:
    sessions = bench.sessions // 3
    for rate in (1.0,) if bench.quick else (0.5, 1.0, 1.5, 2.0):
        tokens = 1e9 * (DRAM_GB + DISK_GB) / bench.base.kv_bytes_per_token
        for name, policy in (("look-ahead", EvictionPolicy.LOOK_AHEAD), ("recompute", None)):
            figures = bench.run(sessions, rate, policy=policy, **tiers(tokens))
            case = {"part": "rates", "rate": rate, "policy": name, "sessions": sessions}
            hours = (figures.prefill_s + figures.decode_s / bench.base.slots) / 3600
            storage = DRAM_GB * DRAM_DOLLARS + DISK_GB * SSD_DOLLARS
            bench.report.add(case, "hit_rate", 100 * figures.hit_rate, "%", 1)
            bench.report.add(case, "prefill_time", figures.prefill_s / 3600, "h", 1)
            bench.report.add(case, "device_time", hours, "h", 1)
            cost = hours * (GPU_DOLLARS + (storage if policy is not None else 0.0))
            bench.report.add(case, "cost", cost, "$", 1)
            bench.report.add(case, "wait", figures.waited_s / figures.turns, "s", 1)


def main() -> None:
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument(
        "--sessions", type=int, default=ALL_SESSIONS, help="of the first part; others take a third"
    )
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a chunk")
    arguments = parser.parse_args()
    report = Report("hit_rate")
    bench = Bench(arguments, report)
    parts = (policies, unsaturated, overflow, capacity, rates)
    for name, part in zip(PARTS, parts, strict=True):
        if name in arguments.parts:
            part(bench)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
