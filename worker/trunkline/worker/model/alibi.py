"""Slopes of attention with linear biases: how much a head's scores fall per token of distance. No torch.

Two formulas are in use for head counts that are no power of two; for the others they agree.
"""

from __future__ import annotations

import struct
from math import ceil, floor, log2


def bloom_slopes(heads: int) -> tuple[float, ...]:
    """Bloom's and Falcon's: the largest power of two below, then every other slope of the next one.

    Falcon rounds slopes to bfloat16, so these are. It also rounds their products with positions, an error that
    depends on absolute positions and is not imitated; there is none below position 256 with 1, 2, 4 or 8 heads.
    """
    whole = 2 ** floor(log2(heads))
    base, between = 2.0 ** -(8 / whole), 2.0 ** -(4 / whole)
    slopes = [base**power for power in range(1, whole + 1)]
    slopes += [between**power for power in range(1, 2 * (heads - whole), 2)]
    return tuple(map(_bfloat16, slopes))


def mpt_slopes(heads: int) -> tuple[float, ...]:
    """MPT's: the power of two above, every other slope first, cut off."""
    whole = 2 ** ceil(log2(heads))
    slopes = [2.0 ** -(8 * power / whole) for power in range(1, whole + 1)]
    if whole != heads:
        slopes = (slopes[1::2] + slopes[::2])[:heads]
    return tuple(slopes)


def _bfloat16(value: float) -> float:
    """Rounded to nearest, ties to even; `value` is finite."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))
    return float(rounded)
