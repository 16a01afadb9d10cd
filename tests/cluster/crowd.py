"""Many clients at once: what they ask, made from a seed, and what they are told.

A *script* is what one client asks, one after the other; each answer is a stream. Scripts of the same seed ask the
same, so that what is answered while processes die can be compared with what is answered in peace.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import httpx
from cluster.module_calls import prompt_source, schema_source

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_SUBJECTS: Final = ("os.path.join", "str.split", "json.dumps", "dict.get", "len", "sorted", "open", "zip", "range")
_SHARED: Final = "The functions of the standard library are described here, each with an example. " * 12
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 12},
    },
    "required": ["name", "items"],
}
_REGEXES: Final = ("[a-z]+(, [a-z]+)*", "([A-Z][a-z]+ )+", "[0-9]+( [+*-] [0-9]+)* = [0-9]+")
_TURNS: Final = 3
TRIES_MAX: Final = 20
QUICK_KINDS: Final = ("greedy", "sampled", "several", "schema", "shared", "shared", "session")
ALL_KINDS: Final = (*QUICK_KINDS, "regex")
"""An expression takes seconds to compile, anew on each worker."""
EVERY_KIND: Final = (*QUICK_KINDS, "beams", "modules")
"""Modules are those of `MODULES`."""
MODULES: Final = schema_source("crowd")
"""A schema that another client has to make before."""


@dataclass(frozen=True)
class Script:
    """What one client asks."""

    name: str
    path: str
    bodies: tuple[dict[str, Any], ...]
    is_session: bool = False
    """The server keeps the conversation, which begins with `system`."""
    system: str = ""


@dataclass
class Answer:
    """What a client was told, by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    tokens: tuple[int, int] = (0, 0)
    """Prompt and output, as they are billed."""
    error: str = ""


