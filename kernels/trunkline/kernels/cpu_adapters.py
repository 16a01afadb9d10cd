"""The adapters of a program that runs in the compiled library (`csrc/cpu/adapters.h`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels.adapters import AdapterLayers, AdapterRows
from trunkline.kernels.experts import Experts
from trunkline.kernels.program import Linear, Op


class ProgramAdapters:
    """The adapters that the library has, by numbers that are used again."""

    def __init__(
        self, sites: list[str], take: Callable[[int, Tensor], None], use: Callable[[Tensor], None]
    ) -> None:
        """
        Args:
            sites: names of the layers that adapters can change, in the library's order; "": there is none.
            take: gives the library the layers of an adapter, or forgets it (no handles).
            use: gives it the number of the adapter of each token of a step.
        """
        self._sites = sites
        self._take, self._use = take, use
        self._kept: list[AdapterLayers | None] = []
        """By number; None: the number is free."""
        self._numbers: dict[bytes, int] = {}

    def set(self, key: bytes, layers: AdapterLayers | None) -> None:
        number = self._numbers.get(key)
        if layers is None:
            if number is not None:
                self._take(number, torch.empty(0, dtype=torch.int64))
                self._kept[self._numbers.pop(key)] = None
            return
        if number is None:
            number = next((at for at, kept in enumerate(self._kept) if kept is None), len(self._kept))
        handles = torch.zeros(len(self._sites), 2, dtype=torch.int64)
        for index, place in enumerate(self._sites):
            if place and (own := layers.get(place)) is not None:
                handles[index, 0], handles[index, 1] = own.down.data.handle, own.up.data.handle
        self._take(number, handles)
        if number == len(self._kept):
            self._kept.append(None)
        self._kept[number], self._numbers[key] = layers, number

    def use(self, rows: AdapterRows) -> None:
        """Take the adapters of the tokens of the step that has begun."""
        numbers = np.array([*(self._numbers[key] for key in rows.keys), -1], dtype=np.int32)
        self._use(torch.from_numpy(numbers[rows.of_token]))


def sites_of(op: Op, is_native: bool) -> list[str]:
    """Return the names of an op's sites, as many as the library counts (`csrc/cpu/adapters.h`)."""
    if isinstance(op, Experts) and is_native:
        return op.sites()
    return [op.place if isinstance(op, Linear) else ""]
