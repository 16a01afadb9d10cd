"""`benchmarks/kv_bytes.py`: what the paper's table 2 says of memory, from what ranks read of configurations."""

from __future__ import annotations

import pytest
from kv_bytes import BERT_BASE, MIB, MODELS, Model, empty_share, read, token_bytes


@pytest.mark.parametrize("model", [model for model in MODELS if model.paper], ids=lambda model: model.name)
def test_the_papers_table(model: Model) -> None:
    """The paper counts a KV head for each query head, and cuts off behind the second digit."""
    config = read(model.config)
    assert model.paper is not None
    own_heads = token_bytes(config) * config.heads / config.kv_heads / MIB
    assert 0 <= own_heads - model.paper < 0.01


def test_the_papers_bert() -> None:
    assert 0 <= BERT_BASE / MIB - 0.03 < 0.01


@pytest.mark.parametrize(("length", "chunk_size", "share"), [(50, 128, 1 - 50 / 128), (1000, 1, 0.0)])
def test_what_chunks_leave_empty(length: int, chunk_size: int, share: float) -> None:
    assert empty_share(length, chunk_size) == pytest.approx(share)
