"""The parts `drain` and `warm` of `kv_travel`: what groups that leave hand over, and how a new group begins.

- `drain`: 60 stored sessions with two turns each are served by three groups of the demo model. One is drained,
  then all sessions have a third turn. `found` is the share of the tokens that were cached, of those in whole
  chunks of what had been computed (all sessions; about a third of them were the drained group's). `--peers off`
  hands nothing over. `command`: how long `trunkline drain` took, with the end of the group's processes.
- `warm`: requests with twelve shared beginnings of 1,200 tokens come four times a second, to all groups in turn. A
  third group is added. From when it is ready: times to the first token of all requests, and the share of prompt
  tokens that the new group found. `--peers off`: neither warmed up, nor does the group pull.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from statistics import median
from typing import Any, Final

import httpx
import numpy as np
from kv_travel_groups import Answer, Groups, ask
from report import Report
from serving import Prompts, model_name

OPTIONS: Final = ("--tp", "1", "--threads", "1", "--disk-tier", "0", "--kv-memory", "256MiB")
CHUNK: Final = 64
AT_ONCE: Final = 4
SESSIONS: Final = 60
SYSTEM_REPEATS: Final = 40
QUESTIONS: Final = ("What does str.split do?", "What does json.dumps do?", "Explain dict.get.")
SHARED: Final = 12
SHARED_TOKENS: Final = 1200
OWN_TOKENS: Final = 40
PER_SECOND: Final = 4.0
PEERS: Final = ("on", "off")


def measure_drain(report: Report, *, quick: bool) -> None:
    """Drain a group with and without peers, in turn."""
    rounds, sessions = (1, 24) if quick else (1, SESSIONS)
    found: dict[str, list[dict[str, float]]] = {peers: [] for peers in PEERS}
    for _, peers in itertools.product(range(rounds), PEERS):
        with Groups("demo", 3, *OPTIONS, "--peers", peers) as groups:
            found[peers].append(asyncio.run(_drain_once(groups, sessions)))
    for peers, runs in found.items():
        case = {"part": "drain", "sessions": sessions, "--peers": peers}
        for name, unit in (("found", "%"), ("fewest in a session", "%"), ("first token", "ms"), ("command", "s")):
            report.add(case, name, median(run[name] for run in runs), unit, rounds)


async def _drain_once(groups: Groups, count: int) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=groups.url, timeout=300) as client:
        model = model_name(groups.url)
        ids = []
        for number in range(count):
            messages = [
                {"role": "system", "content": f"Topic {number} is number {number * 37}. " * SYSTEM_REPEATS}
            ]
            begun = await client.post("/v1/sessions", json={"messages": messages})
            begun.raise_for_status()
            ids.append(begun.json()["id"])
        turns = [await _turns(client, model, ids, question) for question in QUESTIONS[:2]]
        await asyncio.sleep(1.0)  # what was computed last is saved
        took = await asyncio.to_thread(groups.command, "drain", "0")
        last = await _turns(client, model, ids, QUESTIONS[2])
    known = [answer.body["usage"]["total_tokens"] - 1 for answer in turns[-1]]
    whole = [tokens - tokens % CHUNK for tokens in known]
    shares = [min(one.cached_tokens, least) / least for one, least in zip(last, whole, strict=True)]
    return {
        "found": 100 * float(np.average(shares, weights=whole)),
        "fewest in a session": 100 * min(shares),
        "first token": 1e3 * median(answer.first_s for answer in last),
        "command": took,
    }


async def _turns(client: httpx.AsyncClient, model: str, ids: Iterable[str], question: str) -> list[Answer]:
    """One turn of each session, a few at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def turn(session: str) -> Answer:
        body: dict[str, Any] = {"model": model, "session_id": session, "max_tokens": 16, "ignore_eos": True}
        async with gate:
            return await ask(
                client, "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": question}]}
            )

    return list(await asyncio.gather(*map(turn, ids)))


