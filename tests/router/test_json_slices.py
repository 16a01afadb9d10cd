"""Large JSON in slices is the same JSON: values, errors and limits."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from pydantic_core import from_json
from seeds import seeds

from trunkline.router.http import json_slices
from trunkline.router.http.json_slices import (
    DEPTH_MAX,
    LIGHT_BYTES,
    LIGHT_MARKS,
    PARTS_MAX,
    PIECE_BYTES,
    STRING_BYTES_MAX,
    VALUES_MAX,
    TooManyPartsError,
    is_light,
    parse_slices,
)

_PIECES = (1, 5, 30)
_STRANGE = b'[]{},:"\\ 1a\x00\xc3'


@pytest.fixture
def tiny_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every border is met by short documents."""
    monkeypatch.setattr(json_slices, "_SLICE_BYTES", 7)


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(5 if depth > 4 else 9)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice([rng.randrange(-(10**9), 10**9), rng.random()])
    if kind < 5:
        return "".join(rng.choice('ab\\"\n[]{},:é\U0001f600 /') for _ in range(rng.randrange(20)))
    if kind < 7:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(6))]
    keys = ("".join(rng.choice('ab\\":,{ ') for _ in range(rng.randrange(4))) for _ in range(rng.randrange(6)))
    return {key: _value(rng, depth + 1) for key in keys}


def _damaged(rng: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed) + 1)
        changed[at : at + rng.randrange(2)] = rng.choice([b"", bytes([rng.choice(_STRANGE)])])
    return bytes(changed)


def _parsed(parse: Any, text: bytes) -> Any:
    """The value with the order of its fields; or that there is none."""
    try:
        return json.dumps(parse(text))
    except ValueError:
        return ValueError


@pytest.mark.usefixtures("tiny_slices")
@pytest.mark.parametrize("seed", seeds(30))
def test_the_same_as_in_one_go(seed: int) -> None:
    rng = random.Random(seed)
    text = json.dumps(_value(rng), ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])).encode()
    for candidate in (text, *(_damaged(rng, text) for _ in range(15))):
        whole = _parsed(lambda part: from_json(part, allow_inf_nan=False), candidate)
        for piece in _PIECES:
            assert _parsed(lambda part, piece=piece: parse_slices(part, piece), candidate) == whole, candidate


@pytest.mark.soak
@pytest.mark.usefixtures("tiny_slices")
@pytest.mark.parametrize("seed", seeds(1000))
def test_the_same_as_in_one_go_at_length(seed: int) -> None:
    test_the_same_as_in_one_go(seed)


def test_large_documents() -> None:
    rng = random.Random(seeds(1)[0])
    value = {
        "a": [_value(rng, 2) for _ in range(2000)],
        "b": {str(i): _value(rng, 4) for i in range(5000)},
        "c": 'x"' * 300_000,
    }
    text = json.dumps(value).encode()
    assert len(text) > 2 * PIECE_BYTES
    assert parse_slices(text) == value
    with pytest.raises(ValueError, match="in"):
        parse_slices(text[:-1])


def _long(text: bytes) -> bytes:
    return text + b" " * PIECE_BYTES


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (b"[" + b"{}," * PARTS_MAX + b"{}]", PARTS_MAX),
        (b"[" + b'"",' * PARTS_MAX + b'""]', PARTS_MAX),
        (b"{" + b'"a":1,' * PARTS_MAX + b'"a":1}', PARTS_MAX),
        (b"[" + b"1," * (VALUES_MAX + 1) + b"1]", VALUES_MAX),
        (b'{"a":"' + b"x" * STRING_BYTES_MAX + b'"}', STRING_BYTES_MAX),
    ],
    ids=["objects", "strings", "fields", "values", "characters"],
)
def test_too_many_parts(text: bytes, limit: int) -> None:
    with pytest.raises(TooManyPartsError, match=str(limit)):
        parse_slices(_long(text))


def test_as_many_parts_as_are_allowed() -> None:
    assert len(parse_slices(_long(b"[" + b"{}," * (PARTS_MAX - 2) + b"{}]"))) == PARTS_MAX - 1
    assert len(parse_slices(_long(b"[" + b"1," * VALUES_MAX + b"1]"))) == VALUES_MAX + 1


def test_nesting() -> None:
    assert parse_slices(_long(b"[" * DEPTH_MAX + b"]" * DEPTH_MAX))
    with pytest.raises(ValueError, match=str(DEPTH_MAX)):
        parse_slices(_long(b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1)))


def test_deep_and_large() -> None:
    inner = b'"' + b"x" * PIECE_BYTES + b'"'
    value = parse_slices(b'{"a":[' * 90 + inner + b"]}" * 90)
    for _ in range(90):
        [value] = value["a"]
    assert value == "x" * PIECE_BYTES


def test_long_texts_are_light() -> None:
    assert is_light(_long(b'{"messages":["' + b"word " * 200_000 + b'"]}'))
    assert is_light(_long(b"{}" * LIGHT_MARKS))
    assert not is_light(_long(b"{}" * (LIGHT_MARKS + 1)))
    assert not is_light(b" " * (LIGHT_BYTES + 1))
