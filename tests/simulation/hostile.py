"""Messages that no right peer sends: valid ones with one or more places changed, by structure and by byte."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec

_INTEGERS: Final = (
    *(-(1 << 63), -(1 << 31), -(1 << 31) - 1, -2, -1, 0, 1, 2, 255, 256, 65_535, 65_536),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
_FLOATS: Final = (float("nan"), float("inf"), float("-inf"), -0.0, -1.0, 1e308, -1e308, 5e-324, 1e39)


def _bytes(chosen: random.Random) -> bytes:
    kind = chosen.randrange(6)
    if kind == 0:
        return b""
    if kind == 1:
        return chosen.randbytes(chosen.randrange(1, 40))
    if kind == 2:
        return bytes(chosen.choice((4, 8, 16, 1 << 16, 1 << 20)))
    values = [chosen.choice(_INTEGERS[:16]) & 0xFFFF_FFFF for _ in range(chosen.randrange(1, 9))]
    return struct.pack(f"<{len(values)}I", *values) + (b"x" if kind == 3 else b"")


def _text(chosen: random.Random) -> str:
    return chosen.choice(["", "ready", "stop", "x" * 70_000, "\0", "\U0010ffff", "a/b", "../..", "%s{}", "NaN"])


def _value(chosen: random.Random) -> Any:
    """Of any type."""
    makers: list[Callable[[], Any]] = [
        lambda: chosen.choice(_INTEGERS),
        lambda: chosen.choice(_FLOATS),
        lambda: _bytes(chosen),
        lambda: _text(chosen),
        list,
        lambda: [chosen.choice(_INTEGERS)] * chosen.choice((1, 3, 5000)),
        lambda: {chosen.choice(_INTEGERS): _bytes(chosen)},
        lambda: chosen.choice((None, True, False)),
        lambda: _nested(chosen.choice((3, 200, 5000))),
    ]
    return chosen.choice(makers)()


def _nested(depth: int) -> msgspec.Raw:
    return msgspec.Raw(b"\x91" * depth + b"\xc0")


def _alike(chosen: random.Random, value: Any) -> Any:
    """Of the same type, so that it comes further than the decoder."""
    match value:
        case bool():
            return not value
        case int():
            return min(max(chosen.choice((*_INTEGERS, value + 1, value - 1, -value)), -(1 << 63)), (1 << 64) - 1)
        case float():
            return chosen.choice((*_FLOATS, -value, value * 1e9))
        case bytes():
            shorter = value[: chosen.randrange(len(value) + 1)]
            return chosen.choice((shorter, value * 2, value + b"\0", _bytes(chosen), _bytes(chosen)))
        case str():
            return _text(chosen)
        case list():
            return chosen.choice((value[:-1], value * 2, value * 300, list(reversed(value)), []))
        case dict():
            return {chosen.choice(_INTEGERS): next(iter(value.values()), b"")}
    return _value(chosen)


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """All (container, key) in it."""
    pairs = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, inner in pairs:
        found.append((value, key))
        _places(inner, found)
    return found


def altered(chosen: random.Random, message: msgspec.Struct) -> bytes:
    """The message, encoded, with something wrong in it."""
    encoded = msgspec.msgpack.encode(message)
    kind = chosen.randrange(20)
    if kind == 0:  # cut off
        return encoded[: chosen.randrange(len(encoded))]
    if kind <= 3:  # bits that fell over
        damaged = bytearray(encoded)
        for _ in range(chosen.choice((1, 1, 4, 32))):
            damaged[chosen.randrange(len(damaged))] ^= 1 << chosen.randrange(8)
        return bytes(damaged)
    if kind == 4:
        return encoded + chosen.randbytes(5)
    if kind == 5:
        return chosen.randbytes(chosen.randrange(60))
    content = msgspec.msgpack.decode(encoded)
    if kind == 6:  # of another version, with fewer or more fields
        del content[chosen.randrange(1, len(content) + 1) :]
        content += [_value(chosen) for _ in range(chosen.randrange(3))]
        return msgspec.msgpack.encode(content)
    for _ in range(chosen.choice((1, 1, 1, 2, 3))):
        places = _places(content, [])
        places = [place for place in places if place[1] != 0 or place[0] is not content] or places
        container, key = chosen.choice(places)
        inner = container[key]
        container[key] = _alike(chosen, inner) if chosen.random() < 0.8 else _value(chosen)
    return msgspec.msgpack.encode(content)
