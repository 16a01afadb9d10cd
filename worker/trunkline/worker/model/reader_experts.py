"""Readers of families with mixtures of experts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from trunkline.kernels.routing import Routing
from trunkline.worker.errors import UnsupportedModelError
from trunkline.worker.model import records
from trunkline.worker.model.config_fields import Fields
from trunkline.worker.model.model_config import LayerAttention, Mixture, ModelConfig, QueryScale
from trunkline.worker.model.reader_base import Reader, llama_like, windowed, with_attention, with_attention_bias
from trunkline.worker.model.reader_llama import granite_like


def _mixtral(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    config = llama_like(fields, records.MIXTRAL, theta=1e6, norm_eps=1e-5)
    window = int(fields.nullable("sliding_window", 0))
    config = with_attention(config, lambda _, own: replace(own, window=window))
    experts = fields.whole("num_local_experts", 8)
    return replace(config, mixture=Mixture(experts, config.intermediate_size, _routing(fields, experts, 2)))


def _qwen3_moe(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, num_local_experts="num_experts")
    config = with_attention_bias(llama_like(fields, records.QWEN3_MOE), fields)
    window = int(fields.nullable("sliding_window", 4096)) if fields.flag("use_sliding_window", False) else 0
    config = with_attention(config, lambda _, own: replace(own, window=window))
    experts = fields.whole("num_local_experts", 128)
    routing = _routing(fields, experts, 8, normalised=fields.flag("norm_topk_prob", False))
    width, dense = fields.whole("moe_intermediate_size", 768), _dense_layers(fields, config.layers)
    return replace(config, mixture=Mixture(experts, width, routing, dense_layers=dense))


def _qwen2_moe(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(
        {"intermediate_size": 5632, "max_position_embeddings": 32768, **raw}, num_local_experts="num_experts"
    )
    config = replace(llama_like(fields, records.QWEN2_MOE), attention_bias=fields.flag("qkv_bias", True))
    if fields.flag("use_sliding_window", False):
        last = fields.whole("max_window_layers", 28)
        config = windowed(config, fields, lambda layer: layer % 2 == 0 and layer < last)
    experts = fields.whole("num_local_experts", 60)
    routing = _routing(fields, experts, 4, normalised=fields.flag("norm_topk_prob", False))
    mixture = Mixture(
        experts,
        fields.whole("moe_intermediate_size", 1408),
        routing,
        shared_width=fields.whole("shared_expert_intermediate_size", 5632),
        dense_layers=_dense_layers(fields, config.layers),
    )
    return replace(config, mixture=mixture)


def _dense_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Return the layers without experts of Qwen's files."""
    plain, period = set(fields.get("mlp_only_layers", ())), fields.whole("decoder_sparse_step", 1)
    return frozenset(i for i in range(layers) if i in plain or (i + 1) % period)


def _olmoe(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, num_local_experts="num_experts")
    fields.refuse("clip_qkv")
    config = with_attention_bias(llama_like(fields, records.OLMOE, norm_eps=1e-5), fields)
    experts = fields.whole("num_local_experts", 64)
    routing = _routing(fields, experts, 8, normalised=fields.flag("norm_topk_prob", False))
    return replace(config, mixture=Mixture(experts, config.intermediate_size, routing))


def _glm4_moe(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, num_local_experts="n_routed_experts")
    architecture = records.GLM4_MOE
    if fields.flag("use_qk_norm", False):
        names = replace(
            architecture.names, query_norm=records.QWEN3.names.query_norm, key_norm=records.QWEN3.names.key_norm
        )
        architecture = replace(architecture, names=names)
    config = llama_like(fields, architecture, norm_eps=1e-5, fraction=0.5)
    experts, width = fields.whole("num_local_experts", 128), fields.whole("moe_intermediate_size", 1408)
    routing = Routing(
        chosen_experts(fields, experts, 8),
        "sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        factor=fields.number("routed_scaling_factor", 1.0),
        groups=fields.whole("n_group", 1),
        groups_per_token=fields.whole("topk_group", 1),
    )
    mixture = Mixture(
        experts,
        width,
        checked_routing(routing, experts),
        shared_width=width * fields.whole("n_shared_experts", 1),
        dense_layers=frozenset(range(fields.whole("first_k_dense_replace", 1))),
    )
    return replace(config, attention_bias=fields.flag("attention_bias", False), mixture=mixture)


