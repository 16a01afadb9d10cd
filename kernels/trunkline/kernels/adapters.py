"""Adapters (LoRA): what sequences that use one add to the results of linear layers.

An adapter has for some of a program's linear layers two layers of low rank: `B @ (A @ x)` is added to what the
layer gives for a row, before it is activated and rounded. Such layers are those of linear ops, and of mixtures of
experts the router's and those of each expert. Rows of a step are sorted by adapter, so that the layers of each are
called once. A step without such rows does nothing of this (docs/decisions/0020-adapters.md).
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
    """What an adapter has for one layer."""

    down: PackedLinear
    """A: `[rank, in]`."""
    up: PackedLinear
    """B, scaled: `[out, rank]`, of a gated op `[2 * out, rank]`, the gate's rows first."""


AdapterLayers = Mapping[str, AdapterLayer]
"""An adapter, by the names of layers (`program.Linear.place`, `experts.Experts.sites`)."""


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
        """Return the groups of these of the rows, int64."""
        return AdapterGroups(self._rows, chosen, self._adapters, self._device)

    def has(self, places: Iterable[str]) -> bool:
        """Return whether the adapter of any row has something for one of these layers."""
        used = [own for own, rows in self._groups if len(rows)]
        return any(place in own for place in places for own in used)

    def addend(self, kernels: Kernels, place: str, x: Tensor) -> RowAddend | None:
        """Return what the rows' adapters add to a layer's result for `x`; None: nothing."""
        found = [
            (rows, kernels.linear(kernels.linear(x[rows], own.down), own.up, torch.float32))
            for layers, rows in self._groups
            if len(rows) and (own := layers.get(place)) is not None
        ]
        if not found:
            return None
        return RowAddend(*(torch.cat(parts) for parts in zip(*found, strict=True)))
