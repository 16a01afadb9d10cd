"""The decoder: an `Architecture`'s layers over this rank's shard, paged KV and kernels.

      ids -> embedding -> [ norm -> qkv -> rotate, store KV -> attention -> out ─ all-reduce ─ +
                            norm -> gate, up -> down ─ all-reduce ─ + ] × layers -> norm -> head -> logits

This is LLaMA; `Residual` has the other ways in which attention and MLP come together, all written with the same
few parts. What is constant over steps is decided when the decoder is made. RMS norms and gated activations, which
most models have, are ops of the kernels. Layer norms, plain activations and mixtures of experts are a few torch
calls each, on any device.

Decode rows come first in a batch, prefill tokens behind them; the linear layers see all at once (iteration-level
batching, PagedAttention §4.5), attention is called for each kind.

What is promised: in float32 a token's logits do not depend on the batch beyond rounding, so greedy output is
the same unless two tokens are equal to within it. They are not promised to be equal bit by bit: matrix
multiplications of other sizes and other sharers of the prefix add in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.kernels.large_pages import advise_large_pages
from trunkline.kernels.ops import Angles, AttentionSpec, Kernels, KvPool, PackedLinear, QkNorm, make_angles
from trunkline.worker.batch.batch import ForwardBatch
from trunkline.worker.model.architecture import Mlp, NormKind, Residual
from trunkline.worker.model.checkpoint import ExpertWeights, MlpWeights, NormWeights, Weights
from trunkline.worker.model.model_config import LayerAttention, RopeConfig, Shard
from trunkline.worker.tensor_parallel import TensorParallel
from trunkline.worker.tiers.copy_lane import StepGate


class Decoder:
    """One rank's part of the model. Not reentrant; call under `torch.inference_mode`."""

    def __init__(
        self, shard: Shard, weights: Weights, kernels: Kernels, group: TensorParallel, pool: KvPool
    ) -> None:
        """
        Args:
            pool: KV pool with the rank's KV heads, in the weights' dtype.
        """
        config = shard.config
        self.weights = weights
        self.shard = shard
        self._vocab = range(shard.vocab_start, shard.vocab_start + shard.vocab_size)
        """The token ids of this rank, padding included."""
        self._vocab_present = shard.vocab_rows.stop - shard.vocab_rows.start
        self._logit_cap = config.logit_soft_cap
        self._kernels = kernels
        self._group = group
        self.pool = pool
        self._ropes = Ropes(shard, pool.data.device)
        self._layers = make_layers(shard, weights, kernels, self._ropes, pool.data.device)
        self._final_norm = make_norm(shard, kernels, weights.final_norm)
        self._clip = config.qkv_clip
        self._one_norm = not config.architecture.names.mlp_norm
        self._finish = {
            Residual.SEQUENTIAL: self._finish_sequential,
            Residual.PARALLEL: self._finish_parallel,
            Residual.POST_NORM: self._finish_post_norm,
        }[config.architecture.residual]
        # Rounded like the embeddings that it multiplies.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=pool.data.dtype))

    def forward(
        self,
        batch: ForwardBatch,
        gate: StepGate | None = None,
        take_states: Callable[[Tensor], None] | None = None,
    ) -> Tensor | None:
        """Compute a step: store the new tokens' KV and return the logits that are asked for.

        Args:
            gate: Waits for each layer of KV, and is told when it is stored; None: nothing is loaded or saved.
            take_states: Gets the final hidden states, behind the last norm: `[rows of batch.state_rows, hidden]`,
                the same on every rank.

        Returns:
            float32 `[logits rows, padded vocabulary / tp]`: this rank's columns, -inf where padded; None if the
            batch asks for none.
        """
        angles = self._ropes.angles(batch.positions, self.pool.data.dtype)
        last = self._layers[-1]
        residual = self._embed(batch)
        delta: Tensor | None = None
        for layer in self._layers:
            norm = layer.attention_norm
            x = norm.plain(residual) if delta is None else norm.add(delta, residual)
            part = self._attention(x, layer, batch, angles[layer.rope], gate)
            if layer is last:
                # From here on only the tokens matter whose final states are needed.
                if not batch.needs_states:
                    return None
                if batch.state_rows is not None:
                    residual, part, x = residual[batch.state_rows], part[batch.state_rows], x[batch.state_rows]
            residual, delta = self._finish(layer, x, part, residual)
        norm = self._final_norm
        states = norm.plain(residual) if delta is None else norm.add(delta, residual)
        if self.weights.embedding_out is not None:
            states = self._kernels.linear(states, self.weights.embedding_out)
        if take_states is not None:
            take_states(states)
        rows = batch.logits_rows
        return self._logits(states[:rows] if batch.pooled else states) if rows else None

    def _embed(self, batch: ForwardBatch) -> Tensor:
        """Return the embeddings: each rank looks up the ids that it holds, and the sum over ranks has them all."""
        weights, ids = self.weights, batch.ids
        if self._group.size == 1:
            x = F.embedding(ids, weights.embedding)
        else:
            local = ids - self._vocab.start
            foreign = (local < 0) | (local >= len(self._vocab))
            x = F.embedding(local.masked_fill(foreign, 0), weights.embedding).masked_fill_(foreign[:, None], 0.0)
        if weights.embedding_in is not None:
            x = self._kernels.linear(x, weights.embedding_in)
        if weights.positions is not None:
            x += F.embedding(batch.positions, weights.positions)
        x = self._group.all_reduce(x)
        return x.mul_(self._embedding_scale) if self._embedding_scale != 1.0 else x

    def _attention(
        self, x: Tensor, layer: Layer, batch: ForwardBatch, angles: Angles | None, gate: StepGate | None
    ) -> Tensor:
        """Return this rank's part of attention's output: the sum over its heads."""
        kernels, spec, pool = self._kernels, layer.spec, self.pool
        qkv = kernels.linear(x, layer.qkv)
        if self._clip:
            qkv.clamp_(-self._clip, self._clip)
        if gate is not None:
            gate.enter(layer.index)
        q = kernels.write_kv(batch.write, qkv, angles, pool, layer.index, spec, layer.qk_norm)
        if gate is not None:
            gate.stored(layer.index)
        out = x.new_empty(x.shape[0], spec.heads, spec.head_dim)
        rows = batch.num_rows
        if batch.decode is not None:
            kernels.decode_attention(batch.decode, q[:rows], pool, layer.index, spec, out[:rows])
        if batch.prefill is not None:
            kernels.prefill_attention(batch.prefill, q[rows:], pool, layer.index, spec, out[rows:])
        return kernels.linear(out.view(x.shape[0], -1), layer.attention_out)

    def _finish_sequential(
        self, layer: Layer, x: Tensor, part: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the rest of a layer, behind its attention.

        Args:
            x: attention's input.
            part: attention's output on this rank; may be changed in place.
            residual: sum of the layers' outputs so far; may be changed in place.

        Returns:
            The residual, and what is still to be added to it.
        """
        all_reduce = self._group.all_reduce
        delta = all_reduce(part)
        if layer.attention_post_norm is not NO_NORM:
            delta = layer.attention_post_norm.plain(delta)
        delta = all_reduce(layer.mlp(layer.mlp_norm.add(delta, residual)))
        if layer.mlp_post_norm is not NO_NORM:
            delta = layer.mlp_post_norm.plain(delta)
        return residual, delta

    def _finish_parallel(
        self, layer: Layer, x: Tensor, part: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the rest of a layer whose MLP does not wait for attention (see `_finish_sequential`)."""
        if not self._one_norm:
            x = layer.mlp_norm.plain(residual)
        return residual, self._group.all_reduce(part.add_(layer.mlp(x)))

    def _finish_post_norm(
        self, layer: Layer, x: Tensor, part: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the rest of a layer whose norms follow the sums (see `_finish_sequential`)."""
        x = layer.attention_post_norm.add(self._group.all_reduce(part), residual)
        return layer.mlp_post_norm.add(self._group.all_reduce(layer.mlp(x)), x), None

    def _logits(self, x: Tensor) -> Tensor:
        logits = self._kernels.linear(x, self.weights.head, torch.float32)
        if cap := self._logit_cap:
            logits.div_(cap).tanh_().mul_(cap)
        if self._vocab_present < len(self._vocab):
            logits[:, self._vocab_present :] = float("-inf")
        return logits


def make_kv_pool(shard: Shard, blocks: int, chunk_size: int, dtype: torch.dtype, device: torch.device) -> KvPool:
    """Return the KV pool of a rank, uninitialised: ops ignore slots that nothing was written to."""
    config = shard.config
    shape = (blocks, config.layers, 2, shard.kv_heads, chunk_size, config.head_dim)
    data = torch.empty(shape, dtype=dtype, device=device)
    advise_large_pages(data)
    return KvPool.wrap(data)


class Norm(Protocol):
    """A norm over the last dimension, with its weights."""

    def plain(self, x: Tensor) -> Tensor:
        """Return the norm of `x` `[tokens, hidden]`, which is not changed."""
        ...

    def add(self, delta: Tensor, residual: Tensor) -> Tensor:
        """Add `delta` into `residual` (in place) and return its norm."""
        ...


class NoNorm:
    """Stands where a family has no norm: returns its input."""

    def plain(self, x: Tensor) -> Tensor:
        return x

    def add(self, delta: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(delta)


class RmsNorm:
    """RMS norm, an op of the kernels."""

    __slots__ = ("_eps", "_kernels", "_weight")

    def __init__(self, kernels: Kernels, weight: Tensor, eps: float) -> None:
        self._kernels, self._weight, self._eps = kernels, weight, eps

    def plain(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, delta: Tensor, residual: Tensor) -> Tensor:
        return self._kernels.add_rms_norm(delta, residual, self._weight, self._eps)


class LayerNorm:
    """Layer norm by torch; statistics of half types are in float32."""

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
"""The function of each `ModelConfig.activation`; it may overwrite its argument."""


class GatedMlp:
    """A gated MLP: takes `[tokens, hidden]` and returns this rank's part of the output, which the ranks sum."""

    __slots__ = ("_down", "_kernels", "_up")

    def __init__(self, kernels: Kernels, weights: MlpWeights) -> None:
        self._kernels, self._up, self._down = kernels, weights.up, weights.down

    def __call__(self, x: Tensor) -> Tensor:
        kernels = self._kernels
        return kernels.linear(kernels.gated_linear(x, self._up), self._down)


class PlainMlp:
    """An MLP of one matrix, an activation and another matrix."""

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
    """Index of the layer's rope in the result of `Ropes.angles`."""
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
        """Return the index of a rope in the result of `angles`."""
        return -1 if rope is None else list(self.exact).index(rope)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> list[Angles | None]:
        """Return the angles of a step's tokens for each rope, then None, for layers that rotate nothing."""
        made: list[Angles | None] = [
            make_angles(positions, frequencies, rope.attention_factor, dtype)
            for rope, frequencies in self.exact.items()
        ]
        return [*made, None]


def make_layers(
    shard: Shard, weights: Weights, kernels: Kernels, ropes: Ropes, device: torch.device
) -> list[Layer]:
    """Return this rank's layers; they share what they have in common."""
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
    """Return the norm with these weights, to which `checkpoint` has added 1 if they are stored minus one."""
    kind, eps = shard.config.architecture.norm, shard.config.norm_eps
    if weights is None:
        return NO_NORM
    if kind in (NormKind.RMS, NormKind.RMS_OFFSET):
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


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Return the radians per position of each rotated pair, float32 `[rotary_dim / 2]`.

    Raises:
        ValueError: a scaling that `families` should have refused.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    raise ValueError(f"rope scaling {rope.kind!r} has no frequencies here")


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Scale frequencies as Llama 3.1 does: slow pairs are slowed down by the factor, fast ones kept, those between
    blended."""
    turns = rope.original_max_positions / (2 * math.pi / plain)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - kept) * plain / rope.factor + kept * plain
    slowed = torch.where(turns < rope.low_freq_factor, plain / rope.factor, plain)
    between = (turns >= rope.low_freq_factor) & (turns <= rope.high_freq_factor)
    return torch.where(between, blended, slowed)


def _yarn(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Scale frequencies as `_llama3` does, but blend linearly in the index of the pair (YaRN, "NTK-by-parts")."""
    rotary_dim = rope.rotary_dim

    def pair_of(turns: float) -> float:
        wavelength = rope.original_max_positions / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
