"""The weights of a model's shard on one rank, as the step's program takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from trunkline.kernels.ops import ExpertStack, PackedLinear, QkNorm


class NormWeights(NamedTuple):
    """The weights of a norm over the hidden size."""

    weight: Tensor
    bias: Tensor | None


class LatentWeights(NamedTuple):
    """The projections into latent attention on one rank: its heads, and all of the latent."""

    query_down: PackedLinear | None
    """To the vector that queries are made of; None: they are made of the hidden state."""
    query_norm: Tensor | None
    """Weights of that vector's norm."""
    query: PackedLinear
    """To the heads' queries, `[heads * (rotary + plain), …]`."""
    rotary: PackedLinear
    """Projection to the rotary part of the key, `[rotary, hidden]`."""
    latent: PackedLinear
    """Projection to the latent, `[latent, hidden]`."""
    latent_norm: Tensor
    keys: tuple[PackedLinear, ...]
    """For each head `[latent, plain]`: what makes keys of latents, transposed, so that it brings a query there."""
    values: tuple[PackedLinear, ...]
    """For each head `[value, latent]`."""


class MlpWeights(NamedTuple):
    """An MLP on one rank, or a whole expert."""

    up: PackedLinear
    """First matrix of the MLP, `[intermediate, hidden]`; of a gated MLP `[2 * intermediate, hidden]`: gate, up,
    and the activation."""
    down: PackedLinear


class ExpertNorms(NamedTuple):
    """The norms of experts that stand beside the MLP of every token and read another norm of the residual."""

    router: NormWeights
    """Norm of the residual before the router."""
    before: NormWeights
    """Norm of the residual before the experts."""
    behind: NormWeights
    """Norm of what the chosen experts give together."""
    shared_behind: NormWeights
    """Norm of what the MLP beside them gives."""


class ExpertWeights(NamedTuple):
    """A layer's experts, as far as this rank has them."""

    router: PackedLinear
    """Router of the layer, `[experts, hidden]`, with a row for each expert of the layer, on whatever rank the
    expert is."""
    first: int
    """Index, among the layer's experts, of the first one that this rank has."""
    experts: list[MlpWeights]
    choice_bias: Tensor | None
    """float32 `[experts]`, added to an expert's score for the choice alone."""
    shared: MlpWeights | None
    """This rank's part of the experts that every token goes to."""
    stack: ExpertStack | None
    """The same experts for grouped products, where the kernels have them."""
    shared_gate: PackedLinear | None
    """Projection to the number whose sigmoid multiplies their results, `[1, hidden]`."""
    scale: Tensor | None
    """float32 `[experts]`, factor of each expert's share."""
    norms: ExpertNorms | None
    """None: router and experts read what an MLP would."""


class LayerEmbedding(NamedTuple):
    """Embeddings that each layer has of a token beside the model's. Only the table is divided between ranks."""

    table: Tensor
    """`[padded vocabulary / tp, layers * size]`, of this rank's tokens."""
    projection: PackedLinear
    """`[layers * size, hidden]`, from a token's embedding to what is added to the table's row."""
    norm: Tensor
    """float32 `[size]`, the norm of each layer's part of the projection."""


class LayerInput(NamedTuple):
    """How a layer uses its own embedding: as a factor between two matrices."""

    gate: PackedLinear
    """`[size, hidden]`."""
    out: PackedLinear
    """`[hidden, size]`."""
    norm: NormWeights
    """Norm of the result of `out`."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer on one rank."""

    attention_norm: NormWeights | None
    qkv: PackedLinear | LatentWeights
    """Projections to queries, keys and values, `[(heads + 2 * kv_heads) * head_dim, hidden]`; to queries alone in
    layers that read another one's KV."""
    qk_norm: QkNorm | None
    """Norms of query and key heads. In layers that read another one's KV only the queries' norm is used."""
    sinks: Tensor | None
    """float32 `[heads]`, of this rank's heads."""
    attention_out: PackedLinear
    attention_post_norm: NormWeights | None
    mlp_norm: NormWeights | None
    mlp: MlpWeights | ExpertWeights
    mlp_post_norm: NormWeights | None
    layer_input: LayerInput | None
    scale: float
    """Factor of the residual behind the layer."""


@dataclass(frozen=True)
class Weights:
    """A model's shard on one rank."""

    embedding: Tensor
    """Embeddings of this rank's tokens, `[padded vocabulary / tp, embedding size]`."""
    embedding_in: PackedLinear | None
    """Projection of the embeddings, `[hidden, embedding size]`."""
    positions: Tensor | None
    """Table of positions, `[max positions, hidden]`, on rank 0 only: the ranks' embeddings are summed."""
    layer_embedding: LayerEmbedding | None
    layers: list[LayerWeights]
    final_norm: NormWeights | None
    embedding_out: PackedLinear | None
    """Projection before the head, `[embedding size, hidden]`."""
    head: PackedLinear
    """Head of this rank's tokens, `[padded vocabulary / tp, embedding size]`; the embedding's matrix if the two
    are tied."""
    bytes_read: int
    """Bytes read from the files for this shard."""
