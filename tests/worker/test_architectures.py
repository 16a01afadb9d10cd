"""Every supported model: logits and greedy text of one rank and of several, and what each rank reads."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from worker.checkpoints import MODELS, Models, assert_greedy, largest_difference, with_kernels
from worker.driver import VOCAB_SIZE, Driver, generate, run_config
from worker.ranks import generate_with_each, run_ranks
from worker.variants import FAMILIES

from trunkline.kernels.native import library
from trunkline.kernels.ops import PackedLinear
from trunkline.kernels.reference import ReferenceKernels
from trunkline.worker.errors import ParallelismError
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Sampling
from trunkline.worker.model.checkpoint import load_weights
from trunkline.worker.model.families import check_model
from trunkline.worker.model.parallelism import check_parallelism
from trunkline.worker.model.shard import Shard
from trunkline.worker.model.tensor_index import read_tensor_index
from trunkline.worker.model.weights import ExpertWeights, MlpWeights, Weights

CPU = torch.device("cpu")
REPLICATED = (
    "norm",
    "ln_",
    "gate.weight",
    "router.",
    "score_correction",
    "project_",
    "q_a_proj",
    "kv_a_proj",
    "layer_scalar",
    "per_expert_scale",
    "per_layer_model_projection",
    "per_layer_projection",
)
"""Parts of the names of tensors that every rank needs whole."""
KV_NAMES = ("k_proj", "v_proj")
FUSED_NAMES = ("query_key_value", "qkv_proj")


def load_slices(folder: Path, shard: Shard, quantisation: Literal["", "int8"] = "") -> Weights:
    return load_weights(
        folder, shard, torch.float32, CPU, ReferenceKernels(), lambda *_: None, quantisation=quantisation
    )


@with_kernels(MODELS)
def test_logits_and_text_equal_transformers(name: str, kernels: str, models: Models) -> None:
    """Prompts in pieces, some on top of others' blocks, beside rows that decode."""
    folder = models(name)
    if name == "sharded":
        assert len(list(folder.glob("*.safetensors"))) > 2
    runner = load_runner(run_config(folder, kernels=kernels), lambda *_: None)
    assert kernels in ("auto", runner.kernels.name)
    runner.pool.data.fill_(float("nan"))  # nothing that was not written may be read
    for stream in generate(runner):
        assert largest_difference(folder, stream) <= 1e-4
        assert_greedy(folder, stream)


@with_kernels(["gqa", "gpt2", "deepseek-v3"])
def test_no_weight_depends_on_the_file(name: str, kernels: str, models: Models, tmp_path: Path) -> None:
    """Matrices may be packed from its mapping; nothing that stays may lie there."""
    folder = shutil.copytree(models(name), tmp_path / "copy")
    runners = [load_runner(run_config(each, kernels=kernels), lambda *_: None) for each in (folder, models(name))]
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as overwritten:
            overwritten.write(bytes(file.stat().st_size))
    found, expected = ([(each.output, each.logprobs) for each in generate(runner)] for runner in runners)
    assert found == expected


WIDE_HEADS: dict[str, dict[str, int]] = {
    "mistral": {"head_dim": 16},
    "pythia": {},
    "falcon-rw": {"hidden_size": 64},
    "gemma2": {"head_dim": 16},
    "gemma4": {"head_dim": 16, "global_head_dim": 32},
    "gemma4-e": {"head_dim": 16, "global_head_dim": 32},
    "deepseek-v3": {"kv_lora_rank": 16},
}
"""With heads of 16, for which the native kernels pack full chunks of 16 tokens."""


@pytest.mark.skipif(library() is None, reason="the compiled kernels are not installed")
@pytest.mark.parametrize("name", WIDE_HEADS)
def test_packed_chunks(name: str, models: Models) -> None:
    """Windows, biases, caps and partial rotation over packed chunks, some of them shared."""
    folder = models(name, **WIDE_HEADS[name])
    runner = load_runner(run_config(folder, chunk_size=16, kernels="cpu"), lambda *_: None)
    runner.pool.data.fill_(float("nan"))
    driver = Driver(runner.execute, num_blocks=64, chunk_size=16, seed=1)
    rng = np.random.default_rng(3)
    greedy = Sampling(temperature=0, logprobs=VOCAB_SIZE)
    prompts = [rng.integers(VOCAB_SIZE, size=size).tolist() for size in (37, 5)]
    streams = [driver.add(prompts[0], greedy)]
    driver.run(streams, 3, piece=20)
    streams += [driver.add(prompts[0][:32] + prompts[1], greedy, like=streams[0], shared=32) for _ in range(2)]
    driver.run(streams[1:], 14)
    assert runner.pool.packed.any() == (name != "deepseek-v3")  # latents stay in plain order
    for stream in streams:
        assert largest_difference(folder, stream) <= 1e-4
        assert_greedy(folder, stream)


