"""Combinations of test parameters in which every pair of values of two parameters occurs.

A fault in a kernel shows where two properties meet (a head size and a vector width, a type and a block size). The
product of all parameters would repeat each such pair many times; these lists are about as long as the product of
the two longest parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
from kernels.implementations import SANITIZED
from seeds import seeds

Pair = tuple[tuple[int, int], tuple[int, int]]
"""Two (parameter, value), as indices."""


def covering_rows(sizes: Sequence[int]) -> list[list[int]]:
    """Return rows of value indices such that each pair of values of two parameters is in a row.

    Greedy, always with the same result. A row begins with the first pair that is still missing; each other
    parameter takes the value that adds most missing pairs.
    """
    missing: dict[Pair, None] = {
        ((i, a), (j, b)): None
        for i, j in combinations(range(len(sizes)), 2)
        for a, b in product(range(sizes[i]), range(sizes[j]))
    }
    rows = [[value] for value in range(sizes[0])] if len(sizes) == 1 else list[list[int]]()
    while missing and all(sizes):
        chosen = dict(next(iter(missing)))
        for parameter in sorted(set(range(len(sizes))) - set(chosen), key=lambda p: -sizes[p]):
            # Among equals another value in each row, so that all are about equally frequent.
            values = [(value + len(rows)) % sizes[parameter] for value in range(sizes[parameter])]
            gains = [
                sum(_pair((parameter, value), other) in missing for other in chosen.items()) for value in values
            ]
            chosen[parameter] = values[gains.index(max(gains))]
        for pair in combinations(sorted(chosen.items()), 2):
            missing.pop(pair, None)
        rows.append([chosen[parameter] for parameter in range(len(sizes))])
    return rows


def _pair(a: tuple[int, int], b: tuple[int, int]) -> Pair:
    return (a, b) if a < b else (b, a)


def pairwise(*, seeded: bool = False, **parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test over combinations of these values that contain all pairs.

    Cases of the implementations that `make check-native` runs are marked as such.

    Args:
        seeded: The test also gets a `seed`, another one in each case and with each commit.
    """
    names, values = list(parameters), [list(value) for value in parameters.values()]
    rows = covering_rows([len(value) for value in values])
    cases = []
    for row, seed in zip(rows, seeds(len(rows)), strict=True):
        chosen = [value[index] for value, index in zip(values, row, strict=True)]
        marks = [pytest.mark.sanitized] if SANITIZED & {str(value) for value in chosen} else []
        chosen += [seed] if seeded else []
        cases.append(pytest.param(*chosen, marks=marks, id="-".join(_word(value) for value in chosen)))
    return pytest.mark.parametrize([*names, "seed"] if seeded else names, cases)


def _word(value: object) -> str:
    return getattr(value, "__name__", str(value).removeprefix("torch.").replace(" ", ""))
