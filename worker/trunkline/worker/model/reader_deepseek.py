"""Readers of models with latent attention: DeepSeek, GLM-4.7-Flash, Mistral 4. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from trunkline.kernels.routing import Routing
from trunkline.worker.errors import UnsupportedModelError
from trunkline.worker.model import records
from trunkline.worker.model.architecture import Architecture
from trunkline.worker.model.config_fields import Fields, read_rope, yarn_scale
from trunkline.worker.model.model_config import LatentAttention, Mixture, ModelConfig, QueryScale
from trunkline.worker.model.reader_base import GATED_ACTIVATIONS, Reader, base, with_attention, with_attention_bias
from trunkline.worker.model.reader_experts import checked_routing, chosen_experts

ROPE_KINDS: Final = ("default", "yarn")
GLM4_MOE_LITE: Final = {
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
}
"""What its files may leave out, where DeepSeek V3's take something else."""
MISTRAL4: Final = {
    "n_routed_experts": 128,
    "moe_intermediate_size": 2048,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "max_position_embeddings": 1048576,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def _deepseek_v2(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, num_local_experts="n_routed_experts")
    fields.refuse("scoring_func", "softmax")
    fields.refuse("norm_topk_prob", False)
    fields.refuse("mlp_bias", False)
    fields.refuse("topk_method", "greedy", "group_limited_greedy")
    experts = fields.whole("num_local_experts", 64)
    routing = Routing(
        chosen_experts(fields, experts, fields.whole("num_experts_per_tok")),
        normalised=False,
        factor=fields.number("routed_scaling_factor", 1.0),
    )
    if fields.get("topk_method", "greedy") == "group_limited_greedy":
        groups = (fields.whole("n_group"), fields.whole("topk_group"))
        routing = replace(routing, groups=groups[0], groups_per_token=groups[1], group_best=1)
    width, shared = fields.whole("moe_intermediate_size", 1407), fields.whole("n_shared_experts", 2)
    mixture = Mixture(experts, width, checked_routing(routing, experts), shared_width=width * shared)
    return _with_latents(fields, records.DEEPSEEK_V2, mixture, dense_layers=0)


def _deepseek_v3(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, num_local_experts="n_routed_experts")
    config = _with_latents(fields, records.DEEPSEEK_V3, _sigmoid_mixture(fields), dense_layers=3)
    apart = fields.flag("rope_interleave", True)
    return replace(config, architecture=replace(config.architecture, interleaved=apart))


def _glm4_moe_lite(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(_filled_in(raw, GLM4_MOE_LITE), num_local_experts="n_routed_experts")
    config = _with_latents(fields, records.GLM4_MOE_LITE, _sigmoid_mixture(fields), dense_layers=1)
    apart = fields.flag("rope_interleave", True)
    config = replace(config, architecture=replace(config.architecture, interleaved=apart))
    kinds = fields.get("mlp_layer_types")
    if kinds is None or config.mixture is None:
        return config
    if other := set(kinds) - {"dense", "sparse"}:
        raise UnsupportedModelError(f"mlp_layer_types has {', '.join(map(repr, sorted(other)))}")
    if len(kinds) != config.layers:
        raise ValueError(f"mlp_layer_types has {len(kinds)} entries for {config.layers} layers")
    dense = frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
    return replace(config, mixture=replace(config.mixture, dense_layers=dense))


def _mistral4(raw: Mapping[str, Any]) -> ModelConfig:
    """Latent attention whose queries grow with their position, and a softmax over all experts."""
    given: Any = raw.get("rope_parameters") or raw.get("rope_scaling") or MISTRAL4["rope_parameters"]
    # Of its files' heads only the rotary part is rotated, whatever share of the head that is.
    rope = {name: value for name, value in given.items() if name != "partial_rotary_factor"}
    given = {**raw, "rope_parameters": rope, "partial_rotary_factor": None}
    fields = Fields(_filled_in(given, MISTRAL4), num_local_experts="n_routed_experts")
    experts = fields.whole("num_local_experts")
    routing = Routing(
        chosen_experts(fields, experts, 4),
        normalised=fields.flag("norm_topk_prob", True),
        factor=fields.number("routed_scaling_factor", 1.0),
        groups=fields.whole("n_group", 1),
        groups_per_token=fields.whole("topk_group", 1),
    )
    mixture = _mixture(fields, experts, routing)
    config = _with_latents(fields, records.MISTRAL4, mixture, dense_layers=0, ropes=("yarn",))
    scale = QueryScale(float(rope["llama_4_scaling_beta"]), int(rope["original_max_position_embeddings"]), 0)
    apart = fields.flag("rope_interleave", True)
    config = replace(config, architecture=replace(config.architecture, interleaved=apart))
    return with_attention(config, lambda _, own: replace(own, query_scale=scale))


def _filled_in(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's fields, and the defaults of those that are absent or null."""
    known = {name: value for name, value in raw.items() if value is not None or name == "q_lora_rank"}
    return {**defaults, **known}


def _sigmoid_mixture(fields: Fields) -> Mixture:
    """Read experts that are chosen by sigmoids and a bias, in groups; what is left out is DeepSeek V3's."""
    fields.refuse("scoring_func", "sigmoid")
    fields.refuse("topk_method", "noaux_tc")
    experts = fields.whole("num_local_experts", 256)
    routing = Routing(
        chosen_experts(fields, experts, 8),
        "sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        factor=fields.number("routed_scaling_factor", 2.5),
        groups=fields.whole("n_group", 8),
        groups_per_token=fields.whole("topk_group", 4),
    )
    return _mixture(fields, experts, routing)


def _mixture(fields: Fields, experts: int, routing: Routing) -> Mixture:
    width, shared = fields.whole("moe_intermediate_size", 2048), fields.whole("n_shared_experts", 1)
    return Mixture(experts, width, checked_routing(routing, experts), shared_width=width * shared)


def _with_latents(
    fields: Fields,
    architecture: Architecture,
    mixture: Mixture,
    *,
    dense_layers: int,
    ropes: tuple[str, ...] = ROPE_KINDS,
) -> ModelConfig:
    """Read what they have in common.

    Args:
        dense_layers: How many layers in front have no experts, where the file does not say.
        ropes: The kinds of rotary positions that are computed.
    """
    fields.refuse("num_key_value_heads", fields.whole("num_attention_heads"))
    fields.refuse("moe_layer_freq", 1)
    sizes = LatentAttention(
        latent=fields.whole("kv_lora_rank", 512),
        rotary=fields.whole("qk_rope_head_dim", 64),
        plain=fields.whole("qk_nope_head_dim", 128),
        value=fields.whole("v_head_dim", 128),
        query_rank=_query_rank(fields),
    )
    if min(sizes.latent, sizes.plain, sizes.value) < 1 or sizes.latent % 2:
        raise ValueError("kv_lora_rank, qk_nope_head_dim and v_head_dim must be positive, the first one even")
    if not sizes.query_rank:
        names = replace(architecture.names, query="self_attn.q_proj", query_down="", query_down_norm="")
        architecture = replace(architecture, names=names)
    config = base(
        fields,
        architecture,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu", GATED_ACTIVATIONS),
        tied=False,
        head_dim=sizes.rotary + sizes.latent,
        kv_heads=1,
    )
    rope = read_rope(fields, sizes.rotary)
    if rope.kind not in ropes or rope.rotary_dim != sizes.rotary:
        raise UnsupportedModelError(
            f"rope scaling {rope.kind!r} of {rope.rotary_dim} of {sizes.rotary} dimensions is not supported for "
            f"this architecture; supported: {', '.join(ropes)} of all"
        )
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    temperature = yarn_scale(rope.factor, float(given.get("mscale_all_dim") or 0.0))
    scale = sizes.query**-0.5 * temperature**2
    dense = frozenset(range(fields.whole("first_k_dense_replace", dense_layers)))
    config = with_attention(
        with_attention_bias(config, fields), lambda _, own: replace(own, scale=scale, rope=rope)
    )
    return replace(config, latent=sizes, mixture=replace(mixture, dense_layers=dense))


def _query_rank(fields: Fields) -> int:
    """Return `q_lora_rank`, which is 1536 where the file does not say, and none where it says null."""
    return int(fields.nullable("q_lora_rank", 1536))


DEEPSEEK_READERS: Final[Mapping[str, Reader]] = {
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Glm4MoeLiteForCausalLM": _glm4_moe_lite,
    "Mistral4ForCausalLM": _mistral4,
}
