"""The PyTorch reference of sampling, on any device: it defines the tokens that are drawn.

Noise is a pure function of (seed, output index, token id). The generator is a keyed 64-bit mixer (the finaliser
known from MurmurHash3 and SplitMix64): token ids and (seed, index) are each hashed to 64 bits, combined and hashed
again.

Every device must draw the same token. Weights (top-p) are chains of single additions and multiplications, which
IEEE 754 rounds in one way (no function of a library, no fused product and sum), and their sums are exact: weights
are multiples of 2^-34, at most 1, so float64 holds the sum of half a million of them, added in any order. Noise is
computed in float64; libraries may differ in the last bit of a logarithm, which changes a token only where the two
largest sums differ by less than 1e-14.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from trunkline.kernels.sampling import Biases, Draws, LogitEdits, Masks, Penalties, Report

FINITE_MAX: Final = 1e20
"""Bound of the allowed logits of masked rows."""

_GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # odd fraction of 2^64, as a signed number
_MULTIPLY_1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2: Final = 0x94D049BB133111EB - (1 << 64)
_MINUS_INFINITY: Final = float("-inf")


def mix_bits(x: Tensor) -> Tensor:
    """Mix int64 numbers (wrapping) by a bijection in which every input bit changes half of the output bits."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift an unsigned number: torch shifts int64 with its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def token_keys(tokens: Tensor) -> Tensor:
    """Return the hash of token ids, int64 of the same shape; for a whole vocabulary, computed once."""
    return mix_bits((tokens + 1) * _GOLDEN)


def gumbel(seeds: Tensor, output_index: Tensor, keys: Tensor) -> Tensor:
    """Return standard Gumbel noise, float64 `[rows, n]`.

    Args:
        seeds: int64 `[rows]`; an unsigned seed's bits.
        output_index: int64 `[rows]`, number of output tokens before this one.
        keys: int64 `[n]` or `[rows, n]`, `token_keys` of the candidates.
    """
    row = mix_bits(mix_bits(seeds) + (output_index + 1) * _GOLDEN)
    bits = _shift_right(mix_bits(row[:, None] ^ keys), 11)
    uniform = bits.double().add_(0.5).clamp_max_(2.0**53 - 1).mul_(2.0**-53)  # in (0, 1), never an end
    return uniform.log_().neg_().log_().neg_()


def weights(scores: Tensor, largest: Tensor) -> Tensor:
    """Return float32 `exp(scores - largest)`, relative error below 2^-19, rounded to multiples of 2^-34.

    Args:
        scores: float32 `[rows, n]`.
        largest: float32 `[rows, 1]`, not below any score of its row.
    """
    y = ((scores - largest) * 1.44269504).clamp_min_(-64.0)
    whole = y.round()
    f = y - whole
    # Taylor series of 2^f on [-0.5, 0.5].
    p = torch.full_like(f, 1.54035304e-4)
    for coefficient in (1.33335581e-3, 9.61812911e-3, 5.55041087e-2, 2.40226507e-1, 6.93147181e-1, 1.0):
        p.mul_(f).add_(coefficient)
    power = ((whole.int() + 127) << 23).view(torch.float32)
    return p.mul_(power).add_(2.0**-11).sub_(2.0**-11)


def first_argmax(values: Tensor) -> Tensor:
    """Return the index of the largest value of each row, int64 `[rows]`; on a tie the lowest one.

    A row with NaN gives some index that exists.
    """
    if values.device.type == "cpu":
        # Some twenty times faster than torch, and which of several maxima it returns is specified.
        return torch.from_numpy(values.numpy().argmax(axis=-1))
    best = values.amax(dim=-1, keepdim=True)
    # NaN equals nothing, so a row of NaN gives index 0: an id that exists.
    return (values == best).to(torch.uint8).argmax(dim=-1)