SPLIT_IN_FOUR = (
    *("mha", "gqa", "mqa-tied", "opt-350m", "falcon-7b", "falcon-40b", "mixtral-five-experts"),
    *("glm4-moe", "olmo2", "phi3", "deepseek-v3", "gpt-oss", "llama4", "gemma4", "gemma4-experts"),
    "gemma4-e",
)
"""As many, fewer and far fewer KV heads than ranks in each of the layouts; experts that do not divide."""


SPLIT_ALIKE = (
    "llama4",
    "qwen3-moe",
    "qwen3-moe-some-dense",
    "granite",
    "granite-moe-shared",
    "granite-4-dense",
    "granite-4-nope",
    "glm4-moe-lite",
    "ministral",
    "ministral3",
    "olmo3",
    "olmoe",
    "gemma",
    "glm",
    "deepseek-v2-lite",
    "deepseek-v2",
    "seed-oss",
    "smollm3",
    "smollm3-windows",
    "ernie4.5",
    "ernie4.5-moe",
    "cohere",
    "cohere2",
    "exaone4",
)
"""Families whose weights are split as another one's."""
SPLIT_IN_TWO = (*(name for name in FAMILIES if name not in SPLIT_ALIKE), *("mha", "gqa", "mqa-tied", "biases"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("tp", "names"),
    [
        (2, (*SPLIT_IN_TWO, "llama3-rope")),
        (4, SPLIT_IN_FOUR),
        pytest.param(2, SPLIT_ALIKE, marks=pytest.mark.soak),
    ],
)
def test_ranks_give_the_same(tp: int, names: tuple[str, ...], models: Models) -> None:
    """The vocabulary of 101 is padded."""
    folders = [models(name) for name in names]
    results, *_ = run_ranks(generate_with_each, tp, folders)
    for folder, streams in zip(folders, results, strict=True):
        assert len(streams) == 4
        for stream in streams:
            assert len(stream.output) >= 4
            assert largest_difference(folder, stream) <= 1e-4, folder.name
            assert_greedy(folder, stream)


@pytest.mark.processes
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_give_the_same_with_a_part_of_every_expert(tp: int, models: Models) -> None:
    """Four ranks with two KV heads each; biases, which one rank adds; shared experts; experts fewer than ranks."""
    folders = [
        models("mixtral", num_local_experts=3),
        *(models(name) for name in ("gpt-oss", "glm4-moe", "llama4", "gemma4-experts")),
    ]
    results, *_ = run_ranks(partial(generate_with_each, expert_parallel=False), tp, folders)
    for folder, streams in zip(folders, results, strict=True):
        for stream in streams:
            assert largest_difference(folder, stream) <= 1e-4, folder.name
            assert_greedy(folder, stream)


def test_parts_of_experts(models: Models) -> None:
    folder = models("gpt-oss")
    config = check_model(folder, 4, "float32", expert_parallel=False)
    for rank in range(4):
        mlp = load_slices(folder, Shard(config, rank, 4)).layers[0].mlp
        assert isinstance(mlp, ExpertWeights)
        assert (mlp.first, len(mlp.experts)) == (0, 4)
        assert {(own.up.out_features, own.down.in_features) for own in mlp.experts} == {(12, 12)}
    with pytest.raises(ParallelismError, match="experts of 25 over 2 ranks"):
        check_model(models("qwen3-moe", moe_intermediate_size=25), 2, "float32", expert_parallel=False)


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_reads_only_its_slices(name: str, models: Models) -> None:
    """Together the ranks read every tensor once, and again only what each of them needs whole."""
    config = check_model(models(name), 1, "float32")
    whole = load_slices(models(name), Shard(config, 0, 1)).embedding
    for tp in (1, 2, 4):
        try:
            check_parallelism(config, tp)
        except ParallelismError:
            assert (name, tp) == ("mpt-six-heads", 4)
            continue
        loaded = [load_slices(models(name), Shard(config, rank, tp)) for rank in range(tp)]
        keys = config.kv_heads * config.head_dim
        copies = max(1, tp // config.kv_heads)  # of each KV head
        fewer = {
            layer: max(1, tp // own.heads.kv_heads) for layer, own in enumerate(config.attention) if own.heads
        }
        expected = 0
        index = read_tensor_index(models(name))
        stacked = {entry.member.source for entry in index.values() if entry.member}
        for tensor, entry in index.items():
            size = 0 if tensor in stacked else math.prod(entry.shape)
            if config.architecture.wide_norms and "q_norm" in tensor:
                expected += size
            elif config.architecture.wide_norms and "k_norm" in tensor:
                expected += copies * size
            elif any(part in tensor for part in REPLICATED):
                expected += tp * size
            elif any(part in tensor for part in FUSED_NAMES):
                row = 1 if tensor.endswith("bias") else config.hidden_size
                expected += size + (copies - 1) * 2 * keys * row
            elif any(part in tensor for part in KV_NAMES):
                layer = int(tensor.split("layers.")[1].split(".")[0]) if fewer else 0
                expected += fewer.get(layer, copies) * size
            else:
                expected += size
        skipped = config.architecture.position_rows_skipped * config.hidden_size
        sizes = [weights.bytes_read for weights in loaded]
        assert sum(sizes) == 4 * (expected - skipped)
        if not (config.mixture and config.mixture.experts % tp) and not config.architecture.names.positions:
            # Rank 0 has the biases of what is summed, the last rank less of the vocabulary.
            slack = 8 * config.layers * config.hidden_size + 16 * tp * config.hidden_size
            assert max(sizes) - min(sizes) <= slack
        # Together the ranks hold every row of the vocabulary once, and zeros behind it.
        table = torch.cat([weights.embedding for weights in loaded])
        assert torch.equal(table[: config.vocab_size], whole)
        assert not table[config.vocab_size :].any()
        assert {weights.head.out_features for weights in loaded} == {-(-config.vocab_size // tp)}


def test_experts_are_whole_and_spread(models: Models) -> None:
    folder = models("mixtral-five-experts")
    config = check_model(folder, 2, "float32")
    here = []
    for rank in range(2):
        mlp = load_slices(folder, Shard(config, rank, 2)).layers[0].mlp
        assert isinstance(mlp, ExpertWeights)
        assert mlp.router.out_features == 5
        assert {(expert.up.out_features, expert.down.out_features) for expert in mlp.experts} == {(48, 32)}
        here.append(range(mlp.first, mlp.first + len(mlp.experts)))
    assert here == [range(2), range(2, 5)]


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mixtral"])
def test_what_is_quantised(name: str, models: Models) -> None:
    """The layers' matrices; not the head, which is sensitive, nor routers, which choose."""
    config = check_model(models(name), 1, "float32")
    kernels, shard = ReferenceKernels(), Shard(config, 0, 1)
    whole, small = load_slices(models(name), shard), load_slices(models(name), shard, "int8")
    x, wide = torch.randn(5, 32), torch.randn(5, config.intermediate_size)

    def error(y: Tensor, z: Tensor) -> float:
        return float((y - z).norm() / y.norm())

    def linear(x: Tensor, a: PackedLinear, b: PackedLinear) -> float:
        return error(kernels.linear(x, a), kernels.linear(x, b))

    assert linear(x, whole.head, small.head) == 0
    for before, after in zip(whole.layers, small.layers, strict=True):
        assert isinstance(before.qkv, PackedLinear)
        assert isinstance(after.qkv, PackedLinear)
        assert 0 < linear(x, before.qkv, after.qkv) < 0.02
        heads = torch.randn(5, before.attention_out.in_features)
        assert 0 < linear(heads, before.attention_out, after.attention_out) < 0.02
        if isinstance(before.mlp, ExpertWeights) and isinstance(after.mlp, ExpertWeights):
            assert linear(x, before.mlp.router, after.mlp.router) == 0
            pairs = list(zip(before.mlp.experts, after.mlp.experts, strict=True))
            assert len(pairs) == 8
        else:
            assert isinstance(before.mlp, MlpWeights)
            assert isinstance(after.mlp, MlpWeights)
            pairs = [(before.mlp, after.mlp)]
        up = kernels.linear if name == "gpt2" else kernels.gated_linear
        for one, other in pairs:
            assert 0 < error(up(x, one.up), up(x, other.up)) < 0.05
            assert 0 < linear(wide, one.down, other.down) < 0.02


@pytest.mark.parametrize(
    "name", ["gqa", "gpt2", "opt-350m", "pythia", "falcon-rw", "mpt", "mixtral", "gemma3", "gemma4", "deepseek-v3"]
)
def test_half_types_run_and_stay_close(name: str, models: Models) -> None:
    for dtype in ("bfloat16", "float16"):
        runner = load_runner(run_config(models(name), dtype=dtype), lambda *_: None)
        if name == "gqa":
            assert runner.block_bytes == 2 * 2 * 2 * 8 * 8 * 2
        if name == "deepseek-v3":
            assert runner.block_bytes == 2 * 8 * (8 + 12) * 2
        for stream in generate(runner):
            assert largest_difference(models(name), stream) < 1.0
