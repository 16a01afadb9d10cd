"""The supported families as `transformers` configures them, small: every way through the decoder."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from worker.driver import VOCAB_SIZE

POSITIONS: Final = 256
"""Longest sequence of the models that have learned positions or tables of biases."""

LLAMA_LIKE: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
GPT2: Final[dict[str, Any]] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
OPT: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
NEOX: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
FALCON: Final[dict[str, Any]] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MPT: Final[dict[str, Any]] = {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": POSITIONS}
GEMMA: Final[dict[str, Any]] = {
    **LLAMA_LIKE,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
}

GRANITE: Final[dict[str, Any]] = {
    **LLAMA_LIKE,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.7,
}
LATENT: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}


class Variant(NamedTuple):
    """A family, and settings under which it takes another way through the decoder."""

    model: str
    """Its class in `transformers`."""
    config: str
    settings: dict[str, Any]


def _variant(family: str, base: dict[str, Any], *, model: str = "", config: str = "", **own: Any) -> Variant:
    return Variant(model or f"{family}ForCausalLM", config or f"{family}Config", base | own)


def _llama(**own: Any) -> Variant:
    return _variant("Llama", LLAMA_LIKE, **own)


def _rope(kind: str, **own: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0, **own}}


def _gemma4(**own: Any) -> Variant:
    base: dict[str, Any] = {
        **GEMMA,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * (own.get("num_hidden_layers", 4) // 2),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
        "final_logit_softcapping": 5.0,
    }
    return _variant("Gemma4", base, config="Gemma4TextConfig", **own)


LAYOUTS: Final[dict[str, Variant]] = {
    "mha": _llama(num_key_value_heads=4),
    "gqa": _llama(),
    "mqa-tied": _llama(num_key_value_heads=1, tie_word_embeddings=True),
    "biases": _llama(attention_bias=True, mlp_bias=True),
    "wide-heads": _llama(head_dim=16, num_attention_heads=8, num_key_value_heads=4),
    "sharded": _llama(),
    "linear-rope": _llama(**_rope("linear", rope_theta=10000.0)),
    "llama3-rope": _llama(
        **_rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
        )
    ),
    "yarn-rope": _llama(**_rope("yarn", original_max_position_embeddings=128)),
}
"""Llamas with other head layouts, biases, files and scalings of their positions."""
FAMILIES: Final[dict[str, Variant]] = {
    "gpt2": _variant("GPT2", GPT2, model="GPT2LMHeadModel"),
    "gpt2-by-layer": _variant(
        "GPT2", GPT2, model="GPT2LMHeadModel", n_inner=48, scale_attn_by_inverse_layer_idx=True
    ),
    "opt": _variant("OPT", OPT),
    "opt-350m": _variant("OPT", OPT, do_layer_norm_before=False, word_embed_proj_dim=16),
    "opt-galactica": _variant(
        "OPT", OPT, enable_bias=False, activation_function="gelu", tie_word_embeddings=False
    ),
    "codellama": _variant("Llama", LLAMA_LIKE, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "mistral": _variant("Mistral", LLAMA_LIKE, sliding_window=8, head_dim=12),
    "mistral-v0.3": _variant("Mistral", LLAMA_LIKE, sliding_window=None),
    "qwen2": _variant("Qwen2", LLAMA_LIKE, tie_word_embeddings=True),
    "qwen2-windows": _variant(
        "Qwen2",
        LLAMA_LIKE,
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    ),
    "qwen3": _variant("Qwen3", LLAMA_LIKE, head_dim=16),
    "qwen3-bias": _variant("Qwen3", LLAMA_LIKE, attention_bias=True, num_key_value_heads=1),
    "pythia": _variant("GPTNeoX", NEOX),
    "gpt-neox-sequential": _variant(
        "GPTNeoX",
        NEOX,
        use_parallel_residual=False,
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "falcon-7b": _variant("Falcon", FALCON),
    "falcon-40b": _variant("Falcon", FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-11b": _variant(
        "Falcon",
        FALCON,
        new_decoder_architecture=True,
        num_kv_heads=1,
        num_ln_in_parallel_attn=1,
        ffn_hidden_size=48,
        tie_word_embeddings=False,
    ),
    "falcon-rw": _variant("Falcon", FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "mpt": _variant("Mpt", MPT, attn_config={"clip_qkv": 1.0}),
    "mpt-six-heads": _variant("Mpt", MPT, d_model=48, n_heads=6, attn_config={"softmax_scale": 0.5}),
    "mixtral": _variant("Mixtral", LLAMA_LIKE, num_local_experts=8),
    "mixtral-five-experts": _variant(
        "Mixtral", LLAMA_LIKE, num_local_experts=5, num_experts_per_tok=3, sliding_window=8
    ),
    "qwen3-moe": _variant(
        "Qwen3Moe",
        LLAMA_LIKE,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "qwen3-moe-some-dense": _variant(
        "Qwen3Moe",
        LLAMA_LIKE,
        num_hidden_layers=3,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=False,
        mlp_only_layers=[1],
    ),
    "glm4-moe": _variant(
        "Glm4Moe",
        LLAMA_LIKE,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "deepseek-v2-lite": _variant("DeepseekV2", LATENT, q_lora_rank=None, first_k_dense_replace=0),
    "deepseek-v2": _variant(
        "DeepseekV2",
        LATENT,
        q_lora_rank=14,
        attention_bias=True,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "deepseek-v3": _variant(
        "DeepseekV3",
        LATENT,
        q_lora_rank=14,
        n_group=4,
        topk_group=2,
        **_rope("yarn", original_max_position_embeddings=128, mscale=0.8, mscale_all_dim=1.4),
    ),
    "glm4-moe-lite": _variant(
        "Glm4MoeLite", LATENT, q_lora_rank=14, n_group=4, topk_group=2, mlp_layer_types=["sparse", "dense"]
    ),
    "mistral4": _variant(
        "Mistral4",
        LATENT,
        q_lora_rank=14,
        qk_nope_head_dim=8,
        **_rope(
            "yarn",
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.5,
        ),
    ),
    "gpt-oss": _variant(
        "GptOss",
        LLAMA_LIKE,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    ),
    "granite": _variant("Granite", GRANITE),
    "granite-moe-shared": _variant(
        "GraniteMoeShared",
        GRANITE,
        intermediate_size=24,
        num_local_experts=8,
        num_experts_per_tok=3,
        shared_intermediate_size=40,
    ),
    "granite-4-dense": _variant(
        "GraniteMoeHybrid",
        GRANITE,
        layer_types=["full_attention"] * 2,
        mamba_n_heads=4,
        num_local_experts=0,
        shared_intermediate_size=48,
        position_embedding_type="rope",
    ),
    "granite-4-nope": _variant(
        "GraniteMoeHybrid",
        GRANITE,
        layer_types=["full_attention"] * 2,
        mamba_n_heads=4,
        intermediate_size=24,
        num_local_experts=4,
        shared_intermediate_size=40,
    ),
    "qwen2-moe": _variant(
        "Qwen2Moe",
        LLAMA_LIKE,
        num_hidden_layers=3,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "llama4": _variant(
        "Llama4",
        LLAMA_LIKE,
        config="Llama4TextConfig",
        num_hidden_layers=4,
        intermediate_size=24,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0, 1, 1],
        attention_chunk_size=12,
        floor_scale=16,
        attn_scale=0.5,
    ),
    "ministral3": _variant(
        "Ministral3",
        LLAMA_LIKE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "ministral": _variant(
        "Ministral",
        LLAMA_LIKE,
        num_hidden_layers=3,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": _variant("Phi3", LLAMA_LIKE, partial_rotary_factor=0.5, sliding_window=8),
    "olmo2": _variant("Olmo2", LLAMA_LIKE),
    "olmo3": _variant(
        "Olmo3",
        LLAMA_LIKE,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            "sliding_attention": {"rope_type": "default"},
        },
    ),
    "glm4": _variant("Glm4", LLAMA_LIKE, head_dim=16, attention_bias=True),
    "glm": _variant("Glm", LLAMA_LIKE, num_key_value_heads=1),
    "olmoe": _variant("Olmoe", LLAMA_LIKE, num_experts=8, num_experts_per_tok=3),
    "gemma": _variant("Gemma", LLAMA_LIKE, head_dim=16, num_key_value_heads=1),
    "gemma2": _variant("Gemma2", GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3": _variant(
        "Gemma3",
        GEMMA,
        config="Gemma3TextConfig",
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
        final_logit_softcapping=5.0,
    ),
    "seed-oss": _variant("SeedOss", LLAMA_LIKE, head_dim=16),
    "smollm3": _variant("SmolLM3", LLAMA_LIKE, num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]),
    "smollm3-windows": _variant(
        "SmolLM3", LLAMA_LIKE, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=8, mlp_bias=True
    ),
    "ernie4.5": _variant("Ernie4_5", LLAMA_LIKE, use_bias=True, num_key_value_heads=1),
    "ernie4.5-moe": _variant(
        "Ernie4_5_Moe",
        LLAMA_LIKE,
        num_hidden_layers=3,
        moe_num_experts=8,
        moe_k=3,
        moe_intermediate_size=24,
        moe_layer_end_index=1,
    ),
    "cohere": _variant("Cohere", LLAMA_LIKE, attention_bias=True, logit_scale=2.0),
    "cohere2": _variant(
        "Cohere2",
        LLAMA_LIKE,
        num_hidden_layers=3,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "exaone4": _variant("Exaone4", LLAMA_LIKE, sliding_window=8, sliding_window_pattern=2),
    "gemma4": _gemma4(),
    "gemma4-experts": _gemma4(
        enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=24, num_hidden_layers=2
    ),
    "gemma4-e": _gemma4(
        num_hidden_layers=6,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=16,  # of few numbers an activation might leave nearly nothing to normalise
        vocab_size_per_layer_input=VOCAB_SIZE,
        attention_k_eq_v=False,
    ),
}
