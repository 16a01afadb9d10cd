"""Counter-based noise for sampling: a pure function of (seed, output index, token id).

So a stream that is resumed elsewhere, batched with others or split over other ranks draws the same tokens.
The generator is a keyed 64-bit mixer (the finaliser known from MurmurHash3 and SplitMix64): token ids and
(seed, index) are each hashed to 64 bits, combined and hashed again.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

_GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # odd fraction of 2^64, as a signed number
_MULTIPLY_1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2: Final = 0x94D049BB133111EB - (1 << 64)


def _mix(x: Tensor) -> Tensor:
    """A bijection of int64 (wrapping) in which every input bit changes half of the output bits."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift of an unsigned number: torch shifts int64 with its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def token_keys(tokens: Tensor) -> Tensor:
    """The hash of token ids, int64 of the same shape; for a whole vocabulary, computed once."""
    return _mix((tokens + 1) * _GOLDEN)


def gumbel(seeds: Tensor, output_index: Tensor, keys: Tensor) -> Tensor:
    """Standard Gumbel noise, float64 `[rows, n]`.

    Args:
        seeds: int64 `[rows]`; an unsigned seed's bits.
        output_index: int64 `[rows]`, number of output tokens before this one.
        keys: int64 `[n]` or `[rows, n]`, `token_keys` of the candidates.
    """
    row = _mix(_mix(seeds) + (output_index + 1) * _GOLDEN)
    bits = _shift_right(_mix(row[:, None] ^ keys), 11)
    uniform = bits.double().add_(0.5).mul_(2.0**-53)  # in (0, 1), never an end
    return uniform.log_().neg_().log_().neg_()
