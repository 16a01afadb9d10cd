"""Ops of a step's program that lead into latent attention and out of it (DeepSeek-V2, §2.1).

What is stored of a token is one row for all heads: the rotary part of a key, and a latent `c`. A head's key is the
rotary part and `K c`, its value `V c`, with matrices `K` and `V` of its own. They are never made of stored rows:

      score     q_rotary · k_rotary + q_plain · (K c)  =  (q_rotary, Kᵀ q_plain) · (k_rotary, c)
      result    Σ weight · (V c)                       =  V (Σ weight · c)

So a query is brought to the latents' space (`Absorb`), attention reads the row as the key of all heads and its end
as their value (`AttentionSpec.latent_dim`), and what it returns becomes the heads' results behind it (`Expand`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trunkline.kernels.ops import PackedLinear
from trunkline.kernels.program import Buffer, Facts, Op, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorb(Op):
    """`out` = for each head its query's rotary part and `layer(plain part)`; behind them, once, the rotary part of
    the key and the latent: what `StoreKv` and `Attend` take."""

    kind = "absorb"
    reads = ("queries", "rotary", "latent")
    writes = ("out",)
    queries: Buffer
    """For each head the rotary part, then the plain part."""
    rotary: Buffer
    """The rotary part of the key, not rotated yet."""
    latent: Buffer
    """The latent, behind its norm."""
    layers: tuple[PackedLinear, ...]
    """For each head here `[latent, plain]`: its matrix `K`, transposed."""
    out: Buffer

    def facts(self) -> Facts:
        rotary, latent, heads = self.rotary.width, self.latent.width, len(self.layers)
        plain = self.layers[0].in_features
        return [
            ("the shape of queries", (heads * (rotary + plain), *_kind(self.out)), _shape(self.queries)),
            ("the shape of the rotary part", (rotary, *_kind(self.out)), _shape(self.rotary)),
            ("the shape of the latent", (latent, *_kind(self.out)), _shape(self.latent)),
            ("the width of out", (heads + 1) * (rotary + latent), self.out.width),
            ("the shapes of the layers", {(latent, plain)}, _layers(self.layers)),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expand(Op):
    """`out` = for each head `layer(x)` of its part of x."""

    kind = "expand"
    reads = ("x",)
    writes = ("out",)
    x: Buffer
    """A weighted sum of latents for each head."""
    layers: tuple[PackedLinear, ...]
    """For each head here `[value, latent]`: its matrix `V`."""
    out: Buffer

    def facts(self) -> Facts:
        heads, layer = len(self.layers), self.layers[0]
        return [
            ("the shape of x", (heads * layer.in_features, *_kind(self.out)), _shape(self.x)),
            ("the width of out", heads * layer.out_features, self.out.width),
            ("the shapes of the layers", {(layer.out_features, layer.in_features)}, _layers(self.layers)),
        ]


def _kind(buffer: Buffer) -> tuple[torch.dtype, Rows]:
    return buffer.dtype, buffer.rows


def _shape(buffer: Buffer) -> tuple[int, torch.dtype, Rows]:
    return buffer.width, *_kind(buffer)


def _layers(layers: tuple[PackedLinear, ...]) -> set[tuple[int, int]]:
    return {(layer.out_features, layer.in_features) for layer in layers}
