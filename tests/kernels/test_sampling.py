"""Sampling of the compiled library against the reference: the same tokens, the same edited logits, to the bit."""

from __future__ import annotations

import functools

import pytest
import torch
from kernels.implementations import NATIVE, SANITIZED
from kernels.sampling_cases import INFINITY, cut_at_weights, make_draws, make_edits, make_logits
from seeds import seeds
from torch import Tensor

from trunkline.kernels.cpu_sampling import CpuSampling
from trunkline.kernels.native import NativeContext
from trunkline.kernels.reference_sampling import ReferenceSampling, weights
from trunkline.kernels.sampling import Biases, Draws, LogitEdits, Masks

LEVELS = [pytest.param(name, marks=[pytest.mark.sanitized] if name in SANITIZED else []) for name in NATIVE]
SIZES = ((1, 8), (31, 8), (64, 24), (1000, 32), (4097, 24), (32_000, 4), (128_000, 2), (256_000, 1))
"""Vocabularies, and rows to draw from each."""


def native(level: str, threads: int = 1) -> CpuSampling:
    return CpuSampling(NativeContext(level, threads))


@functools.cache
def expected_draws(vocab_size: int, rows: int, seed: int) -> tuple[Tensor, Draws, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits, draws = make_logits(rows, vocab_size, generator), make_draws(rows, vocab_size, generator)
    return logits, draws, ReferenceSampling().draw(logits, draws)


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_draws_the_tokens_of_the_reference(level: str, seed: int) -> None:
    for vocab_size, rows in SIZES:
        logits, draws, expected = expected_draws(vocab_size, rows, seed)
        for threads in (1, 3):
            assert torch.equal(native(level, threads).draw(logits, draws), expected), vocab_size
        wide = torch.full((rows, vocab_size + 5), INFINITY)
        wide[:, :vocab_size] = logits
        assert torch.equal(native(level).draw(wide[:, :vocab_size], draws), expected), "columns of a wider matrix"


@pytest.mark.parametrize("level", LEVELS)
def test_noise_alone_decides_among_equal_logits(level: str) -> None:
    """Without limits, and with each alone: long searches, many refusals."""
    rows, vocab_size = 200, 3000
    generator = torch.Generator().manual_seed(1)
    logits = torch.zeros(rows, vocab_size)
    plain = make_draws(rows, vocab_size, generator)
    for k, p, m in ((0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.01, 0.0), (0, 1.0, 0.5), (80, 0.125, 0.1)):
        factors = torch.tensor([1.0, p, m])[:, None].expand(3, rows).contiguous()
        factors[2].log_()
        draws = plain._replace(top_k=torch.full((rows,), k, dtype=torch.int32), factors=factors)
        drawn = native(level).draw(logits, draws)
        assert torch.equal(drawn, ReferenceSampling().draw(logits, draws))
        allowed = {(0, 1.0): 3000, (7, 1.0): 7, (0, 0.01): 30, (80, 0.125): 10}[k, p]
        assert int(drawn.max()) < allowed
        assert len(set(drawn.tolist())) > min(allowed, rows) / 2


@pytest.mark.parametrize("level", LEVELS)
def test_a_limit_at_the_very_weight_of_a_token_cuts_alike(level: str) -> None:
    """top-p is the share, rounded, of the tokens before one of them: the last bit of a weight decides."""
    logits, draws = cut_at_weights(2000, 10)
    assert torch.equal(native(level).draw(logits, draws), ReferenceSampling().draw(logits, draws))


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_edits_logits_as_the_reference_does(level: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for vocab_size, rows in SIZES:
        logits, edits = make_logits(rows, vocab_size, generator), make_edits(rows, vocab_size, generator)
        expected = logits.clone()
        ReferenceSampling().edit_logits(expected, edits)
        native(level).edit_logits(logits, edits)
        assert torch.equal(logits.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)), vocab_size


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_reports_log_probabilities(level: str) -> None:
    generator = torch.Generator().manual_seed(3)
    for vocab_size, rows in SIZES:
        logits = torch.randn(rows, vocab_size, generator=generator) * 4
        logits[0, : vocab_size // 2] = -INFINITY
        numbers = torch.arange(0, rows, 2, dtype=torch.int32)
        chosen = torch.randint(0, vocab_size, (len(numbers),), generator=generator)
        for count in {0, 1, min(20, vocab_size), min(1000, vocab_size)}:
            found = native(level).report(logits, numbers, chosen, count)
            expected = ReferenceSampling().report(logits, numbers, chosen, count)
            torch.testing.assert_close(found.chosen, expected.chosen, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(found.top, expected.top, atol=2e-5, rtol=1e-5)
            own = logits[numbers].gather(1, found.top_ids.long())
            assert torch.equal(own, logits[numbers].gather(1, expected.top_ids.long())), "the largest logits"


def test_sums_of_weights_are_exact_in_any_order() -> None:
    scores = torch.randn(4, 100_000, generator=torch.Generator().manual_seed(4)) * 6
    largest = scores.amax(dim=1, keepdim=True)
    found = weights(scores, largest).double()
    shuffled = found[:, torch.randperm(found.shape[1])]
    assert torch.equal(found.sum(dim=1), shuffled.flip(1).cumsum(dim=1)[:, -1])
    torch.testing.assert_close(found, (scores.double() - largest).exp(), atol=2.0**-34, rtol=3e-6)


def test_what_lies_outside_is_refused() -> None:
    ops, logits = native(NATIVE[0]), torch.zeros(2, 40)
    draws = make_draws(2, 40, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="seeds must be"):
        ops.draw(logits, draws._replace(seeds=torch.zeros(3, dtype=torch.int64)))
    row, token = torch.tensor([2], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    with pytest.raises(ValueError, match="rows has 2"):
        ops.edit_logits(logits, LogitEdits(biases=Biases(row, row, torch.zeros(1))))
    with pytest.raises(ValueError, match="tokens has 40"):
        ops.edit_logits(logits, LogitEdits(biases=Biases(row - 1, token, torch.zeros(1))))
    with pytest.raises(ValueError, match="words must be"):
        ops.edit_logits(logits, LogitEdits(masks=Masks(row - 1, torch.zeros(1, 1, dtype=torch.int32))))
    with pytest.raises(ValueError, match="more tokens"):
        ops.report(logits, row - 1, torch.tensor([0]), 41)
