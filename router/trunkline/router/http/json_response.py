"""JSON answers and server-sent events, as bytes. A stream encodes one event for each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response

_encode = msgspec.json.Encoder().encode


class JsonResponse(Response):
    """An answer whose body is a Struct, dict or list as JSON."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(_encode(content), status_code=status, headers=headers)


def encoded(content: Any) -> msgspec.Raw:
    """Return a part of an answer as JSON. An answer of many large parts is encoded part by part: while one call
    encodes, no other thread of the process runs."""
    return msgspec.Raw(_encode(content))


def event(content: Any) -> bytes:
    """Return a server-sent event with a JSON payload."""
    return b"data: " + _encode(content) + b"\n\n"


class TextEvents:
    """Events that differ in their text only, as nearly all of a stream do: all else is encoded once."""

    def __init__(self, encode: Callable[[int, str], bytes]) -> None:
        """`encode`: the whole event of a choice, by its index, with a text."""
        self._encode = encode
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        """Return the event of a choice with a text."""
        around = self._around.get(index)
        if around is None:
            head, _, tail = self._encode(index, _MARK).rpartition(_MARK_JSON)
            around = self._around[index] = head, tail
        return around[0] + _encode(text) + around[1]


_MARK: Final = "\ue000the text goes here\ue000"
_MARK_JSON: Final = _encode(_MARK)
"""The text is the last of an event's fields that can hold anything a client or a model says."""

DONE_EVENT = b"data: [DONE]\n\n"
