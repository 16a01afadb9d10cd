"""Which routing rule finds what is cached, and how long clients wait: all rules of the router in simulated time.

    python benchmarks/routing.py [--quick] [--json PATH] [--scenario NAME] [--workload NAME] [--rule NAME]
                                 [--seeds N]

The rules, the index of chunks, sticky sessions and the breaker are the router's own (`trunkline.router.routing`);
GPUs and clients are models (`routing_server`, `routing_workloads`). `oracle` is the rule `prefix` with one index
for all routers that learns of everything at the moment it happens.

Scenarios:

- base: 8 controllers, one router, events after 5 ms.
- routers-2, routers-4: several routers, which know of each other's requests only what controllers tell.
- stale-1s, stale-5s: events and loads come so late.
- own-only, own-only-2: no events; one router, or two, that know their own requests only.
- death: a controller dies after a third, another after 60 %, each for 30 s; its requests start again elsewhere.
- scale-up: 4 controllers, and 4 more after half of the time (at 60 % of the load).
- no-host: no tier behind the device, where there was one.
- peers, peers-death, peers-scale-up: as base, death and scale-up, but controllers pull from each other what they
  lack (12.5 GB/s). Only the workloads with a tier of host memory can show a difference.

Figures are means over seeds, ± the standard deviation. At the end: whether `prefix` is the best rule, by the
paired differences over the seeds: "noise" if its distance from the best is below two standard errors.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

from report import Report, argument_parser
from routing_sim import ORACLE, Setting, Simulation
from routing_workloads import WORKLOADS

from trunkline.router.routing.policies import POLICIES

PREFIX: Final = "prefix"
SEEDS: Final = 5
_SEED: Final = 100
"""The first. Settings were chosen with others."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A setting, and what is run in it."""

    setting: Setting
    workloads: tuple[str, ...]
    scale: float = 0.5
    """Of the workloads' durations."""
    load: float = 1.0
    """Of the workloads' rates."""
    rules: tuple[str, ...] = (PREFIX, ORACLE, "llm-d", "lmetric", "sglang")


_SOME: Final = ("conversation", "zipf")
_WITH_PEOPLE: Final = (*_SOME, "chat")
SCENARIOS: Final = {
    "base": Scenario(Setting(), tuple(WORKLOADS), 1.0, rules=(*POLICIES, ORACLE)),
    "routers-2": Scenario(Setting(routers=2), _SOME),
    "routers-4": Scenario(Setting(routers=4), _WITH_PEOPLE),
    "stale-1s": Scenario(Setting(delay_s=1.0), _SOME),
    "stale-5s": Scenario(Setting(delay_s=5.0), _SOME),
    "own-only": Scenario(Setting(events=False), _SOME),
    "own-only-2": Scenario(Setting(events=False, routers=2), _WITH_PEOPLE),
    "death": Scenario(Setting(dies=(1 / 3, 0.6)), _WITH_PEOPLE),
    "scale-up": Scenario(Setting(joins=4), _SOME, load=0.6),
    "no-host": Scenario(Setting(host=False), ("conversation", "synthetic")),
    "peers": Scenario(Setting(peers=True), tuple(WORKLOADS), 1.0, rules=(*POLICIES, ORACLE)),
    "peers-death": Scenario(Setting(dies=(1 / 3, 0.6), peers=True), _WITH_PEOPLE),
    "peers-scale-up": Scenario(Setting(joins=4, peers=True), _SOME, load=0.6),
}
UNITS: Final = {
    "mean": "s",
    "p50": "s",
    "p90": "s",
    "p99": "s",
    "hits": "%",
    "pulled": "%",
    "load_cv": "",
    "moves": "%",
    "errors": "requests",
    "sheds": "requests",
}

Runs = dict[str, list[dict[str, float]]]
"""Metrics of each seed's run, by rule."""


