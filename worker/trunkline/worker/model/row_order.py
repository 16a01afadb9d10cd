"""Rows of weights: in another order, with zeros between them, below each other."""

from __future__ import annotations

import torch
from torch import Tensor

from trunkline.kernels.grouped import GroupedWeight, stack
from trunkline.kernels.ops import Weight


def reordered(weight: Weight, bias: Tensor | None, order: list[int]) -> tuple[Weight, Tensor | None]:
    """Return these output rows of a layer, in this order; -1: zeros."""
    if -1 in order:
        assert isinstance(weight, Tensor)  # families with such layers have no packed files
        return filled(weight, order), None if bias is None else filled(bias, order)
    rows = torch.tensor(order, device=weight.codes.device if isinstance(weight, GroupedWeight) else weight.device)
    picked = weight.rows(rows) if isinstance(weight, GroupedWeight) else weight[rows]
    return picked, None if bias is None else bias[rows]


def filled(rows: Tensor, order: list[int]) -> Tensor:
    """Return these rows, in this order; zeros for -1."""
    chosen = torch.tensor(order, device=rows.device)
    picked = rows[chosen]
    picked[chosen < 0] = 0.0
    return picked


def stacked_rows(parts: list[Weight]) -> Weight:
    """Return matrices below each other; in blocks if all of them are."""
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if len(grouped) == len(parts):
        return stack(grouped)
    return torch.cat([part.dequantise(part.dtype) if isinstance(part, GroupedWeight) else part for part in parts])
