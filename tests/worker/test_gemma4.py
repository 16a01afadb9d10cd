"""Gemma 4's config.json: heads of several sizes, both forms of it, what is refused and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from trunkline.kernels.routing import Routing
from trunkline.worker.errors import ModelError, ParallelismError, UnsupportedModelError
from trunkline.worker.model.families import read_model_config
from trunkline.worker.model.model_config import (
    LayerAttention,
    LayerHeads,
    Mixture,
    ModelConfig,
    RopeConfig,
)
from trunkline.worker.model.parallelism import check_parallelism

GEMMA4: Final[dict[str, Any]] = {
    "architectures": ["Gemma4ForCausalLM"],
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
    "hidden_size": 4096,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 7,
    "num_key_value_heads": 16,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
    "vocab_size": 262144,
}


def read_gemma4(tmp_path: Path, **changes: Any) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA4, **changes}))
    return read_model_config(tmp_path)


def test_gemma4(tmp_path: Path) -> None:
    config = read_gemma4(tmp_path)
    assert (config.head_dim, config.kv_heads, config.embedding_scale) == (512, 16, 64.0)
    assert (config.logit_soft_cap, config.tied_embeddings, config.only_on_cpus) == (
        30,
        True,
        "heads of several sizes",
    )
    near = LayerAttention(1.0, 1024, rope=RopeConfig(1e4, 256), unit_values=True, heads=LayerHeads(256, 16))
    turning = RopeConfig(1e6, 512, "proportional", turning_pairs=64)
    far = LayerAttention(1.0, 0, rope=turning, unit_values=True, heads=LayerHeads(512, 4, keys_are_values=True))
    assert config.attention == (*[near] * 5, far, far)  # the last one sees everything, whatever the pattern is
    with pytest.raises(ParallelismError, match=r"possible for this model: 1, 2, 4, 8, 16, 32$"):
        check_parallelism(config, 64)
    odd = read_gemma4(
        tmp_path, num_global_key_value_heads=1, num_key_value_heads=3, num_attention_heads=12, intermediate_size=48
    )
    with pytest.raises(ParallelismError, match=r"cannot split 3 KV heads over 4 ranks; .*: 1, 3, 6, 12"):
        check_parallelism(odd, 4)
    assert config.chunk_format(64, "bfloat16").chunk_bytes == 7 * 2 * 16 * 64 * 512 * 2
    assert config.positions_shift
    saved = {str(layer): {"head_dim": 512, "num_key_value_heads": 4} for layer in (5, 6)}
    kinds = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    again = read_gemma4(tmp_path, per_layer_config=saved, layer_types=kinds, num_global_key_value_heads=None)
    assert again == config
    assert read_gemma4(tmp_path, attention_k_eq_v=False).attention[-1].heads is None
    alike = read_gemma4(tmp_path, attention_k_eq_v=False, global_head_dim=256)
    assert ({own.heads for own in alike.attention}, alike.only_on_cpus) == ({None}, "")


EXPERTS: Final = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}


def test_experts_of_gemma4(tmp_path: Path) -> None:
    mixture = read_gemma4(tmp_path, **EXPERTS).mixture
    assert mixture == Mixture(128, 704, Routing(8), shared_width=8192)  # the MLP beside them has the dense width
    assert read_gemma4(tmp_path, **{**EXPERTS, "enable_moe_block": False}).mixture is None


SMALL: Final[dict[str, Any]] = {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
}
"""Of the kind of the published E2B."""


def test_layers_that_read_the_kv_of_others(tmp_path: Path) -> None:
    config = read_gemma4(tmp_path, **SMALL)
    assert (config.kv_layers, config.layer_embedding_size) == (15, 256)
    assert config.kv_sources == (13, 13, 13, 13, 14) * 4  # the last ones of each kind that keep KV
    assert config.mlp_widths == (8192,) * 15 + (16384,) * 20
    assert [config.kv_layer(layer) for layer in (0, 14, 15, 19, 34)] == [0, 14, 13, 14, 14]
    assert config.chunk_format(64, "bfloat16").chunk_bytes == 15 * 2 * 64 * 512 * 2
    assert config.only_on_cpus == (
        "heads of several sizes, layers that read the KV of others, embeddings of each layer"
    )
    plain = read_gemma4(tmp_path, **{**SMALL, "use_double_wide_mlp": False})
    assert (plain.kv_sources, plain.mlp_widths) == (config.kv_sources, ())
    with pytest.raises(ParallelismError, match=r"an MLP of 8193 over 2 ranks"):  # though all others are even
        check_parallelism(read_gemma4(tmp_path, **SMALL, intermediate_size=8193), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 101},
            "vocab_size_per_layer_input is 101 and vocab_size 262144",
        ),
        (
            {**EXPERTS, "num_kv_shared_layers": 1, "use_double_wide_mlp": True},
            "use_double_wide_mlp is not supported with enable_moe_block",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"layer_types": ["chunked_attention"] * 7}, "layer_types has 'chunked_attention'"),
        ({"per_layer_config": {"1": {"intermediate_size": 9}}}, "per_layer_config has 'intermediate_size'"),
        (
            {"num_key_value_heads": 8, "num_attention_heads": 24, "num_global_key_value_heads": 3},
            "3 and with 8 KV",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config is there"),
    ],
)
def test_what_of_gemma4_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_gemma4(tmp_path, **changes)
    outside = {name: changes[name] for name in changes if name == "quantization_config"}
    text = {**GEMMA4, **{name: value for name, value in changes.items() if name not in outside}}
    raw = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text, **outside}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_global_key_value_heads": 5}, "layer 5 has 5 KV heads of 512 for 32 heads"),
        ({**EXPERTS, "top_k_experts": None}, "field 'top_k_experts' is missing"),
        ({**EXPERTS, "num_experts": None}, "field 'num_experts' is missing"),
        ({**EXPERTS, "top_k_experts": 129}, "top_k_experts is 129; there are 128 experts"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 7 layers"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1; it must not be negative"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7 of 7 layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1 of 7 layers"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2: no layer before those is of 'full_attention'"),
        (
            {"num_kv_shared_layers": 1, "per_layer_config": {"6": {"head_dim": 512}}},
            "layer 6 has other heads than layer 5, whose KV it reads",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "'sliding_attention' is missing"),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 1e4},
                    "full_attention": {
                        "rope_type": "proportional",
                        "rope_theta": 1e6,
                        "partial_rotary_factor": 0.0,
                    },
                }
            },
            "partial_rotary_factor of full_attention is 0.0",
        ),
    ],
)
def test_bad_values_of_gemma4(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_gemma4(tmp_path, **changes)
