"""Ops of a step's program that normalise all queries of a token as one vector, and all keys (OLMo).

The squares are summed over the ranks between the two, since each rank has only its heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trunkline.kernels.ops import QkNorm
from trunkline.kernels.program import Buffer, Facts, Op, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareSums(Op):
    """`out` = the sums of the squares of the queries and of the keys of each token that are here."""

    kind = "square_sums"
    reads = ("qkv",)
    writes = ("out",)
    qkv: Buffer
    widths: tuple[int, int]
    """Columns of all queries, in front, and of all keys behind them."""
    out: Buffer
    """float32, width 2."""

    def facts(self) -> Facts:
        return [
            ("the shape of out", (2, torch.float32, self.qkv.rows), _shape(self.out)),
            ("whether queries and keys are in qkv", True, sum(self.widths) <= self.qkv.width),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WideNorm(Op):
    """RMS norms of all queries as one vector and of all keys as one, in place, by sums over all ranks."""

    kind = "wide_norm"
    reads = ("sums",)
    changes = ("qkv",)
    sums: Buffer
    qkv: Buffer
    ranks: int
    """How many ranks' squares are in the sums."""
    norm: QkNorm
    """With a weight for each column that is here."""

    def facts(self) -> Facts:
        columns = len(self.norm.q_weight) + len(self.norm.k_weight)
        return [
            ("the shape of the sums", (2, torch.float32, self.qkv.rows), _shape(self.sums)),
            ("whether queries and keys are in qkv", True, columns <= self.qkv.width),
        ]


def _shape(buffer: Buffer) -> tuple[int, torch.dtype, Rows]:
    return buffer.width, buffer.dtype, buffer.rows
