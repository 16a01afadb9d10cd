"""Tiny random Llama checkpoints, made with `transformers`, and its logits for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from worker.driver import VOCAB_SIZE


def make_checkpoint(folder: Path, *, shard_size: str = "1GB", seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint; returns `folder`."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
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
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def transformers_logits(folder: Path, tokens: list[int]) -> Tensor:
    """float32 `[tokens, vocabulary]`."""
    with torch.inference_mode():
        logits: Tensor = _transformers_model(folder)(torch.tensor([tokens])).logits[0]
        return logits
