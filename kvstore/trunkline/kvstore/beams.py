"""Rules by which the beams of a search move from step to step, shared by the controller and the workers.

The workers know first which beams go on. The controller hears of it a step or two later and must come to the same
block tables (PagedAttention §4.4). So both apply these functions to the same candidates.

A search of width k owns k tail blocks while its tails are not full. A beam without children leaves its tail
to a beam that shares its parent with another, so moving needs copies but never a block:

      parents  0 0 2 0          tails  0 1 2 3      beams 1 and 3 die;
      beam 0 keeps tail 0, beam 2 keeps tail 2, the second and third child of beam 0 get copies in tails 1 and 3.

A full tail is not copied: it is a block like those before it, and children refer to it together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.chunks import Int32Array


def choose_beams(tokens: Int32Array, stop_ids: Int32Array, width: int) -> NDArray[np.intp]:
    """Return the indices `[width]` of the candidates that become the next beams: the best that are no stop tokens.

    Args:
        tokens: `[candidates]`, best first.

    Raises:
        ValueError: Fewer than `width` candidates are left.
    """
    chosen = np.flatnonzero(~np.isin(tokens, stop_ids))[:width]
    if len(chosen) < width:
        raise ValueError(f"{len(chosen)} of {len(tokens)} candidates go on; {width} beams need as many")
    return chosen


def assign_tails(parents: Sequence[int]) -> list[int]:
    """Return, for each new beam, the old beam whose tail block it gets.

    The first child of a parent keeps the parent's; later ones get those of beams without children, in order.
    Where the result differs from `parents`, the parent's tail is copied into it.
    """
    free = iter(sorted(set(range(len(parents))) - set(parents)))
    seen: set[int] = set()
    tails = []
    for parent in parents:
        tails.append(next(free) if parent in seen else parent)
        seen.add(parent)
    return tails


def candidate_count(width: int, stop_ids: int) -> int:
    """Return how many candidates always leave `width` beams, as `transformers` counts them."""
    return max(2, 1 + stop_ids) * width
