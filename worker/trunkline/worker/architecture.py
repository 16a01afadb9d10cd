"""What distinguishes model families, as data: the decoder is composed from it (design.md §5).

A new family is a new `Architecture` and a reader of its config.json in `families`, not a new class of model.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Norm(StrEnum):
    RMS = "rms"


class Positions(StrEnum):
    ROTARY = "rotary"


class Mlp(StrEnum):
    GATED_SILU = "gated_silu"


@dataclass(frozen=True)
class WeightNames:
    """Tensor names in a checkpoint, without the ending `.weight` or `.bias`."""

    embedding: str
    layer: str
    """Prefix of a layer's names, with `{}` for its index."""
    attention_norm: str
    query: str
    key: str
    value: str
    attention_out: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    final_norm: str
    head: str


@dataclass(frozen=True)
class Architecture:
    """A family of decoders."""

    family: str
    norm: Norm
    positions: Positions
    mlp: Mlp
    parallel_residual: bool
    """Attention and MLP read the same normalised input, and one addition follows both."""
    names: WeightNames


LLAMA: Final = Architecture(
    family="llama",
    norm=Norm.RMS,
    positions=Positions.ROTARY,
    mlp=Mlp.GATED_SILU,
    parallel_residual=False,
    names=WeightNames(
        embedding="model.embed_tokens",
        layer="model.layers.{}.",
        attention_norm="input_layernorm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        attention_out="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        final_norm="model.norm",
        head="lm_head",
    ),
)

ARCHITECTURES: Final = {"LlamaForCausalLM": LLAMA}
"""By the name in config.json's `architectures`."""
