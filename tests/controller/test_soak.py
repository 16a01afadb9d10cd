"""Random traffic of every kind over several engines: no deadlock, no livelock, bounded memory, all outputs right.

What is asserted stands in `simulation.traffic` (per request and every few hundred events) and in the simulated
workers (every step computes something).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from seeds import seeds
from simulation.engines import ENGINES, MIXES
from simulation.traffic import Mix, Traffic

from trunkline.controller.scheduling import row_blocks

LATE = ["tiny, swapping", "tiny, recomputing", "tiers", "many rows", "without a cache", "modules, tiers"]
"""Engines with which full chunks wait for each other."""


def run(name: str, requests: int, seed: int, losses: float = 0.0, *, plans_with_answers: bool = False) -> Traffic:
    mix = replace(MIXES.get(name, Mix()), losses=losses)
    traffic = Traffic(ENGINES[name], mix, seed, check=False)
    traffic.simulation.plans_with_answers = plans_with_answers
    traffic.run(requests)
    counters = traffic.simulation.engine.counters
    assert counters.steps <= traffic.simulation.workers.computed_tokens
    return traffic


@pytest.mark.parametrize("seed", seeds(1, always=(1,)))
@pytest.mark.parametrize("name", ENGINES)
def test_traffic(name: str, seed: int) -> None:
    traffic = run(name, 130, seed)
    if name.startswith("tiny"):
        assert traffic.simulation.engine.scheduler.counters.preemptions


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("name", LATE)
def test_traffic_of_few_rows_whose_chunks_wait_for_each_other(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks enter the tree late, and blocks come early, as in large batches; steps are planned with answers."""
    monkeypatch.setattr(row_blocks, "SLACK_ROWS_MIN", 1)
    monkeypatch.setattr(row_blocks, "SLACK_PART", 2)
    run(name, 250, seed, plans_with_answers=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("losses", [0.0, 0.01])
@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("name", ENGINES)
def test_much_traffic(name: str, seed: int, losses: float) -> None:
    """In all some 350,000 requests."""
    run(name, 2000 if losses else 7200, seed, losses)
