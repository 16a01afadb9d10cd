"""Readers of DeepSeek's config.json: latent attention, and experts in groups. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from trunkline.kernels.routing import Routing
from trunkline.worker.errors import UnsupportedModelError
from trunkline.worker.model import architecture as records
from trunkline.worker.model.architecture import Architecture
from trunkline.worker.model.config_fields import Fields, read_rope, yarn_scale
from trunkline.worker.model.model_config import LatentAttention, Mixture, ModelConfig
from trunkline.worker.model.reader_base import GATED_ACTIVATIONS, Reader, base, with_attention, with_attention_bias
from trunkline.worker.model.reader_experts import checked_routing, chosen_experts

ROPE_KINDS: Final = ("default", "yarn")


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
    width, shared = fields.whole("moe_intermediate_size", 2048), fields.whole("n_shared_experts", 1)
    mixture = Mixture(experts, width, checked_routing(routing, experts), shared_width=width * shared)
    config = _with_latents(fields, records.DEEPSEEK_V3, mixture, dense_layers=3)
    apart = fields.flag("rope_interleave", True)
    return replace(config, architecture=replace(config.architecture, interleaved=apart))


def _with_latents(
    fields: Fields, architecture: Architecture, mixture: Mixture, *, dense_layers: int
) -> ModelConfig:
    """Read what the versions have in common.

    Args:
        dense_layers: How many layers in front have no experts, where the file does not say.
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
    if rope.kind not in ROPE_KINDS or rope.rotary_dim != sizes.rotary:
        raise UnsupportedModelError(
            f"rope scaling {rope.kind!r} of {rope.rotary_dim} of {sizes.rotary} dimensions is not supported for "
            f"this architecture; supported: {', '.join(ROPE_KINDS)} of all"
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
}
