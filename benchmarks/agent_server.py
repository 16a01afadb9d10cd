"""Agents before a real server: conversations of a trace with their lengths divided, several at once.

Each agent sends the requests of one conversation one after the other, a sub-agent's where they were recorded, with
its pauses shortened. What a prompt repeats it repeats word by word; where it goes on from an answer, that is the
answer that the server gave. All words of a run are new to the server.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

import httpx
import numpy as np
from agent_apis import ApiError, Part, Reply, Target, ask
from agent_traces import BLOCK, NONE, Conversation, Request
from small_model import VOCABULARY

TURNS_MIN: Final = 4
ANSWER_MIN: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How conversations are made shorter."""

    divide: int = 32
    """All lengths by this number."""
    window: int = 8192
    """Tokens of prompt and answer: a conversation ends where it does not fit."""
    turns: int = 40
    """Requests of a conversation, at most."""
    hurry: float = 20.0
    """Pauses are divided by this number, …"""
    pause_s: float = 2.0
    """… and none is longer."""


class Script:
    """The prompts of one conversation, as messages, and how much of each is ideal."""

    def __init__(self, whole: Conversation, pace: Pace, salt: str, fronts: set[tuple[int, int]]) -> None:
        """
        Args:
            salt: Makes all words of a run others.
            fronts: Tools and system prompts that were sent in this run; it grows.
        """
        self._whole = whole
        self._pace = pace
        self._salt = salt
        self._fronts = fronts
        self._prompts: dict[int, list[Part]] = {}
        self._answers: dict[int, tuple[str, ...]] = {}

    def requests(self) -> list[Request]:
        """Return the requests that fit, up to the first that does not."""
        fitting: list[Request] = []
        for request in self._whole.requests[: self._pace.turns]:
            if (request.prompt + request.answer) // self._pace.divide + 2 * ANSWER_MIN > self._pace.window:
                break
            fitting.append(request)
        return fitting

    def answer_tokens(self, request: Request) -> int:
        return max(ANSWER_MIN, request.answer // self._pace.divide)

    def pause_s(self, request: Request) -> float:
        think_s = 0.0 if math.isnan(request.think_s) else request.think_s
        return min(think_s / self._pace.hurry, self._pace.pause_s)

    def prompt(self, request: Request) -> tuple[list[Part], int]:
        """Return the messages of a prompt, and how many of its first tokens were sent or answered before."""
        divide, parts, ideal = self._pace.divide, list[Part](), 0
        if request.base == NONE:
            client = request.client
            front = min(request.prompt, client.tools + client.system) // divide
            parts.append(Part("system", self._words(front, f"{self._salt} {client.tools} {client.system}")))
            key = (client.tools, client.system)
            ideal = front if key in self._fronts else 0
            self._fronts.add(key)
        else:
            base = self._whole.requests[request.base]
            goes_on = request.keep == base.blocks and request.prompt >= base.prompt + base.answer
            before = self._prompts[request.base]
            if goes_on:
                parts = [*before, Part("assistant", self._answers[request.base])]
            else:
                parts = _first(before, request.keep * BLOCK // divide)
            ideal = _count(parts)
        new = max(1, request.prompt // divide - _count(parts))
        parts.append(Part("user", self._words(new, f"{self._salt} {self._whole.id} {request.number}")))
        self._prompts[request.number] = parts
        return parts, ideal

    def answered(self, request: Request, words: Sequence[str]) -> None:
        """Note what the server answered."""
        self._answers[request.number] = tuple(words)

    @staticmethod
    def _words(count: int, seed: str) -> tuple[str, ...]:
        rng = Random(seed)
        return tuple(f"w{rng.randrange(2, VOCABULARY)}" for _ in range(count))


def _count(parts: Sequence[Part]) -> int:
    return sum(len(part.words) for part in parts)


def _first(parts: Sequence[Part], count: int) -> list[Part]:
    """Return the first so many words."""
    kept: list[Part] = []
    for part in parts:
        if count <= 0:
            break
        kept.append(Part(part.role, part.words[:count]))
        count -= len(part.words)
    return kept


@dataclass(slots=True)
class Served:
    """What a run has shown. The first requests of agents are apart: all of theirs is computed."""

    prompt: int = 0
    ideal: int = 0
    found: int = 0
    miscounted: int = 0
    """Requests whose prompt had another number of tokens at the server."""
    firsts_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=lambda: {"edited": 0, "going on": 0})
    """Ideal tokens that were not found: behind an edit's place, or of a prompt that only goes on."""
    errors: int = 0

    def count(self, request: Request, parts: Sequence[Part], ideal: int, reply: Reply) -> None:
        self.prompt += reply.prompt_tokens
        self.ideal += ideal
        found = min(reply.cached_tokens, ideal)
        self.found += found
        self.miscounted += reply.prompt_tokens != _count(parts)
        self.token_s.append(reply.token_s)
        (self.ttft_s if request.base != NONE else self.firsts_s).append(reply.ttft_s)
        if request.base != NONE:
            goes_on = len(parts) > 1 and parts[-2].role == "assistant"
            self.lost["going on" if goes_on else "edited"] += ideal - found

    def first(self) -> float:
        """Median time to the first token of agents' first requests, in seconds."""
        return float(np.quantile(self.firsts_s, 0.5)) if self.firsts_s else math.nan

    def ttft(self, share: float) -> float:
        return float(np.quantile(self.ttft_s, share)) if self.ttft_s else math.nan

    def token(self, share: float) -> float:
        return float(np.quantile(self.token_s, share)) if self.token_s else math.nan


def fitting(conversations: Sequence[Conversation], pace: Pace) -> list[Conversation]:
    """Return the conversations of which enough requests fit."""
    return [whole for whole in conversations if len(Script(whole, pace, "", set()).requests()) >= TURNS_MIN]


async def serve(
    target: Target,
    conversations: Sequence[Conversation],
    pace: Pace,
    salt: str,
    seconds: float,
    event: Callable[[], None] | None = None,
) -> tuple[Served, Served]:
    """Let one agent for each conversation work for so many seconds; an agent that is done is not replaced.

    Agents begin within the first fifth of the time, belong to the tenants in turn, and share tools and system
    prompts with those of their tenant only. What is under way at the end is finished.

    Args:
        event: What happens to the server in the middle of the time, beside its requests; it may block. Agents go
            on for half of the time after its end.

    Returns:
        What was shown, and the part of it by requests that were sent in the second half.
    """
    served, later = Served(), Served()
    fronts = [set[tuple[int, int]]() for _ in target.keys]
    begun = time.perf_counter()
    rng = Random(salt)
    ends_s = math.inf if event else seconds

    async def agent(number: int, whole: Conversation, wait_s: float) -> None:
        tenant = number % len(target.keys)
        script = Script(whole, pace, f"{salt} {tenant}", fronts[tenant])
        await asyncio.sleep(wait_s)
        for request in script.requests():
            await asyncio.sleep(script.pause_s(request))
            sent_s = time.perf_counter() - begun
            if sent_s > ends_s:
                return
            parts, ideal = script.prompt(request)
            shown = [served, later] if sent_s > seconds / 2 else [served]
            try:
                reply = await ask(target, parts, script.answer_tokens(request), target.keys[tenant])
            except (ApiError, httpx.HTTPError) as error:
                for each in shown:
                    each.errors += 1
                print(f"# {whole.id}, request {request.number}: {error!r}")
                return
            script.answered(request, reply.words)
            for each in shown:
                each.count(request, parts, ideal, reply)

    async def happen(event: Callable[[], None]) -> None:
        nonlocal ends_s
        await asyncio.sleep(seconds / 2)
        try:
            await asyncio.to_thread(event)
        finally:
            ends_s = max(seconds, time.perf_counter() - begun + seconds / 2)

    waits = [rng.uniform(0.0, seconds / 5) for _ in conversations]
    agents = [agent(number, *each) for number, each in enumerate(zip(conversations, waits, strict=True))]
    await asyncio.gather(*agents, *([happen(event)] if event else []))
    return served, later
