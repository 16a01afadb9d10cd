"""What the readers of all families share: the fields that every config.json has, in a `ModelConfig`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from trunkline.worker.errors import UnsupportedModelError
from trunkline.worker.model.architecture import Architecture
from trunkline.worker.model.config_fields import Fields, read_rope
from trunkline.worker.model.model_config import LayerAttention, ModelConfig

Reader = Callable[[Mapping[str, Any]], ModelConfig]
"""Function that reads the parsed config.json of a family."""

GATED_ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh")
PLAIN_ACTIVATIONS: Final = ("relu", "gelu", "gelu_tanh", "silu")


def llama_like(
    fields: Fields,
    architecture: Architecture,
    *,
    theta: float = 1e4,
    norm_eps: float = 1e-6,
    activation: str = "silu",
    tied: bool = False,
    head_dim: int = 0,
    fraction: float = 0.0,
) -> ModelConfig:
    """Read what LLaMA and its followers have in common; the keywords are defaults.

    Args:
        fraction: share of a head that is rotated, where the file does not say; 0: a family whose heads are rotated
            whole, so that the file may not say otherwise.
    """
    config = base(
        fields,
        architecture,
        norm_eps=fields.number("rms_norm_eps", norm_eps),
        activation=fields.activation("hidden_act", activation, GATED_ACTIVATIONS),
        tied=tied,
        head_dim=fields.whole("head_dim", head_dim),
    )
    rope = read_rope(fields, config.head_dim, theta, fraction or 1.0)
    if not fraction and rope.rotary_dim != config.head_dim:
        raise UnsupportedModelError("partial_rotary_factor is not supported for this architecture")
    return with_attention(config, lambda _, own: replace(own, rope=rope))


def base(
    fields: Fields,
    architecture: Architecture,
    *,
    norm_eps: float,
    activation: str,
    tied: bool = True,
    head_dim: int = 0,
    kv_heads: int = 0,
    max_positions: int = 2048,
) -> ModelConfig:
    """Read the fields that all families have.

    Args:
        tied: whether embedding and head are one, where the file does not say.
        head_dim: 0: the hidden size divided by the heads.
        kv_heads: 0: what the file says, and if it does not, as many as heads.
        max_positions: longest context, where the file does not say.
    """
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers")
    head_dim = head_dim or hidden // heads
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads or fields.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=fields.whole("intermediate_size", 4 * hidden),
        vocab_size=fields.whole("vocab_size"),
        max_positions=fields.whole("max_position_embeddings", max_positions),
        norm_eps=norm_eps,
        activation=activation,
        attention=(LayerAttention(head_dim**-0.5),) * layers,
        tied_embeddings=fields.flag("tie_word_embeddings", tied),
        stored_dtype=str(fields.get("dtype") or fields.get("torch_dtype") or ""),
    )
    if min(layers, heads, config.kv_heads, config.vocab_size, config.intermediate_size) < 1:
        raise ValueError("layers, heads, vocab_size and intermediate_size must be positive")
    if heads % config.kv_heads:
        raise ValueError(f"{heads} attention heads cannot share {config.kv_heads} KV heads evenly")
    return config


def with_attention(config: ModelConfig, change: Callable[[int, LayerAttention], LayerAttention]) -> ModelConfig:
    """Return the configuration with each layer's attention changed; equal ones stay one object."""
    made: dict[LayerAttention, LayerAttention] = {}
    changed = (change(layer, own) for layer, own in enumerate(config.attention))
    return replace(config, attention=tuple(made.setdefault(own, own) for own in changed))


def with_attention_bias(config: ModelConfig, fields: Fields, default: bool = False) -> ModelConfig:
    """Return a model with biases in all projections of attention if `attention_bias` says so."""
    bias = fields.flag("attention_bias", default)
    return replace(config, attention_bias=bias, attention_out_bias=bias)


def windowed(config: ModelConfig, fields: Fields, is_sliding: Callable[[int], bool]) -> ModelConfig:
    """Add a window to the layers that `layer_types` names, or, without that field, `is_sliding`."""
    window = int(fields.nullable("sliding_window", 4096))
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if is_sliding(i) else "full_attention" for i in range(config.layers)]
    other = set(kinds) - {"sliding_attention", "full_attention"}
    if other:
        raise UnsupportedModelError(f"layer_types has {', '.join(map(repr, sorted(other)))}")
    if len(kinds) != config.layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {config.layers} layers")
    return with_attention(
        config, lambda i, own: replace(own, window=window if kinds[i] == "sliding_attention" else 0)
    )
