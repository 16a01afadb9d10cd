"""Prompts of token ids in bodies: what is read into an array is what the whole body has."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from seeds import seeds

from trunkline.kvstore.chunks import pack_int32
from trunkline.kvstore.native_names import library
from trunkline.router.errors import ApiError
from trunkline.router.http.body import parse_json_object
from trunkline.router.http.listed_prompts import parse_body
from trunkline.router.text.token_ids import TokenIds

pytestmark = pytest.mark.sanitized

needs_library = pytest.mark.skipif(library is None, reason="the compiled library does not run here")
BODIES = (
    b'{"prompt": [1, 2, 3], "max_tokens": 4}',
    b'{"stream":true,"prompt":[0]}',
    b' {\r\n"prompt"\t:\n [ 7 ,\t2147483647\r\n] } ',
)
OTHERS = (
    b'{"prompt": "text", "stop": [1, 2]}',
    b'{"prompt": []}',
    b'{"prompt": [[1, 2], [3]]}',
    b'{"prompt": ["a", "b"]}',
    b'{"prompt": [true, 1]}',
    b'{"prompt": [1, null]}',
    b'{"prompt": [1.0, 2]}',
    b'{"prompt": [1e3]}',
    b'{"prompt": [-1, 5]}',
    b'{"prompt": [2147483648]}',
    b'{"prompt": [99999999999999999999999999]}',
    b'{"prompt": [4294967297, 2]}',  # 1 in 32 bits
    b'{"prompt": [18446744073709551617, 2]}',  # 1 in 64 bits
    b'{"prompt": {"schema": "s", "ids": [1]}}',
    b'{"metadata": {"prompt": [1, 2]}}',
    b'{"metadata": {"prompt": [1, 2]}, "prompt": [3]}',
    b'{"a\\"prompt": [1, 2]}',
    b'{"user": "\\"prompt\\": [1, 2]", "prompt": [3]}',
    b'{"prompt": [1, 2], "prompt": "last"}',
    b'{"prompt": "first", "prompt": [1, 2]}',
    b'["prompt", [1]]',
    b"{}",
)
BROKEN = (
    b'{"prompt": [1, 2',
    b'{"prompt": [1, 2]',
    b'{"prompt": [1, 2]]}',
    b'{"prompt": [1,, 2]}',
    b'{"prompt": [1 2]}',
    b'{"prompt": [01]}',
    b'{"prompt": [00]}',
    b'{"prompt": [1,\x0c2]}',
    b'{"prompt": [1,]}',
    b'{"prompt": [,1]}',
    b'{"prompt": [1 /* */, 2]}',
    b'{"prompt":\x0b[1]}',
    b'{"prompt"}[1]',
    b'"prompt":[1]',
)


def outcome(parse: Any, body: bytes) -> Any:
    """What a parser makes of a body: the fields, or the error."""
    try:
        return parse(body)
    except ApiError as error:
        return error.status, error.message, error.code


@needs_library
@pytest.mark.parametrize("body", BODIES)
def test_ids_are_read_into_an_array(body: bytes) -> None:
    fields = parse_body(body)
    assert type(fields["prompt"]) is TokenIds
    assert fields["prompt"].packed == pack_int32(parse_json_object(body)["prompt"])
    assert fields == parse_json_object(body)
    assert list(fields) == list(parse_json_object(body))


@pytest.mark.parametrize("body", OTHERS + BROKEN)
def test_any_other_body_is_what_it_was(body: bytes) -> None:
    assert outcome(parse_body, body) == outcome(parse_json_object, body)


@pytest.mark.parametrize("seed", seeds(4))
def test_bodies_with_random_changes(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [*(bytes([character]) for character in b'[]{},:"\\07-.e \n'), b'"prompt"']
    read = 0
    for _ in range(2000):
        ids = [rng.choice((rng.randrange(10), rng.randrange(1 << 31))) for _ in range(rng.randrange(1, 8))]
        fields = {"model": "m", "prompt": ids, "n": 1, "metadata": {"prompt": [5]}}
        names = rng.sample(list(fields), rng.randrange(1, 5))
        body = json.dumps({name: fields[name] for name in names}, indent=rng.choice((None, 1))).encode()
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(body))
            body = body[:at] + rng.choice(pieces) + body[at + rng.randrange(3) :]
        found = outcome(parse_body, body)
        assert found == outcome(parse_json_object, body), body
        read += isinstance(found, dict) and type(found.get("prompt")) is TokenIds
    assert read > 300 or library is None


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.router.text.token_ids._read_ids", None)
    for body in BODIES:
        assert type(parse_body(body)["prompt"]) is list
