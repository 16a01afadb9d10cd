"""The simulated cluster of benchmarks/agents.py: what is ideal, what is lost and why, and that no rule beats one
that knows the future."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from agent_policies import Belady, Foresight, Talk
from agent_sim import Figures, Setting, Simulation, footprint, talks_of
from agent_traces import BLOCK, ChunkNames, Conversation, conversation, synthetic
from agents import POLICIES
from seeds import seeds

BASE = Setting(groups=1, blocks=8)


def run(
    conversations: list[Conversation], setting: Setting, rule: Callable[[list[Talk]], Foresight] = POLICIES["lru"]
) -> Figures:
    """Return what a rule finds."""
    talks = talks_of(conversations, setting)
    simulation = Simulation(setting, rule(talks))
    figures = simulation.run(talks)
    for group in simulation.groups:
        group.directory.check()
        assert all(chunk.host_ready and not chunk.running for chunk in group.chunks.values())
    assert figures.found + sum(figures.lost.values()) == figures.ideal
    return figures


def ideal(conversations: list[Conversation], setting: Setting) -> int:
    """Return the tokens that stood in an earlier prompt of the conversation or its answer: clients apart."""
    total = 0
    for talk in conversations:
        names, seen = ChunkNames(talk, setting.blocks, clients=False), set[bytes]()
        for request in sorted(talk.requests, key=lambda each: each.at_s):
            prompt = names.prompt(request.number)
            total += next((at for at, name in enumerate(prompt) if name not in seen), len(prompt))
            seen.update(prompt, names.answer(request.number))
    return total * setting.tokens


@pytest.mark.parametrize("seed", seeds(1))
def test_no_rule_beats_one_that_knows_the_future(seed: int) -> None:
    conversations = synthetic(4, seed, scale=0.25)
    setting = replace(BASE, prefill_us=0.01, attention_us=0.0, load_us=0.0, clients=False)
    room = footprint(talks_of(conversations, setting), setting.tokens)
    small = replace(setting, room=room // 5)
    best = run(conversations, small, Belady)
    assert best.found > 0
    for rule in POLICIES.values():
        figures = run(conversations, small, rule)
        assert figures.ideal == best.ideal
        assert figures.found <= best.found
        assert figures.lost["evicted"] == sum(figures.lost.values()), "there is one group, and no request waits"


@pytest.mark.parametrize("seed", seeds(1))
def test_who_knows_the_future_knows_it_at_all_groups(seed: int) -> None:
    """A chunk that is used at one group is not waited for at another: in the end nothing is wanted anywhere."""
    conversations = synthetic(6, seed, scale=0.25)
    setting = replace(BASE, groups=3, room=1 << 12, pull_us=0.0, prefill_us=1.0)
    talks = talks_of(conversations, setting)
    simulation = Simulation(setting, Belady(talks))
    simulation.run(talks)
    left = [chunk for group in simulation.groups for chunk in group.chunks.values()]
    assert len({chunk.name for chunk in left}) < len(left), "some chunks are at several groups"
    assert {chunk.known_use for chunk in left} == {math.inf}


@pytest.mark.parametrize("seed", seeds(1))
def test_with_room_for_all_one_group_finds_all(seed: int) -> None:
    conversations = synthetic(5, seed, scale=0.25)
    setting = replace(BASE, clients=False, room=1 << 15)
    figures = run(conversations, setting)
    assert figures.found == figures.ideal == ideal(conversations, setting)
    assert figures.requests == sum(len(talk.requests) for talk in conversations)
    shared = run(conversations, replace(setting, clients=True))
    assert shared.ideal >= figures.ideal


def test_what_another_group_has_is_lost_for_that_reason_or_pulled() -> None:
    one = {"tools": 6400, "system": 0, "requests": [[0.0, 6464, 10, 0.0, 1.0, -1, 0]]}
    talks = [conversation({**one, "id": str(number)}) for number in range(40)]
    setting = Setting(groups=2, blocks=1, room=2000, per_hour=1e6, pulls=False)
    crowd = run(talks, setting)
    assert crowd.ideal == 39 * 6400
    assert crowd.lost["other group"] + crowd.lost["not ready"] == 6400, "the second group computes it once"
    assert crowd.lost["evicted"] == 0
    pulling = run(talks, replace(setting, per_hour=1e5, pulls=True))
    assert pulling.found == pulling.ideal
    assert pulling.pulled == 6400, "now the second group gets it from the first"


def test_the_footprint_is_that_of_agents_under_way() -> None:
    row = [0.0, 10 * BLOCK, 0, 0.0, 5.0, -1, 0]
    whole = conversation(
        {"id": "", "tools": 0, "system": 0, "requests": [row, [9.0, 30 * BLOCK, 1, 4.0, 1.0, 0, 5]]}
    )
    talks = talks_of([whole], replace(BASE, blocks=1))
    assert footprint(talks, BLOCK) == 31
    twice = talks_of([whole, whole], replace(BASE, blocks=1, per_hour=1.0, seed=1))
    assert footprint(twice, BLOCK) == 31, "the first is over when the second begins"
