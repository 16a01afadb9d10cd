"""What the engine tells the directory of requests that end, and whose blocks are taken first because of it."""

from __future__ import annotations

import pytest
from controller.tier_harness import CHUNK, TIERED, Session, settle, simulate, sink, tiers_of
from msgspec.structs import replace
from simulation.driver import Simulation

from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.engine.events import AnswerTold, GoesOnElsewhere
from trunkline.kvstore.tier import TierKind

PREDICTED = replace(
    TIERED, tier_policy="predicted", disk_slots=0, remote=False, host_slots=0, preemption="recompute"
)


def path_of(simulation: Simulation, prompt: list[int]) -> list[Node]:
    """A prompt's full chunks that are on the device."""
    node, path = simulation.tree.root(b""), list[Node]()
    for at in range(0, len(prompt) - CHUNK + 1, CHUNK):
        key = b"".join(token.to_bytes(4, "little") for token in prompt[at : at + CHUNK])
        if key not in node.children or not node.children[key].on_device:
            break
        node = node.children[key]
        path.append(node)
    return path


def cached(simulation: Simulation, prompt: list[int]) -> int:
    return len(path_of(simulation, prompt))


def test_a_session_that_comes_back_is_recognised() -> None:
    simulation = simulate(PREDICTED)
    session, other = Session(simulation), Session(simulation, start=500)
    uses = simulation.tree.tiers.next_use
    output = session.turn(18).output
    (first,) = uses._away
    assert first.kind == ("", f"{output[-2]} {output[-1]}", 3, 0)
    other.turn(10)
    simulation.now += 5.0
    session.turn(9)
    assert first.wait == float("inf")
    assert len(uses) == 2
    (second,) = [turn for turn in uses._away if turn.mean_gap]
    assert 4.0 < 2.0**second.mean_gap - 1.0 < 6.0
    path = simulation.tree.root(b"").children
    assert {node.turns for node in path.values()} == {(second,), tuple(t for t in uses._away if t is not second)}


def test_the_tools_that_an_answer_calls_are_learnt_in_place_of_its_last_tokens() -> None:
    simulation = simulate(PREDICTED)
    uses = simulation.tree.tiers.next_use
    requests = [simulation.submit(list(range(100 * at, 100 * at + 20)), 2) for at in range(1, 4)]
    simulation.run()
    turns = [uses.turn_of(request) for request in requests]
    for request, told in zip(requests, ("calls read", "", "calls read"), strict=True):
        if told:
            simulation.receive(AnswerTold(request, told))
    simulation.receive(AnswerTold(10_000, "calls read"))  # not known
    kinds = [turn.kind[1] for turn in turns if turn is not None]
    assert kinds[0] == kinds[2] == "calls read"
    assert kinds[1] not in kinds[::2]
    simulation.submit(list(range(100, 140)), 1)
    simulation.run()
    assert uses.turn_of(requests[0]) is None, "its session is back"
    assert uses.turn_of(requests[1]) is turns[1]


def test_a_session_that_goes_on_at_another_group_leaves_first() -> None:
    simulation = simulate(PREDICTED)
    prompts = [list(range(100 * at, 100 * at + 40)) for at in range(1, 4)]
    for prompt in prompts:
        simulation.submit(prompt, 1)
        simulation.run()
        simulation.now += 1.0
    names = b"".join(node.name for node in path_of(simulation, prompts[1])[-3:])
    simulation.receive(GoesOnElsewhere(names, 60))
    simulation.submit(list(range(900, 960)), 1)
    simulation.run()
    left = [cached(simulation, prompt) for prompt in prompts]
    assert left[1] < left[0] == left[2] == 10


@pytest.mark.parametrize("policy", ["predicted", "look-ahead"])
def test_what_a_client_has_said_is_its_last_request_leaves_first(policy: str) -> None:
    simulation = simulate(replace(PREDICTED, tier_policy=policy))
    prompts = [list(range(100 * at, 100 * at + 40)) for at in range(1, 4)]
    for prompt, is_last in zip(prompts, (False, True, False), strict=True):
        simulation.submit(prompt, 1, is_last=is_last)
        simulation.run()
        simulation.now += 1.0
    simulation.submit(list(range(900, 960)), 1)
    simulation.run()
    left = [cached(simulation, prompt) for prompt in prompts]
    if policy == "predicted":
        assert left[1] < left[0] == left[2] == 10
    else:
        assert left[0] < left[1] == left[2] == 10


def test_who_says_when_it_returns_stays_longer_than_who_returns_later() -> None:
    simulation = simulate(PREDICTED)
    prompts = [list(range(100 * at, 100 * at + 40)) for at in range(1, 4)]
    for prompt, next_s in zip(prompts, (20.0, 30.0, 40_000.0), strict=True):
        simulation.submit(prompt, 1, next_s=next_s)
        simulation.run()
        simulation.now += 1.0
    simulation.submit(list(range(900, 960)), 1)
    simulation.run()
    left = [cached(simulation, prompt) for prompt in prompts]
    assert left[2] < left[0] == left[1] == 10, "the last one used is needed last"


@pytest.mark.parametrize("policy", ["predicted", "look-ahead"])
def test_what_has_sunk_is_fetched_before_its_session_is_back(policy: str) -> None:
    simulation = simulate(replace(TIERED, tier_policy=policy))
    prompt = list(range(100, 140))
    simulation.submit(prompt, 1, next_s=300.0)
    simulation.run()
    sink(simulation, TierKind.DISK)
    simulation.now += 250.0
    settle(simulation)
    again = simulation.submit([*prompt, 1, 2], 1)
    simulation.run()
    found = tiers_of(simulation.streams[again])
    assert found == ([0, 40, 0, 0] if policy == "predicted" else [0, 0, 40, 0])
