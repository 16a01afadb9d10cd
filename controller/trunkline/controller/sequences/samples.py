"""Several samples of one request: what they have in common and what each has for itself."""

from __future__ import annotations

from typing import Final

_MASK: Final = (1 << 64) - 1


def sample_seed(seed: int, sample: int) -> int:
    """The seed of sample `sample`: the request's own for sample 0, else 64 bits mixed from both.

    So the first of n samples is what the request gives alone, and each of them can be drawn again by itself.
    The mixer is the finaliser of SplitMix64.
    """
    if sample == 0:
        return seed & _MASK
    x = (seed + sample * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31
