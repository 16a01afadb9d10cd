"""Adapters (LoRA): what sequences that use one add to the results of linear layers.

An adapter has for some of a program's linear ops two layers of low rank: `B @ (A @ x)` is added to what the op's
own layer gives for a row, before it is activated and rounded. Rows of a step are sorted by adapter, so that the
layers of each are called once. A step without such rows does nothing of this (docs/decisions/0020-adapters.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels.ops import Kernels, PackedLinear, RowAddend
from trunkline.kvstore.chunks import Int32Array


class AdapterLayer(NamedTuple):
    """What an adapter has for one op."""

    down: PackedLinear
    """A: `[rank, in]`."""
    up: PackedLinear
    """B, scaled: `[out, rank]`, of a gated op `[2 * out, rank]`, the gate's rows first."""


AdapterLayers = Mapping[str, AdapterLayer]
"""An adapter, by the names of the ops (`program.Linear.place`)."""


class AdapterRows(NamedTuple):
    """Which of a step's tokens use which adapter."""

    keys: tuple[bytes, ...]
    """The adapters."""
    of_token: Int32Array
    """For each token the index of its adapter in `keys`; -1: none."""


class AdapterGroups:
    """The rows of one kind of buffer, by adapter, as ops that run one by one need them."""

    def __init__(self, rows: AdapterRows, chosen: Tensor | None, device: torch.device) -> None:
        """
        Args:
            chosen: int64, the token of each row; None: rows are tokens.
        """
        of_row = rows.of_token if chosen is None else rows.of_token[chosen.cpu().numpy()]
        self._groups = [
            (key, torch.from_numpy(np.flatnonzero(of_row == index)).to(device))
            for index, key in enumerate(rows.keys)
        ]

    def addend(
        self, kernels: Kernels, adapters: Mapping[bytes, AdapterLayers], place: str, x: Tensor
    ) -> RowAddend | None:
        """Return what the rows' adapters add to an op's result for `x`; None: nothing."""
        found = [
            (rows, kernels.linear(kernels.linear(x[rows], own.down), own.up, torch.float32))
            for key, rows in self._groups
            if len(rows) and (own := adapters[key].get(place)) is not None
        ]
        if not found:
            return None
        return RowAddend(*(torch.cat(parts) for parts in zip(*found, strict=True)))
