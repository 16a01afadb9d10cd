"""Model families as data, from which the decoder is composed.

A new family is a record here and a reader of its config.json in `families`, not a new class of model. What may
differ between two models of a family is in `ModelConfig`; a reader may also change parts of the record
(`dataclasses.replace`), as Falcon's does, under whose name three layouts go.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from trunkline.worker.model.architecture import Architecture, Mlp, NormKind, Positions, Qkv, Residual, WeightNames

LLAMA: Final = Architecture(
    family="llama",
    norm=NormKind.RMS,
    positions=Positions.ROTARY,
    qkv=Qkv.SEPARATE,
    mlp=Mlp.GATED,
    residual=Residual.SEQUENTIAL,
    prefixes=("model.", ""),
    names=WeightNames(
        embedding="embed_tokens",
        layer="layers.{}.",
        attention_norm="input_layernorm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        attention_out="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        final_norm="norm",
    ),
)

MISTRAL: Final = replace(LLAMA, family="mistral")
QWEN2: Final = replace(LLAMA, family="qwen2")
SEED_OSS: Final = replace(LLAMA, family="seed_oss")
SMOLLM3: Final = replace(LLAMA, family="smollm3")
ERNIE4_5: Final = replace(LLAMA, family="ernie4_5", interleaved=True)
COHERE: Final = replace(
    LLAMA,
    family="cohere",
    norm=NormKind.LAYER_NO_BIAS,
    residual=Residual.PARALLEL,
    interleaved=True,
    names=replace(LLAMA.names, mlp_norm=""),
)
QWEN3: Final = replace(
    LLAMA,
    family="qwen3",
    names=replace(LLAMA.names, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
)
MIXTRAL: Final = replace(
    LLAMA,
    family="mixtral",
    names=replace(
        LLAMA.names,
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}.",
        gate="w1",
        up="w3",
        down="w2",
    ),
)
QWEN3_MOE: Final = replace(
    QWEN3,
    family="qwen3_moe",
    names=replace(
        QWEN3.names,
        router="mlp.gate",
        expert="mlp.experts.{}.",
        dense="mlp.",
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
    ),
)
QWEN2_MOE: Final = replace(
    QWEN3_MOE,
    family="qwen2_moe",
    names=replace(
        QWEN3_MOE.names,
        query_norm="",
        key_norm="",
        shared_experts="mlp.shared_expert.",
        shared_gate="mlp.shared_expert_gate",
    ),
)
ERNIE4_5_MOE: Final = replace(
    ERNIE4_5,
    family="ernie4_5_moe",
    choice_bias_is_row=True,
    names=replace(
        QWEN3_MOE.names,
        query_norm="",
        key_norm="",
        shared_experts="mlp.shared_experts.",
        choice_bias="mlp.moe_statics.e_score_correction_bias",
    ),
)
GLM4_MOE: Final = replace(
    LLAMA,
    family="glm4_moe",
    names=replace(
        QWEN3_MOE.names,
        query_norm="",
        key_norm="",
        shared_experts="mlp.shared_experts.",
        choice_bias="mlp.gate.e_score_correction_bias",
    ),
)
DEEPSEEK_V3: Final = replace(
    GLM4_MOE,
    family="deepseek_v3",
    qkv=Qkv.LATENT,
    interleaved=True,
    names=replace(
        GLM4_MOE.names,
        query_down="self_attn.q_a_proj",
        query_down_norm="self_attn.q_a_layernorm",
        query="self_attn.q_b_proj",
        key="",
        value="",
        latent="self_attn.kv_a_proj_with_mqa",
        latent_norm="self_attn.kv_a_layernorm",
        expand="self_attn.kv_b_proj",
    ),
)
DEEPSEEK_V2: Final = replace(DEEPSEEK_V3, family="deepseek_v2", names=replace(DEEPSEEK_V3.names, choice_bias=""))
GLM4_MOE_LITE: Final = replace(DEEPSEEK_V3, family="glm4_moe_lite")
MISTRAL4: Final = replace(
    DEEPSEEK_V2,
    family="mistral4",
    names=replace(DEEPSEEK_V2.names, expert_gate="gate_up_proj", expert_up="gate_up_proj"),
)
PHI3: Final = replace(
    LLAMA,
    family="phi3",
    qkv=Qkv.STACKED,
    names=replace(
        LLAMA.names,
        query="",
        key="",
        value="",
        qkv="self_attn.qkv_proj",
        gate="mlp.gate_up_proj",
        up="mlp.gate_up_proj",
    ),
)
GRANITE: Final = replace(LLAMA, family="granite")
GRANITE_MOE: Final = replace(
    LLAMA,
    family="granitemoe",
    names=replace(
        LLAMA.names,
        gate="input_linear",
        up="input_linear",
        down="output_linear",
        router="block_sparse_moe.router.layer",
        expert="block_sparse_moe.experts.{}.",
        shared_experts="shared_mlp.",
        dense="shared_mlp.",
    ),
)
GLM: Final = replace(
    LLAMA,
    family="glm",
    interleaved=True,
    names=replace(LLAMA.names, gate="mlp.gate_up_proj", up="mlp.gate_up_proj"),
)
GLM4: Final = replace(
    GLM,
    family="glm4",
    names=replace(GLM.names, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"),
)
OLMO2: Final = replace(
    LLAMA,
    family="olmo2",
    wide_norms=True,
    names=replace(
        QWEN3.names,
        attention_norm="",
        attention_post_norm="post_attention_layernorm",
        mlp_norm="",
        mlp_post_norm="post_feedforward_layernorm",
    ),
)
EXAONE4: Final = replace(OLMO2, family="exaone4", wide_norms=False)
GPT_OSS: Final = replace(
    LLAMA,
    family="gpt_oss",
    interleaved_gates=True,
    names=replace(
        LLAMA.names,
        sinks="self_attn.sinks",
        router="mlp.router",
        expert="mlp.experts.{}.",
        gate="gate_up_proj",
        up="gate_up_proj",
        down="down_proj",
    ),
)
GPT_OSS_APART: Final = replace(GPT_OSS, names=replace(GPT_OSS.names, gate="gate_proj", up="up_proj"))
"""With a matrix for the gate and one for up."""
LLAMA4: Final = replace(
    LLAMA,
    family="llama4",
    interleaved=True,
    names=replace(
        LLAMA.names,
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
        dense="feed_forward.",
        router="feed_forward.router",
        expert="feed_forward.experts.{}.",
        expert_gate="gate_up_proj",
        expert_up="gate_up_proj",
        shared_experts="feed_forward.shared_expert.",
    ),
)
OLMOE: Final = replace(QWEN3_MOE, family="olmoe", wide_norms=True)
GEMMA: Final = replace(LLAMA, family="gemma", norm=NormKind.RMS_OFFSET)
GEMMA2: Final = replace(
    LLAMA,
    family="gemma2",
    norm=NormKind.RMS_OFFSET,
    names=replace(
        LLAMA.names,
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
)
GEMMA3: Final = replace(
    GEMMA2,
    family="gemma3",
    names=replace(GEMMA2.names, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
)
GEMMA4: Final = replace(
    GEMMA3,
    family="gemma4",
    norm=NormKind.RMS,
    names=replace(
        GEMMA3.names,
        layer_scale="layer_scalar",
        layer_embedding="embed_tokens_per_layer",
        layer_projection="per_layer_model_projection",
        layer_projection_norm="per_layer_projection_norm",
        layer_gate="per_layer_input_gate",
        layer_out="per_layer_projection",
        layer_out_norm="post_per_layer_input_norm",
    ),
)
GEMMA4_EXPERTS: Final = replace(
    GEMMA4,
    names=replace(
        GEMMA4.names,
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
        shared_experts="mlp.",
        shared_post_norm="post_feedforward_layernorm_1",
        router="router.proj",
        router_norm="router.scale",
        expert="experts.{}.",
        expert_gate="gate_up_proj",
        expert_up="gate_up_proj",
        expert_scale="router.per_expert_scale",
        experts_norm="pre_feedforward_layernorm_2",
        experts_post_norm="post_feedforward_layernorm_2",
    ),
)
"""The MLP beside the experts is one that every token goes to."""
GPT2: Final = Architecture(
    family="gpt2",
    norm=NormKind.LAYER,
    positions=Positions.LEARNED,
    qkv=Qkv.STACKED,
    mlp=Mlp.PLAIN,
    residual=Residual.SEQUENTIAL,
    transposed=True,
    prefixes=("transformer.", ""),
    names=WeightNames(
        embedding="wte",
        positions="wpe",
        layer="h.{}.",
        attention_norm="ln_1",
        qkv="attn.c_attn",
        attention_out="attn.c_proj",
        mlp_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
        final_norm="ln_f",
    ),
)
OPT: Final = Architecture(
    family="opt",
    norm=NormKind.LAYER,
    positions=Positions.LEARNED,
    qkv=Qkv.SEPARATE,
    mlp=Mlp.PLAIN,
    residual=Residual.SEQUENTIAL,
    position_rows_skipped=2,
    prefixes=("model.decoder.", "decoder."),
    names=WeightNames(
        embedding="embed_tokens",
        positions="embed_positions",
        layer="layers.{}.",
        attention_norm="self_attn_layer_norm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        attention_out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up="fc1",
        down="fc2",
        final_norm="final_layer_norm",
    ),
)
OPT_POST_NORM: Final = replace(
    OPT,
    residual=Residual.POST_NORM,
    names=replace(
        OPT.names,
        attention_norm="",
        attention_post_norm="self_attn_layer_norm",
        mlp_norm="",
        mlp_post_norm="final_layer_norm",
        final_norm="",
    ),
)
GPT_NEOX: Final = Architecture(
    family="gpt_neox",
    norm=NormKind.LAYER,
    positions=Positions.ROTARY,
    qkv=Qkv.GROUPED,
    mlp=Mlp.PLAIN,
    residual=Residual.PARALLEL,
    prefixes=("gpt_neox.", ""),
    names=WeightNames(
        embedding="embed_in",
        layer="layers.{}.",
        attention_norm="input_layernorm",
        qkv="attention.query_key_value",
        attention_out="attention.dense",
        mlp_norm="post_attention_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        final_norm="final_layer_norm",
        head="embed_out",
    ),
)
FALCON: Final = Architecture(
    family="falcon",
    norm=NormKind.LAYER,
    positions=Positions.ROTARY,
    qkv=Qkv.GROUPED,
    mlp=Mlp.PLAIN,
    residual=Residual.PARALLEL,
    prefixes=("transformer.", ""),
    names=WeightNames(
        embedding="word_embeddings",
        layer="h.{}.",
        attention_norm="input_layernorm",
        qkv="self_attention.query_key_value",
        attention_out="self_attention.dense",
        mlp_norm="",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        final_norm="ln_f",
    ),
)
FALCON_TWO_NORMS: Final = replace(FALCON, names=replace(FALCON.names, attention_norm="ln_attn", mlp_norm="ln_mlp"))
FALCON_SEQUENTIAL: Final = replace(
    FALCON,
    residual=Residual.SEQUENTIAL,
    names=replace(FALCON.names, mlp_norm="post_attention_layernorm"),
)
MPT: Final = Architecture(
    family="mpt",
    norm=NormKind.LAYER_NO_BIAS,
    positions=Positions.ALIBI,
    qkv=Qkv.STACKED,
    mlp=Mlp.PLAIN,
    residual=Residual.SEQUENTIAL,
    prefixes=("transformer.", ""),
    names=WeightNames(
        embedding="wte",
        layer="blocks.{}.",
        attention_norm="norm_1",
        qkv="attn.Wqkv",
        attention_out="attn.out_proj",
        mlp_norm="norm_2",
        up="ffn.up_proj",
        down="ffn.down_proj",
        final_norm="norm_f",
    ),
)
