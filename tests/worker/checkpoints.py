"""Tiny random checkpoints of every supported family, made with `transformers`, and its logits for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from worker.driver import VOCAB_SIZE

LLAMA_LIKE: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
GPT2: Final[dict[str, Any]] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OPT: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
NEOX: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
FALCON: Final[dict[str, Any]] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MPT: Final[dict[str, Any]] = {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
GEMMA: Final[dict[str, Any]] = {
    **LLAMA_LIKE,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
}


class Variant(NamedTuple):
    """A family, and settings under which it takes another way through the decoder."""

    model: str
    """Its class in `transformers`."""
    config: str
    settings: dict[str, Any]


def _variant(family: str, *settings: dict[str, Any], model: str = "", config: str = "", **own: Any) -> Variant:
    merged: dict[str, Any] = {}
    for each in settings:
        merged.update(each)
    return Variant(model or f"{family}ForCausalLM", config or f"{family}Config", {**merged, **own})


VARIANTS: Final[dict[str, Variant]] = {
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
}


def make_variant(folder: Path, name: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint of `VARIANTS[name]`; returns `folder`."""
    model_name, config_name, settings = VARIANTS[name]
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = getattr(transformers, config_name)(vocab_size=VOCAB_SIZE, **{**tokens, **settings, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:  # zeros and ones would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


def make_checkpoint(folder: Path, *, shard_size: str = "1GB", seed: int = 0, **overrides: Any) -> Path:
    """Write a random Llama checkpoint; returns `folder`."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        **LLAMA_LIKE,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    config = LlamaConfig(**{**settings, **overrides})
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # zeros and ones would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


@cache
def _transformers_model(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def transformers_logits(folder: Path, tokens: list[int]) -> Tensor:
    """float32 `[tokens, vocabulary]`."""
    with torch.inference_mode():
        logits: Tensor = _transformers_model(folder)(torch.tensor([tokens])).logits[0]
        return logits
