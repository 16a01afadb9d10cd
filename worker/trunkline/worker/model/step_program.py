"""Compile an `Architecture`'s layers over a rank's shard to the program of a step (`trunkline.kernels.program`).

      ids -> embedding -> [ norm -> qkv -> rotate, store KV -> attention -> out ─ all-reduce ─ +
                            norm -> gate, up -> down ─ all-reduce ─ + ] × layers -> norm -> head -> logits

This is LLaMA; `Residual` has the other ways in which attention and MLP come together. Behind attention of the last
layer, and before the first one that reads another one's KV, only the tokens go on whose final states are needed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trunkline.kernels.experts import Experts
from trunkline.kernels.family_ops import Gate, HeadNorm, Multiply, PrepareQueries, Spread
from trunkline.kernels.latent import Absorb, Expand
from trunkline.kernels.ops import AttentionSpec, PackedLinear, QkNorm
from trunkline.kernels.program import (
    Activate,
    Add,
    AddPositions,
    AllReduce,
    Attend,
    Buffer,
    Clamp,
    Embed,
    Forbid,
    LayerNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    Rotations,
    Rows,
    Scale,
    Select,
    SoftCap,
    StoreKv,
)
from trunkline.kernels.query_scale import Temper
from trunkline.kernels.wide_norms import SquareSums, WideNorm
from trunkline.worker.model.architecture import Mlp, NormKind, Residual
from trunkline.worker.model.model_config import LayerAttention, RopeConfig
from trunkline.worker.model.ropes import exact_frequencies
from trunkline.worker.model.shard import Shard
from trunkline.worker.model.weights import (
    ExpertNorms,
    ExpertWeights,
    LatentWeights,
    LayerEmbedding,
    LayerInput,
    LayerWeights,
    NormWeights,
    Weights,
)


def compile_step(
    shard: Shard, weights: Weights, dtype: torch.dtype, device: torch.device, *, sums: bool
) -> Program:
    """Return the program of a rank's steps.

    Args:
        dtype: type of the hidden states, which is that of the weights.
        sums: whether there are other ranks, with which parts are summed.
    """
    return _Compiler(shard, weights, dtype, device, sums).compile()


class _Compiler:
    def __init__(
        self, shard: Shard, weights: Weights, dtype: torch.dtype, device: torch.device, sums: bool
    ) -> None:
        self._shard, self._config, self._weights = shard, shard.config, weights
        self._dtype, self._device, self._sums = dtype, device, sums
        self._frequencies = exact_frequencies(shard.config, device)
        self._specs = _specs(shard, self._frequencies, device)
        self._rows = Rows.TOKENS
        """Rows of the buffers that are made from here on."""
        self._rotations: dict[RopeConfig, tuple[Buffer, Buffer]] = {}
        self._ops: list[Op] = []
        self._layer = 0
        """Index of the layer that is being compiled."""

    def compile(self) -> Program:
        config, weights = self._config, self._weights
        self._rotate()
        residual = self._embed()
        layer_embedding = None
        if weights.layer_embedding is not None:
            layer_embedding = self._embed_layers(weights.layer_embedding, residual)
        delta: Buffer | None = None
        for index, layer in enumerate(weights.layers):
            self._layer = index
            if index == config.kv_layers:
                residual, layer_embedding = self._keep_states(residual, layer_embedding)
            x = self._norm(layer.attention_norm, delta, residual)
            attended = self._attention(index, layer, x)
            if index == config.layers - 1 and self._rows is Rows.TOKENS:
                residual, layer_embedding = self._keep_states(residual, layer_embedding)
                attended = self._select(attended, "attended")
                if config.architecture.residual is Residual.PARALLEL and not config.architecture.names.mlp_norm:
                    x = self._select(x, "x")
            residual, delta = self._finish(layer, x, attended, residual)
            if layer.layer_input is not None and layer_embedding is not None:
                delta = self._layer_input(layer.layer_input, layer_embedding, residual, delta)
            if config.architecture.names.layer_scale:
                if delta is not None:
                    self._ops.append(Add(x=delta, into=residual))
                self._ops.append(Scale(factor=layer.scale, into=residual))
                delta = None
        states = self._norm(weights.final_norm, delta, residual)
        if weights.embedding_out is not None:
            states = self._linear(states, weights.embedding_out, "projected")
        logits = Buffer("logits", Rows.LOGITS, weights.head.out_features, torch.float32)
        self._ops.append(Linear(x=states, layer=weights.head, gated=False, out=logits))
        if config.logit_scale != 1.0:
            self._ops.append(Scale(factor=config.logit_scale, into=logits))
        if config.logit_soft_cap:
            self._ops.append(SoftCap(cap=config.logit_soft_cap, into=logits))
        present = self._shard.vocab_rows.stop - self._shard.vocab_rows.start
        if present < logits.width:
            self._ops.append(Forbid(first=present, into=logits))
        return Program(tuple(self._ops), config.kv_layers, states, logits, self._shard.vocab_start)

    def _keep_states(self, residual: Buffer, layer_embedding: Buffer | None) -> tuple[Buffer, Buffer | None]:
        """Keep only the tokens whose final states are needed, from here on; return both buffers for them."""
        self._rows = Rows.STATES
        kept = None if layer_embedding is None else self._select(layer_embedding, "layer_embedding")
        return self._select(residual, "residual"), kept

    def _buffer(self, name: str, width: int, dtype: torch.dtype | None = None) -> Buffer:
        prefix = "" if self._rows is Rows.TOKENS else "last_"
        return Buffer(prefix + name, self._rows, width, dtype or self._dtype)

    def _rotate(self) -> None:
        for number, (rope, frequencies) in enumerate(self._frequencies.items()):
            cos, sin = (self._buffer(f"{name}_{number}", rope.rotary_dim) for name in ("cos", "sin"))
            self._rotations[rope] = (cos, sin)
            self._ops.append(Rotations(frequencies=frequencies, factor=rope.attention_factor, cos=cos, sin=sin))

    def _embed(self) -> Buffer:
        """Look up the ids that this rank holds; the sum over the ranks has them all."""
        config, weights = self._config, self._weights
        residual = self._buffer("residual", config.hidden_size)
        out = residual if weights.embedding_in is None else self._buffer("embedded", weights.embedding.shape[1])
        self._ops.append(Embed(table=weights.embedding, first=self._shard.vocab_start, out=out))
        if weights.embedding_in is not None:
            self._linear(out, weights.embedding_in, "residual")
        if weights.positions is not None:
            self._ops.append(AddPositions(table=weights.positions, into=residual))
        self._sum(residual)
        # Rounded like the embeddings that it multiplies.
        scale = float(torch.tensor(config.embedding_scale, dtype=self._dtype))
        if scale != 1.0:
            self._ops.append(Scale(factor=scale, into=residual))
        return residual

    def _embed_layers(self, weights: LayerEmbedding, embedded: Buffer) -> Buffer:
        """Return the factors of all layers, one layer's behind the other's: `[tokens, layers * size]`.

        They are `(e * sqrt(size) + norm(p)) / sqrt(2)`, where `e` are the layers' own embeddings of the token and
        `p` is the projection of its embedding.
        """
        config = self._config
        size, width = config.layer_embedding_size, weights.table.shape[1]
        own = self._buffer("own_embedding", width)
        self._ops.append(Embed(table=weights.table, first=self._shard.vocab_start, out=own))
        self._sum(own)
        self._ops.append(Scale(factor=(size / 2) ** 0.5, into=own))
        out = self._linear(embedded, weights.projection, "layer_embedding")
        # `p` is divided by the root of the hidden size before its norm, so the eps weighs more.
        eps = config.norm_eps * config.hidden_size
        self._ops.append(HeadNorm(into=out, first=0, weight=weights.norm * 0.5**0.5, eps=eps))
        self._ops.append(Add(x=own, into=out))
        return out

    def _layer_input(
        self, weights: LayerInput, embedding: Buffer, residual: Buffer, delta: Buffer | None
    ) -> Buffer:
        """Add `delta` to the residual; return what the layer's own embedding is to add after it."""
        if delta is not None:
            self._ops.append(Add(x=delta, into=residual))
        inner = self._linear(residual, weights.gate, "layer_inner", place="layer_gate")
        self._ops.append(Activate(activation=self._config.activation, into=inner))
        self._ops.append(Multiply(x=embedding, first=self._layer * inner.width, into=inner))
        out = self._linear(inner, weights.out, "delta", place="layer_out")
        return self._norm(weights.norm, None, out, self._buffer("normed", out.width))

    def _attention(self, index: int, layer: LayerWeights, x: Buffer) -> Buffer:
        """Return attention's output, before its projection."""
        own = self._config.attention[index]
        spec = self._specs[own]
        cos, sin = self._rotations[own.rope] if own.rope else (None, None)
        if isinstance(layer.qkv, LatentWeights):
            qkv = self._absorb(layer.qkv, x, spec)
            self._ops.append(StoreKv(qkv=qkv, layer=index, spec=spec, cos=cos, sin=sin, norm=None))
            self._temper(qkv, own, spec)
            latents = self._buffer("latents", spec.heads * spec.value_dim)
            self._ops.append(Attend(qkv=qkv, layer=index, spec=spec, out=latents))
            attended = self._buffer("attended", sum(value.out_features for value in layer.qkv.values))
            self._ops.append(Expand(x=latents, layers=layer.qkv.values, out=attended))
            return attended
        if layer.sinks is not None:
            spec = replace(spec, sinks=layer.sinks)
        if index >= self._config.kv_layers:
            queries = self._queries(layer.qkv, layer.qk_norm, x, own, spec)
            return self._select(self._attend(queries, index, spec), "attended")
        qkv = self._linear(x, layer.qkv, "qkv", place="qkv")
        if self._config.qkv_clip:
            self._ops.append(Clamp(limit=self._config.qkv_clip, into=qkv))
        norm = layer.qk_norm
        if own.unit_heads:
            ones = torch.ones(spec.head_dim, dtype=self._dtype, device=self._device)
            norm = QkNorm(ones, ones, self._config.norm_eps)
        if own.unit_values:
            self._unit_values(qkv, own, spec)
        if norm is not None and self._config.architecture.wide_norms:
            self._wide_norm(qkv, norm)
            norm = None
        self._ops.append(StoreKv(qkv=qkv, layer=index, spec=spec, cos=cos, sin=sin, norm=norm))
        self._temper(qkv, own, spec)
        return self._attend(qkv, index, spec)

    def _queries(
        self, layer: PackedLinear, norm: QkNorm | None, x: Buffer, own: LayerAttention, spec: AttentionSpec
    ) -> Buffer:
        """Return the queries of a layer that reads another one's KV.

        Attention takes queries of all tokens. Only those whose results are needed are computed, the others are
        zeros: the layer stores no KV, so no token sees another one's states of this layer.
        """
        made = self._linear(x, layer, "queries", place="qkv")
        queries = Buffer("queries", Rows.TOKENS, made.width, made.dtype)
        self._ops.append(Spread(x=made, out=queries))
        cos, sin = self._rotations[own.rope] if own.rope else (None, None)
        weight, eps = (norm.q_weight, norm.eps) if norm else (None, 0.0)
        self._ops.append(PrepareQueries(queries=queries, spec=spec, cos=cos, sin=sin, weight=weight, eps=eps))
        return queries

    def _attend(self, qkv: Buffer, index: int, spec: AttentionSpec) -> Buffer:
        attended = Buffer("attended", Rows.TOKENS, spec.heads * spec.head_dim, self._dtype)
        self._ops.append(Attend(qkv=qkv, layer=self._config.kv_layer(index), spec=spec, out=attended))
        return attended

    def _unit_values(self, qkv: Buffer, own: LayerAttention, spec: AttentionSpec) -> None:
        """Normalise the heads of values. Where they end in zeros, the mean over all of a head is smaller."""
        share = self._config.head_share(own)
        weight = torch.full((spec.head_dim,), share**0.5, dtype=torch.float32, device=self._device)
        first, eps = (spec.heads + spec.kv_heads) * spec.head_dim, self._config.norm_eps * share
        self._ops.append(HeadNorm(into=qkv, first=first, weight=weight, eps=eps))

    def _temper(self, qkv: Buffer, own: LayerAttention, spec: AttentionSpec) -> None:
        if (scale := own.query_scale) is not None:
            factor, period, added = scale.factor, scale.period, scale.added
            width = spec.heads * spec.head_dim
            self._ops.append(Temper(qkv=qkv, width=width, factor=factor, period=period, added=added))

    def _absorb(self, weights: LatentWeights, x: Buffer, spec: AttentionSpec) -> Buffer:
        """Return the queries in the space of what is stored, behind them what is stored of the token."""
        source = x
        if weights.query_down is not None and weights.query_norm is not None:
            down = self._linear(x, weights.query_down, "query_down", place="query_down")
            source = self._latent_norm(down, weights.query_norm, "query_source")
        queries = self._linear(source, weights.query, "queries", place="query")
        latent = self._linear(x, weights.latent, "latent_raw", place="latent")
        latent = self._latent_norm(latent, weights.latent_norm, "latent")
        rotary = self._linear(x, weights.rotary, "rotary_key", place="rotary")
        out = self._buffer("qkv", spec.qkv_width)
        self._ops.append(Absorb(queries=queries, rotary=rotary, latent=latent, layers=weights.keys, out=out))
        return out

    def _latent_norm(self, x: Buffer, weight: Tensor, name: str) -> Buffer:
        sizes = self._config.latent
        assert sizes is not None
        out = self._buffer(name, x.width)
        self._ops.append(RmsNorm(x=x, residual=None, weight=weight, eps=sizes.norm_eps, out=out))
        return out

    def _wide_norm(self, qkv: Buffer, norm: QkNorm) -> None:
        sums = Buffer("square_sums", qkv.rows, 2, torch.float32)
        widths = (len(norm.q_weight), len(norm.k_weight))
        self._ops.append(SquareSums(qkv=qkv, widths=widths, out=sums))
        # KV heads that several ranks have are counted as often in all sums.
        self._sum(sums)
        self._ops.append(WideNorm(sums=sums, qkv=qkv, ranks=self._shard.tp, norm=norm))

    def _finish(
        self, layer: LayerWeights, x: Buffer, attended: Buffer, residual: Buffer
    ) -> tuple[Buffer, Buffer | None]:
        """Compile the rest of a layer, behind its attention.

        Args:
            x: attention's input.
            residual: sum of the layers' outputs so far.

        Returns:
            The residual, and what is still to be added to it.
        """
        kind = self._config.architecture.residual
        delta = self._linear(attended, layer.attention_out, "delta", place="attention_out")
        if kind is Residual.PARALLEL:  # the MLP does not wait for attention
            if self._config.architecture.names.mlp_norm:
                x = self._norm(layer.mlp_norm, None, residual)
            self._ops.append(Add(x=self._mlp(layer, x, "beside"), into=delta))
            return residual, self._sum(delta)
        self._scaled_sum(delta)
        if kind is Residual.POST_NORM:  # norms follow the sums
            x = self._norm(layer.attention_post_norm, delta, residual)
            delta = self._scaled_sum(self._mlp(layer, x, "delta"))
            return self._norm(layer.mlp_post_norm, delta, x, residual), None
        if layer.attention_post_norm is not None:
            delta = self._norm(layer.attention_post_norm, None, delta, self._buffer("normed", delta.width))
        x = self._norm(layer.mlp_norm, delta, residual)
        if isinstance(layer.mlp, ExpertWeights) and layer.mlp.norms is not None:
            delta = self._experts_beside(layer.mlp, layer.mlp.norms, x, residual)
        else:
            delta = self._scaled_sum(self._mlp(layer, x, "delta"))
        if layer.mlp_post_norm is not None:
            delta = self._norm(layer.mlp_post_norm, None, delta, self._buffer("normed", delta.width))
        return residual, delta

    def _mlp(self, layer: LayerWeights, x: Buffer, name: str) -> Buffer:
        """Return this rank's part of the MLP's output."""
        weights, config = layer.mlp, self._config
        if isinstance(weights, ExpertWeights):
            return self._experts(weights, x, name)
        is_plain = config.architecture.mlp is Mlp.PLAIN
        width = f"_{weights.up.out_features}" if config.mlp_widths else ""
        inner = self._linear(x, weights.up, f"inner{width}", gated=not is_plain, place="up")
        if is_plain:
            self._ops.append(Activate(activation=config.activation, into=inner))
        return self._linear(inner, weights.down, name, place="down")

    def _experts_beside(self, weights: ExpertWeights, norms: ExpertNorms, x: Buffer, residual: Buffer) -> Buffer:
        """Return the sum of the experts and of the MLP beside them, which have norms of their own.

        Args:
            x: the input of the MLP that all tokens go to.
        """
        router_x = self._norm(norms.router, None, residual, self._buffer("router_x", x.width))
        expert_x = self._norm(norms.before, None, residual, self._buffer("expert_x", x.width))
        chosen = self._sum(self._chosen_experts(weights, expert_x, "chosen", router_x))
        out = self._norm(norms.behind, None, chosen, self._buffer("delta", x.width))
        shared = self._sum(self._shared_experts(weights, x))
        beside = self._norm(norms.shared_behind, None, shared, self._buffer("beside", x.width))
        self._ops.append(Add(x=beside, into=out))
        return out

    def _experts(self, weights: ExpertWeights, x: Buffer, name: str) -> Buffer:
        """Return the sum over the chosen experts that are here, and this rank's part of those all tokens go to."""
        out = self._chosen_experts(weights, x, name)
        if weights.shared is not None:
            self._ops.append(Add(x=self._shared_experts(weights, x), into=out))
        return out

    def _shared_experts(self, weights: ExpertWeights, x: Buffer) -> Buffer:
        """Return this rank's part of the experts that all tokens go to."""
        assert weights.shared is not None
        inner = self._linear(x, weights.shared.up, "shared_inner", gated=True, place="shared_up")
        shared = self._linear(inner, weights.shared.down, "shared", place="shared_down")
        if weights.shared_gate is not None:
            gate = self._buffer("shared_gate", 1, torch.float32)
            self._ops.append(Linear(x=x, layer=weights.shared_gate, gated=False, out=gate))
            self._ops.append(Gate(x=gate, into=shared))
        return shared

    def _chosen_experts(
        self, weights: ExpertWeights, x: Buffer, name: str, router_x: Buffer | None = None
    ) -> Buffer:
        """Return the sum over the chosen experts that are here. `router_x`: what the router reads; None: `x`."""
        mixture = self._config.mixture
        assert mixture is not None
        out = self._buffer(name, x.width)
        chosen = Experts(
            x=x,
            router=weights.router,
            first=weights.first,
            experts=tuple((expert.up, expert.down) for expert in weights.experts),
            routing=mixture.routing,
            choice_bias=weights.choice_bias,
            out=out,
            stack=weights.stack,
            router_x=router_x,
            scale=weights.scale,
            place=f"{self._layer}.experts",
        )
        self._ops.append(chosen)
        return out

    def _linear(
        self, x: Buffer, layer: PackedLinear, name: str, *, gated: bool = False, place: str = ""
    ) -> Buffer:
        """Compile a linear op. `place`: its name within the layer for adapters; "": they cannot change it."""
        out = self._buffer(name, layer.out_features)
        named = f"{self._layer}.{place}" if place else ""
        self._ops.append(Linear(x=x, layer=layer, gated=gated, out=out, place=named))
        return out

    def _norm(
        self, weights: NormWeights | None, delta: Buffer | None, residual: Buffer, out: Buffer | None = None
    ) -> Buffer:
        """Add `delta` into `residual`; return the norm of the sum, or the sum itself where a family has no norm.
        `checkpoint` has added 1 to weights that are stored minus one."""
        if weights is None:
            if delta is not None:
                self._ops.append(Add(x=delta, into=residual))
            return residual
        out = out or self._buffer("x", residual.width)
        x, into = (residual, None) if delta is None else (delta, residual)
        eps = self._config.norm_eps
        if self._config.architecture.norm in (NormKind.RMS, NormKind.RMS_OFFSET):
            self._ops.append(RmsNorm(x=x, residual=into, weight=weights.weight, eps=eps, out=out))
        else:
            norm = LayerNorm(x=x, residual=into, weight=weights.weight, bias=weights.bias, eps=eps, out=out)
            self._ops.append(norm)
        return out

    def _select(self, x: Buffer, name: str) -> Buffer:
        out = self._buffer(name, x.width)
        self._ops.append(Select(x=x, out=out))
        return out

    def _scaled_sum(self, part: Buffer) -> Buffer:
        """Sum what attention or an MLP adds to the residual over the ranks."""
        if self._config.residual_scale != 1.0:
            self._ops.append(Scale(factor=self._config.residual_scale, into=part))
        return self._sum(part)

    def _sum(self, part: Buffer) -> Buffer:
        if self._sums:
            self._ops.append(AllReduce(into=part))
        return part


def _specs(
    shard: Shard, frequencies: dict[RopeConfig, torch.Tensor], device: torch.device
) -> dict[LayerAttention, AttentionSpec]:
    config = shard.config
    slopes = torch.tensor(shard.alibi_slopes, dtype=torch.float32, device=device)
    return {
        own: AttentionSpec(
            heads=shard.heads,
            kv_heads=shard.kv_heads,
            head_dim=config.head_dim,
            # Queries and keys that end in zeros are longer behind their norms, by the root of the share each.
            scale=own.scale * config.head_share(own),
            inverse_frequencies=frequencies[own.rope] if own.rope else None,
            alibi_slopes=slopes if shard.alibi_slopes else None,
            window=own.window,
            soft_cap=own.soft_cap,
            latent_dim=config.latent.latent if config.latent else 0,
            span=own.span,
        )
        for own in set(config.attention)
    }
