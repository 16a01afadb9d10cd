"""Whatever changes KV or the bytes that hold it changes the fingerprint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trunkline.kvstore import fingerprint
from trunkline.kvstore.chunk_format import ChunkFormat, Numbers, kv_format, latent_format
from trunkline.kvstore.fingerprint import (
    FINGERPRINT_BYTES,
    exchange_fingerprint,
    model_fingerprint,
    tier_fingerprint,
)

SIZES = (4, 2, 64, 32)
CHUNK = kv_format(SIZES, "float32", positions="rope 1e4")
MODEL = b"m" * 16


def test_equal_configurations_agree() -> None:
    first = tier_fingerprint(MODEL, CHUNK, 2)
    assert first == tier_fingerprint(MODEL, kv_format(SIZES, "float32", positions="rope 1e4"), 2)
    assert len(first) == FINGERPRINT_BYTES


OTHERS: list[ChunkFormat] = [
    kv_format(SIZES, "bfloat16", positions="rope 1e4"),
    kv_format(SIZES, "float32", "int8", positions="rope 1e4"),
    kv_format(SIZES, "float32", "fp8", positions="rope 1e4"),  # as many bytes as int8
    kv_format(SIZES, "bfloat16", "int8", positions="rope 1e4"),  # computed in another precision
    replace(CHUNK, chunk_size=32),
    replace(CHUNK, layers=5),
    replace(CHUNK, layers=2, heads=4),  # as many bytes
    replace(CHUNK, positions="rope 1e5"),
    replace(CHUNK, bands=("latents",)),
    latent_format((4, 16, 8, 16), "float32", positions="rope 1e4"),
    latent_format((4, 16, 8, 16), "float32", "int8", positions="rope 1e4"),
    latent_format((4, 16, 4, 24), "float32", "int8", positions="rope 1e4"),  # as many bytes
    replace(CHUNK, row=(Numbers("latent", "float32", 28), Numbers("rotary", "float32", 4))),
]


@pytest.mark.parametrize("other", OTHERS)
def test_every_difference_counts(other: ChunkFormat) -> None:
    found = [
        (tier_fingerprint(MODEL, chunk, 2), exchange_fingerprint(MODEL, chunk))
        for chunk in (CHUNK, other, *OTHERS)
    ]
    assert len(set(found)) == len(OTHERS) + 1
    assert {len(one) for pair in found for one in pair} == {FINGERPRINT_BYTES}


@pytest.mark.parametrize("model", [b"n" * 16, b""])
def test_the_model_counts(model: bytes) -> None:
    assert tier_fingerprint(model, CHUNK, 2) != tier_fingerprint(MODEL, CHUNK, 2)
    assert exchange_fingerprint(model, CHUNK) != exchange_fingerprint(MODEL, CHUNK)


def test_the_number_of_ranks_counts_within_a_group_only() -> None:
    assert len({tier_fingerprint(MODEL, CHUNK, tp) for tp in (1, 2, 4)}) == 3  # at 4 ranks the part is that of 2
    assert exchange_fingerprint(MODEL, CHUNK) != tier_fingerprint(MODEL, CHUNK, 1)


def test_new_bytes_make_old_data_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[Any] = [tier_fingerprint(MODEL, CHUNK, 2), exchange_fingerprint(MODEL, CHUNK)]
    monkeypatch.setattr(fingerprint, "FORMAT", fingerprint.FORMAT + 1)
    assert tier_fingerprint(MODEL, CHUNK, 2) != before[0]
    assert exchange_fingerprint(MODEL, CHUNK) != before[1]


def test_parts_do_not_run_into_each_other() -> None:
    assert model_fingerprint(b"ab", "c") != model_fingerprint(b"a", "bc")
    assert model_fingerprint(b"ab", "") != model_fingerprint(b"ab", "int8")
    assert model_fingerprint(b"ab", "") != b"ab"