def scripts(seed: int, streams: int, tokens: int, kinds: Sequence[str] = QUICK_KINDS) -> list[Script]:
    """Scripts with so many streams together, of all these kinds.

    Args:
        tokens: length of most answers; grammars and ends of texts make some shorter.
    """
    rng = random.Random(f"scripts {seed}")
    made: list[Script] = []
    while (left := streams - sum(len(script.bodies) for script in made)) > 0:
        kind = rng.choice(kinds)
        if kind == "session" and left < _TURNS:
            kind = "greedy"
        made.append(_script(kind, f"{kind}-{len(made)}", rng, rng.randrange(tokens * 3 // 4, tokens * 5 // 4)))
    return made


def _script(kind: str, name: str, rng: random.Random, tokens: int) -> Script:
    subject = rng.choice(_SUBJECTS)
    body: dict[str, Any] = {
        "prompt": f"{name}. {subject}\n\nReturn the",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "seed": rng.randrange(1 << 31),
    }
    warm = {"temperature": rng.choice((0.7, 1.0)), "top_p": rng.choice((0.9, 1.0))}
    match kind:
        case "sampled":
            body |= warm
        case "several":
            body |= warm | {"n": 2, "max_tokens": tokens // 2}
        case "regex":
            body |= warm | {"structured_outputs": {"regex": rng.choice(_REGEXES)}, "ignore_eos": False}
        case "schema":
            body |= {"structured_outputs": {"json": _SCHEMA}, "ignore_eos": False}
        case "beams":
            body |= {"use_beam_search": True, "beam_width": 3, "n": 2, "max_tokens": tokens // 2}
        case "modules":
            del body["prompt"]
            body |= {"pml": prompt_source("crowd", ("a", rng.choice("bc")), f"{name}. What is {subject}?")}
        case "shared":
            body |= {"prompt": f"{_SHARED}{subject} is", **(warm if rng.random() < 0.5 else {})}
        case "session":
            turns = [f"What does {rng.choice(_SUBJECTS)} do?" for _ in range(_TURNS)]
            del body["prompt"]
            bodies = [body | {"messages": [{"role": "user", "content": turn}]} for turn in turns]
            return Script(name, CHAT, tuple(bodies), is_session=True, system=f"{name}. You know Python.")
    return Script(name, COMPLETIONS, (body,))


class Crowd:
    """Clients of one cluster."""

    def __init__(self, url: str, retries: str = "") -> None:
        """
        Args:
            retries: what the idempotency keys begin with of clients who send a request again that has lost its
                connection; "": nobody does.
        """
        self.answers: dict[tuple[str, int], Answer] = {}
        """By the script's name and the number of the request in it."""
        self.between: set[tuple[str, int]] = set()
        """Streams that have begun and not ended."""
        self.ended = 0
        self.retried = 0
        """Requests that were sent again."""
        self.seconds: dict[str, float] = {}
        """From a script's beginning to its end."""
        self._url = url
        self._retries = retries

    async def all(self, scripts: Sequence[Script], concurrency: int) -> None:
        """Play all scripts, so many at once."""
        slots = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency + 8)
        async with httpx.AsyncClient(base_url=self._url, timeout=120.0, limits=limits) as client:

            async def play(script: Script) -> None:
                async with slots:
                    begun = time.monotonic()
                    await self._play(client, script)
                    self.seconds[script.name] = time.monotonic() - begun

            async with asyncio.TaskGroup() as group:
                for script in scripts:
                    group.create_task(play(script))

    async def _play(self, client: httpx.AsyncClient, script: Script) -> None:
        session: dict[str, Any] = {}
        if script.is_session:
            created = await self._answered(
                script.name, -1, lambda answer, key: _create(client, script, answer, key)
            )
            if created.error:
                self.answers[script.name, 0] = created
                return
            session = {"session_id": created.texts[0]}
        for number, body in enumerate(script.bodies):
            asked = {**body, **session}
            read = partial(self._read, client, script, number, asked)
            self.answers[script.name, number] = answer = await self._answered(script.name, number, read)
            self.ended += 1
            if answer.error:
                return

    async def _answered(
        self, name: str, number: int, ask: Callable[[Answer, dict[str, str]], Awaitable[None]]
    ) -> Answer:
        """Ask until there is an answer."""
        key = {"Idempotency-Key": f"{self._retries} {name} {number}"} if self._retries else {}
        for tries in range(TRIES_MAX if key else 1):
            self.retried += tries > 0
            answer = Answer()
            try:
                await ask(answer, key)
            except httpx.HTTPError as error:
                answer.error = f"{type(error).__name__}: {error}"
                if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
                    continue
            finally:
                self.between.discard((name, number))
            break
        return answer

    async def _read(
        self,
        client: httpx.AsyncClient,
        script: Script,
        number: int,
        body: dict[str, Any],
        answer: Answer,
        headers: dict[str, str],
    ) -> None:
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", script.path, json=asked, headers=headers) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread()).decode()}"
                return
            is_whole = False
            async for event in events(response):
                if event is None:
                    is_whole = True
                    self.between.discard((script.name, number))
                    continue
                take(answer, event)
                if any(answer.texts.values()):
                    self.between.add((script.name, number))
        if not is_whole:
            answer.error = answer.error or "the stream ended without [DONE]"


async def _create(client: httpx.AsyncClient, script: Script, answer: Answer, headers: dict[str, str]) -> None:
    """Make a session; its id is the answer's text."""
    messages = [{"role": "system", "content": script.system}]
    response = await client.post("/v1/sessions", json={"messages": messages}, headers=headers)
    if response.status_code != 200:
        answer.error = f"no session: {response.status_code}: {response.text}"
        return
    answer.texts[0] = str(response.json()["id"])


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    """Server-sent events; None: `[DONE]`."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield None if line[6:].strip() == b"[DONE]" else json.loads(line[6:])


def take(answer: Answer, event: dict[str, Any]) -> None:
    """Add what an event says."""
    if "error" in event:
        answer.error = f"in the stream: {event['error']}"
        return
    if usage := event.get("usage"):
        answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event["choices"]:
        index = choice["index"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        answer.texts[index] = answer.texts.get(index, "") + (text or "")
        if choice["finish_reason"]:
            answer.reasons[index] = choice["finish_reason"]


def compare(scripts: Sequence[Script], expected: Crowd, got: Crowd) -> list[str]:
    """What is wrong with the answers, one line each."""
    wrong = []
    for script in scripts:
        for number in range(len(script.bodies)):
            before, after = expected.answers.get((script.name, number)), got.answers.get((script.name, number))
            if before is None or before.error:
                wrong.append(f"{script.name}/{number}: not even in peace: {before and before.error}")
            elif after is None or after.error:
                wrong.append(f"{script.name}/{number}: {after.error if after else 'not asked'}")
            elif before != after:
                wrong.append(f"{script.name}/{number}:\n  expected {before}\n  got      {after}")
    return wrong
