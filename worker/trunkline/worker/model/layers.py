"""The parts of a decoder layer, ready to be called: norms, MLPs, and what attention needs besides its weights.

RMS norms and gated activations, which most models have, are ops of the kernels. Layer norms, plain activations
and mixtures of experts are a few torch calls each, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.kernels.ops import Angles, AttentionSpec, Kernels, PackedLinear, QkNorm, make_angles
from trunkline.worker.model import architecture
from trunkline.worker.model.architecture import Mlp
from trunkline.worker.model.checkpoint import ExpertWeights, MlpWeights, NormWeights, Weights
from trunkline.worker.model.model_config import LayerAttention, RopeConfig
from trunkline.worker.model.rope import inverse_frequencies
from trunkline.worker.model.sharding import Shard


class Norm(Protocol):
    """A norm over the last dimension, with its weights."""

    def plain(self, x: Tensor) -> Tensor:
        """Of `x` `[tokens, hidden]`, which is not changed."""
        ...

    def add(self, delta: Tensor, residual: Tensor) -> Tensor:
        """Add `delta` into `residual` (in place) and return its norm."""
        ...


class NoNorm:
    """Where a family has none: what comes in goes out."""

    def plain(self, x: Tensor) -> Tensor:
        return x

    def add(self, delta: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(delta)


class RmsNorm:
    """By the kernels."""

    __slots__ = ("_eps", "_kernels", "_weight")

    def __init__(self, kernels: Kernels, weight: Tensor, eps: float) -> None:
        self._kernels, self._weight, self._eps = kernels, weight, eps

    def plain(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, delta: Tensor, residual: Tensor) -> Tensor:
        return self._kernels.add_rms_norm(delta, residual, self._weight, self._eps)


class LayerNorm:
    """By torch; statistics of half types are in float32."""

    def __init__(self, weights: NormWeights, eps: float) -> None:
        self._weights, self._eps = weights, eps

    def plain(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self._weights.weight, self._weights.bias, self._eps)

    def add(self, delta: Tensor, residual: Tensor) -> Tensor:
        residual += delta
        return self.plain(residual)


NO_NORM: Final = NoNorm()

PLAIN_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "relu": F.relu_,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x, inplace=True),
}
"""By `ModelConfig.activation`; the argument may be overwritten."""


class GatedMlp:
    """`[tokens, hidden]` to this rank's part of the output, which the ranks sum; so are the other two."""

    __slots__ = ("_down", "_kernels", "_up")

    def __init__(self, kernels: Kernels, weights: MlpWeights) -> None:
        self._kernels, self._up, self._down = kernels, weights.up, weights.down

    def __call__(self, x: Tensor) -> Tensor:
        kernels = self._kernels
        return kernels.linear(kernels.gated_linear(x, self._up), self._down)


class PlainMlp:
    """One matrix, an activation, another matrix."""

    def __init__(self, kernels: Kernels, weights: MlpWeights, activation: str) -> None:
        self._kernels, self._weights = kernels, weights
        self._activation = PLAIN_ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        kernels, weights = self._kernels, self._weights
        return kernels.linear(self._activation(kernels.linear(x, weights.up)), weights.down)


