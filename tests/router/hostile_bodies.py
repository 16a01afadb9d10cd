"""Requests that cost a server much more than they cost their sender."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from router.harness import MESSAGES

_MIB: Final = 1 << 20
_LARGEST: Final = 16 * _MIB - 256
_EMOJI: Final = "\U0001f600"
_SAID: Final = {"role": "user", "content": "x"}
_CALL: Final = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class Hostile(NamedTuple):
    """A request, and what may be answered."""

    path: str
    make: Callable[[], bytes]
    statuses: tuple[int, ...] = (400, 413)
    headers: dict[str, str] = {}  # noqa: RUF012 (a NamedTuple's default, never changed)


def _json(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(fields, ensure_ascii=False).encode()


def _many(head: bytes, item: bytes, tail: bytes, size: int = _LARGEST) -> Callable[[], bytes]:
    """`item` repeated, with commas, up to `size` bytes."""
    return lambda: head + b",".join([item] * ((size - len(head) - len(tail)) // (len(item) + 1))) + tail


def _text(path_head: bytes, piece: bytes, tail: bytes, size: int = _LARGEST) -> Callable[[], bytes]:
    return lambda: path_head + piece * ((size - len(path_head) - len(tail)) // len(piece)) + tail


def _properties(functions: int, properties: int) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties)}}
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(functions)]


_CHAT: Final = "/v1/chat/completions"
_PLAIN: Final = "/v1/completions"
_USER: Final = b'{"messages":[{"role":"user","content":"'
HOSTILE: Final[dict[str, Hostile]] = {
    "prompts": Hostile(_PLAIN, _json(prompt=[[5, 6]] * 1024, max_tokens=1), (200,)),
    "prompts streamed": Hostile(_PLAIN, _json(prompt=[[5, 6]] * 1024, max_tokens=1, stream=True), (200,)),
    "long prompts": Hostile(_PLAIN, _json(prompt=[[5] * 2000] * 600, max_tokens=1, echo=True), (200,)),
    "scored prompts": Hostile(
        _PLAIN, _json(prompt=[[5] * 100] * 128, max_tokens=1, echo=True, logprobs=20), (400,)
    ),
    "scores": Hostile(_PLAIN, _json(prompt=[[5] * 40] * 128, max_tokens=1, echo=True, prompt_logprobs=20), (200,)),
    "choices": Hostile(_PLAIN, _json(prompt="x", n=256, max_tokens=50, logprobs=20), (200,)),
    "choices of a chat": Hostile(_CHAT, _json(messages=MESSAGES, n=256, max_tokens=50), (200,)),
    "best_of": Hostile(_PLAIN, _json(prompt="x", best_of=256, max_tokens=50), (200,)),
    "ids": Hostile("/detokenize", _many(b'{"tokens":[', b"5", b"]}", 9 * _MIB)),
    "a million ids": Hostile("/detokenize", _many(b'{"tokens":[', b"2005", b"]}", 5 * _MIB), (200,)),
    "an id that is none": Hostile("/detokenize", _many(b'{"tokens":[', b"5", b',"a"]}', 2 * _MIB)),
    "prose": Hostile("/tokenize", _json(prompt="os.path.join(a, b) " * 140_000, return_token_strs=True), (200,)),
    "emoji": Hostile("/tokenize", _text(b'{"prompt":"', _EMOJI.encode(), b'"}')),
    "emoji that fit": Hostile("/tokenize", _text(b'{"prompt":"', _EMOJI.encode(), b'"}', 6 * _MIB)),
    "messages to tokenize": Hostile("/tokenize", _json(messages=[_SAID] * 16_000), (200,)),
    "metadata": Hostile("/v1/sessions", _many(b'{"metadata":[', b"{}", b"]}")),
    "keys of metadata": Hostile("/v1/sessions", _json(metadata={str(i): "1" for i in range(60_000)})),
    "300,000 messages": Hostile(_CHAT, _json(messages=[_SAID] * 300_000)),
    "messages": Hostile(_CHAT, _json(messages=[_SAID] * 16_384)),
    "messages too many": Hostile(_CHAT, _json(messages=[_SAID] * 16_385)),
    "bad messages": Hostile(_CHAT, _json(messages=[{"role": 5}] * 16_384)),
    "messages in the loop": Hostile(_CHAT, _json(messages=[_SAID] * 1_900)),
    "text parts": Hostile(
        _CHAT, _json(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 17_000}])
    ),
    "tool calls": Hostile(_CHAT, _json(messages=[{"role": "assistant", "tool_calls": [_CALL] * 7_500}])),
    "escapes": Hostile(_CHAT, _text(_USER, b"\\u00e9", b'"}]}')),
    "escapes that fit": Hostile(_CHAT, _text(_USER, b"\\u00e9", b'"}]}', 12 * _MIB)),
    "mixed widths": Hostile(_CHAT, _text(_USER, b"aaaaaaaaaaaa" + _EMOJI.encode(), b'"}]}', 12 * _MIB)),
    "text to cut": Hostile(
        _PLAIN, _json(prompt="x " * (_MIB - 8), truncate_prompt_tokens=100, max_tokens=1), (200,)
    ),
    "nesting": Hostile(_CHAT, lambda: b'{"a":' + b"[" * 8_000_000 + b"]" * 8_000_000 + b"}"),
    "nesting in the loop": Hostile(_CHAT, lambda: b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}"),
    "numbers": Hostile(_CHAT, _many(b'{"a":[', b"12345678901234567890123", b"]}")),
    "empty strings": Hostile(_CHAT, _many(b'{"a":[', b'""', b"]}")),
    "backslashes": Hostile(_CHAT, _text(_USER, b"\\\\", b'"}]}', 12 * _MIB)),
    "unknown keys": Hostile(_CHAT, lambda: json.dumps({str(i): 1 for i in range(100_000)}).encode()),
    "tools": Hostile(_CHAT, _json(messages=MESSAGES, tools=_properties(128, 100))),
    "large tools": Hostile(_CHAT, _json(messages=MESSAGES, tools=_properties(16, 1000))),
    "one large tool": Hostile(
        _CHAT, _text(b'{"messages":[' + json.dumps(_SAID).encode() + b'],"tools":["', b"x", b'"]}', 11 * _MIB)
    ),
    "stops": Hostile(_CHAT, _json(messages=MESSAGES, stop=["a"] * 100_000)),
    "logit_bias": Hostile(_CHAT, _json(messages=MESSAGES, logit_bias={str(i): 1 for i in range(100_000)})),
    "allowed ids": Hostile(_PLAIN, _json(prompt=[[5, 6]] * 16, allowed_token_ids=[7] * 262_144), (200,)),
    "bad allowed ids": Hostile(_PLAIN, _json(prompt="x", allowed_token_ids=[-1] * 262_144)),
    "bad words": Hostile(_PLAIN, _json(prompt="x", bad_words=[_EMOJI * 128] * 128), (200,)),
    "schema": Hostile(
        _CHAT,
        _json(
            messages=MESSAGES,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"enum": [f"v{i}" for i in range(80_000)]}},
            },
        ),
    ),
    "guided choices": Hostile(_PLAIN, _json(prompt="x", guided_choice=[f"{i}" + "y" * 1000 for i in range(1024)])),
    "anthropic": Hostile("/v1/messages", _json(max_tokens=5, messages=[_SAID] * 16_384)),
    "anthropic blocks": Hostile(
        "/v1/messages",
        _json(max_tokens=5, messages=[{"role": "user", "content": [{"type": "text", "text": "y"}] * 17_000}]),
    ),
    "anthropic count": Hostile("/v1/messages/count_tokens", _json(messages=[_SAID] * 16_384), (200,)),
    "responses": Hostile("/v1/responses", _json(input=[_SAID] * 16_000)),
    "responses calls": Hostile(
        "/v1/responses",
        _json(
            input=[
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "x"},
            ]
            * 6_000
        ),
    ),
    "session of many messages": Hostile("/v1/sessions", _json(messages=[_SAID] * 16_000), (200,)),
    "session of a long text": Hostile(
        "/v1/sessions", _json(messages=[{"role": "user", "content": f"x{_EMOJI}" * _MIB}])
    ),
    "fork": Hostile("/v1/sessions/sess_none/fork", _many(b'{"metadata":[', b"{}", b"]}"), (413,)),
    "pml": Hostile(_PLAIN, _json(pml="<prompt schema='x'>" + "<a/>" * (2 * _MIB) + "</prompt>")),
    "modules": Hostile(
        _PLAIN,
        _json(prompt={"schema": "x", "modules": [{"path": f"a{i}", "args": {"k": "v"}} for i in range(12_000)]}),
        (400, 404),
    ),
    "pml schema": Hostile(
        "/v1/schemas",
        _json(name="x", pml="<schema name='x'>" + "<module name='m'>t</module>" * 200_000 + "</schema>"),
    ),
    "idempotent": Hostile(_PLAIN, _text(b'{"prompt":"', b"a", b'"}', 11 * _MIB), headers={"Idempotency-Key": "k"}),
}
"""By a name for people."""
