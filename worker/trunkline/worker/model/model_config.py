"""A model's shape in this project's words. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trunkline.kernels.routing import Routing
from trunkline.kvstore.chunk_format import INT8_MOST, ChunkFormat, kv_format, latent_format
from trunkline.worker.errors import UnsupportedModelError
from trunkline.worker.model.architecture import Architecture, Positions


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions and their scaling (config.json's `rope_parameters`, formerly `rope_scaling`)."""

    theta: float
    rotary_dim: int
    """Leading dimensions of a head that are rotated."""
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Factor of cos and sin (YaRN)."""
    truncate: bool = True
    """Whether YaRN's correction range is rounded to whole dimensions."""
    short_factors: tuple[float, ...] = ()
    """Factor of each pair's wavelength in contexts up to `original_max_positions` (LongRoPE)."""
    long_factors: tuple[float, ...] = ()
    """Factor of each pair's wavelength in longer contexts."""
    turning_pairs: int = 0
    """Leading pairs that turn at all (proportional positions); 0: every pair."""
    is_long: bool = False
    """Whether the long factors are used, for whatever text: KV of one model has one kind of positions."""


@dataclass(frozen=True)
class QueryScale:
    """How queries grow with their position: by `1 + factor * log(1 + floor((position + added) / period))`."""

    factor: float
    period: int
    added: int


@dataclass(frozen=True)
class LayerHeads:
    """The heads that a layer's weights have, where they are not the model's.

    The model's are as wide as the widest, and as many as the most. In a layer's pool narrower heads end in zeros,
    and fewer KV heads are there several times.
    """

    head_dim: int
    kv_heads: int
    keys_are_values: bool = False
    """Whether one matrix makes keys and values."""


@dataclass(frozen=True)
class LayerAttention:
    """The properties of attention that may differ from layer to layer."""

    scale: float
    """Factor of the scores."""
    window: int = 0
    """Number of latest positions that a token sees, its own included; 0: all before it."""
    soft_cap: float = 0.0
    """Cap of the scores, which become `soft_cap * tanh(score / soft_cap)`; 0: no cap."""
    rope: RopeConfig | None = None
    span: int = 0
    """Positions are cut every `span`; a token sees those before it in its own part; 0: they are not cut."""
    query_scale: QueryScale | None = None
    unit_heads: bool = False
    """Whether the heads of queries and keys are normalised (RMS), without weights."""
    unit_values: bool = False
    """Whether values are, too."""
    heads: LayerHeads | None = None

    @property
    def shifts(self) -> bool:
        """Whether rotary attention is the same wherever a text stands: it depends on distances alone."""
        return self.rope is not None and not self.span and self.query_scale is None


@dataclass(frozen=True)
class Mixture:
    """A model's mixtures of experts."""

    experts: int
    """Number of experts of a layer."""
    width: int
    """Width within one expert."""
    routing: Routing
    shared_width: int = 0
    """Width of the experts that every token goes to, taken as one; 0: there are none."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that have a plain MLP instead."""
    router_bias: bool = False
    is_split: bool = False
    """Whether each rank has a part of every expert's width, instead of whole experts."""


@dataclass(frozen=True)
class LatentAttention:
    """The sizes of latent attention (DeepSeek-V2, §2.1), in numbers of a head."""

    latent: int
    """Numbers of the latent, of which all heads' keys and values are made."""
    rotary: int
    """The part of queries and keys that is rotated; keys of all heads have the same."""
    plain: int
    """The rest of queries and keys."""
    value: int
    query_rank: int = 0
    """Numbers of the vector that queries are made of; 0: they are made of the hidden state."""
    norm_eps: float = 1e-6
    """Of the norms of latent and vector, whatever the model's other norms have."""

    @property
    def query(self) -> int:
        """Numbers of a query."""
        return self.plain + self.rotary

    def query_order(self, interleaved: bool) -> list[int]:
        """Return a query's rows in the checkpoint in the order that kernels take: the rotary part comes first."""
        return [*(self.plain + row for row in self._rotary_order(interleaved)), *range(self.plain)]

    def key_order(self, interleaved: bool) -> list[int]:
        """Return the rows of the rotary key in the matrix that also has the latent's."""
        return [self.latent + row for row in self._rotary_order(interleaved)]

    def _rotary_order(self, interleaved: bool) -> list[int]:
        every = range(self.rotary)
        return [*every[::2], *every[1::2]] if interleaved else list(every)