class ExpertsMlp:
    """A mixture of experts. Every rank computes the same routing; an expert gets all its tokens at once."""

    def __init__(self, kernels: Kernels, weights: ExpertWeights, per_token: int) -> None:
        """
        Args:
            per_token: experts that a token goes to; their shares are normalised to 1.
        """
        self._kernels, self._weights = kernels, weights
        self._per_token = per_token
        self._experts = [GatedMlp(kernels, expert) for expert in weights.experts]

    def __call__(self, x: Tensor) -> Tensor:
        first, router = self._weights.first, self._weights.router
        shares, chosen = self._kernels.linear(x, router, torch.float32).softmax(dim=-1).topk(self._per_token)
        shares /= shares.sum(dim=-1, keepdim=True)
        order = chosen.view(-1).argsort(stable=True)
        tokens, share = order // self._per_token, shares.view(-1)[order, None]
        # One transfer to the host per layer: up to where in `order` each expert's tokens reach.
        stops = chosen.view(-1).bincount(minlength=router.out_features).cumsum(0).tolist()
        out = torch.zeros_like(x, dtype=torch.float32)
        start = stops[first - 1] if first else 0
        for expert, stop in zip(self._experts, stops[first : first + len(self._experts)], strict=True):
            if stop > start:
                own = tokens[start:stop]
                out.index_add_(0, own, expert(x[own]).float().mul_(share[start:stop]))
            start = stop
        return out.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer on one rank; norms that the family does not have are `NO_NORM`."""

    index: int
    spec: AttentionSpec
    rope: int
    """Index into `Ropes.angles`."""
    attention_norm: Norm
    qkv: PackedLinear
    qk_norm: QkNorm | None
    attention_out: PackedLinear
    attention_post_norm: Norm
    mlp_norm: Norm
    mlp: Callable[[Tensor], Tensor]
    mlp_post_norm: Norm


class Ropes:
    """The rotary positions of all layers. Kernels keep what they derive from frequencies by their identity.

    Angles are in float64 until their cosines are taken: behind cuts positions go on counting (CachedAttention
    §3.4), far beyond the model's maximum, and a turn by a shift must take back exactly what was rotated.
    """

    def __init__(self, shard: Shard, device: torch.device) -> None:
        distinct = dict.fromkeys(own.rope for own in shard.config.attention if own.rope)
        self.exact = {rope: inverse_frequencies(rope).to(device).double() for rope in distinct}

    def index(self, rope: RopeConfig | None) -> int:
        """Into what `angles` returns."""
        return -1 if rope is None else list(self.exact).index(rope)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> list[Angles | None]:
        """Of a step's tokens, for each rope; behind them None, for layers that rotate nothing."""
        made: list[Angles | None] = [
            make_angles(positions, frequencies, rope.attention_factor, dtype)
            for rope, frequencies in self.exact.items()
        ]
        return [*made, None]


def make_layers(
    shard: Shard, weights: Weights, kernels: Kernels, ropes: Ropes, device: torch.device
) -> list[Layer]:
    """What layers have in common, they share."""
    config = shard.config
    specs = _specs(shard, ropes, device)
    return [
        Layer(
            index=index,
            spec=specs[own],
            rope=ropes.index(own.rope),
            attention_norm=make_norm(shard, kernels, layer.attention_norm),
            qkv=layer.qkv,
            qk_norm=layer.qk_norm,
            attention_out=layer.attention_out,
            attention_post_norm=make_norm(shard, kernels, layer.attention_post_norm),
            mlp_norm=make_norm(shard, kernels, layer.mlp_norm),
            mlp=_mlp(shard, kernels, layer.mlp),
            mlp_post_norm=make_norm(shard, kernels, layer.mlp_post_norm),
        )
        for index, (own, layer) in enumerate(zip(config.attention, weights.layers, strict=True))
    ]


def make_norm(shard: Shard, kernels: Kernels, weights: NormWeights | None) -> Norm:
    """For weights as `checkpoint` loads them: nothing is stored minus one any more."""
    kind, eps = shard.config.architecture.norm, shard.config.norm_eps
    if weights is None:
        return NO_NORM
    if kind in (architecture.NormKind.RMS, architecture.NormKind.RMS_OFFSET):
        return RmsNorm(kernels, weights.weight, eps)
    return LayerNorm(weights, eps)


def _mlp(shard: Shard, kernels: Kernels, weights: MlpWeights | ExpertWeights) -> Callable[[Tensor], Tensor]:
    if isinstance(weights, ExpertWeights):
        return ExpertsMlp(kernels, weights, shard.config.experts_per_token)
    if shard.config.architecture.mlp is Mlp.PLAIN:
        return PlainMlp(kernels, weights, shard.config.activation)
    return GatedMlp(kernels, weights)


def _specs(shard: Shard, ropes: Ropes, device: torch.device) -> dict[LayerAttention, AttentionSpec]:
    config = shard.config
    slopes = torch.tensor(shard.alibi_slopes, dtype=torch.float32, device=device)
    return {
        own: AttentionSpec(
            heads=shard.heads,
            kv_heads=shard.kv_heads,
            head_dim=config.head_dim,
            scale=own.scale,
            inverse_frequencies=ropes.exact[own.rope] if own.rope else None,
            alibi_slopes=slopes if shard.alibi_slopes else None,
            window=own.window,
            soft_cap=own.soft_cap,
        )
        for own in set(config.attention)
    }
