"""Ops of a step's program that only some families need: gates of shared experts, norms of values, queries of
layers that read another one's KV, and factors that are columns of a buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trunkline.kernels.ops import AttentionSpec
from trunkline.kernels.program import Buffer, Facts, Op, Rows


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareQueries(Op):
    """Norm and rotate queries in place: what `StoreKv` does to them, in a layer that reads another one's KV."""

    kind = "prepare_queries"
    reads = ("cos", "sin")
    changes = ("queries",)
    queries: Buffer
    spec: AttentionSpec
    cos: Buffer | None
    """None, as is `sin`: nothing is rotated."""
    sin: Buffer | None
    weight: Tensor | None
    """`[head_dim]`, of the type of the queries; None: there is no norm."""
    eps: float

    def facts(self) -> Facts:
        spec, weight = self.spec, self.weight
        found: Facts = [
            ("the width of the queries", spec.heads * spec.head_dim, self.queries.width),
            ("the rows of the queries", Rows.TOKENS, self.queries.rows),
            ("the presence of sin", self.cos is not None, self.sin is not None),
        ]
        if self.cos is not None:
            found.append(("whether a head is wide enough for the rotation", True, self.cos.width <= spec.head_dim))
        if weight is not None:
            alike = (list(weight.shape), weight.dtype)
            found.append(("the shape and type of the weight", ([spec.head_dim], self.queries.dtype), alike))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiply(Op):
    """`into *= x[:, first : first + width of into]`."""

    kind = "multiply"
    reads = ("x",)
    changes = ("into",)
    x: Buffer
    first: int
    into: Buffer

    def facts(self) -> Facts:
        return [
            ("the rows and type of x", (self.into.rows, self.into.dtype), (self.x.rows, self.x.dtype)),
            ("whether x has the columns", True, 0 <= self.first <= self.x.width - self.into.width),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread(Op):
    """`out` = the rows of `x` at their tokens, zeros at the others: the reverse of `Select`."""

    kind = "spread"
    reads = ("x",)
    writes = ("out",)
    x: Buffer
    out: Buffer

    def facts(self) -> Facts:
        return [
            ("the rows of x and out", (Rows.STATES, Rows.TOKENS), (self.x.rows, self.out.rows)),
            ("the width and type of out", (self.x.width, self.x.dtype), (self.out.width, self.out.dtype)),
        ]