def measure_warm(report: Report, *, quick: bool) -> None:
    """Add a group with and without peers, in turn."""
    rounds, edges = (1, (0, 5, 15)) if quick else (1, (0, 5, 15, 60))
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _, peers in itertools.product(range(rounds), PEERS):
        with Groups("demo", 2, *OPTIONS, "--peers", peers, "--policy", "round-robin") as groups:
            for edge, figures in asyncio.run(_warm_once(groups, edges)).items():
                found.setdefault((peers, edge), []).append(figures)
    for (peers, edge), runs in sorted(found.items()):
        span = "before" if edge < 0 else f"{edges[edge]} to {edges[edge + 1]} s"
        case = {"part": "warm", "--peers": peers, "time": span}
        for name, unit in (
            ("first token, p50", "ms"),
            ("first token, p99", "ms"),
            ("found by the new group", "%"),
        ):
            if name in runs[0]:
                report.add(case, name, median(run[name] for run in runs), unit, rounds)


async def _warm_once(groups: Groups, edges: tuple[int, ...]) -> dict[int, dict[str, float]]:
    """Figures by the number of the stretch of time; -1: before there is a third group."""
    prompts, chance = Prompts(4096, 0), np.random.default_rng(0)
    shared = [prompts.take(SHARED_TOKENS) for _ in range(SHARED)]
    model, answers, tasks = model_name(groups.url), list[tuple[float, Answer]](), set[asyncio.Task[None]]()
    weights = 1 / np.arange(1, SHARED + 1)
    async with httpx.AsyncClient(base_url=groups.url, timeout=300) as client:

        async def send() -> None:
            text = shared[chance.choice(SHARED, p=weights / weights.sum())]
            body = {
                "model": model,
                "prompt": [*text, *prompts.take(OWN_TOKENS)],
                "max_tokens": 8,
                "ignore_eos": True,
            }
            began = time.perf_counter()
            answers.append((began, await ask(client, "/v1/completions", body)))

        async def load() -> None:
            while True:
                tasks.add(asyncio.create_task(send()))
                await asyncio.sleep(chance.exponential(1 / PER_SECOND))

        loading = asyncio.create_task(load())
        await asyncio.sleep(15.0)
        steady = time.perf_counter()
        await asyncio.sleep(5.0)
        added = time.perf_counter()
        scaling = asyncio.create_task(asyncio.to_thread(groups.command, "scale", "3"))
        await asyncio.to_thread(groups.wait_ready, 3)
        ready = time.perf_counter()
        counts = [_at_new_group(groups)]
        for edge in edges[1:]:
            await asyncio.sleep(max(0.0, ready + edge - time.perf_counter()))
            counts.append(await asyncio.to_thread(_at_new_group, groups))
        loading.cancel()
        await asyncio.gather(*tasks)
        await scaling
    figures = {-1: _firsts(answers, steady, added)}
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        (prompt, hit), (prompt_after, hit_after) = counts[number : number + 2]
        figures[number] = _firsts(answers, ready + start, ready + stop)
        if prompt_after > prompt:
            figures[number]["found by the new group"] = 100 * (hit_after - hit) / (prompt_after - prompt)
    return figures


def _at_new_group(groups: Groups) -> tuple[float, float]:
    """Prompt tokens of the third group, and those that were found in some tier. Up to a second old."""
    prompt = sum(groups.counted("controller_prompt_tokens_total", controller="2"))
    return prompt, sum(groups.counted("tier_hit_tokens_total", controller="2"))


def _firsts(answers: list[tuple[float, Answer]], start: float, stop: float) -> dict[str, float]:
    firsts = [answer.first_s for began, answer in answers if start <= began < stop]
    names = (("first token, p50", 0.5), ("first token, p99", 0.99))
    return {name: 1e3 * float(np.quantile(firsts, part)) for name, part in names}
