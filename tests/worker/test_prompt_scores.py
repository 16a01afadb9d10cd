"""Prompt log-probabilities against a plain log-softmax: values, ranks, ties, pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trunkline.kvstore.chunks import unpack_int32
from trunkline.worker.sampling import selection
from trunkline.worker.sampling.sampler import LOGPROB_MIN
from trunkline.worker.sampling.selection import score_prompt

V = 211


@pytest.mark.parametrize("piece_rows", [1, 3, 1000])
@pytest.mark.parametrize("count", [0, 1, 5, V, V + 50])
def test_scores_equal_a_log_softmax(piece_rows: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_CHUNK_BYTES_MAX", piece_rows * 4 * V)
    rng = np.random.default_rng(count)
    logits = torch.from_numpy(rng.normal(0, 3, (10, V)).astype(np.float32))
    targets = rng.integers(0, V, 10).astype(np.int32)
    kept = logits.clone()
    found = score_prompt(logits, targets, 7, count)
    assert torch.equal(logits, kept)
    expected = logits.double().log_softmax(-1).numpy()
    own = expected[np.arange(10), targets]
    assert found.start == 7
    np.testing.assert_allclose(np.frombuffer(found.token_logprobs, "<f4"), own, atol=1e-5)
    assert unpack_int32(found.ranks).tolist() == (1 + (expected > own[:, None]).sum(1)).tolist()
    shown = min(count, V)
    order = np.argsort(-expected, axis=1)[:, :shown]
    assert np.frombuffer(found.top_ids, "<i4").reshape(10, shown).tolist() == order.tolist()
    top = np.frombuffer(found.top_logprobs, "<f4").reshape(10, shown)
    np.testing.assert_allclose(top, np.take_along_axis(expected, order, 1), atol=1e-5)


def test_only_strictly_likelier_tokens_count_for_the_rank() -> None:
    logits = torch.zeros(3, V)
    logits[1, [4, 5, 6]] = 2.0
    logits[2, 9] = -float("inf")
    found = score_prompt(logits, np.array([3, 3, 9], dtype=np.int32), 1, 1)
    assert unpack_int32(found.ranks).tolist() == [1, 4, V]
    assert np.frombuffer(found.token_logprobs, "<f4")[2] == LOGPROB_MIN


def test_no_targets_give_an_empty_report() -> None:
    found = score_prompt(torch.zeros(0, V), np.zeros(0, dtype=np.int32), 5, 3)
    assert (found.token_logprobs, found.ranks, found.top_ids, found.top_logprobs) == (b"", b"", b"", b"")
