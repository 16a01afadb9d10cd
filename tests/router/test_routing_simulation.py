"""The simulator behind `benchmarks/routing.py`: its GPU's time and bookkeeping, its workloads, whole runs."""

from __future__ import annotations

import math
from random import Random

import pytest
from routing_server import DEVICE, HOST, Gpu, Job, Server
from routing_sim import ORACLE, Figures, Setting, Simulation
from routing_workloads import CHUNK, WORKLOADS, Chains
from seeds import seeds

GPU = Gpu(device_chunks=40, host_chunks=30, rows_max=6)


def run_dry(server: Server, now: float) -> list[Job]:
    """Step until nothing is left; the jobs in the order of their ends."""
    done = []
    while (end := server.begin(now)) < math.inf:
        now = end
        done += server.end(now)[1]
    return done


def test_what_is_cached_is_not_computed_again() -> None:
    server, names = Server(GPU), Chains().chain(8 * CHUNK)
    server.submit(Job(1, 4 * CHUNK + 5, 4, names[:4], None))
    run_dry(server, 0.0)
    longer = Job(2, 6 * CHUNK, 1, names[:6], None)
    server.submit(longer)
    assert server.queued_tokens == 2 * CHUNK
    run_dry(server, 9.0)
    assert longer.cached == 4 * CHUNK
    again = Job(3, 6 * CHUNK, 1, names[:6], None)
    server.submit(again)
    run_dry(server, 99.0)
    assert again.cached == 6 * CHUNK - 1, "the last token is always computed"


@pytest.mark.parametrize("seed", seeds(1))
def test_blocks_are_kept_and_told_of_exactly(seed: int) -> None:
    rng, chains, server = Random(seed), Chains(), Server(GPU)
    known: list[list[bytes]] = [chains.chain(6 * CHUNK) for _ in range(4)]
    told: dict[bytes, int] = {}
    now, end, ticket, ended, submitted = 0.0, math.inf, 0, 0, 0
    for _ in range(3000):
        if rng.random() < 0.3:
            ticket += 1
            prefix = rng.choice(known)
            prompt = rng.randrange(1, len(prefix) * CHUNK + 3 * CHUNK)
            output = rng.randrange(1, 900)
            names = prefix[: prompt // CHUNK]
            chains.extend(names, prompt + output)
            known[rng.randrange(len(known))] = names or prefix
            submitted += server.submit(Job(ticket, prompt, output, names, None))
        if end == math.inf:
            end = server.begin(now)
        elif end < math.inf:
            now = end
            ended += len(server.end(now)[1])
            end = server.begin(now)
        told.update(server.changed)
        server.changed.clear()
        truth = dict.fromkeys(server.cache, DEVICE)
        for name in server.host:
            truth[name] = truth.get(name, 0) | HOST
        assert {name: tiers for name, tiers in told.items() if tiers} == truth
        assert 0 <= server.kv_used <= 1
        assert set(server.idle) == {name for name, count in server.cache.items() if not count}
        assert len(server.host) <= GPU.host_chunks
        assert server.queued_tokens == sum(job.estimate for job in server.waiting) + sum(
            job.remaining for job in server.prefilling
        )
    ended += len(run_dry(server, now)) if end == math.inf else len(finish(server, end))
    assert ended == submitted > 100
    assert server.queued_tokens == server.kv_used == server.requests == 0


def finish(server: Server, end: float) -> list[Job]:
    """The step under way, and all that follow."""
    return server.end(end)[1] + run_dry(server, end)


@pytest.mark.parametrize("name", WORKLOADS)
def test_turns_hold_what_was_said_before(name: str) -> None:
    workload = WORKLOADS[name](1, 0.05, 1.0)
    assert workload.sessions
    for session in workload.sessions:
        for turn in session.turns:
            assert len(turn.names) == (turn.prompt + turn.output) // CHUNK
            assert len(set(turn.names)) == len(turn.names)
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            assert after.prompt > before.prompt + before.output
            assert after.names[: len(before.names)] == before.names


def run(name: str, rule: str, setting: Setting, seed: int = 1) -> tuple[Figures, int]:
    """Figures, and how many requests were to be counted, at least (all, of open sessions)."""
    workload = WORKLOADS[name](seed, 0.1, 1.0)
    open_turns = sum(
        workload.warmup <= turn.at < workload.seconds
        for session in workload.sessions
        for turn in session.turns[: 1 if session.is_closed else None]
    )
    return Simulation(workload, rule, setting, seed).run(), open_turns


@pytest.mark.parametrize("rule", ["round-robin", "prefix", "llm-d", ORACLE])
def test_all_are_answered_and_a_seed_decides_everything(rule: str) -> None:
    setting = Setting(routers=2, delay_s=0.5)
    figures, requests = run("conversation", rule, setting)
    assert len(figures.ttft_s) == requests
    assert figures.errors == figures.sheds == 0
    assert run("conversation", rule, setting)[0] == figures


def test_whoever_follows_the_cache_finds_more_in_it() -> None:
    found = {}
    for rule in ("round-robin", "prefix", ORACLE):
        figures, _ = run("groups", rule, Setting())
        found[rule] = figures.hit_tokens / figures.prompt_tokens
    assert found["prefix"] > found["round-robin"] + 0.2
    assert found["prefix"] > found[ORACLE] - 0.05
