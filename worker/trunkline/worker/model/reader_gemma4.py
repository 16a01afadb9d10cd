"""Reader of Gemma 4's config.json: layers have heads of two sizes, and may have experts, or embeddings of their
own and the KV of earlier layers (the small "E" models). No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from trunkline.kernels.routing import Routing
from trunkline.worker.errors import UnsupportedModelError
from trunkline.worker.model import records
from trunkline.worker.model.config_fields import Fields, make_rope
from trunkline.worker.model.model_config import LayerAttention, LayerHeads, Mixture, ModelConfig, RopeConfig
from trunkline.worker.model.reader_base import Reader, llama_like, windowed, with_attention, with_attention_bias
from trunkline.worker.model.reader_experts import chosen_experts

DEFAULTS: Final = {
    "num_hidden_layers": 30,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
    "hidden_size_per_layer_input": 256,
}
ROPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
NOT_PACKED: Final = "heads of several sizes are filled up with zeros, which packed weights cannot be"


def _gemma4(raw: Mapping[str, Any]) -> ModelConfig:
    given = {**DEFAULTS, **{name: value for name, value in raw.items() if value is not None}}
    if given.get("quantization_config"):
        raise UnsupportedModelError(f"quantization_config is there, which is not implemented: {NOT_PACKED}")
    layers = int(given["num_hidden_layers"])
    kinds = list(
        given.get("layer_types")
        or ("full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers))
    )
    kinds[-1:] = ["full_attention"]  # whatever the file says
    fields = Fields(
        {**given, "layer_types": kinds}, hidden_act="hidden_activation", num_experts_per_tok="top_k_experts"
    )
    fields.refuse("use_bidirectional_attention", "vision")
    has_experts = fields.flag("enable_moe_block", False)
    record = records.GEMMA4_EXPERTS if has_experts else records.GEMMA4
    config = llama_like(fields, record, activation="gelu_pytorch_tanh", tied=True, head_dim=256)
    config = windowed(with_attention_bias(config, fields), fields, lambda _: True)
    heads = _heads(fields, config, kinds)
    config = replace(
        config,
        head_dim=max(own.head_dim for own in heads),
        kv_heads=max(own.kv_heads for own in heads),
        embedding_scale=config.hidden_size**0.5,
        logit_soft_cap=fields.nullable("final_logit_softcapping", 0.0),
        mixture=_mixture(fields, config) if has_experts else None,
        layer_embedding_size=_layer_embedding_size(fields, config),
    )
    if fewer := next((own.kv_heads for own in heads if config.kv_heads % own.kv_heads), 0):
        raise UnsupportedModelError(f"layers with {fewer} and with {config.kv_heads} KV heads are not supported")
    plain = LayerHeads(config.head_dim, config.kv_heads)

    def changed(layer: int, own: LayerAttention) -> LayerAttention:
        rope = _rope(fields, config, kinds[layer], heads[layer].head_dim)
        found = None if heads[layer] == plain else heads[layer]
        return replace(own, scale=1.0, rope=rope, unit_values=True, heads=found)

    return _shared(fields, with_attention(config, changed), kinds)


def _layer_embedding_size(fields: Fields, config: ModelConfig) -> int:
    """Return the width of each layer's own embeddings, of which all tokens must have one."""
    size, tokens = fields.whole("hidden_size_per_layer_input"), fields.whole("vocab_size_per_layer_input", 262144)
    if size < 0:
        raise ValueError(f"hidden_size_per_layer_input is {size}; it must not be negative")
    if size and tokens != config.vocab_size:
        raise UnsupportedModelError(
            f"vocab_size_per_layer_input is {tokens} and vocab_size {config.vocab_size}; they must be equal"
        )
    return size


def _shared(fields: Fields, config: ModelConfig, kinds: list[str]) -> ModelConfig:
    """Return the model whose last layers read the KV of the last earlier one of their kind, as the file says."""
    shared = fields.whole("num_kv_shared_layers", 0)
    own = config.layers - shared
    if not 0 <= shared < config.layers:
        raise ValueError(f"num_kv_shared_layers is {shared} of {config.layers} layers")
    last = {kind: layer for layer, kind in enumerate(kinds[:own])}
    if missing := set(kinds) - set(last):
        raise ValueError(f"num_kv_shared_layers is {shared}: no layer before those is of {min(missing)!r}")
    sources = tuple(last[kind] for kind in kinds[own:])
    for layer, source in enumerate(sources, own):
        if config.attention[layer] != config.attention[source]:
            raise ValueError(f"layer {layer} has other heads than layer {source}, whose KV it reads")
    if not shared or not fields.flag("use_double_wide_mlp", False):
        return replace(config, kv_sources=sources)
    if config.mixture is not None:
        raise UnsupportedModelError("use_double_wide_mlp is not supported with enable_moe_block")
    width = config.intermediate_size
    return replace(config, kv_sources=sources, mlp_widths=(*[width] * own, *[2 * width] * shared))


def _mixture(fields: Fields, config: ModelConfig) -> Mixture:
    """Return the experts of each layer, beside which every token goes to an MLP."""
    experts, width = fields.whole("num_experts"), fields.whole("moe_intermediate_size")
    routing = Routing(chosen_experts(fields, experts, fields.whole("num_experts_per_tok")))
    return Mixture(experts, width, routing, shared_width=config.intermediate_size)


def _heads(fields: Fields, config: ModelConfig, kinds: list[str]) -> list[LayerHeads]:
    """Return the heads of each layer, from either form: `per_layer_config`, or fields for layers that see all."""
    shared = fields.flag("attention_k_eq_v", False)
    given = fields.get("per_layer_config")
    if given is None:
        wide: dict[str, Any] = {"head_dim": fields.whole("global_head_dim", 512)}
        if shared and fields.get("num_global_key_value_heads") is not None:
            wide["num_key_value_heads"] = fields.whole("num_global_key_value_heads")
        given = {str(layer): wide for layer, kind in enumerate(kinds) if kind == "full_attention"}
    found = []
    for layer, kind in enumerate(kinds):
        own = given.get(str(layer)) or {}
        if other := set(own) - {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModelError(f"per_layer_config has {', '.join(map(repr, sorted(other)))}")
        sizes = (int(own.get("head_dim", config.head_dim)), int(own.get("num_key_value_heads", config.kv_heads)))
        if min(sizes) < 1 or config.heads % sizes[1]:
            raise ValueError(f"layer {layer} has {sizes[1]} KV heads of {sizes[0]} for {config.heads} heads")
        found.append(LayerHeads(*sizes, keys_are_values=shared and kind == "full_attention"))
    return found


def _rope(fields: Fields, config: ModelConfig, kind: str, head_dim: int) -> RopeConfig:
    given = (fields.get("rope_parameters") or ROPES)[kind]
    theta = float(given["rope_theta"])
    if given.get("rope_type") != "proportional":
        return make_rope(given, head_dim, theta, config.max_positions)
    if head_dim % 2:
        raise ValueError(f"{head_dim} dimensions of a head are rotated; it must be an even number")
    pairs = int(float(given.get("partial_rotary_factor", 1.0)) * head_dim // 2)
    if not 1 <= pairs <= head_dim // 2:
        raise ValueError(f"partial_rotary_factor of {kind} is {given['partial_rotary_factor']}")
    return RopeConfig(theta, head_dim, "proportional", float(given.get("factor", 1.0)), turning_pairs=pairs)


GEMMA4_READERS: Final[Mapping[str, Reader]] = {"Gemma4ForCausalLM": _gemma4}
