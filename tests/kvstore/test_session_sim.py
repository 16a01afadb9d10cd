"""The simulated server of benchmarks/hit_rate.py: what CachedAttention §4.3 finds holds for the real directory."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from session_model import Conversation, conversations
from session_sim import Figures, Overflow, Setting, Simulation

from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_policy import EvictionPolicy

SESSIONS = 150
CHUNK = 1024
BASE = Setting(chunk_tokens=CHUNK, overflow=Overflow.SHIFT, window=4096, kv_bytes_per_token=0.12e6, slots=4)


@cache
def workload(rate: float) -> list[Conversation]:
    return conversations(SESSIONS, rate, seed=3)


@cache
def footprint(rate: float) -> float:
    return run(replace(BASE, policy=None), rate).live_chunks_max * CHUNK


def run(setting: Setting, rate: float = 1.0) -> Figures:
    return Simulation(setting).run(workload(rate))


def run_with(policy: EvictionPolicy, share: float, rate: float = 1.0) -> Figures:
    tokens = share * footprint(rate)
    return run(replace(BASE, policy=policy, host_tokens=0.4 * tokens, disk_tokens=0.6 * tokens), rate)


def test_the_workload_is_that_of_the_paper() -> None:
    made = conversations(4000, 1.0, seed=1)
    tokens = [sum(c.user_tokens) + sum(c.answer_tokens) for c in made]
    assert sum(len(c.user_tokens) for c in made) / len(made) == pytest.approx(5.75, abs=0.2)
    assert sum(len(c.user_tokens) > 1 for c in made) / len(made) == pytest.approx(0.73, abs=0.03)
    assert sum(t > 2000 for t in tokens) / len(made) == pytest.approx(0.47, abs=0.05)
    assert sum(t > 4000 for t in tokens) / len(made) == pytest.approx(0.30, abs=0.03)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_looking_ahead_finds_more_than_lru_and_fifo_when_jobs_wait(share: float) -> None:
    ahead, lru, fifo = (
        run_with(policy, share) for policy in (EvictionPolicy.LOOK_AHEAD, EvictionPolicy.LRU, EvictionPolicy.FIFO)
    )
    assert ahead.queue_max > 10 * BASE.slots, "the queue is saturated"
    assert ahead.hit_rate > max(lru.hit_rate, fifo.hit_rate) + 0.05
    assert ahead.host_share > 0.75 > max(lru.host_share, fifo.host_share)


def test_when_none_waits_there_is_nothing_to_look_ahead_to() -> None:
    ahead, lru = (run_with(policy, 0.6, rate=0.01) for policy in (EvictionPolicy.LOOK_AHEAD, EvictionPolicy.LRU))
    assert ahead.queue_max <= 2
    assert ahead.hit_rate == pytest.approx(lru.hit_rate, abs=0.02)


def test_with_room_for_all_every_later_turn_hits() -> None:
    figures = run_with(EvictionPolicy.LOOK_AHEAD, 2.5)
    assert figures.later_hit_rate == 1.0
    assert figures.found_tokens == figures.history_tokens
    assert run(replace(BASE, policy=None)).hits == 0


def test_what_is_fetched_is_used() -> None:
    tokens = 0.5 * footprint(1.0)
    setting = replace(BASE, host_tokens=0.4 * tokens, disk_tokens=0.6 * tokens)
    simulation = Simulation(setting)
    simulation.run(workload(1.0))
    reads = simulation.directory.stats()[TierKind.DISK].totals.reads
    assert 0 < reads <= 1.1 * simulation.directory.totals[TierKind.DEVICE].writes


def test_a_cut_by_shift_keeps_what_a_cut_of_embedded_positions_loses() -> None:
    rates = {}
    for overflow in (Overflow.SHIFT, Overflow.INVALIDATE):
        rates[overflow] = run(replace(BASE, window=2048, chunk_tokens=512, overflow=overflow)).later_hit_rate
    assert rates[Overflow.SHIFT] > 0.99
    assert rates[Overflow.INVALIDATE] < 0.8


def test_a_time_to_live_forgets_those_who_think_too_long() -> None:
    kept = run(replace(BASE, ttl_s=math.inf)).later_hit_rate
    short = run(replace(BASE, ttl_s=30.0), rate=0.01).later_hit_rate
    assert kept == 1.0
    assert 0.3 < short < 0.7, "thinking takes a minute in the mean"


def test_where_pauses_have_no_pattern_prediction_loses_nothing_to_speak_of() -> None:
    """People's pauses are drawn, so nothing can be learnt of them but that who is away for long may have gone."""
    found = dict.fromkeys((EvictionPolicy.LRU, EvictionPolicy.PREDICTED), 0.0)
    for seed in range(3):
        chats = conversations(300, 0.3, seed)
        setting = replace(BASE, slots=24, disk_tokens=0.0)
        room = 0.3 * CHUNK * Simulation(replace(setting, policy=None)).run(chats).live_chunks_max
        for policy in found:
            figures = Simulation(replace(setting, policy=policy, host_tokens=room)).run(chats)
            found[policy] += figures.found_share / figures.turns / 3
    assert found[EvictionPolicy.PREDICTED] > found[EvictionPolicy.LRU] - 0.01
