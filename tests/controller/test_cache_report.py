"""Why a prompt was not found, and from which token on: each reason, by the shortest way to it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from controller.tier_harness import Session, miss_of, settle, simulate, sink, sunken, tiers_of
from msgspec.structs import replace
from simulation.driver import Simulation
from simulation.streams import Options, verify

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.scheduling import admission
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import MissReason

PLAIN = EngineConfig(num_blocks=40, chunk_size=4, max_context=96, token_budget=40, max_rows=8)
PROMPT = list(range(100, 122))


def ask(simulation: Simulation, prompt: list[int], **options: Options) -> tuple[str, int]:
    request = simulation.submit(prompt, 2, **options)  # type: ignore[arg-type]
    simulation.run()
    verify(simulation.streams[request], simulation.engine.config.longest_sequence)
    return miss_of(simulation.streams[request])


@pytest.fixture
def simulation() -> Simulation:
    simulation = Simulation(PLAIN)
    assert ask(simulation, PROMPT) == ("new", 0)
    return simulation


def test_nothing_is_missed_of_what_was_just_there(simulation: Simulation) -> None:
    assert ask(simulation, PROMPT) == ("", 0)
    assert ask(simulation, PROMPT[:9]) == ("", 0)
    assert ask(simulation, [7]) == ("", 0), "the last token is always computed"
    assert simulation.engine.counters.misses == {"new": 1}


def test_a_reason_is_found_without_looking_at_every_prompt(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, find = [], admission._reason

    def counted(*arguments: Any) -> MissReason:
        calls: list[str] = []
        sys.setprofile(lambda _frame, event, _function: calls.append(event))
        try:
            return find(*arguments)
        finally:
            sys.setprofile(None)
            counts.append(len(calls))

    monkeypatch.setattr(admission, "_reason", counted)
    for first in range(1000, 1040):
        assert ask(simulation, [first, 3]) == ("new", 0)
    assert len(counts) == 40
    assert max(counts) < 2 * min(counts), "at least one more call for each prompt that begins at the root"


def test_what_comes_after_what_was_there_is_new(simulation: Simulation) -> None:
    session = simulation.streams[1]
    longer = session.prompt + session.output[:1]
    assert ask(simulation, [*longer, 1, 2, 3]) == ("new", len(longer))


@pytest.mark.parametrize("agreed", [1, 4, 10, 16, 19])
def test_another_prompt_that_agrees_up_to_there(simulation: Simulation, agreed: int) -> None:
    assert ask(simulation, [*PROMPT[:agreed], 1, 2, 3, 4, 5]) == ("diverged", agreed)


@pytest.mark.parametrize("evicted", [2, 6])
def test_what_made_room_for_others(simulation: Simulation, evicted: int) -> None:
    tree = simulation.tree
    assert tree.evict(evicted) == evicted
    # Chunks go leaf first: the tail of 3, which nobody asks for whole, then those of 4.
    assert ask(simulation, PROMPT) == ("evicted", (6 - evicted) * 4)


def test_expired() -> None:
    simulation = Simulation(replace(PLAIN, session_ttl_s=10.0))
    ask(simulation, PROMPT)
    simulation.now += 20.0
    simulation.plan()
    assert ask(simulation, PROMPT) == ("ttl", 0)


def test_another_tenant(simulation: Simulation) -> None:
    request = simulation.submit(PROMPT, 2, salt=b"other")
    simulation.run()
    assert miss_of(simulation.streams[request]) == ("salt", 0)
    request = simulation.submit([1, *PROMPT], 2, salt=b"other")
    simulation.run()
    assert miss_of(simulation.streams[request])[0] == "new", "there is something under the salt now"


def test_off() -> None:
    simulation = Simulation(replace(PLAIN, prefix_cache=False))
    assert ask(simulation, PROMPT) == ("off", 0)


def test_a_scored_prompt_is_computed_whole(simulation: Simulation) -> None:
    request = simulation.submit(PROMPT, 2, prompt_logprobs=0)
    simulation.run()
    assert miss_of(simulation.streams[request]) == ("off", 0)


def test_a_tier_that_could_not_give_it_back() -> None:
    session = sunken(TierKind.DISK, remote=False)
    simulation = session.simulation
    for rank in simulation.tiers.disk:
        del rank[next(node.disk for node in simulation.tree.nodes() if node.depth == 3)]
    assert miss_of(session.turn(3)) == ("lost", 8)


def test_a_host_from_which_loading_is_slower_than_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    session = sunken(TierKind.HOST, remote=False, preemption="auto")
    monkeypatch.setattr(StepCosts, "load_pays", lambda self, tokens: False)
    stream = session.turn(3)
    assert sum(tiers_of(stream)) == 0
    assert miss_of(stream) == ("slow", 0)


def test_tiers_add_up_over_a_path_that_is_everywhere() -> None:
    simulation = simulate()
    session = Session(simulation)
    session.turn(46, 2)
    sink(simulation, TierKind.DISK)
    tree = simulation.tree
    path = sorted((node for node in tree.nodes()), key=lambda node: node.depth)
    assert len(path) == 11
    for node in path[6:]:  # the end is far away, …
        assert node.remote
        tree.tiers.copies.drop_disk(node)
    head = Session(simulation, start=900)
    head.history = session.history[:8]
    assert tiers_of(head.turn(3)) == [0, 0, 8, 0]  # … the beginning comes back to the device
    settle(simulation)
    stream = session.turn(3)
    assert tiers_of(stream) == [8, 0, 16, 20]
    assert stream.cached_tokens == 44
    assert simulation.engine.counters.tier_tokens == [8, 0, 24, 20, 0]
    assert simulation.engine.counters.cached_tokens == 52


def test_exact_says_whether_anything_was_kept_from_before_a_cut() -> None:
    simulation = Simulation(PLAIN)
    session = Session(simulation)
    exact = []
    for drops in ((), (), ((4, 16),), ((4, 16),)):
        stream = session.turn(12, drops=drops)
        assert stream.started is not None
        exact.append(stream.started.exact)
    assert exact[:2] == [True, True]
    assert exact[3] is False
