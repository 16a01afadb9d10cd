"""Readers of LLaMA's config.json and those of its followers without experts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from trunkline.worker.model import records
from trunkline.worker.model.architecture import Architecture
from trunkline.worker.model.config_fields import Fields, make_rope
from trunkline.worker.model.model_config import ModelConfig, QueryScale, RopeConfig
from trunkline.worker.model.reader_base import Reader, llama_like, windowed, with_attention, with_attention_bias


def _llama(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    config = llama_like(fields, records.LLAMA)
    return replace(with_attention_bias(config, fields), mlp_bias=fields.flag("mlp_bias", False))


def _seed_oss(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields({"num_key_value_heads": 8, "max_position_embeddings": 524288, **raw})
    return replace(
        llama_like(fields, records.SEED_OSS, head_dim=128),
        attention_bias=fields.flag("attention_bias", True),
        attention_out_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _smollm3(raw: Mapping[str, Any]) -> ModelConfig:
    """Every fourth layer has no positions."""
    fields = Fields({"num_key_value_heads": 4, "max_position_embeddings": 32768, **raw})
    config = with_attention_bias(llama_like(fields, records.SMOLLM3, theta=2e6, tied=True), fields)
    period = fields.whole("no_rope_layer_interval", 4)
    given = fields.get("no_rope_layers")
    is_rotary = [(i + 1) % period > 0 for i in range(config.layers)] if given is None else list(map(bool, given))
    if len(is_rotary) != config.layers:
        raise ValueError(f"no_rope_layers has {len(is_rotary)} entries for {config.layers} layers")
    if fields.flag("use_sliding_window", False) and fields.get("sliding_window") is not None:
        config = windowed(config, fields, lambda layer: not is_rotary[layer])
    config = with_attention(config, lambda layer, own: own if is_rotary[layer] else replace(own, rope=None))
    return replace(config, mlp_bias=fields.flag("mlp_bias", False))


def _ernie4_5(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(
        {"num_key_value_heads": 2, "max_position_embeddings": 131072, **raw}, attention_bias="use_bias"
    )
    config = llama_like(fields, records.ERNIE4_5, theta=5e5, norm_eps=1e-5, tied=True, head_dim=128)
    return replace(with_attention_bias(config, fields), mlp_bias=fields.flag("use_bias", False))


def _cohere(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields({"max_position_embeddings": 8192, **raw}, rms_norm_eps="layer_norm_eps")
    fields.refuse("use_qk_norm", False)
    config = llama_like(fields, records.COHERE, theta=5e5, norm_eps=1e-5, tied=True)
    config = with_attention_bias(config, fields)
    return replace(config, logit_scale=fields.number("logit_scale", 0.0625))


def _cohere2(raw: Mapping[str, Any]) -> ModelConfig:
    """Three of four layers have windows, and only these have positions."""
    return _positions_in_windows(_cohere({"rope_theta": 1e4, **raw}), Fields(raw))


def _exaone4(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    config = llama_like(fields, records.EXAONE4, norm_eps=1e-5)
    return _positions_in_windows(config, fields) if fields.nullable("sliding_window", 4096) else config


def _positions_in_windows(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Return a model of which layers without a window have no positions; they are every fourth, if nothing else is
    said."""
    period = fields.get("sliding_window_pattern", 4)
    if fields.get("layer_types") is None and not isinstance(period, int):
        raise ValueError(f"sliding_window_pattern is {period!r}, and there are no layer_types")
    config = windowed(config, fields, lambda layer: (layer + 1) % period > 0)
    return with_attention(config, lambda _, own: own if own.window else replace(own, rope=None))


