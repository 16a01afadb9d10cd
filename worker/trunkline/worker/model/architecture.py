"""What a record of a model family says (`records`): how its layers are composed, and the names of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NormKind(StrEnum):
    """The kind of a norm of hidden states."""

    RMS = "rms"
    RMS_OFFSET = "rms, weights stored minus one"
    LAYER = "layer"
    LAYER_NO_BIAS = "layer, without bias"


class Positions(StrEnum):
    """The way in which a token's position enters the model."""

    ROTARY = "rotary"
    ALIBI = "alibi"
    LEARNED = "learned"
    """A table of vectors added to the embeddings. Keys depend on it, so cached KV cannot move."""


class Qkv(StrEnum):
    """The place of the query, key and value projections in the checkpoint."""

    SEPARATE = "three matrices"
    STACKED = "one matrix: all queries, all keys, all values"
    GROUPED = "one matrix: for each KV head its queries, its key, its value"
    LATENT = "queries, a latent and a rotary key for all heads, and what makes keys and values of the latent"


class Mlp(StrEnum):
    """The kind of an MLP, or of a mixture's experts."""

    PLAIN = "down(activation(up(x)))"
    GATED = "down(activation(gate(x)) * up(x))"


class Residual(StrEnum):
    """The way in which attention `a` and MLP `m` are added to `x`; `n` are norms of their own."""

    SEQUENTIAL = "x + a(n(x)), then x + m(n(x))"
    PARALLEL = "x + a(n(x)) + m(n(x))"
    """Attention and MLP side by side: one all-reduce per layer."""
    POST_NORM = "n(x + a(x)), then n(x + m(x))"


@dataclass(frozen=True)
class WeightNames:
    """Tensor names in a checkpoint, without the ending `.weight` or `.bias`; "": there is none.

    Every name but `head` stands behind the prefix of `Architecture.prefixes` that the checkpoint uses; the names
    of a layer's tensors also stand behind `layer`.
    """

    embedding: str
    layer: str
    """Prefix of a layer's names, with `{}` for its index."""
    attention_norm: str
    attention_out: str
    mlp_norm: str
    """Norm before the MLP. Empty under `PARALLEL` if the MLP reads what attention reads."""
    up: str
    down: str
    final_norm: str
    head: str = "lm_head"
    qkv: str = ""
    """The fused projection; empty if there are `query`, `key` and `value`."""
    query: str = ""
    key: str = ""
    value: str = ""
    query_norm: str = ""
    """RMS norm of each query head before rotation, or of all together (`Architecture.wide_norms`)."""
    key_norm: str = ""
    query_down: str = ""
    """`LATENT`: projection to the vector that queries are made of, with a norm; empty if they are made of the
    hidden state."""
    query_down_norm: str = ""
    latent: str = ""
    """`LATENT`: one matrix, first the latent's rows, then those of the rotary key."""
    latent_norm: str = ""
    expand: str = ""
    """`LATENT`: for each head the rows that make a key of the latent, then those that make a value."""
    gate: str = ""
    """The same as `up` if one matrix has both: first the gate's rows."""
    attention_post_norm: str = ""
    """Norm of attention's output before it is added; under `POST_NORM`, of the sum."""
    mlp_post_norm: str = ""
    router: str = ""
    """Router of a mixture of experts; empty if the family has none."""
    expert: str = ""
    """Prefix of the names of an expert's tensors (`gate`, `up`, `down`), with `{}` for its index."""
    expert_gate: str = ""
    """Name of an expert's gate where it is not `gate`; so with `expert_up`."""
    expert_up: str = ""
    shared_experts: str = ""
    """Prefix of the same names of the experts that every token goes to."""
    shared_gate: str = ""
    """Projection to one number, whose sigmoid multiplies what those give."""
    dense: str = ""
    """Prefix of the same names in layers without a mixture."""
    sinks: str = ""
    """Score of each head's sink (`AttentionSpec.sinks`); the whole name."""
    choice_bias: str = ""
    """What is added to an expert's score for the choice alone; the whole name."""
    experts_norm: str = ""
    """Norm of the residual before the experts, where these and the MLP of every token read different ones, and the
    sum of the two goes through `mlp_post_norm`; then there are `router_norm`, `experts_post_norm` and
    `shared_post_norm`, too."""
    experts_post_norm: str = ""
    """Norm of what the chosen experts give together."""
    shared_post_norm: str = ""
    """Norm of what the experts give that every token goes to."""
    router_norm: str = ""
    """Weights of the norm of the residual before the router, which are divided by the root of the hidden size; the
    whole name."""
    expert_scale: str = ""
    """Factor of each expert's share; the whole name."""
    layer_scale: str = ""
    """What multiplies the residual behind the layer, one number; the whole name."""
    layer_embedding: str = ""
    """Table of the embeddings that each layer has of its own (`ModelConfig.layer_embedding_size`): a row has all
    layers' behind each other."""
    layer_projection: str = ""
    """Projection of a token's embedding to what is added to those, for all layers."""
    layer_projection_norm: str = ""
    """Norm of each layer's part of it."""
    layer_gate: str = ""
    """Projection of the residual behind the MLP to what the layer's own embedding multiplies."""
    layer_out: str = ""
    """Projection of the product to what is added to the residual."""
    layer_out_norm: str = ""
    positions: str = ""
    embedding_in: str = ""
    """Projection from the embeddings' width to the hidden size."""
    embedding_out: str = ""
    """Projection from the hidden size to the embeddings' width, before the head."""

    @property
    def expert_gates(self) -> tuple[str, str]:
        """Names of an expert's gate and up."""
        return self.expert_gate or self.gate, self.expert_up or self.up


@dataclass(frozen=True)
class Architecture:
    """A family of decoders."""

    family: str
    norm: NormKind
    positions: Positions
    qkv: Qkv
    mlp: Mlp
    residual: Residual
    names: WeightNames
    prefixes: tuple[str, ...]
    """Prefixes of tensor names; a checkpoint uses one of them."""
    wide_norms: bool = False
    """Whether queries are normalised as one vector, and keys as one, instead of each head."""
    interleaved: bool = False
    """Whether the pairs of dimensions that rotary positions turn are neighbours in the checkpoint; here they are
    half of the rotated part apart."""
    transposed: bool = False
    """Whether the layers' matrices are stored as `[in, out]`."""
    head_prefixes: tuple[str, ...] = ()
    """Prefix of the head's name for each of `prefixes`; empty: none has any."""
    interleaved_gates: bool = False
    """Whether, in a matrix of gate and up, their rows alternate; else all of the gate's come first."""
    choice_bias_is_row: bool = False
    """Whether the bias of the choice of experts is stored as `[1, experts]`."""
    position_rows_skipped: int = 0
    """Number of rows of the table of positions in front of position 0."""
