"""Every supported family: logits, greedy text, and what each rank reads of the checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from worker.checkpoints import VARIANTS, make_variant, transformers_logits
from worker.driver import VOCAB_SIZE, Driver, Stream, generate, run_config
from worker.test_equality import largest_difference
from worker.test_parallel import run_ranks

from trunkline.controller.messages import TopLogprobs
from trunkline.kernels.native import library
from trunkline.kernels.ops import PackedLinear
from trunkline.kernels.reference import ReferenceKernels
from trunkline.worker.errors import ParallelismError
from trunkline.worker.messages import Sampling
from trunkline.worker.model.checkpoint import ExpertWeights, MlpWeights, Weights, load_weights
from trunkline.worker.model.families import check_model, check_parallelism
from trunkline.worker.model.sharding import Shard
from trunkline.worker.model.tensor_index import read_tensor_index
from trunkline.worker.runner import Runner

REPLICATED = ("norm", "ln_", "gate.weight", "project_")
"""Parts of the names of tensors that every rank needs whole."""
KV_NAMES = ("k_proj", "v_proj")
FUSED_NAMES = ("query_key_value",)

NATIVE = pytest.param(
    "cpu", marks=pytest.mark.skipif(library() is None, reason="the compiled kernels are not installed")
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in VARIANTS:
        make_variant(folder / name, name)
    return folder


def assert_greedy(folder: Path, stream: Stream) -> None:
    """The output is what `transformers` would have generated."""
    logits = transformers_logits(folder, stream.prompt + stream.output)
    assert logits[len(stream.prompt) - 1 : -1].argmax(dim=-1).tolist() == stream.output


@pytest.mark.parametrize("kernels", ["reference", NATIVE])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_text_equal_transformers(name: str, kernels: str, models: Path) -> None:
    """Prompts in pieces, some on top of others' blocks, beside rows that decode."""
    runner = Runner.load(run_config(models / name, kernels=kernels), lambda *_: None)
    assert runner.kernels.name == kernels
    runner.pool.data.fill_(float("nan"))  # nothing that was not written may be read
    for stream in generate(runner):
        assert largest_difference(models / name, stream) <= 1e-4
        assert_greedy(models / name, stream)


WIDE_HEADS: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 64},
    "mistral": {"head_dim": 16},
    "pythia": {},
    "falcon-rw": {"hidden_size": 64},
    "falcon-40b": {"hidden_size": 64},
    "mpt": {"d_model": 64},
    "gemma2": {"head_dim": 16},
    "gemma3": {"head_dim": 16},
}
"""With heads of 16, for which the native kernels pack full chunks of 16 tokens."""


@pytest.mark.skipif(library() is None, reason="the compiled kernels are not installed")
@pytest.mark.parametrize("name", WIDE_HEADS)
def test_packed_chunks(name: str, tmp_path: Path) -> None:
    """Windows, biases, caps and partial rotation over packed chunks, some of them shared."""
    folder = make_variant(tmp_path / name, name, **WIDE_HEADS[name])
    runner = Runner.load(run_config(folder, chunk_size=16, kernels="cpu"), lambda *_: None)
    runner.pool.data.fill_(float("nan"))
    driver = Driver(runner.execute, num_blocks=64, chunk_size=16, seed=1)
    rng = np.random.default_rng(3)
    greedy = Sampling(temperature=0, logprobs=VOCAB_SIZE)
    prompts = [rng.integers(VOCAB_SIZE, size=size).tolist() for size in (37, 5)]
    streams = [driver.add(prompts[0], greedy)]
    driver.run(streams, 3, piece=20)
    streams += [driver.add(prompts[0][:32] + prompts[1], greedy, like=streams[0], shared=32) for _ in range(2)]
    driver.run(streams[1:], 14)
    assert runner.pool.packed.any()
    for stream in streams:
        assert largest_difference(folder, stream) <= 1e-4
        assert_greedy(folder, stream)


SPLIT_IN_FOUR = ("opt-350m", "falcon-7b", "falcon-40b", "mixtral-five-experts")
"""Fewer KV heads than ranks in each of the layouts; experts that do not divide."""