def _mistral(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    window = int(fields.nullable("sliding_window", 4096))
    return with_attention(llama_like(fields, records.MISTRAL), lambda _, own: replace(own, window=window))


def _qwen2(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    return replace(_qwen_windowed(llama_like(fields, records.QWEN2), fields), attention_bias=True)


def _qwen3(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    config = with_attention_bias(llama_like(fields, records.QWEN3, head_dim=128), fields)
    return _qwen_windowed(config, fields)


def _qwen_windowed(config: ModelConfig, fields: Fields) -> ModelConfig:
    if not fields.flag("use_sliding_window", False):
        return config
    first = fields.whole("max_window_layers", 28)
    return windowed(config, fields, lambda layer: layer >= first)


def _ministral(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    return windowed(llama_like(fields, records.MISTRAL), fields, lambda _: True)


def _ministral3(raw: Mapping[str, Any]) -> ModelConfig:
    positions = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "llama_4_scaling_beta": 0.1,
    }
    defaults = {"num_key_value_heads": 8, "max_position_embeddings": 262144}
    given: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or positions
    fields = Fields({**defaults, **raw, "rope_parameters": given})
    config = llama_like(fields, records.MISTRAL, norm_eps=1e-5, head_dim=128)
    window, beta = int(fields.nullable("sliding_window", 0)), given.get("llama_4_scaling_beta")
    scale = None
    if beta is not None:
        scale = QueryScale(float(beta), int(given["original_max_position_embeddings"]), 0)
    return with_attention(config, lambda _, own: replace(own, window=window, query_scale=scale))


def _phi3(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    window = int(fields.nullable("sliding_window", 0))
    config = llama_like(fields, records.PHI3, norm_eps=1e-5, fraction=1.0)
    return with_attention(config, lambda _, own: replace(own, window=window))


def _granite(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    return replace(granite_like(fields, records.GRANITE), mlp_bias=fields.flag("mlp_bias", False))


def granite_like(fields: Fields, architecture: Architecture) -> ModelConfig:
    """Read what Granites have in common: factors of embeddings, scores, residual and logits."""
    scale = fields.number("attention_multiplier", 1.0)
    config = with_attention_bias(llama_like(fields, architecture), fields)
    return replace(
        with_attention(config, lambda _, own: replace(own, scale=scale)),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


def _glm(raw: Mapping[str, Any]) -> ModelConfig:
    return _glm_like(raw, records.GLM)


def _glm4(raw: Mapping[str, Any]) -> ModelConfig:
    return _glm_like(raw, records.GLM4)


def _glm_like(raw: Mapping[str, Any], architecture: Architecture) -> ModelConfig:
    fields = Fields(raw)
    config = llama_like(fields, architecture, norm_eps=1.5625e-7, head_dim=128, fraction=0.5)
    return replace(config, attention_bias=fields.flag("attention_bias", True))


def _olmo2(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    return with_attention_bias(llama_like(fields, records.OLMO2, norm_eps=1e-5), fields)


def _olmo3(raw: Mapping[str, Any]) -> ModelConfig:
    """OLMo 2 with windows in three of four layers; only the others' positions are scaled."""
    fields = Fields(raw)
    config = llama_like(Fields({**raw, "rope_parameters": None, "rope_scaling": None}), records.OLMO2, theta=5e5)
    config = windowed(with_attention_bias(config, fields), fields, lambda layer: (layer + 1) % 4 > 0)
    ropes = _ropes_by_kind(fields, config, (5e5, 5e5))
    return with_attention(
        replace(config, norm_eps=fields.number("rms_norm_eps", 1e-5)),
        lambda _, own: replace(own, rope=ropes[bool(own.window)]),
    )


def _ropes_by_kind(
    fields: Fields, config: ModelConfig, thetas: tuple[float, float], near_theta: str = "rope_theta"
) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary positions of layers that see everything and of those with windows.

    Args:
        thetas: of the two, where the file does not say.
        near_theta: The older field with the second one's theta.
    """
    given = fields.get("rope_parameters") or {}
    everywhere = given.get("full_attention") or fields.get("rope_scaling") or {}
    nearby = given.get("sliding_attention") or {}
    far = float(everywhere.get("rope_theta") or fields.number("rope_theta", thetas[0]))
    near = float(nearby.get("rope_theta") or fields.number(near_theta, thetas[1]))
    return (
        make_rope(everywhere, config.head_dim, far, config.max_positions),
        make_rope(nearby, config.head_dim, near, config.max_positions),
    )


def _gemma1(raw: Mapping[str, Any]) -> ModelConfig:
    # The first files say "gelu" and mean its approximation.
    named = "gelu_pytorch_tanh" if raw.get("hidden_act") in (None, "gelu") else raw["hidden_act"]
    fields = Fields({**raw, "hidden_act": named})
    fields.refuse("use_bidirectional_attention", False)
    config = with_attention_bias(llama_like(fields, records.GEMMA, tied=True, head_dim=256), fields)
    return replace(config, embedding_scale=config.hidden_size**0.5)


def _gemma2(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, hidden_act="hidden_activation")
    config = _gemma(fields, records.GEMMA2, period=2)
    soft_cap = fields.nullable("attn_logit_softcapping", 50.0)
    return replace(
        with_attention(config, lambda _, own: replace(own, soft_cap=soft_cap)),
        logit_soft_cap=fields.nullable("final_logit_softcapping", 30.0),
    )


def _gemma3(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, hidden_act="hidden_activation")
    fields.refuse("attn_logit_softcapping")
    config = _gemma(fields, records.GEMMA3, period=fields.whole("sliding_window_pattern", 6))
    ropes = _ropes_by_kind(fields, config, (1e6, 1e4), "rope_local_base_freq")
    return replace(
        with_attention(config, lambda _, own: replace(own, rope=ropes[bool(own.window)])),
        logit_soft_cap=fields.nullable("final_logit_softcapping", 0.0),
    )


def _gemma(fields: Fields, architecture: Architecture, period: int) -> ModelConfig:
    """Read what Gemmas have in common: every `period`-th layer sees all before it, the others a window."""
    fields.refuse("use_bidirectional_attention", False)
    config = llama_like(fields, architecture, activation="gelu_pytorch_tanh", tied=True, head_dim=256)
    scale = fields.number("query_pre_attn_scalar", 256) ** -0.5
    config = with_attention(config, lambda _, own: replace(own, scale=scale))
    config = windowed(config, fields, lambda layer: (layer + 1) % period > 0)
    return replace(with_attention_bias(config, fields), embedding_scale=config.hidden_size**0.5)


LLAMA_READERS: Final[Mapping[str, Reader]] = {
    "Cohere2ForCausalLM": _cohere2,
    "CohereForCausalLM": _cohere,
    "Ernie4_5ForCausalLM": _ernie4_5,
    "Exaone4ForCausalLM": _exaone4,
    "Gemma2ForCausalLM": _gemma2,
    "GemmaForCausalLM": _gemma1,
    "Gemma3ForCausalLM": _gemma3,
    "Glm4ForCausalLM": _glm4,
    "GlmForCausalLM": _glm,
    "GraniteForCausalLM": _granite,
    "LlamaForCausalLM": _llama,
    "Ministral3ForCausalLM": _ministral3,
    "MinistralForCausalLM": _ministral,
    "MistralForCausalLM": _mistral,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SeedOssForCausalLM": _seed_oss,
    "SmolLM3ForCausalLM": _smollm3,
}