def largest_sums(logits: Tensor, draws: Draws, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return what decides which token each row draws, without limits: the largest sum of score and noise, float64
    `[rows]`, and the column that has it, int64 `[rows]`. Of parts of a vocabulary, the token is that of the part
    with the largest sum, on a tie the first.

    Nothing depends on a look at the numbers from the host, so a CUDA graph may hold all of it.

    Args:
        logits: float32 `[rows, n]`.
        keys: int64 `[n]`, `token_keys` of the columns' tokens.
    """
    logits = torch.where(logits.isnan(), _MINUS_INFINITY, logits)
    temperature = draws.factors[0, :, None]
    scores = logits / torch.where(temperature == 0, 1.0, temperature)
    noise = gumbel(draws.seeds, draws.output_index, keys)
    sums = torch.where(temperature == 0, logits.double(), scores.double() + noise)
    best = sums.amax(dim=-1, keepdim=True)
    columns = torch.arange(sums.shape[1], device=sums.device)
    return best.squeeze(1), torch.where(sums == best, columns, sums.shape[1]).amin(dim=-1)


class ReferenceSampling:
    """Implements `trunkline.kernels.sampling.SamplingOps`."""

    def edit_logits(self, logits: Tensor, edits: LogitEdits) -> None:
        if edits.biases is not None:
            _add_biases(logits, edits.biases)
        if edits.masks is not None:
            _mask(logits, edits.masks)
        if edits.penalties is not None:
            _penalise(logits, edits.penalties)

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        seeds, output_index, top_k, factors = (part.to(logits.device) for part in draws[:4])
        logits = torch.where(logits.isnan(), _MINUS_INFINITY, logits)
        greedy = first_argmax(logits)
        temperature = factors[0, :, None]
        if not bool((temperature != 0).any()):
            return greedy
        scores = logits / torch.where(temperature == 0, 1.0, temperature)
        keys = token_keys(torch.arange(logits.shape[1], device=logits.device))
        if draws.limited:
            scores, candidates = _limit(scores, top_k, factors)
            sums = scores.double() + gumbel(seeds, output_index, keys[candidates])
        else:
            candidates = None
            sums = scores.double() + gumbel(seeds, output_index, keys)
        best = first_argmax(sums)[:, None]
        drawn = best if candidates is None else candidates.gather(1, best)
        possible = (sums.gather(1, best) > _MINUS_INFINITY) & (temperature != 0)
        return torch.where(possible.squeeze(1), drawn.squeeze(1), greedy)

    def report(self, logits: Tensor, rows: Tensor, chosen: Tensor, count: int) -> Report:
        log_probs = logits[rows.to(logits.device)].log_softmax(dim=-1)
        own = log_probs.gather(1, chosen.to(logits.device)[:, None]).squeeze(1)
        top = log_probs.topk(count, dim=-1)
        return Report(own, top.indices.int(), top.values)


def _limit(scores: Tensor, top_k: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Apply top-k, top-p, min-p; return the candidates' scores and ids `[rows, n]`, most likely first, -inf beyond
    each row's last candidate; n is the largest number of candidates of any row."""
    top_p, log_min_p = factors[1, :, None], factors[2, :, None]
    scores, candidates = scores.sort(dim=-1, descending=True, stable=True)
    keep = torch.arange(scores.shape[1], device=scores.device) < top_k[:, None]
    keep |= top_k[:, None] <= 0
    if bool((top_p < 1).any()):
        own = weights(scores, scores[:, :1]).double().masked_fill_(~keep, 0.0)
        before = own.cumsum(dim=-1) - own
        keep &= (before < top_p.double() * own.sum(dim=-1, keepdim=True)) | (top_p >= 1)
    keep &= scores >= scores[:, :1] + log_min_p
    keep[:, 0] = True  # the most likely token stays, whatever the parameters
    most = int(keep.sum(dim=-1).max())
    return scores.masked_fill_(~keep, _MINUS_INFINITY)[:, :most], candidates[:, :most]


def _add_biases(logits: Tensor, biases: Biases) -> None:
    rows, tokens, values = (part.to(logits.device) for part in biases)
    logits.index_put_((rows, tokens), values, accumulate=True)


def _mask(logits: Tensor, masks: Masks) -> None:
    rows, words = (part.to(logits.device) for part in masks)
    bits = (words[:, :, None] >> torch.arange(32, device=logits.device, dtype=torch.int32)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    x = logits[rows].clamp_(-FINITE_MAX, FINITE_MAX).nan_to_num_(-FINITE_MAX)
    logits[rows] = x.masked_fill_(~allowed, _MINUS_INFINITY)


def _penalise(logits: Tensor, penalties: Penalties) -> None:
    rows, indptr, tokens, counts, factors = (part.to(logits.device) for part in penalties)
    entry = torch.repeat_interleave(torch.arange(len(rows), device=logits.device), indptr.diff())
    repetition, frequency, presence = factors[entry].unbind(1)
    places = (rows[entry], tokens)
    x = logits[places]
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    logits[places] = repeated - (frequency * counts + presence * (counts > 0))
