"""Whatever changes KV or the bytes that hold it changes the fingerprint."""

from __future__ import annotations

from typing import Any

import pytest

from trunkline.kvstore import fingerprint
from trunkline.kvstore.fingerprint import (
    FINGERPRINT_BYTES,
    KvShape,
    exchange_fingerprint,
    model_fingerprint,
    tier_fingerprint,
)

SHAPE = KvShape(layers=4, kv_heads=2, chunk_size=64, head_dim=32)
ARGUMENTS: dict[str, Any] = {
    "model": b"m" * 16,
    "dtype": "float32",
    "tp": 2,
    "shape": SHAPE,
    "positions": "rope 1e4",
}


def test_equal_configurations_agree() -> None:
    first = tier_fingerprint(**ARGUMENTS)
    assert first == tier_fingerprint(**ARGUMENTS)
    assert len(first) == FINGERPRINT_BYTES


CHANGES: list[dict[str, Any]] = [
    {"model": b"n" * 16},
    {"model": b""},
    {"dtype": "bfloat16"},
    {"shape": SHAPE._replace(chunk_size=32)},
    {"shape": SHAPE._replace(layers=5)},
    {"shape": SHAPE._replace(layers=2, kv_heads=4)},  # as many bytes
    {"positions": "rope 1e5"},
]


@pytest.mark.parametrize("change", [{"tp": 1}, *CHANGES])
def test_every_difference_counts(change: dict[str, Any]) -> None:
    assert tier_fingerprint(**ARGUMENTS | change) != tier_fingerprint(**ARGUMENTS)


@pytest.mark.parametrize("change", CHANGES)
def test_every_difference_but_ranks_counts_between_groups(change: dict[str, Any]) -> None:
    arguments = {name: value for name, value in ARGUMENTS.items() if name != "tp"}
    first = exchange_fingerprint(**arguments)
    assert first == exchange_fingerprint(**arguments) != exchange_fingerprint(**arguments | change)
    assert len(first) == FINGERPRINT_BYTES
    assert first != tier_fingerprint(**ARGUMENTS)


def test_a_new_format_makes_old_data_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tier_fingerprint(**ARGUMENTS)
    exchanged = exchange_fingerprint(b"m", "float32", SHAPE, "")
    monkeypatch.setattr(fingerprint, "FORMAT", fingerprint.FORMAT + 1)
    assert tier_fingerprint(**ARGUMENTS) != before
    assert exchange_fingerprint(b"m", "float32", SHAPE, "") != exchanged


def test_parts_do_not_run_into_each_other() -> None:
    assert model_fingerprint(b"ab", "c") != model_fingerprint(b"a", "bc")
    assert model_fingerprint(b"ab", "") != model_fingerprint(b"ab", "int8")
    assert model_fingerprint(b"ab", "") != b"ab"
