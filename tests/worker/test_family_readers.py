"""config.json of each family: the forms it has had, what is refused, and which group sizes are possible."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from transformers.models.mpt import modeling_mpt
from worker.checkpoints import Models, largest_difference, make_checkpoint
from worker.driver import generate, run_config

from trunkline.kernels.routing import Routing
from trunkline.worker.errors import CheckpointError, ModelError, ParallelismError, UnsupportedModelError
from trunkline.worker.loading import load_runner
from trunkline.worker.model.config_fields import bloom_slopes, mpt_slopes
from trunkline.worker.model.families import check_model, read_model_config
from trunkline.worker.model.model_config import (
    LatentAttention,
    LayerAttention,
    Mixture,
    ModelConfig,
    QueryScale,
    RopeConfig,
)
from trunkline.worker.model.parallelism import check_parallelism

HUB: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "hub_configs.json").read_text())
"""Configurations as they are on the hub, without the fields that have no effect here."""


def read(tmp_path: Path, name: str, **changes: Any) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**HUB[name], **changes}))
    return read_model_config(tmp_path)


def test_smollm3_has_layers_without_positions(tmp_path: Path) -> None:
    given = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 8}
    config = read(tmp_path, "mistral-7b-v0.1", **given)
    assert [own.rope is None for own in config.attention] == [False, False, False, True] * 2
    assert ({own.window for own in config.attention}, config.positions_shift) == ({0}, False)
    slid = read(tmp_path, "mistral-7b-v0.1", **given, use_sliding_window=True, no_rope_layer_interval=2)
    assert [own.window for own in slid.attention] == [0, 4096] * 4
    with pytest.raises(ModelError, match="no_rope_layers has 1 entries for 8 layers"):
        read(tmp_path, "mistral-7b-v0.1", **given, no_rope_layers=[1])


def test_only_layers_with_windows_have_positions(tmp_path: Path) -> None:
    given = {"architectures": ["Exaone4ForCausalLM"], "num_hidden_layers": 8}
    config = read(tmp_path, "mistral-7b-v0.1", **given)
    assert [own.window for own in config.attention] == [4096, 4096, 4096, 0] * 2
    assert all((own.rope is None) == (own.window == 0) for own in config.attention)
    assert not config.positions_shift
    plain = read(tmp_path, "mistral-7b-v0.1", **given, sliding_window=None)
    assert ({own.window for own in plain.attention}, plain.positions_shift) == ({0}, True)
    with pytest.raises(ModelError, match="sliding_window_pattern is 'LLLG', and there are no layer_types"):
        read(tmp_path, "mistral-7b-v0.1", **given, sliding_window_pattern="LLLG")
    cohere = read(tmp_path, "mistral-7b-v0.1", **{**given, "architectures": ["Cohere2ForCausalLM"]})
    assert (cohere.attention, cohere.logit_scale, cohere.tied_embeddings) == (config.attention, 0.0625, False)


def test_layers_of_ernie_with_experts(tmp_path: Path) -> None:
    given = {"architectures": ["Ernie4_5_MoeForCausalLM"], "num_hidden_layers": 8, "moe_layer_interval": 2}
    mixture = read(tmp_path, "mistral-7b-v0.1", **given).mixture
    assert mixture == Mixture(64, 1536, Routing(6), shared_width=3072, dense_layers=frozenset({0, 2, 4, 6}))
    ends = {"moe_layer_interval": 1, "moe_layer_start_index": 3, "moe_layer_end_index": 5, "moe_k": 2}
    mixture = read(tmp_path, "mistral-7b-v0.1", **{**given, **ends}).mixture
    assert mixture == Mixture(64, 1536, Routing(2), shared_width=3072, dense_layers=frozenset({0, 1, 2, 6, 7}))


def possible(config: ModelConfig) -> list[int]:
    """Group sizes up to 16, as the error names them."""
    with pytest.raises(ParallelismError) as caught:
        check_parallelism(config, 1000)
    sizes = str(caught.value).split("possible for this model: ")[1]
    return [size for size in map(int, sizes.split(", ")) if size <= 16]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2", [1, 2, 3, 4, 6, 12]),
        ("opt-350m", [1, 2, 4, 8, 16]),
        ("mistral-7b-v0.1", [1, 2, 4, 8, 16]),
        ("mixtral-8x7b", [1, 2, 4, 8]),
        ("qwen2.5-7b", [1, 2, 4]),
        ("pythia-1.4b", [1, 2, 4, 8, 16]),
        ("falcon-7b", [1]),
        ("falcon-40b", [1, 2, 4, 8, 16]),
        ("mpt-7b", [1, 2, 4, 8, 16]),
        ("gemma-2-2b", [1, 2, 4, 8]),
        ("gemma-3-1b", [1, 2, 4]),
        ("qwen3-235b-a22b", [1, 2, 4, 8, 16]),
        ("glm-4.5-air", [1, 2, 4, 8, 16]),
        ("deepseek-v2-lite", [1, 2, 4, 8, 16]),
        ("deepseek-v3", [1, 2, 4, 8, 16]),
        ("gpt-oss-20b", [1, 2, 4, 8, 16]),
    ],
)
def test_group_sizes(name: str, sizes: list[int], tmp_path: Path) -> None:
    assert possible(read(tmp_path, name)) == sizes


def test_gpt2(tmp_path: Path) -> None:
    config = read(tmp_path, "gpt2")
    assert (config.hidden_size, config.intermediate_size, config.kv_heads, config.head_dim) == (768, 3072, 12, 64)
    assert (config.activation, config.tied_embeddings, config.max_positions) == ("gelu_tanh", True, 1024)
    assert config.attention == (LayerAttention(0.125),) * 12
    assert not config.positions_shift
    assert config.chunk_format(64, "float16").of_rank(3).chunk_bytes == 12 * 2 * 4 * 64 * 64 * 2
    assert read(tmp_path, "gpt2", n_inner=10).intermediate_size == 10


def test_opt_350m(tmp_path: Path) -> None:
    config = read(tmp_path, "opt-350m")
    assert (config.embedding_size, config.hidden_size, config.stored_dtype) == (512, 1024, "float16")
    assert config.architecture.residual == "n(x + a(x)), then n(x + m(x))"
    assert not config.architecture.names.final_norm
    other = read(tmp_path, "opt-350m", do_layer_norm_before=True, word_embed_proj_dim=1024)
    assert (other.embedding_size, other.architecture.names.final_norm) == (0, "final_layer_norm")
    assert not other.positions_shift
    removed = read(tmp_path, "opt-350m", do_layer_norm_before=True, _remove_final_layer_norm=True)
    assert not removed.architecture.names.final_norm


def test_windows(tmp_path: Path) -> None:
    mistral = read(tmp_path, "mistral-7b-v0.1")
    assert mistral.positions_shift
    assert {own.window for own in mistral.attention} == {4096}
    assert {own.window for own in read(tmp_path, "mistral-7b-v0.1", sliding_window=None).attention} == {0}
    assert {own.window for own in read(tmp_path, "mixtral-8x7b").attention} == {0}
    assert {own.window for own in read(tmp_path, "qwen2.5-7b").attention} == {0}
    slid = read(tmp_path, "qwen2.5-7b", use_sliding_window=True, max_window_layers=20)
    assert [own.window for own in slid.attention] == [0] * 20 + [131072] * 8
    kinds = ["full_attention", "sliding_attention"] * 14
    named = read(tmp_path, "qwen2.5-7b", use_sliding_window=True, layer_types=kinds)
    assert [own.window for own in named.attention] == [0, 131072] * 14


def test_gemma(tmp_path: Path) -> None:
    config = read(tmp_path, "gemma-2-2b")
    near = LayerAttention(256**-0.5, 4096, 50.0, RopeConfig(10000.0, 256))
    assert config.attention == (near, LayerAttention(256**-0.5, 0, 50.0, near.rope)) * 13
    assert len({id(own) for own in config.attention}) == 2
    assert (config.logit_soft_cap, config.embedding_scale, config.tied_embeddings) == (30.0, 48.0, True)
    uncapped = read(tmp_path, "gemma-2-2b", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention[0].soft_cap, uncapped.logit_soft_cap) == (0.0, 0.0)
    config = read(tmp_path, "gemma-3-1b")
    near = LayerAttention(256**-0.5, 512, 0.0, RopeConfig(10000.0, 256))
    far = LayerAttention(256**-0.5, 0, 0.0, RopeConfig(1e6, 256, "linear", 8.0))
    assert config.attention == ((near,) * 5 + (far,)) * 4 + (near,) * 2
    newer = read(
        tmp_path,
        "gemma-3-1b",
        rope_scaling=None,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        layer_types=[*(["sliding_attention"] * 25), "full_attention"],
    )
    assert newer.attention == (near,) * 25 + (far,)


def test_mixtures(tmp_path: Path) -> None:
    config = read(tmp_path, "qwen3-235b-a22b")
    assert config.mixture == Mixture(128, 1536, Routing(8))
    assert (config.attention[0].window, config.head_dim) == (0, 128)
    other = read(tmp_path, "qwen3-235b-a22b", norm_topk_prob=False, decoder_sparse_step=3, mlp_only_layers=[2])
    assert other.mixture is not None
    assert not other.mixture.routing.normalised
    assert {i for i in range(94) if other.mixture_of(i)} == set(range(5, 94, 3))
    config = read(tmp_path, "glm-4.5-air")
    assert config.mixture == Mixture(128, 1408, Routing(8, "sigmoid"), 1408, frozenset([0]))
    assert (config.mixture_of(0), config.attention_bias, config.attention_out_bias) == (None, True, False)
    assert config.attention[0].rope == RopeConfig(1e6, 64)
    assert not config.architecture.names.query_norm
    assert read(tmp_path, "glm-4.5-air", use_qk_norm=True).architecture.names.query_norm
    # What is split is the layers with one MLP, and the experts for all tokens.
    assert possible(read(tmp_path, "glm-4.5-air", intermediate_size=10946)) == [1, 2]
    assert possible(read(tmp_path, "glm-4.5-air", moe_intermediate_size=1412)) == [1, 2, 4]
    assert possible(read(tmp_path, "qwen3-235b-a22b", intermediate_size=1)) == [1, 2, 4, 8, 16]


def test_latent_attention(tmp_path: Path) -> None:
    config = read(tmp_path, "deepseek-v3")
    assert config.latent == LatentAttention(512, 64, 128, 128, query_rank=1536)
    assert config.mixture == Mixture(256, 2048, Routing(8, "sigmoid", True, 2.5, 8, 4), 2048, frozenset(range(3)))
    (own,) = set(config.attention)
    # The temperature is wholly in the scale, none of it in the rotation.
    assert own.rope == RopeConfig(10000.0, 64, "yarn", 40.0, 4096, attention_factor=1.0)
    assert own.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    chunk = config.chunk_format(64, "bfloat16")
    assert chunk.chunk_bytes == 61 * 64 * 576 * 2
    assert chunk.of_rank(8) == chunk
    assert config.positions_shift
    assert config.architecture.interleaved
    assert not read(tmp_path, "deepseek-v3", rope_interleave=False).architecture.interleaved
    published = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    assert read(tmp_path, "deepseek-v3", quantization_config=published) == config
    lite = read(tmp_path, "deepseek-v2-lite")
    assert lite.latent == LatentAttention(512, 64, 128, 128)
    assert lite.architecture.names.query == "self_attn.q_proj"
    assert lite.mixture == Mixture(64, 1408, Routing(6, normalised=False), 2816, frozenset([0]))
    grouped = read(tmp_path, "deepseek-v2-lite", topk_method="group_limited_greedy", n_group=8, topk_group=3)
    assert grouped.mixture is not None
    assert grouped.mixture.routing == Routing(6, normalised=False, groups=8, groups_per_token=3, group_best=1)
    assert lite.chunk_format(64, "bfloat16", "int8").row_bytes == 2 * 64 + 512 + 2 * 4
    wide = read(tmp_path, "deepseek-v2-lite", kv_lora_rank=520)
    with pytest.raises(
        UnsupportedModelError, match=r"not supported with latents of 520 numbers .* up to 512 and 256"
    ):
        wide.chunk_format(64, "bfloat16", "int8")


def test_what_files_of_latent_attention_leave_out(tmp_path: Path) -> None:
    """As the configurations of `transformers` fill it in."""
    own = {"hidden_size": 2048, "num_attention_heads": 20, "num_hidden_layers": 4, "vocab_size": 9}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["Glm4MoeLiteForCausalLM"], **own}))
    config = read_model_config(tmp_path)
    assert config.latent == LatentAttention(512, 64, 192, 256, query_rank=768)
    assert config.mixture == Mixture(64, 1536, Routing(4, "sigmoid", True, 1.8), 1536, frozenset([0]))
    assert (config.norm_eps, config.max_positions) == (1e-5, 202752)
    path.write_text(json.dumps({"architectures": ["Glm4MoeLiteForCausalLM"], **own, "q_lora_rank": None}))
    assert read_model_config(tmp_path).architecture.names.query == "self_attn.q_proj"
    for kinds, message in ((["dense"], "1 entries for 4 layers"), (["wide"] * 4, "mlp_layer_types has 'wide'")):
        path.write_text(json.dumps({"architectures": ["Glm4MoeLiteForCausalLM"], **own, "mlp_layer_types": kinds}))
        with pytest.raises(ModelError, match=message):
            read_model_config(tmp_path)
    path.write_text(json.dumps({"architectures": ["Mistral4ForCausalLM"], **own}))
    config = read_model_config(tmp_path)
    assert config.latent == LatentAttention(256, 64, 64, 128, query_rank=1024)
    assert config.mixture == Mixture(128, 2048, Routing(4), 2048)
    (layer,) = set(config.attention)
    assert layer.rope == RopeConfig(10000.0, 64, "yarn", 128.0, 8192)
    assert layer.query_scale == QueryScale(0.1, 8192, 0)
    assert layer.scale == pytest.approx(128**-0.5 * (0.1 * math.log(128) + 1) ** 2)
    assert not config.positions_shift
    plain = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    for rope, message in (
        ({**plain, "original_max_position_embeddings": 8192}, "rope scaling 'default' .*: yarn of all"),
        ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8}, "llama_4_scaling_beta"),
    ):
        path.write_text(json.dumps({"architectures": ["Mistral4ForCausalLM"], **own, "rope_parameters": rope}))
        with pytest.raises(ModelError, match=message):
            read_model_config(tmp_path)


def test_granites(tmp_path: Path) -> None:
    experts = {"num_local_experts": 40, "num_experts_per_tok": 8, "intermediate_size": 512}
    shared = read(tmp_path, "granite-3.1-8b", architectures=["GraniteMoeSharedForCausalLM"], **experts)
    assert shared.mixture == Mixture(40, 512, Routing(8))
    more = {**experts, "shared_intermediate_size": 1024}
    shared = read(tmp_path, "granite-3.1-8b", architectures=["GraniteMoeSharedForCausalLM"], **more)
    assert shared.mixture == Mixture(40, 512, Routing(8), 1024)
    assert read(tmp_path, "granite-3.1-8b", architectures=["GraniteMoeForCausalLM"], **more).mixture == Mixture(
        40, 512, Routing(8)
    )
    hybrid = {"architectures": ["GraniteMoeHybridForCausalLM"], **more}
    for kinds, message in ((None, "layer_types has 'mamba'"), (["attention", "mamba"] * 20, "'mamba'; supported")):
        with pytest.raises(UnsupportedModelError, match=message):
            read(tmp_path, "granite-3.1-8b", **hybrid, layer_types=kinds)
    with pytest.raises(ModelError, match="layer_types has 1 entries for 40 layers"):
        read(tmp_path, "granite-3.1-8b", **hybrid, layer_types=["attention"])
    kinds = ["attention"] * 40
    config = read(tmp_path, "granite-3.1-8b", **hybrid, layer_types=kinds)
    assert config.mixture == Mixture(40, 512, Routing(8), 1024)
    assert (config.attention[0].rope, config.positions_shift) == (None, False)
    dense = {**hybrid, "num_local_experts": 0, "position_embedding_type": "rope"}
    config = read(tmp_path, "granite-3.1-8b", **dense, layer_types=kinds)
    assert (config.mixture, config.intermediate_size, config.positions_shift) == (None, 1024, True)


def test_factors(tmp_path: Path) -> None:
    config = read(tmp_path, "granite-3.1-8b")
    assert (config.embedding_scale, config.residual_scale, config.logit_scale) == (12.0, 0.22, 1 / 16)
    assert {own.scale for own in config.attention} == {0.0078125}
    config = read(tmp_path, "glm-4-9b-0414")
    assert config.attention[0].rope == RopeConfig(10000.0, 64)
    assert (config.attention_bias, config.architecture.interleaved) == (False, True)


def test_partial_rotary(tmp_path: Path) -> None:
    older = read(tmp_path, "pythia-1.4b", rotary_emb_base=77)
    assert older.attention[0].rope == RopeConfig(77.0, 32)
    parameters = {"rope_type": "default", "rope_theta": 88.0, "partial_rotary_factor": 0.5}
    newer = read(tmp_path, "pythia-1.4b", rotary_pct=None, rotary_emb_base=None, rope_parameters=parameters)
    assert newer.attention[0].rope == RopeConfig(88.0, 64)
    assert newer.positions_shift


def test_falcon(tmp_path: Path) -> None:
    config = read(tmp_path, "falcon-7b")
    assert (config.kv_heads, config.head_dim, config.intermediate_size) == (1, 64, 4 * 4544)
    assert config.architecture.names.mlp_norm == ""
    config = read(tmp_path, "falcon-40b")
    assert (config.kv_heads, config.architecture.names.mlp_norm) == (8, "ln_mlp")
    assert read(tmp_path, "falcon-40b", num_ln_in_parallel_attn=1).architecture.names.mlp_norm == ""
    config = read(tmp_path, "falcon-7b", alibi=True, multi_query=False, parallel_attn=False)
    assert (config.kv_heads, config.architecture.names.mlp_norm) == (71, "post_attention_layernorm")
    assert (config.attention[0].rope, len(config.alibi_slopes), config.positions_shift) == (None, 71, True)


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 32, 71])
def test_slopes_equal_transformers(heads: int) -> None:
    at_one = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)[:, 0, 1]
    assert list(bloom_slopes(heads)) == at_one.tolist()
    build: Any = modeling_mpt.build_mpt_alibi_tensor
    per_token = build(heads, 2)[:, 0].diff(dim=1).flatten()
    assert list(mpt_slopes(heads)) == pytest.approx(per_token.tolist())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mpt-7b", {"attn_config": {"alibi": False}}, "alibi is False"),
        ("mpt-7b", {"attn_config": {"qk_ln": True}}, "qk_ln is True"),
        ("mpt-7b", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type is 'multiquery"),
        ("mpt-7b", {"attn_config": {"prefix_lm": True}}, "prefix_lm is True"),
        ("mpt-7b", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max is 16; supported .*: 8"),
        ("mpt-7b", {"no_bias": False}, "no_bias is False"),
        ("mpt-7b", {"logit_scale": 0.5}, "logit_scale is 0.5; supported .*: nothing"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2", {"activation_function": "mish"}, "activation_function 'mish' is not supported; supported: silu"),
        ("opt-350m", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
        ("falcon-40b", {"parallel_attn": False}, "parallel_attn is False"),
        ("gemma-2-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma-3-1b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma-2-2b", {"layer_types": ["chunked_attention"] * 26}, "layer_types has 'chunked_attention'"),
        ("gpt2", {"quantization_config": {"bits": 8}}, "quantization_config"),
        ("granite-3.1-8b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported .*: 'sigmoid'"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method is 'greedy'; supported .*: 'noaux_tc'"),
        ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads is 8; supported .*: 128"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (
            "deepseek-v3",
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope scaling 'linear' .*: default, yarn",
        ),
        ("deepseek-v3", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope scaling 'dynamic'"),
        ("deepseek-v3", {"partial_rotary_factor": 0.5}, "32 of 64 dimensions"),
        ("deepseek-v3", {"quantization_config": {"quant_method": "modelopt"}}, "modelopt"),
        ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek-v2-lite", {"mlp_bias": True}, "mlp_bias is True"),
        ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        (
            "mixtral-8x7b",
            {"architectures": ["Qwen2_5_VLForConditionalGeneration"]},
            "Qwen2_5_VLForConditionalGeneration .its positions have three dimensions",
        ),
        (
            "mistral-7b-v0.1",
            {"architectures": ["CohereForCausalLM"], "use_qk_norm": True},
            "use_qk_norm is True; supported .*: False",
        ),
        (
            "mistral-7b-v0.1",
            {"architectures": ["Ernie4_5_MoeForCausalLM"], "use_bias": True},
            "use_bias is True; supported .*: False",
        ),
        ("gpt-oss-20b", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0; supported .*: 7.0"),
        ("gpt-oss-20b", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
    ],
)
def test_what_is_refused_by_name(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"n_embd": None}, "field 'n_embd' is missing"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; there are 8 experts"),
        ("glm-4.5-air", {"n_group": 3}, "n_group is 3; there are 128 experts"),
        ("glm-4.5-air", {"topk_group": 2}, "topk_group is 2; there are 1 groups"),
        ("glm-4.5-air", {"n_group": 32}, "1 groups have fewer than 8 experts"),
        ("deepseek-v3", {"kv_lora_rank": 511}, "kv_lora_rank, .* the first one even"),
        ("deepseek-v3", {"qk_rope_head_dim": 63}, "63 dimensions of a head are rotated"),
        ("deepseek-v3", {"n_group": 7}, "n_group is 7; there are 256 experts"),
        ("gemma-2-2b", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 26 layers"),
        ("pythia-1.4b", {"rotary_pct": 0.04}, "5 dimensions of a head are rotated"),
        ("falcon-40b", {"num_kv_heads": 7}, "128 attention heads cannot share 7 KV heads"),
        ("mpt-7b", {"attn_config": "torch"}, "has no attribute"),
    ],
)
def test_bad_values(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, name, **changes)


def rewrite(folder: Path, rename: dict[str, str], **extra: torch.Tensor) -> None:
    """Replace parts of tensor names, and add tensors."""
    path = folder / "model.safetensors"
    tensors = dict(extra)
    for name, tensor in load_file(path).items():
        for old, new in rename.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("variant", "prefix", "other"),
    [
        ("gpt2", "transformer.", ""),
        ("opt", "model.decoder.", "decoder."),
        ("mpt", "transformer.", ""),
        ("pythia", "gpt_neox.", ""),
    ],
)
def test_names_without_the_usual_prefix(
    variant: str, prefix: str, other: str, models: Models, tmp_path: Path
) -> None:
    """And with the buffers that old versions of `transformers` saved, which are no weights."""
    folder = make_checkpoint(tmp_path / "model", variant)
    mask = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
    rewrite(folder, {prefix: other}, **{f"{other}h.0.attn.bias": mask})
    runner = load_runner(run_config(folder), lambda *_: None)
    for stream in generate(runner):
        assert largest_difference(models(variant), stream) <= 1e-4


@pytest.mark.parametrize(
    ("variant", "name", "prefix", "head", "outside"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration", "language_model.model.", "language_model.", {}),
        ("gemma3", "Gemma3ForConditionalGeneration", "model.language_model.", "", {"tie_word_embeddings": True}),
        ("mistral", "Mistral3ForConditionalGeneration", "language_model.model.", "language_model.", {}),
        ("ministral3", "Mistral3ForConditionalGeneration", "model.language_model.", "", {}),
        ("mistral4", "Mistral3ForConditionalGeneration", "model.language_model.", "", {}),
        ("gemma4", "Gemma4ForConditionalGeneration", "model.language_model.", "", {}),
        ("llama4", "Llama4ForConditionalGeneration", "language_model.model.", "language_model.", {}),
    ],
)
def test_text_models_of_those_that_see_images(
    variant: str, name: str, prefix: str, head: str, outside: dict[str, Any], models: Models, tmp_path: Path
) -> None:
    """The image's tower is not read."""
    folder = make_checkpoint(tmp_path / "model", variant)
    rewrite(folder, {"model.": prefix, "lm_head.": f"{head}lm_head."}, **{"vision_tower.weight": torch.ones(3)})
    path = folder / "config.json"
    text = json.loads(path.read_text())
    text.pop("architectures")
    path.write_text(json.dumps({"architectures": [name], "text_config": text, "vision_config": {}, **outside}))
    runner = load_runner(run_config(folder), lambda *_: None)
    for stream in generate(runner):
        assert largest_difference(models(variant), stream) <= 1e-4


def test_gemma3_with_images_as_published(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model_config(tmp_path)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.max_positions, config.tied_embeddings, config.stored_dtype) == (131072, True, "bfloat16")
    assert [own.window for own in config.attention[:6]] == [1024] * 5 + [0]
    for wrong, message in (
        ({"text_config": None}, "text_config is not an object"),
        ({"text_config": {}}, "missing"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**raw, **wrong}))
        with pytest.raises(ModelError, match=message):
            read_model_config(tmp_path)


def test_weights_that_are_no_floats(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "gpt2")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"].to(torch.int8)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"transformer.wte.weight is I8, not floating point; quantised"):
        check_model(folder, 1, "float32")