@pytest.mark.parametrize(("tp", "names"), [(2, tuple(VARIANTS)), (4, SPLIT_IN_FOUR)])
def test_ranks_give_the_same(tp: int, names: tuple[str, ...], models: Path, tmp_path: Path) -> None:
    folders = [models / name for name in names]
    assert run_ranks("parallel_rank.py", tp, tmp_path, *map(str, folders)) == [0] * tp
    for folder in folders:
        data = (tmp_path / f"{folder.name}-{tp}.msgpack").read_bytes()
        reports = msgspec.msgpack.decode(data, type=list[tuple[list[int], list[int], list[TopLogprobs]]])
        assert len(reports) == 4
        for prompt, output, logprobs in reports:
            assert len(output) >= 4
            stream = Stream(0, prompt, Sampling(), [], output=output, logprobs=logprobs)
            assert largest_difference(folder, stream) <= 1e-4, folder.name
            assert_greedy(folder, stream)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_rank_reads_only_its_slices(name: str, tp: int, models: Path) -> None:
    """Together the ranks read every tensor once, and again only what each of them needs whole."""
    config = check_model(models / name, 1, "float32")
    try:
        check_parallelism(config, tp)
    except ParallelismError:
        assert name == "mpt-six-heads"
        return
    shards = [Shard(config, rank, tp) for rank in range(tp)]
    kernels, device = ReferenceKernels(), torch.device("cpu")
    loaded = [
        load_weights(models / name, shard, torch.float32, device, kernels, lambda *_: None) for shard in shards
    ]
    keys = config.kv_heads * config.head_dim
    copies = max(1, tp // config.kv_heads)  # of each KV head
    expected = 0
    for tensor, entry in read_tensor_index(models / name).items():
        size = math.prod(entry.shape)
        if any(part in tensor for part in REPLICATED):
            expected += tp * size
        elif any(part in tensor for part in KV_NAMES):
            expected += copies * size
        elif any(part in tensor for part in FUSED_NAMES):
            row = 1 if tensor.endswith("bias") else config.hidden_size
            expected += size + (copies - 1) * 2 * keys * row
        else:
            expected += size
    skipped = config.architecture.position_rows_skipped * config.hidden_size
    assert sum(weights.bytes_read for weights in loaded) == 4 * (expected - skipped)
    sizes = [weights.bytes_read for weights in loaded]
    if not config.experts % tp and not config.architecture.names.positions:
        # Rank 0 has the biases of what is summed, the last rank less of the vocabulary.
        slack = 8 * config.layers * config.hidden_size + 16 * tp * config.hidden_size
        assert max(sizes) - min(sizes) <= slack


def test_experts_are_whole_and_spread(models: Path) -> None:
    config = check_model(models / "mixtral-five-experts", 2, "float32")
    here = []
    for rank in range(2):
        shard = Shard(config, rank, 2)
        weights = load_weights(
            models / "mixtral-five-experts",
            shard,
            torch.float32,
            torch.device("cpu"),
            ReferenceKernels(),
            lambda *_: None,
        )
        mlp = weights.layers[0].mlp
        assert isinstance(mlp, ExpertWeights)
        assert mlp.router.out_features == 5
        assert {(expert.up.out_features, expert.down.out_features) for expert in mlp.experts} == {(48, 32)}
        here.append(range(mlp.first, mlp.first + len(mlp.experts)))
    assert here == [range(2), range(2, 5)]


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mixtral"])
def test_what_is_quantised(name: str, models: Path) -> None:
    """The layers' matrices; not the head, which is sensitive, nor routers, which choose."""
    config = check_model(models / name, 1, "float32")
    shard, device, kernels = Shard(config, 0, 1), torch.device("cpu"), ReferenceKernels()

    def load(quantisation: Literal["", "int8"]) -> Weights:
        return load_weights(
            models / name, shard, torch.float32, device, kernels, lambda *_: None, quantisation=quantisation
        )

    whole, small = load(""), load("int8")
    x, wide = torch.randn(5, 32), torch.randn(5, config.intermediate_size)

    def error(y: Tensor, z: Tensor) -> float:
        return float((y - z).norm() / y.norm())

    def linear(x: Tensor, a: PackedLinear, b: PackedLinear) -> float:
        return error(kernels.linear(x, a), kernels.linear(x, b))

    assert linear(x, whole.head, small.head) == 0
    for before, after in zip(whole.layers, small.layers, strict=True):
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


@pytest.mark.parametrize("name", ["gpt2", "opt-350m", "pythia", "falcon-rw", "mpt", "mixtral", "gemma3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_run_and_stay_close(name: str, dtype: str, models: Path) -> None:
    runner = Runner.load(run_config(models / name, dtype=dtype), lambda *_: None)
    for stream in generate(runner):
        assert largest_difference(models / name, stream) < 1.0