@dataclass(frozen=True)
class ModelConfig:
    """A model: its family's architecture, and what its config.json adds."""

    architecture: Architecture
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    """Numbers of a query or a key; with latent attention, of what is stored of a token."""
    intermediate_size: int
    """Width of the MLP where a layer has one."""
    vocab_size: int
    max_positions: int
    """Longest context the model was made for, in tokens."""
    norm_eps: float
    activation: str
    """Name of the activation: "silu", "gelu", "gelu_tanh" or "relu"."""
    attention: tuple[LayerAttention, ...]
    """The attention of each layer; equal ones are one object."""
    tied_embeddings: bool
    stored_dtype: str
    """Type of the checkpoint's weights, as config.json says; "" if it does not."""
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    embedding_size: int = 0
    """Width of embedding and head where it is not the hidden size; else 0."""
    embedding_scale: float = 1.0
    """Factor of looked-up embeddings. The head is not scaled, even if the two are tied."""
    logit_soft_cap: float = 0.0
    """Cap of the logits, as `LayerAttention.soft_cap` of scores."""
    qkv_clip: float = 0.0
    """Largest magnitude of queries, keys and values, which are clamped to ± this; 0: they are not."""
    alibi_slopes: tuple[float, ...] = ()
    """Slope of each head for ALiBi: `slope * (key position - query position)` is added to scaled scores."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual."""
    logit_scale: float = 1.0
    mixture: Mixture | None = None
    latent: LatentAttention | None = None
    """Keys and values are made of latents; then `kv_heads` is 1."""
    kv_sources: tuple[int, ...] = ()
    """For each of the last layers, if they keep no KV, the earlier layer whose KV it reads."""
    mlp_widths: tuple[int, ...] = ()
    """Width of each layer's MLP where they differ; empty: all have `intermediate_size`."""
    layer_embedding_size: int = 0
    """Width of the embedding that each layer has of a token beside the model's; 0: there are none."""

    @property
    def kv_layers(self) -> int:
        """Number of layers that keep KV; they are the first ones."""
        return self.layers - len(self.kv_sources)

    def kv_layer(self, layer: int) -> int:
        """Return the layer whose KV a layer's attention reads."""
        return layer if layer < self.kv_layers else self.kv_sources[layer - self.kv_layers]

    def mixture_of(self, layer: int) -> Mixture | None:
        """Return the mixture of experts of a layer; None if it has a plain MLP."""
        return None if self.mixture is None or layer in self.mixture.dense_layers else self.mixture

    def of_layer(self, layer: int) -> ModelConfig:
        """Return the model with the heads and the MLP of a layer's weights."""
        own, names = self.attention[layer].heads, self.architecture.names
        if own is None and not self.mlp_widths and not self.kv_sources:
            return self
        if own is not None and own.keys_are_values:
            names = replace(names, value="")
        if layer >= self.kv_layers:
            names = replace(names, key="", value="", key_norm="")
        return replace(
            self,
            head_dim=own.head_dim if own else self.head_dim,
            kv_heads=own.kv_heads if own else self.kv_heads,
            intermediate_size=self.mlp_widths[layer] if self.mlp_widths else self.intermediate_size,
            architecture=replace(self.architecture, names=names),
        )

    def head_share(self, own: LayerAttention) -> float:
        """Return which part of a head in the pool a layer's own heads fill."""
        return 1.0 if own.heads is None else own.heads.head_dim / self.head_dim

    def serving(self, max_context: int, *, expert_parallel: bool = True) -> ModelConfig:
        """Return the model as it serves contexts up to `max_context` tokens; 0: up to its own limit.

        Args:
            expert_parallel: Whether each rank has whole experts, if there are any.
        """
        context = max_context or self.max_positions

        def served(own: LayerAttention) -> LayerAttention:
            if own.rope is None or own.rope.kind != "longrope":
                return own
            return replace(own, rope=replace(own.rope, is_long=context > own.rope.original_max_positions))

        changed = {own: served(own) for own in self.attention}
        mixture = None if self.mixture is None else replace(self.mixture, is_split=not expert_parallel)
        return replace(self, attention=tuple(changed[own] for own in self.attention), mixture=mixture)

    @property
    def window(self) -> int:
        """The number of tokens that the layer with the widest window sees; 0: some layer sees all tokens."""
        return max(own.window for own in self.attention) if all(own.window for own in self.attention) else 0

    @property
    def part_window(self) -> int:
        """Where some layers see all tokens and others have a window: what a query sees in the widest of these; 0:
        all layers are of one kind."""
        return 0 if self.window else max(own.window for own in self.attention)

    @property
    def positions_shift(self) -> bool:
        """Whether KV computed at one position can act at another."""
        if self.architecture.positions is Positions.ROTARY:
            return all(own.shifts for own in set(self.attention))
        return self.architecture.positions is not Positions.LEARNED

    @property
    def only_on_cpus(self) -> str:
        """What of this model the kernels for GPUs do not compute; "": nothing."""
        found = ["latent attention"] if self.latent is not None else []
        if self.architecture.names.sinks:
            found.append("sinks in its attention")
        if any(own.heads for own in self.attention):
            found.append("heads of several sizes")
        if any(own.span for own in self.attention):
            found.append("attention within parts of the positions")
        if self.activation == "clamped_silu":
            found.append("clamped activations")
        if self.kv_sources:
            found.append("layers that read the KV of others")
        if self.layer_embedding_size:
            found.append("embeddings of each layer")
        return ", ".join(found)

    def chunk_format(self, chunk_size: int, dtype: str, kv_dtype: str = "auto") -> ChunkFormat:
        """Return what a chunk of this model's KV is, with all its heads.

        Args:
            dtype: The type of the computation.
            kv_dtype: One of `chunk_format.KV_DTYPES`.

        Raises:
            UnsupportedModelError: KV of this model cannot be kept in that type.
        """
        # Their text names all fields: a field that is added changes it, and KV is computed again.
        positions = repr((self.architecture.positions, self.attention, self.alibi_slopes, self.max_positions))
        if (own := self.latent) is not None:
            if kv_dtype == "fp8":
                raise UnsupportedModelError("KV in fp8 is not supported with latent attention; use int8 or auto")
            if kv_dtype != "auto" and max(2 * own.rotary, own.latent) > INT8_MOST:
                raise UnsupportedModelError(
                    f"KV in int8 is not supported with latents of {own.latent} numbers and rotary parts of "
                    f"{own.rotary}, only up to {INT8_MOST} and {INT8_MOST // 2}; use auto"
                )
            latents = (self.kv_layers, chunk_size, own.rotary, own.latent)
            return latent_format(latents, dtype, kv_dtype, positions=positions, shifts=self.positions_shift)
        sizes = (self.kv_layers, self.kv_heads, chunk_size, self.head_dim)
        return kv_format(sizes, dtype, kv_dtype, positions=positions, shifts=self.positions_shift)
