"""The names of chunks: the compiled form and Python make the same ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
from seeds import seeds

from trunkline.kvstore import chunks
from trunkline.kvstore.chunks import NAME_BYTES, chain, chunk_name
from trunkline.kvstore.fingerprint import FORMAT
from trunkline.kvstore.native_names import write_names

pytestmark = pytest.mark.sanitized


def one_by_one(start: bytes, tokens: bytes, size: int, marker: bytes) -> list[bytes]:
    names = [start]
    for at in range(0, len(tokens), 4 * size):
        names.append(chunk_name(names[-1], marker + tokens[at : at + 4 * size]))
    return names[1:]


@pytest.mark.parametrize("seed", seeds(2))
def test_a_chain_is_made_of_single_names(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(1000):
        size = rng.choice((1, 2, 4, 7, 16, 24, 28, 29, 32, 60, 64, 128))  # below, at and over a block of the hash
        tokens = rng.randbytes(rng.choice((4 * rng.randrange(12 * size), rng.randrange(40 * size))))
        start, marker = rng.randbytes(16), rng.randbytes(rng.choice((0, 0, 16, 64, 65)))
        assert chain(start, tokens, size, marker) == one_by_one(start, tokens, size, marker)


def test_names_stay_what_they_are() -> None:
    """Disks and remote stores hold them: with other names `fingerprint.FORMAT` must be another one, too."""
    tokens, start = b"".join(token.to_bytes(4, "little") for token in range(200)), bytes(range(16))
    assert chain(start, tokens, 64)[2:] == [
        bytes.fromhex("0d7e7b7e76394fa0b0dc7ef0490f06c4"),
        bytes.fromhex("97e97e31dd7518f15984506e9f36d2c6"),
    ]
    assert chain(start, tokens, 64, b"root" * 4)[3] == bytes.fromhex("aec944ca272d8e9e5ea0367672ae24b2")
    assert FORMAT == 3


@pytest.mark.skipif(write_names is None, reason="the library of names is not installed or does not run here")
def test_long_chains_are_made_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def noted(*arguments: Any) -> None:
        made.append(1)
        assert write_names is not None
        write_names(*arguments)

    monkeypatch.setattr(chunks, "write_names", noted)
    start, tokens = bytes(range(16)), bytes(4 * 640)
    by_library = chain(start, tokens, 64)
    monkeypatch.setattr(chunks, "write_names", None)
    assert chain(start, tokens, 64) == by_library
    assert len(by_library) == 10
    assert all(type(name) is bytes and len(name) == NAME_BYTES for name in by_library)
    assert made == [1]