def _ernie4_5_moe(raw: Mapping[str, Any]) -> ModelConfig:
    defaults = {"num_key_value_heads": 4, "max_position_embeddings": 131072}
    fields = Fields({**defaults, **raw}, num_local_experts="moe_num_experts", num_experts_per_tok="moe_k")
    fields.refuse("use_bias", False)
    config = llama_like(fields, records.ERNIE4_5_MOE, theta=5e5, norm_eps=1e-5, tied=True)
    experts, width = fields.whole("num_local_experts", 64), fields.whole("moe_intermediate_size", 1536)
    first, last = fields.whole("moe_layer_start_index", 1), fields.whole("moe_layer_end_index", -1)
    period = fields.whole("moe_layer_interval", 1)
    sparse = range(first, (config.layers - 1 if last == -1 else last) + 1)
    mixture = Mixture(
        experts,
        width,
        _routing(fields, experts, 6),
        shared_width=width * fields.whole("moe_num_shared_experts", 2),
        dense_layers=frozenset(i for i in range(config.layers) if i not in sparse or (i + 1) % period),
    )
    return replace(config, mixture=mixture)


def _granite_moe(raw: Mapping[str, Any]) -> ModelConfig:
    return _granite_experts(Fields(raw), 0)


def _granite_moe_shared(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    return _granite_experts(fields, fields.whole("shared_intermediate_size", 0))


def _granite_experts(fields: Fields, shared_width: int) -> ModelConfig:
    config = granite_like(fields, records.GRANITE_MOE)
    experts = fields.whole("num_local_experts", 8)
    routing = _routing(fields, experts, 2)
    mixture = Mixture(experts, config.intermediate_size, routing, shared_width=shared_width)
    return replace(config, mixture=mixture)


def _granite_hybrid(raw: Mapping[str, Any]) -> ModelConfig:
    """Granite 4 as far as all of its layers have attention: with or without experts, and rotary positions."""
    fields = Fields(raw)
    kinds = fields.get("layer_types") or fields.get("layers_block_type") or ["mamba"]
    if other := set(kinds) - {"attention", "full_attention"}:
        raise UnsupportedModelError(
            f"layer_types has {', '.join(map(repr, sorted(other)))}; supported for this architecture: 'attention' "
            "in all layers"
        )
    fields.refuse("position_embedding_type", "rope", "nope")
    width = fields.whole("shared_intermediate_size", 1024)
    if fields.whole("num_local_experts", 8):
        config = _granite_experts(fields, width)
    else:
        config = replace(granite_like(fields, records.GRANITE_MOE), intermediate_size=width)
    if len(kinds) != config.layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {config.layers} layers")
    if fields.get("position_embedding_type") == "rope":
        return config
    return with_attention(config, lambda _, own: replace(own, rope=None))


def _gpt_oss(raw: Mapping[str, Any]) -> ModelConfig:
    scaled = {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    fields = Fields({"rope_scaling": scaled, "sliding_window": 128, "max_position_embeddings": 131072, **raw})
    for name, value in zip(("swiglu_alpha", "swiglu_limit"), CLAMPED_SILU, strict=True):
        fields.refuse(name, value)
    fields.refuse("hidden_act", "silu")
    apart = fields.flag("gate_and_up_apart", False)  # as GGUF files have them
    record = records.GPT_OSS_APART if apart else records.GPT_OSS
    config = llama_like(fields, record, theta=150000.0, norm_eps=1e-5, head_dim=64)
    config = with_attention_bias(windowed(config, fields, lambda layer: layer % 2 == 0), fields, True)
    experts = fields.whole("num_local_experts", 128)
    mixture = Mixture(experts, config.intermediate_size, _routing(fields, experts, 4), router_bias=True)
    return replace(config, mlp_bias=True, activation="clamped_silu", mixture=mixture)


def _llama4(raw: Mapping[str, Any]) -> ModelConfig:
    """Layers with rotary positions see a part of the positions. The others see all, without any but a scale."""
    fields = Fields({"num_key_value_heads": 8, "max_position_embeddings": 131072, **raw})
    config = llama_like(fields, records.LLAMA4, theta=5e5, norm_eps=1e-5, head_dim=128)
    layers = range(config.layers)
    period = fields.whole("no_rope_layer_interval", 4)
    is_rotary = [bool(flag) for flag in fields.get("no_rope_layers") or [(i + 1) % period for i in layers]]
    kinds = fields.get("layer_types") or ["chunked_attention" if own else "full_attention" for own in is_rotary]
    if other := set(kinds) - {"chunked_attention", "full_attention"}:
        raise UnsupportedModelError(f"layer_types has {', '.join(map(repr, sorted(other)))}")
    if len(kinds) != config.layers or len(is_rotary) < config.layers:
        raise ValueError(f"layer_types and no_rope_layers do not have entries for {config.layers} layers")
    span, unit = int(fields.nullable("attention_chunk_size", 8192)), fields.flag("use_qk_norm", True)
    scale = QueryScale(fields.number("attn_scale", 0.1), fields.whole("floor_scale", 8192), 1)
    tunes = fields.flag("attn_temperature_tuning", True)

    def own(layer: int, attention: LayerAttention) -> LayerAttention:
        rotary = is_rotary[layer]
        return replace(
            attention,
            rope=attention.rope if rotary else None,
            span=span if kinds[layer] == "chunked_attention" else 0,
            query_scale=scale if tunes and not rotary else None,
            unit_heads=unit and rotary,
        )

    width, experts = fields.whole("intermediate_size", 8192), fields.whole("num_local_experts", 16)
    routing = Routing(chosen_experts(fields, experts, 1), "sigmoid", normalised=False, scales_inputs=True)
    every = fields.whole("interleave_moe_layer_step", 1)
    sparse = fields.get("moe_layers")
    sparse = range(every - 1, config.layers, every) if sparse is None else sparse
    mixture = Mixture(experts, width, routing, shared_width=width, dense_layers=frozenset(layers) - set(sparse))
    config = with_attention_bias(with_attention(config, own), fields)
    return replace(config, intermediate_size=fields.whole("intermediate_size_mlp", 16384), mixture=mixture)


def _routing(fields: Fields, experts: int, chosen: int, *, normalised: bool = True) -> Routing:
    """Return routing by softmax.

    Args:
        chosen: experts per token, where the file does not say.
    """
    return Routing(chosen_experts(fields, experts, chosen), normalised=normalised)


def chosen_experts(fields: Fields, experts: int, default: int) -> int:
    """Return how many experts a token goes to, checked."""
    chosen = fields.whole("num_experts_per_tok", default)
    if not 1 <= chosen <= experts:
        name = fields.spelled("num_experts_per_tok")
        raise ValueError(f"{name} is {chosen}; there are {experts} experts")
    return chosen


def checked_routing(routing: Routing, experts: int) -> Routing:
    """Return the routing if its groups are possible."""
    if routing.groups < 1 or experts % routing.groups:
        raise ValueError(f"n_group is {routing.groups}; there are {experts} experts")
    if not 1 <= routing.groups_per_token <= routing.groups:
        raise ValueError(f"topk_group is {routing.groups_per_token}; there are {routing.groups} groups")
    if routing.per_token > routing.groups_per_token * (experts // routing.groups):
        raise ValueError(f"{routing.groups_per_token} groups have fewer than {routing.per_token} experts")
    return routing


CLAMPED_SILU: Final = (1.702, 7.0)
"""Alpha and limit of the one clamped activation that there is (`trunkline.kernels.ops`, which imports torch)."""
EXPERTS_READERS: Final[Mapping[str, Reader]] = {
    "Ernie4_5_MoeForCausalLM": _ernie4_5_moe,
    "Glm4MoeForCausalLM": _glm4_moe,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteMoeForCausalLM": _granite_moe,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "GraniteMoeSharedForCausalLM": _granite_moe_shared,
    "Llama4ForCausalLM": _llama4,
    "MixtralForCausalLM": _mixtral,
    "OlmoeForCausalLM": _olmoe,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
