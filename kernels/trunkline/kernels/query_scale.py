"""The op of a step's program that scales queries by their positions (Llama 4, Ministral 3)."""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.kernels.program import Buffer, Facts, Op, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Temper(Op):
    """Multiply the queries by `1 + factor * log(1 + floor((position + added) / period))`, in place."""

    kind = "temper"
    changes = ("qkv",)
    qkv: Buffer
    width: int
    """Columns of all queries, in front."""
    factor: float
    period: int
    added: int

    def facts(self) -> Facts:
        return [
            ("the rows of qkv", Rows.TOKENS, self.qkv.rows),
            ("whether the queries are in qkv", True, 0 < self.width <= self.qkv.width),
            ("whether there is a period", True, self.period > 0 and self.added in (0, 1)),
        ]