def run(scenario: Scenario, workload: str, rule: str, seed: int, scale: float) -> dict[str, float]:
    """One simulation."""
    clients = WORKLOADS[workload](seed, scenario.scale * scale, scenario.load)
    return Simulation(clients, rule, scenario.setting, seed).run().metrics()


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _cell(values: Sequence[float]) -> str:
    mean = fmean(values)
    digits = 0 if mean >= 100 else 1 if mean >= 10 else 2
    return f"{mean:.{digits}f} ± {_spread(values):.{digits}f}"


def show(runs: Runs) -> None:
    """A table with a row per rule."""
    print(
        "| rule | TTFT mean (s) | p50 | p90 | p99 | hits (%) | pulled (%) | load CV | moves (%) | errors | sheds |"
    )
    print("|" + "---|" * 11)
    for rule, results in runs.items():
        cells = [
            _cell([result[metric] for result in results]) for metric in UNITS if metric not in ("errors", "sheds")
        ]
        counts = [f"{fmean(result[metric] for result in results):g}" for metric in ("errors", "sheds")]
        print(f"| {rule} | {' | '.join([*cells, *counts])} |")


def compare(runs: Runs, metric: str) -> str:
    """How `prefix` stands against the best of the other rules, the oracle apart."""
    means = {rule: fmean(result[metric] for result in results) for rule, results in runs.items()}
    others = {rule: mean for rule, mean in means.items() if rule not in (PREFIX, ORACLE)}
    if not others:
        return ""
    best = min(others, key=lambda rule: others[rule])
    share = means[PREFIX] / others[best] - 1
    gaps = [ours[metric] - theirs[metric] for ours, theirs in zip(runs[PREFIX], runs[best], strict=True)]
    error = _spread(gaps) / math.sqrt(len(gaps))
    verdict = "best" if share <= 0 else "noise" if fmean(gaps) <= 2 * error else "**worse**"
    return f"{verdict} ({share:+.0%} to {best})"


def verdicts(all_runs: dict[tuple[str, str], Runs]) -> None:
    """A row per scenario and workload."""
    print("\n## How `prefix` stands\n")
    print("| scenario | workload | TTFT mean | TTFT p99 | hits below the oracle's (points) |")
    print("|---|---|---|---|---|")
    for (scenario, workload), runs in all_runs.items():
        if PREFIX not in runs:
            continue
        cells = [compare(runs, "mean"), compare(runs, "p99")]
        if ORACLE in runs:
            gaps = [best["hits"] - ours["hits"] for best, ours in zip(runs[ORACLE], runs[PREFIX], strict=True)]
            cells.append(f"{fmean(gaps):.1f} ± {_spread(gaps):.1f}")
        print(f"| {scenario} | {workload} | {' | '.join(cells)} |")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="only this (may be repeated)")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this (may be repeated)")
    parser.add_argument("--rule", choices=(*POLICIES, ORACLE), action="append", help="only this (may be repeated)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"runs of each cell ({SEEDS})")
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    report = Report("routing")
    scale, seeds = (0.12, 2) if arguments.quick else (1.0, arguments.seeds)
    all_runs: dict[tuple[str, str], Runs] = {}
    for name, scenario in SCENARIOS.items():
        if arguments.scenario and name not in arguments.scenario:
            continue
        for workload in scenario.workloads:
            if arguments.workload and workload not in arguments.workload:
                continue
            rules = [rule for rule in scenario.rules if not arguments.rule or rule in arguments.rule]
            runs: Runs = {
                rule: [run(scenario, workload, rule, seed, scale) for seed in range(_SEED, _SEED + seeds)]
                for rule in rules
            }
            all_runs[name, workload] = runs
            print(f"\n## {name}: {workload}\n")
            show(runs)
            for rule, results in runs.items():
                case = {"scenario": name, "workload": workload, "rule": rule}
                for metric, unit in UNITS.items():
                    values = [result[metric] for result in results]
                    report.add(case, f"{metric} (mean)", fmean(values), unit, seeds)
                    report.add(case, f"{metric} (standard deviation)", _spread(values), unit, seeds)
    verdicts(all_runs)
    report.close(arguments.json)


if __name__ == "__main__":
    main()
