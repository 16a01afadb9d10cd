"""A model's shape in this project's words, whatever its config.json calls things. No torch."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Multiplies cos and sin (YaRN)."""
    truncate: bool = True
    """Whether YaRN's correction range is rounded to whole dimensions."""


@dataclass(frozen=True)
class LayerAttention:
    """What may differ from layer to layer in attention."""

    scale: float
    """Multiplies the scores."""
    window: int = 0
    """A token sees the last `window` positions, its own included; 0: all before it."""
    soft_cap: float = 0.0
    """Scores become `soft_cap * tanh(score / soft_cap)`; 0: as they are."""
    rope: RopeConfig | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A model: its family's architecture, and what its config.json adds."""

    architecture: Architecture
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the MLP, of one expert if there are several."""
    vocab_size: int
    max_positions: int
    """Longest context the model was made for, in tokens."""
    norm_eps: float
    activation: str
    """"silu", "gelu", "gelu_tanh" or "relu"."""
    attention: tuple[LayerAttention, ...]
    """By layer; equal ones are one object."""
    tied_embeddings: bool
    stored_dtype: str
    """Of the checkpoint's weights, as config.json says; "" if it does not."""
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    embedding_size: int = 0
    """Width of embedding and head where it is not the hidden size; else 0."""
    embedding_scale: float = 1.0
    """Multiplies looked-up embeddings, but not the head, even if they are tied."""
    logit_soft_cap: float = 0.0
    """As `LayerAttention.soft_cap`, of the logits."""
    qkv_clip: float = 0.0
    """Queries, keys and values are clamped to ± this; 0: they are not."""
    alibi_slopes: tuple[float, ...] = ()
    """By head: `slope * (key position - query position)` is added to scaled scores."""
    experts: int = 0
    experts_per_token: int = 0

    @property
    def positions_shift(self) -> bool:
        """Whether KV computed at one position can act at another (design.md, idea 5)."""
        return self.architecture.positions is not Positions.LEARNED

    def kv_block_bytes(self, chunk_size: int, tp: int, dtype: str) -> int:
        """Bytes of one block on one rank."""
        width = 4 if dtype == "float32" else 2
        return self.layers * 2 * max(1, self.kv_heads // tp) * chunk_size * self.head_dim * width
