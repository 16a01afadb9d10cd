"""The part `turn` of `kv_travel`: the time to the first token of a turn, by where its conversation's KV is.

Two groups of one worker each take requests in turn. One computes a conversation; after a while the other one gets
the next turn of it, `NEW` tokens longer, and then the first one gets it, too:

- `home`: the KV is on the device of the group that has the turn.
- `memory`, `tcp`, `redis`, `s3`: only the other group has it, or the remote tier. It is read in the memory of a
  process on the same host; comes by TCP with wire keys (groups in process namespaces of their own); comes from a
  store (`--peers off`), whose server runs on this machine.
- `recomputed`: a prompt of the same length that is new.

The pools of all groups have been touched before.

Each way has its own `home` and `recomputed` in the same round; ratios are medians of each round's ratio.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import httpx
from kv_travel_groups import Answer, Groups, ask, can_part
from kv_travel_remote import redis_server, s3_server
from report import Report
from serving import Prompts, model_name
from small_model import VOCABULARY, small_model

NEW: Final = 40
LONG_ROUNDS: Final = 2
"""Number of rounds with the longer lengths."""
CHUNK: Final = 64
OPTIONS: Final = ("--tp", "1", "--threads", "1", "--disk-tier", "0", "--policy", "round-robin")
SAVED_S: Final = 0.5
"""In this time a conversation's last chunks have come to host memory, and the router knows of them."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and lengths of conversations in whole chunks."""

    name: str
    folder: str
    vocabulary: int
    options: tuple[str, ...]
    lengths: tuple[int, ...]


@dataclass(slots=True)
class Turns:
    """Answers by where the KV was, in rounds."""

    recomputed: list[Answer] = field(default_factory=list)
    away: list[Answer] = field(default_factory=list)
    home: list[Answer] = field(default_factory=list)


def models() -> list[Model]:
    """The models to be measured."""
    demo = Model("demo", "demo", 4096, ("--kv-memory", "256MiB"), (24 * CHUNK,))  # its context ends at 2,048
    options = ("--dtype", "bfloat16", "--kv-memory", "256MiB")
    return [demo, Model("110 M", str(small_model()), VOCABULARY, options, (24 * CHUNK, 94 * CHUNK))]


def measure_turns(report: Report, *, quick: bool) -> None:
    """Measure all ways that are possible on this machine."""
    rounds = 3 if quick else 4
    for model in models():
        lengths = model.lengths[:1] if quick else model.lengths
        with ExitStack() as stack:
            stores = {
                "redis": stack.enter_context(redis_server()),
                "s3": stack.enter_context(s3_server()),
            }
            ways: dict[str, dict[str, Any]] = {"memory": {}}
            if can_part():
                ways["tcp"] = {"apart": True}
            for store, url in stores.items():
                if url:
                    ways[store] = {
                        "options": ("--peers", "off", "--remote-tier", url, "--records", "sqlite::memory:")
                    }
            groups = {
                way: stack.enter_context(
                    Groups(
                        model.folder,
                        2,
                        *OPTIONS,
                        *model.options,
                        *settings.get("options", ()),
                        apart=settings.get("apart", False),
                    )
                )
                for way, settings in ways.items()
            }
            for served in groups.values():
                served.touch_memory()
            found = asyncio.run(_all_turns(groups, model, lengths, rounds))
        for (length, way), turns in found.items():
            _report(report, model, length, way, turns)


async def _all_turns(
    groups: dict[str, Groups], model: Model, lengths: tuple[int, ...], rounds: int
) -> dict[tuple[int, str], Turns]:
    prompts = Prompts(model.vocabulary, 0)
    found = {(length, way): Turns() for length in lengths for way in groups}
    for number in range(rounds + 1):
        for way, served in groups.items():
            async with httpx.AsyncClient(base_url=served.url, timeout=300) as client:
                for length in lengths[: 1 if number > LONG_ROUNDS else None]:
                    turns = Turns() if not number else found[length, way]  # what comes first is slow
                    await _one_round(client, served, prompts, length, turns, stores=way in ("redis", "s3"))
    return found


async def _one_round(
    client: httpx.AsyncClient, served: Groups, prompts: Prompts, length: int, turns: Turns, *, stores: bool
) -> None:
    model = model_name(served.url)
    text = prompts.take(length)

    async def turn(prompt: list[int]) -> Answer:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        return await ask(client, "/v1/completions", body)

    turns.recomputed.append(await turn([*text, *prompts.take(NEW)]))
    await asyncio.sleep(SAVED_S)
    if stores:
        served.settle(
            'tier_writes_total{controller="0",tier="remote"', 'tier_writes_total{controller="1",tier="remote"'
        )
    turns.away.append(await turn([*text, *prompts.take(NEW)]))
    await asyncio.sleep(SAVED_S)
    turns.home.append(await turn([*text, *prompts.take(NEW)]))


def _report(report: Report, model: Model, length: int, way: str, turns: Turns) -> None:
    case = {"part": "turn", "model": model.name, "cached tokens": length, "KV": way}
    runs = len(turns.away)

    def ms(answers: list[Answer]) -> float:
        return 1e3 * median(answer.first_s for answer in answers)

    def ratio(above: list[Answer], below: list[Answer]) -> float:
        return median(a.first_s / b.first_s for a, b in zip(above, below, strict=True))

    report.add(case, "first token", ms(turns.away), "ms", runs)
    report.add(case, "at home", ms(turns.home), "ms", runs)
    report.add(case, "recomputed", ms(turns.recomputed), "ms", runs)
    report.add(case, "of home", ratio(turns.away, turns.home), "x", runs)
    report.add(case, "faster than recomputed", ratio(turns.recomputed, turns.away), "x", runs)
    found = median(answer.cached_tokens for answer in turns.away)
    report.add(case, "found", 100 * found / length, "%", runs)
