"""Whatever changes KV or the bytes that hold it changes the fingerprint."""

from __future__ import annotations

from typing import Any

import pytest

from trunkline.kvstore import fingerprint
from trunkline.kvstore.fingerprint import FINGERPRINT_BYTES, KvShape, model_fingerprint, tier_fingerprint

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


@pytest.mark.parametrize(
    "change",
    [
        {"model": b"n" * 16},
        {"model": b""},
        {"dtype": "bfloat16"},
        {"tp": 1},
        {"shape": SHAPE._replace(chunk_size=32)},
        {"shape": SHAPE._replace(layers=5)},
        {"shape": SHAPE._replace(layers=2, kv_heads=4)},  # as many bytes
        {"positions": "rope 1e5"},
    ],
)
def test_every_difference_counts(change: dict[str, Any]) -> None:
    assert tier_fingerprint(**ARGUMENTS | change) != tier_fingerprint(**ARGUMENTS)


def test_a_new_format_makes_old_data_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tier_fingerprint(**ARGUMENTS)
    monkeypatch.setattr(fingerprint, "FORMAT", fingerprint.FORMAT + 1)
    assert tier_fingerprint(**ARGUMENTS) != before


def test_parts_do_not_run_into_each_other() -> None:
    assert model_fingerprint(b"ab", "c") != model_fingerprint(b"a", "bc")
    assert model_fingerprint(b"ab", "") != model_fingerprint(b"ab", "int8")
    assert model_fingerprint(b"ab", "") != b"ab"
