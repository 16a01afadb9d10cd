"""One streamed request of an agent over each API: what is sent, and what is read from the stream.

Texts are words of small_model.py's vocabulary, one token each, so that lengths in tokens are exact everywhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import httpx

CHAT_TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
"""Nothing but the words."""


class Part(NamedTuple):
    """A message."""

    role: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass(slots=True)
class Reply:
    """What came back. Times are seconds of `time.perf_counter`."""

    sent_at: float
    first_at: float = 0.0
    ended_at: float = 0.0
    words: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.sent_at

    @property
    def token_s(self) -> float:
        """Time per token after the first."""
        return (self.ended_at - self.first_at) / max(1, len(self.words) - 1)


class ApiError(RuntimeError):
    """The server refused a request, or its stream is not of the API's form."""


def _completions(model: str, parts: list[Part], tokens: int) -> dict[str, Any]:
    ids = [int(word[1:]) for part in parts for word in part.words]
    return {**_open(model, tokens), "prompt": ids}


def _chat(model: str, parts: list[Part], tokens: int) -> dict[str, Any]:
    return {**_open(model, tokens), "messages": [{"role": part.role, "content": part.text} for part in parts]}


def _open(model: str, tokens: int) -> dict[str, Any]:
    head = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return {**head, "stream_options": {"include_usage": True}}


def _messages(model: str, parts: list[Part], tokens: int) -> dict[str, Any]:
    system = [{"type": "text", "text": part.text} for part in parts if part.role == "system"]
    turns = [{"role": part.role, "content": part.text} for part in parts if part.role != "system"]
    head = {"model": model, "max_tokens": tokens, "temperature": 0, "stream": True}
    return {**head, "messages": turns, **({"system": system} if system else {})}


def _responses(model: str, parts: list[Part], tokens: int) -> dict[str, Any]:
    items = [{"role": part.role, "content": part.text} for part in parts]
    head = {"model": model, "max_output_tokens": tokens, "temperature": 0, "stream": True, "store": False}
    return {**head, "input": items}


def _read_openai(event: dict[str, Any], reply: Reply) -> str:
    usage = event.get("usage")
    if usage:
        reply.prompt_tokens = usage["prompt_tokens"]
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event.get("choices", []):
        return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
    return ""


def _read_messages(event: dict[str, Any], reply: Reply) -> str:
    usage = event.get("usage") or (event.get("message") or {}).get("usage")
    if usage and "input_tokens" in usage:
        cached = usage.get("cache_read_input_tokens") or 0
        written = usage.get("cache_creation_input_tokens") or 0
        reply.prompt_tokens, reply.cached_tokens = usage["input_tokens"] + cached + written, cached
    return str((event.get("delta") or {}).get("text") or "")


def _read_responses(event: dict[str, Any], reply: Reply) -> str:
    usage = (event.get("response") or {}).get("usage")
    if usage:
        reply.prompt_tokens = usage["input_tokens"]
        reply.cached_tokens = (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0
    return str(event.get("delta") or "") if event.get("type") == "response.output_text.delta" else ""


class Api(NamedTuple):
    """One of the APIs: its path, the body of a request, how an event of its stream is read, how a key is sent."""

    path: str
    body: Callable[[str, list[Part], int], dict[str, Any]]
    read: Callable[[dict[str, Any], Reply], str]
    key: Callable[[str], dict[str, str]]


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _x_api_key(key: str) -> dict[str, str]:
    return {"x-api-key": key}


APIS: Final = {
    "completions": Api("/v1/completions", _completions, _read_openai, _bearer),
    "chat": Api("/v1/chat/completions", _chat, _read_openai, _bearer),
    "messages": Api("/v1/messages", _messages, _read_messages, _x_api_key),
    "responses": Api("/v1/responses", _responses, _read_responses, _bearer),
}


def events(lines: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON events of a stream's lines."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how it is asked."""

    client: httpx.AsyncClient
    api: Api
    model: str
    keys: tuple[str, ...] = ("",)
    """API keys, one for each tenant; an empty one: the server asks for none."""


async def ask(target: Target, parts: list[Part], tokens: int, key: str = "") -> Reply:
    """Send a request and read its stream.

    Raises:
        ApiError: The server refused it, or it told no usage.
    """
    reply, text, api = Reply(time.perf_counter()), "", target.api
    body, headers = api.body(target.model, parts, tokens), api.key(key) if key else {}
    async with target.client.stream("POST", api.path, json=body, headers=headers) as response:
        if response.status_code != 200:
            raise ApiError(f"{response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            for event in events([line]):
                said = api.read(event, reply)
                if said and not reply.first_at:
                    reply.first_at = time.perf_counter()
                text += said
    reply.ended_at = time.perf_counter()
    reply.words = text.split()
    if not reply.prompt_tokens or not reply.first_at:
        raise ApiError(f"{api.path} told no usage or no text")
    return reply
