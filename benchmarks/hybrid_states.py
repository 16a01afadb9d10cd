"""Prefix hits of models with recurrent states, in simulation: where snapshots are taken, and which leave first.

    python benchmarks/hybrid_states.py [TRACES] [--quick] [--json PATH] [--conversations 100] [--rooms 0.1,…]
                                       [--states 1536,…] [--rules "ends; every 512"]

TRACES is a file of recorded conversations (agent_traces.py); without one, conversations are drawn from a seed.
Requests come to one cache (state_tree.py) when they were recorded and take no time. Room is given as a part of the
KV of all contexts under way at the peak; `--states` is the weight of one state, as the number of tokens whose KV
weighs as much. Of a model with 36 layers of gated delta rule with 32 heads of 128 × 128 and 12 layers of attention
with 2 KV heads of 256, all in bfloat16, that is 1,536.

`of_ideal`: tokens that need not be computed, of the prefix tokens that one cache of attention only and without
limits would have. `recomputed`: the rest. All rules share one room and the same tree, where KV lives for the sake
of snapshots; two pools, one for KV and one for states, are not simulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from agent_policies import Talk
from agent_sim import Setting, footprint, talks_of
from agent_traces import BLOCK, read_traces, synthetic
from report import Report, argument_parser
from state_tree import (
    Oldest,
    Order,
    Places,
    RecencyAndSavings,
    Returns,
    Sizes,
    StateTree,
    branches,
    ends,
    ends_and_branches,
    grid,
)

RULES: Final[dict[str, tuple[Places, Callable[[], Order]]]] = {
    "every 512": (grid(512 // BLOCK), Oldest),
    "every 2048": (grid(2048 // BLOCK), Oldest),
    "every 8192": (grid(8192 // BLOCK), Oldest),
    "ends": (ends, Oldest),
    "branches, savings": (branches, RecencyAndSavings),
    "ends and branches": (ends_and_branches, Oldest),
    "ends and branches, savings": (ends_and_branches, RecencyAndSavings),
    "ends and branches, returns": (ends_and_branches, Returns),
}
"""Where snapshots are taken, and which leave first."""


class Result:
    """What a rule has found, in tokens."""

    def __init__(self) -> None:
        self.prompt = self.ideal = self.found = 0


def simulate(talks: Sequence[Talk], tree: StateTree, places: Places) -> Result:
    """Send all requests of some conversations to a tree, in the order of their times."""
    result, seen = Result(), set[bytes]()
    arrivals = [
        (talk.due_s(request), at, request) for at, talk in enumerate(talks) for request in talk.whole.requests
    ]
    for now, at, request in sorted(arrivals, key=lambda each: (each[0], each[1], each[2].number)):
        prompt = talks[at].names.prompt(request.number)
        both = prompt + talks[at].names.answer(request.number)
        known, start = tree.find(prompt, now)
        ideal = next((depth for depth in range(known, len(prompt)) if prompt[depth] not in seen), len(prompt))
        seen.update(both)
        result.prompt += request.prompt
        result.ideal += ideal * BLOCK
        result.found += start * BLOCK
        tree.add(both, places(len(prompt), len(both), start, known), now)
    return result


def run(talks: Sequence[Talk], report: Report, arguments: argparse.Namespace) -> None:
    peak = footprint(talks, BLOCK)
    print(f"# {len(talks)} conversations, {peak * BLOCK / 1e6:.1f}M tokens under way at the peak", flush=True)
    for state in map(int, arguments.states.split(",")):
        sizes = Sizes(chunk=BLOCK, state=state)
        for room in map(float, arguments.rooms.split(",")):
            for name in arguments.rules:
                places, order = RULES[name]
                tree = StateTree(sizes, room * peak * BLOCK, order())
                result = simulate(talks, tree, places)
                case = {"state": state, "room": room, "rule": name}
                report.add(case, "of_ideal", 100 * result.found / result.ideal, "%", 1)
                report.add(case, "recomputed", (result.ideal - result.found) / 1e6, "M tokens", 1)
                report.add(case, "taken", tree.counts.taken, "snapshots", 1)
                report.add(case, "held", len(tree.snapshots), "snapshots", 1)
                weight = 100 * len(tree.snapshots) * state / max(tree.held, 1)
                report.add(case, "states of what is held", weight, "%", 1)


def _rules(names: str) -> list[str]:
    found = [name.strip() for name in names.split(";")]
    if unknown := [name for name in found if name not in RULES]:
        raise argparse.ArgumentTypeError(f"no rule {unknown[0]!r}; there are {', '.join(map(repr, RULES))}")
    return found


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("traces", nargs="?", type=Path)
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--rooms", default="0.1,0.4,1.0")
    parser.add_argument("--states", default="1536")
    parser.add_argument("--rules", type=_rules, default=list(RULES), help="; ".join(RULES))
    arguments = parser.parse_args()
    count = min(arguments.conversations, 12) if arguments.quick else arguments.conversations
    whole = read_traces(arguments.traces, count) if arguments.traces else synthetic(count)
    report = Report("hybrid_states")
    run(talks_of(whole, Setting(blocks=1)), report, arguments)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
