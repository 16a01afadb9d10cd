"""Ops of a step's program that single families need: gates of shared experts, norms of values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trunkline.kernels.program import Buffer, Facts, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate(Op):
    """`into *= sigmoid(x)`, one number for each row."""

    kind = "gate"
    reads = ("x",)
    changes = ("into",)
    x: Buffer
    """float32, one column."""
    into: Buffer

    def facts(self) -> Facts:
        found = (self.x.width, self.x.dtype, self.x.rows)
        return [("the shape of x", (1, torch.float32, self.into.rows), found)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm(Op):
    """RMS norm of each head of `into` from column `first` on, in place."""

    kind = "head_norm"
    changes = ("into",)
    into: Buffer
    first: int
    weight: Tensor
    """float32 `[head_dim]`."""
    eps: float

    def facts(self) -> Facts:
        columns = self.into.width - self.first
        return [
            ("the type of the weight", torch.float32, self.weight.dtype),
            ("whether there are heads", True, self.first >= 0 and columns > 0),
            ("columns without a head", 0, columns % len(self.weight)),
        ]
