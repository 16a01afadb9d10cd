"""Bodies with whole conversations, of which only what is new is parsed.

    came before   {"messages": [A, B, C          the bytes, and the messages that were read
    comes now     {"messages": [A, B, C, D, E], "model": …}
    is parsed     {"messages": [ mark  , D, E], "model": …}      the messages before stand where the mark is

Bytes decide whether a body goes on as another one, so what is read is what the whole body has. Where the parser
finds no mark in place of the first message, or anything wrong, the whole body is parsed.

The items of `/v1/responses` (`input`) are such messages, too.

Clients that mark where a cache is to end (`cache_control`) move the marks to what is new: the last messages come
back without. So of the last messages those from the first one with such a mark on are not remembered.
"""

from __future__ import annotations

import secrets
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from trunkline.router.errors import ApiError
from trunkline.router.http.body import parse_json_object
from trunkline.router.http.json_slices import LIGHT_BYTES, LIGHT_MARKS, marks_at_most
from trunkline.router.request_context import current
from trunkline.router.tenancy.auth import cache_salt
from trunkline.router.text.body_memory import BodyMemory, KnownBody
from trunkline.router.text.conversation_memory import LEAST

BYTES_LEAST: Final = 16 << 10
"""Smallest size in bytes of a body that is remembered: shorter ones are parsed in no time."""
_MARK: Final = secrets.token_hex(16)
"""Stands for the messages that are known. No client knows it."""
_MARK_JSON: Final = f'"{_MARK}"'.encode()


_MOVED: Final = b'"cache_control"'
_MOVED_MAX: Final = 4
"""Number of last messages that are looked at for marks that move: clients have them in two turns, and an answer
between."""


class _Messages(msgspec.Struct):
    """The messages of a body as they stand there."""

    messages: list[msgspec.Raw]


class _Input(msgspec.Struct):
    """The items of a body for `/v1/responses` as they stand there."""

    input: list[msgspec.Raw]


_LISTS: Final[dict[str, type[msgspec.Struct]]] = {"messages": _Messages, "input": _Input}
"""By the name of the field in which a body may have a conversation."""


class _Places(NamedTuple):
    """Where the messages of a body are, in bytes."""

    number: int
    """Number of messages."""
    kept: int
    """Number of first messages that are to be remembered."""
    head: int
    """Where the first one begins."""
    head_end: int
    """Where the first one ends."""
    end: int
    """Where the last one ends that is to be remembered."""


def parse_body(body: bytes) -> dict[str, Any]:
    """Return a body as a JSON object. Its messages may be those of an earlier request, and must not be changed.

    Raises:
        ApiError: as `parse_json_object`.
    """
    memory = current().conversations
    if memory is None or not BYTES_LEAST <= len(body) <= min(LIGHT_BYTES, memory.bodies.bytes_max):
        return parse_json_object(body)
    scope = cache_salt(None)
    known = memory.bodies.find(scope, body)
    if known is not None:
        fields = _continued(memory.bodies, scope, known, body)
        if fields is not None:
            return fields
    fields = parse_json_object(body)
    name = next((name for name in _LISTS if isinstance(fields.get(name), list)), "")
    messages = fields.get(name, ())
    if len(messages) < LEAST or (name == "input" and not isinstance(messages[0], dict)):  # texts for embeddings
        return fields
    if (weight := marks_at_most(body)) <= LIGHT_MARKS:
        places = _places(body, name)
        if places is not None and places.number == len(messages) and places.kept:
            known = KnownBody(body[: places.end], places.head, tuple(messages[: places.kept]), weight, name)
            memory.bodies.put(scope, known, None)
    return fields


def _continued(memory: BodyMemory, scope: bytes, known: KnownBody, body: bytes) -> dict[str, Any] | None:
    """Return the fields of a body that begins as a known one; None: it must be parsed as a whole."""
    head, prefix, name = known.head, len(known.prefix), known.name
    short = b"".join((body[:head], _MARK_JSON, body[prefix:]))
    if known.weight + marks_at_most(short) > LIGHT_MARKS:
        return None
    try:
        fields = parse_json_object(short)
    except ApiError:
        return None
    new, places = fields.get(name), _places(short, name)
    if not isinstance(new, list) or places is None or len(new) != places.number or new[0] != _MARK:
        return None
    if (places.head, places.head_end) != (head, head + len(_MARK_JSON)):
        return None
    fields[name] = [*known.messages, *new[1:]]
    if places.kept > 1:
        end = places.end - len(_MARK_JSON) - head + prefix
        weight = known.weight + marks_at_most(short[places.head_end : places.end])
        longer = KnownBody(body[:end], head, (*known.messages, *new[1 : places.kept]), weight, name)
        memory.put(scope, longer, known)
    return fields


def _places(body: bytes, name: str) -> _Places | None:
    """Return where the messages of a body are; None: that cannot be said, or there are none. `name`: of their
    field."""
    try:
        found: list[msgspec.Raw] = getattr(msgspec.json.decode(body, type=_LISTS[name]), name)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not found:
        return None
    kept = len(found)
    for at in range(max(0, kept - _MOVED_MAX), kept):
        if _MOVED in bytes(found[at]):
            kept = at
            break
    # Each is a view of the body.
    first, last = (np.frombuffer(raw, np.uint8) for raw in (found[0], found[max(0, kept - 1)]))
    start = np.frombuffer(body, np.uint8).ctypes.data
    head, tail = first.ctypes.data - start, last.ctypes.data - start
    if not 0 <= head <= tail < len(body):
        return None
    return _Places(len(found), kept, head, head + len(first), tail + len(last))
