"""The demo model with latent attention: the same numbers, in the form that DeepSeek's models keep KV.

There are no trained weights with latents here, and random ones have no perplexity. But attention with few KV
heads is a case of latent attention (DeepSeek-V2, §2.1), so the demo model can be written as one:

      latent           values of all KV heads, side by side; each head's expansion takes its KV head's part
      rotary part      keys of all KV heads, side by side; a query has zeros in the parts of other KV heads

A token's row has as many numbers as keys and values have: nothing is left out, nothing is rounded. Two things
are outside of what a config.json can say, so `write_latent` returns a change of the configuration. The pairs of
each KV head turn at the same frequencies, so the rotary part has each frequency several times (as factors of
LongRoPE). And the latent's norm must do nothing: its eps is 2^40, beside which the latent's own squares are
nothing, and its weights are 2^20. Both powers are exact in all types.

Trained latents hold keys, too. With `slow_pairs` the slowest pairs of all keys go into the latent and no longer
turn. Over 512 tokens they turn little, so this is another model, but one that predicts about as well. In the
latent these keys are scaled by a power of two, to the values' size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trunkline.worker.model.model_config import ModelConfig, RopeConfig

NORM_EPS: Final = 2.0**40
LEAST_PLAIN: Final = 2
"""Numbers of a key that do not turn; the form has some. They are zero where no pairs are slow."""


class LatentShape:
    """The sizes of a Llama's attention, and of its form with latents."""

    def __init__(self, config: dict[str, Any], slow_pairs: int) -> None:
        """
        Args:
            config: the parsed config.json.
            slow_pairs: pairs of each key that go into the latent, the slowest ones.
        """
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.layers = config["head_dim"], config["num_hidden_layers"]
        self.theta: float = config["rope_parameters"]["rope_theta"]
        self.slow_pairs, self.fast_pairs = slow_pairs, self.head_dim // 2 - slow_pairs
        self.rotary = 2 * self.fast_pairs * self.kv_heads
        self.plain = max(2 * slow_pairs, LEAST_PLAIN)
        self.latent = (self.head_dim + 2 * slow_pairs) * self.kv_heads

    def fast_rows(self) -> list[int]:
        """Return a key's rows that turn, the two of a pair side by side, as DeepSeek's files have them."""
        half = self.head_dim // 2
        return [row for pair in range(self.fast_pairs) for row in (pair, half + pair)]

    def slow_rows(self) -> list[int]:
        half = self.head_dim // 2
        return [row + pair for row in (0, half) for pair in range(self.fast_pairs, half)]

    def rope(self) -> RopeConfig:
        """Return rotary positions that have the frequencies of a key's fast pairs once for each KV head."""
        pairs = self.fast_pairs * self.kv_heads
        factors = []
        for pair in range(pairs):
            wanted = self.theta ** (-2 * (pair % self.fast_pairs) / self.head_dim)
            factors.append(self.theta ** (-pair / pairs) / wanted)
        kept = tuple(factors)
        return RopeConfig(self.theta, self.rotary, "longrope", short_factors=kept, long_factors=kept)


def write_latent(source: Path, folder: Path, slow_pairs: int = 0) -> Callable[[ModelConfig], ModelConfig]:
    """Write a Llama's checkpoint with latent attention; return what its configuration must be changed by.

    Args:
        source: a folder with one file of weights, without biases, whose positions are not scaled.
        slow_pairs: as of `LatentShape`.
    """
    config = json.loads((source / "config.json").read_text())
    shape = LatentShape(config, slow_pairs)
    tensors = load_file(source / "model.safetensors")
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}.self_attn."
        query, key, value = (tensors.pop(f"{prefix}{name}_proj.weight").float() for name in "qkv")
        tensors |= {f"{prefix}{name}": own for name, own in _attention(shape, query, key, value).items()}
    folder.mkdir(parents=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    kept = ("rms_norm_eps", "hidden_size", "intermediate_size", "vocab_size", "tie_word_embeddings", "dtype")
    fields = {name: config[name] for name in (*kept, "max_position_embeddings", "num_hidden_layers")}
    fields |= {
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": None,
        "kv_lora_rank": shape.latent,
        "qk_rope_head_dim": shape.rotary,
        "qk_nope_head_dim": shape.plain,
        "v_head_dim": shape.head_dim,
        "first_k_dense_replace": shape.layers,
        "n_routed_experts": 1,
        "num_experts_per_tok": 1,
    }
    (folder / "config.json").write_text(json.dumps(fields))

    def changed(found: ModelConfig) -> ModelConfig:
        assert found.latent is not None
        attention = tuple(replace(own, rope=shape.rope()) for own in found.attention)
        return replace(found, attention=attention, latent=replace(found.latent, norm_eps=NORM_EPS))

    return changed


def _attention(shape: LatentShape, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Return a layer's matrices of queries, latents and expansions, of those of queries, keys and values."""
    group, width = shape.heads // shape.kv_heads, shape.head_dim
    keys, values = key.view(shape.kv_heads, width, -1), value.view(shape.kv_heads, width, -1)
    fast, slow = keys[:, shape.fast_rows()], keys[:, shape.slow_rows()]
    ratio = float(values.square().mean() / slow.square().mean()) if shape.slow_pairs else 1.0
    factor = 2.0 ** round(math.log2(ratio) / 2)
    latent = torch.cat((values.flatten(0, 1), factor * slow.flatten(0, 1), fast.flatten(0, 1)))
    # Scores are scaled by the size of a query, which is now larger.
    own = query.view(shape.heads, width, -1) * ((shape.plain + shape.rotary) / width) ** 0.5
    queries = torch.zeros(shape.heads, shape.plain + shape.rotary, query.shape[1])
    expand = torch.zeros(shape.heads, shape.plain + width, shape.latent)
    count, turning = 2 * shape.slow_pairs, 2 * shape.fast_pairs
    for head in range(shape.heads):
        kv_head = head // group
        first = shape.plain + kv_head * turning
        queries[head, :count] = own[head, shape.slow_rows()]
        queries[head, first : first + turning] = own[head, shape.fast_rows()]
        start = shape.kv_heads * width + kv_head * count
        expand[head, :count, start : start + count] = torch.eye(count) / factor
        expand[head, shape.plain :, kv_head * width : (kv_head + 1) * width] = torch.eye(width)
    return {
        "q_proj.weight": queries.flatten(0, 1),
        "kv_a_proj_with_mqa.weight": latent,
        "kv_a_layernorm.weight": torch.full((shape.latent,), NORM_EPS**0.5),
        "kv_b_proj.weight": expand.flatten(0, 1),
    }
