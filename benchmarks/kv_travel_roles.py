"""What running streams notice of long prompts, with and without roles: the part `roles` of `kv_travel.py`.

Two groups of one worker each serve the demo model. Streams run all the time; meanwhile long prompts arrive, one
after the other, each with a short answer. Of the running streams the times between tokens are measured at the
client, of the long prompts the times to the first token. `both`: each group does everything. `prefill,decode`: one
computes the long prompts, the other one goes on with all streams. `quiet`: no long prompts come.

Groups that compute on the same cores slow each other down, with and without roles.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from math import inf

import httpx
import numpy as np
from report import Report
from serving import Server, model_name

from trunkline.deploy.config.machine import available_cores

ROLES = {"both": "both", "prefill,decode": "prefill,decode"}
STREAMS = 6
STREAM_TOKENS = 900
PROMPT_TOKENS = 1800
ANSWER_TOKENS = 8
PAUSE_SECONDS = 0.5
"""Between the end of a long prompt's answer and the next one."""
VOCABULARY = 4096


@dataclass
class Measured:
    """Times in seconds."""

    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)


async def read(client: httpx.AsyncClient, body: dict[str, object], until: float = inf) -> list[float]:
    """When each part of a streamed answer came, after the time of the request. At `until` the client leaves."""
    times = [time.perf_counter()]
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(time.perf_counter())
                if times[-1] > until:
                    break
    return times


async def measure_once(url: str, seed: int, seconds: float, *, prompts: bool) -> Measured:
    """Measure for some time."""
    draws, found, numbers = random.Random(seed), Measured(), itertools.count()
    model = model_name(url)
    until = time.perf_counter() + seconds

    def body(count: int, answer: int) -> dict[str, object]:
        ids = [draws.randrange(10, VOCABULARY) for _ in range(count)]
        settings = {"temperature": 0.8, "seed": next(numbers), "ignore_eos": True}
        return {"model": model, "prompt": ids, "max_tokens": answer, **settings}

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=64)) as client:

        async def run() -> None:
            while time.perf_counter() < until:
                _, *times = await read(client, body(32, STREAM_TOKENS), until)
                found.gaps.extend(after - before for before, after in itertools.pairwise(times) if after < until)

        async def arrive() -> None:
            await asyncio.sleep(PAUSE_SECONDS)
            while prompts and time.perf_counter() < until:
                sent, first, *_ = await read(client, body(PROMPT_TOKENS, ANSWER_TOKENS))
                found.firsts.append(first - sent)
                await asyncio.sleep(PAUSE_SECONDS)

        await asyncio.gather(*(run() for _ in range(STREAMS)), arrive())
    return found


def planned(url: str) -> float:
    """How many prompts were computed for another group. Up to a second old."""
    start = 'trunkline_planned_continuations_total{outcome="went_on"'
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def measure_roles(report: Report, *, quick: bool) -> None:
    """Measure with and without roles, in turn."""
    seconds, rounds = (6.0, 1) if quick else (20.0, 3)
    found = {(roles, prompts): Measured() for roles in ROLES for prompts in (False, True)}
    parted = dict.fromkeys(ROLES, 0.0)
    for number in range(rounds):
        for roles, option in ROLES.items():
            serve = f"--groups 2 --role {option} --threads 1 --disk-tier 0 --kv-memory 512MiB"
            with Server(argparse.Namespace(model="", tp=1, dtype="float32", serve_args=serve)) as server:
                asyncio.run(measure_once(server.url, 1000 + number, 2.0, prompts=True))  # costs are learnt
                for prompts in (False, True):
                    one = asyncio.run(measure_once(server.url, number, seconds, prompts=prompts))
                    found[roles, prompts].gaps += one.gaps
                    found[roles, prompts].firsts += one.firsts
                time.sleep(1.5)
                parted[roles] += planned(server.url)
    for (roles, prompts), all_times in found.items():
        case: dict[str, str | int] = {
            "part": "roles",
            "roles": roles,
            "long prompts": "yes" if prompts else "quiet",
        }
        case |= {"streams": STREAMS, "cores": available_cores()}
        for name, part in (("median", 0.5), ("p99", 0.99), ("longest", 1.0)):
            report.add(
                case, f"between tokens, {name}", float(np.quantile(all_times.gaps, part)) * 1e3, "ms", rounds
            )
        if prompts:
            report.add(case, "first token, median", float(np.median(all_times.firsts)) * 1e3, "ms", rounds)
            report.add(case, "long prompts", len(all_times.firsts), "", rounds)
            report.add(case, "computed elsewhere", parted[roles], "", rounds)
