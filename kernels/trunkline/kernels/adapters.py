"""Adapters (LoRA): what sequences that use one add to the results of linear layers.

For some of a program's linear layers, its *sites*, an adapter has two layers of low rank: `B @ (A @ x)` is added
to what the layer gives for a row, before that is activated and rounded. Sites are the layers of linear ops, and in
a mixture of experts the router and both layers of each expert. Rows of a step are sorted by adapter, so that the
layers of each adapter are called once. A step without such rows does nothing of this
(docs/decisions/0020-adapters.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels.ops import Kernels, PackedLinear, RowAddend
from trunkline.kvstore.chunks import Int32Array


class AdapterLayer(NamedTuple):
    """An adapter's two layers for one site."""

    down: PackedLinear
    """A: `[rank, in]`."""
    up: PackedLinear
    """B, scaled: `[out, rank]`, of a gated op `[2 * out, rank]`, the gate's rows first."""


AdapterLayers = Mapping[str, AdapterLayer]
"""An adapter's layers, by the names of sites (`program.Linear.place`, `experts.Experts.sites`)."""


class AdapterRows(NamedTuple):
    """Which of a step's tokens use which adapter."""

    keys: tuple[bytes, ...]
    """The adapters."""
    of_token: Int32Array
    """For each token the index of its adapter in `keys`; -1: none."""


class AdapterGroups:
    """Rows by adapter, as ops that run one by one need them."""

    def __init__(
        self,
        rows: AdapterRows,
        chosen: Tensor | None,
        adapters: Mapping[bytes, AdapterLayers],
        device: torch.device,
    ) -> None:
        """
        Args:
            chosen: int64, the token of each row; None: rows are tokens.
        """
        of_row = rows.of_token if chosen is None else rows.of_token[chosen.cpu().numpy()]
        self._rows = AdapterRows(rows.keys, of_row)
        self._adapters, self._device = adapters, device
        self._groups = [
            (adapters[key], torch.from_numpy(np.flatnonzero(of_row == index)).to(device))
            for index, key in enumerate(rows.keys)
        ]

    def within(self, chosen: Tensor) -> AdapterGroups:
        """Return the groups of some of the rows. `chosen`: int64, their numbers."""
        return AdapterGroups(self._rows, chosen, self._adapters, self._device)

    def has(self, places: Iterable[str]) -> bool:
        """Return whether the adapter of any row changes one of these sites."""
        used = [own for own, rows in self._groups if len(rows)]
        return any(place in own for place in places for own in used)

    def addend(self, kernels: Kernels, place: str, x: Tensor) -> RowAddend | None:
        """Return what the rows' adapters add to a site's result for `x`; None: nothing."""
        found = [
            (rows, kernels.linear(kernels.linear(x[rows], own.down), own.up, torch.float32))
            for layers, rows in self._groups
            if len(rows) and (own := layers.get(place)) is not None
        ]
        if not found:
            return None
        return RowAddend(*(torch.cat(parts) for parts in zip(*found, strict=True)))
