"""Coding agents: what of their prompts is found again, and how many of them a server carries.

    python benchmarks/agents.py [TRACES] [--quick] [--json PATH] [--parts directory] [--conversations 120]
                                [--rooms 0.1,…] [--policies lru,…] [--groups 1,4] [--chunk 1024] [--labels]

TRACES is a file of recorded conversations (agent_traces.py says in which form). Without one, conversations of
about the same statistics are drawn from a seed.

- directory: the real router core and a real directory per group in simulated time, without a model, at full
  length (agent_sim.py). Room is given as a part of the peak footprint: the contexts of all agents under way.
  `of_ideal` is the share of the prefix tokens that a single cache without limits would have found. `of_belady` is
  the share of those that are found where all next uses are known, in one cache with the room of all groups and as
  fast as all of them. What is lacking of the ideal stands by its cause, in percent of the ideal tokens, and as
  requests whose first missing chunk has that cause. TTFT is simulated, too: it says how policies compare, not how
  fast a server is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from agent_sim import CAUSES, Belady, Figures, Foresight, Plain, Setting, Simulation, Talk, footprint, talks_of
from agent_traces import BLOCK, Conversation, read_traces, synthetic
from report import Report, argument_parser

from trunkline.kvstore.tier_policy import EvictionPolicy

PARTS: Final = ("directory",)
BELADY: Final = "belady"
POLICIES: Final[dict[str, Callable[[Sequence[Talk]], Foresight]]] = {
    BELADY: Belady,
    "lru": lambda _: Plain(EvictionPolicy.LRU),
    "look-ahead": lambda _: Plain(EvictionPolicy.LOOK_AHEAD),
}


def directory(conversations: Sequence[Conversation], report: Report, arguments: argparse.Namespace) -> None:
    base = Setting(
        blocks=arguments.chunk // BLOCK,
        per_hour=arguments.per_hour,
        labels=arguments.labels,
        seed=arguments.seed,
    )
    peak = footprint(talks_of(conversations, base), base.tokens)
    size = f"peak footprint {peak * base.tokens / 1e6:.1f}M tokens"
    print(f"# {len(conversations)} conversations, {size}", flush=True)
    for room in map(float, arguments.rooms.split(",")):
        setting = replace(base, room=int(room * peak))
        case = {"part": "directory", "conversations": len(conversations), "room": room}
        figures = run(conversations, setting.faster(arguments.groups[-1]), BELADY)
        best = figures.found
        add(report, {**case, "groups": 1, "policy": BELADY}, figures, best)
        for groups in arguments.groups:
            for name in arguments.policies.split(","):
                figures = run(conversations, replace(setting, groups=groups), name)
                add(report, {**case, "groups": groups, "policy": name}, figures, best)
    unfindable(report, {"part": "not ideal", "conversations": len(conversations)}, figures)


def run(conversations: Sequence[Conversation], setting: Setting, policy: str) -> Figures:
    begun = time.perf_counter()
    talks = talks_of(conversations, setting)
    figures = Simulation(setting, POLICIES[policy](talks)).run(talks)
    seconds = time.perf_counter() - begun
    print(f"# {policy}, {setting.groups} groups, {setting.room} chunks: {seconds:.0f} s", flush=True)
    return figures


def add(report: Report, case: dict[str, Any], figures: Figures, best: int) -> None:
    """Add what one run has found."""
    report.add(case, "of_ideal", 100 * figures.of_ideal, "%", 1)
    report.add(case, "of_belady", 100 * figures.found / best, "%", 1)
    report.add(case, "hit_rate", 100 * figures.found / figures.prompt, "%", 1)
    for cause in CAUSES:
        report.add(case, cause, 100 * figures.lost[cause] / figures.ideal, "%", 1)
    for cause in CAUSES:
        report.add(case, f"requests, {cause}", figures.losers[cause], "", 1)
    report.add(case, "ttft_p50", figures.ttft(0.5), "s", 1)
    report.add(case, "ttft_p99", figures.ttft(0.99), "s", 1)


def unfindable(report: Report, case: dict[str, Any], figures: Figures) -> None:
    """Add what no cache of prefixes finds, which is the same for all policies."""
    report.add(case, "ideal", 100 * figures.ideal / figures.prompt, "% of prompts", 1)
    report.add(case, "behind edits", 100 * figures.edited / figures.prompt, "% at most", 1)
    new = figures.prompt - figures.ideal - figures.edited
    report.add(case, "new text, ends of chunks", 100 * new / figures.prompt, "% at least", 1)
    report.add(case, "edits that lose a tenth or more", figures.edits, "", 1)
    report.add(case, "requests", figures.requests, "", 1)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("traces", type=Path, nargs="?", help="recorded conversations; default: drawn ones")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--conversations", type=int, default=0, help="the first ones of the file; default: 120")
    parser.add_argument("--rooms", default="", help="shares of the peak footprint; default: 0.1,0.2,0.4,0.6,1")
    parser.add_argument("--policies", default="lru,look-ahead", help=f"some of {', '.join(POLICIES)}")
    parser.add_argument("--groups", default="1,4", help="numbers of groups that share the room")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a chunk, a multiple of 64")
    parser.add_argument("--per-hour", type=float, default=60.0, help="conversations that begin")
    parser.add_argument("--labels", action="store_true", help="requests name their conversation to the router")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.groups = [int(groups) for groups in arguments.groups.split(",")]
    count = arguments.conversations or (12 if arguments.quick else 120)
    arguments.rooms = arguments.rooms or ("0.2,1" if arguments.quick else "0.1,0.2,0.4,0.6,1")
    conversations = read_traces(arguments.traces, count) if arguments.traces else synthetic(count, arguments.seed)
    report = Report("agents")
    for name, part in zip(PARTS, (directory,), strict=True):
        if name in arguments.parts.split(","):
            part(conversations, report, arguments)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
