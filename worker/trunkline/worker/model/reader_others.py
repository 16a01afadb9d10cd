"""Readers of the families whose layers are not LLaMA's: GPT-2, OPT, GPT-NeoX, Falcon, MPT. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from trunkline.worker.errors import UnsupportedModelError
from trunkline.worker.model import records
from trunkline.worker.model.architecture import Positions, Residual
from trunkline.worker.model.config_fields import Fields, bloom_slopes, mpt_slopes, read_rope
from trunkline.worker.model.model_config import ModelConfig
from trunkline.worker.model.reader_base import PLAIN_ACTIVATIONS, Reader, base, with_attention, with_attention_bias


def _gpt2(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(
        raw,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        intermediate_size="n_inner",
        max_position_embeddings="n_positions",
        hidden_act="activation_function",
    )
    fields.refuse("add_cross_attention", False)
    config = base(
        fields,
        records.GPT2,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=fields.activation("hidden_act", "gelu_new", PLAIN_ACTIVATIONS),
        max_positions=1024,
    )
    scale = config.head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    return replace(
        with_attention(config, lambda i, own: replace(own, scale=scale / (i + 1) if by_layer else scale)),
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
    )


def _opt(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, intermediate_size="ffn_dim", hidden_act="activation_function")
    fields.refuse("layer_norm_elementwise_affine", True)
    architecture = records.OPT if fields.flag("do_layer_norm_before", True) else records.OPT_POST_NORM
    if fields.flag("_remove_final_layer_norm", False):
        architecture = replace(architecture, names=replace(architecture.names, final_norm=""))
    width, hidden = fields.whole("word_embed_proj_dim", 0), fields.whole("hidden_size")
    if width not in (0, hidden):
        names = replace(architecture.names, embedding_in="project_in", embedding_out="project_out")
        architecture = replace(architecture, names=names)
    bias = fields.flag("enable_bias", True)
    return replace(
        base(
            fields,
            architecture,
            norm_eps=1e-5,
            activation=fields.activation("hidden_act", "relu", PLAIN_ACTIVATIONS),
        ),
        embedding_size=0 if width == hidden else width,
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
    )


def _gpt_neox(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, rope_theta="rotary_emb_base")
    parallel = fields.flag("use_parallel_residual", True)
    config = base(
        fields,
        replace(records.GPT_NEOX, residual=Residual.PARALLEL if parallel else Residual.SEQUENTIAL),
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        activation=fields.activation("hidden_act", "gelu", PLAIN_ACTIVATIONS),
        tied=False,
    )
    rope = read_rope(fields, config.head_dim, fraction=fields.number("rotary_pct", 0.25))
    config = with_attention(config, lambda _, own: replace(own, rope=rope))
    return replace(with_attention_bias(config, fields, default=True), mlp_bias=True)


def _falcon(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, intermediate_size="ffn_hidden_size", hidden_act="activation")
    grouped, parallel = fields.flag("new_decoder_architecture", False), fields.flag("parallel_attn", True)
    if grouped and not parallel:
        raise UnsupportedModelError("parallel_attn is False; the new decoder architecture is always parallel")
    if grouped and fields.whole("num_ln_in_parallel_attn", 2) == 2:
        architecture = records.FALCON_TWO_NORMS
    else:
        architecture = records.FALCON if parallel else records.FALCON_SEQUENTIAL
    heads = fields.whole("num_attention_heads")
    kv_heads = 1 if fields.flag("multi_query", True) else heads
    if grouped:
        kv_heads = fields.whole("num_kv_heads", heads)
    config = base(
        fields,
        architecture,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=fields.activation("hidden_act", "gelu", PLAIN_ACTIVATIONS),
        kv_heads=kv_heads,
    )
    bias = fields.flag("bias", False)
    config = replace(config, attention_bias=bias, attention_out_bias=bias, mlp_bias=bias)
    if not fields.flag("alibi", False):
        rope = read_rope(fields, config.head_dim)
        return with_attention(config, lambda _, own: replace(own, rope=rope))
    return replace(
        config,
        architecture=replace(architecture, positions=Positions.ALIBI),
        # The biases are added before the scores are scaled.
        alibi_slopes=tuple(slope * config.head_dim**-0.5 for slope in bloom_slopes(heads)),
    )


def _mpt(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(
        raw,
        hidden_size="d_model",
        num_hidden_layers="n_layers",
        num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    )
    own = Fields(fields.get("attn_config", {}))
    fields.refuse("no_bias", True)
    fields.refuse("logit_scale")
    own.refuse("alibi", True)  # without it, positions are learned
    own.refuse("alibi_bias_max", 8)
    own.refuse("attn_type", "multihead_attention")
    own.refuse("prefix_lm", False)
    own.refuse("qk_ln", False)
    config = base(
        fields,
        records.MPT,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation="gelu",
    )
    scale = own.number("softmax_scale", config.head_dim**-0.5)
    return replace(
        with_attention(config, lambda _, layer: replace(layer, scale=scale)),
        intermediate_size=fields.whole("expansion_ratio", 4) * config.hidden_size,
        qkv_clip=own.number("clip_qkv", 0.0),
        alibi_slopes=mpt_slopes(config.heads),
    )


OTHER_READERS: Final[Mapping[str, Reader]] = {
    "FalconForCausalLM": _falcon,
    "GPT2LMHeadModel": _gpt2,
    "GPTNeoXForCausalLM": _gpt_neox,
    "MPTForCausalLM": _mpt,
    "MptForCausalLM": _mpt,
    "OPTForCausalLM": _opt,
}
