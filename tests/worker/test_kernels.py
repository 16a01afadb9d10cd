"""The engine on native kernels: that they run, that they say what the reference says, and what they read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from worker.checkpoints import make_checkpoint
from worker.driver import VOCAB_SIZE, Driver, Stream, dense_logprobs, run_config

from trunkline.kernels.native import isa_levels
from trunkline.worker.messages import Sampling
from trunkline.worker.runner import Runner

CHUNK = 16
LAYERS = 2
KV_HEADS = 2
HEAD_DIM = 16
GREEDY = Sampling(temperature=0, logprobs=VOCAB_SIZE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Head size and chunk size are such that full chunks are packed."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / "model", hidden_size=64, head_dim=HEAD_DIM)


def load(folder: Path, **fields: object) -> Runner:
    runner = Runner.load(run_config(folder, chunk_size=CHUNK, **fields), lambda *_: None)
    runner.pool.data.fill_(float("nan"))  # nothing that was not written may be read
    return runner


def shared_prefix(runner: Runner, tokens: int) -> list[Stream]:
    """One stream computes a prefix of four chunks, three more share it and decode beside each other."""
    driver = Driver(runner.execute, num_blocks=64, chunk_size=CHUNK, seed=1)
    rng = np.random.default_rng(3)
    prefix = rng.integers(VOCAB_SIZE, size=4 * CHUNK).tolist()
    first = driver.add(prefix + rng.integers(VOCAB_SIZE, size=5).tolist(), GREEDY)
    driver.run([first], 4)
    others = [
        driver.add(prefix + rng.integers(VOCAB_SIZE, size=size).tolist(), GREEDY, like=first, shared=len(prefix))
        for size in (1, 7, 20)
    ]
    runner.kernels.counters.reset()
    driver.run(others, tokens)
    return [first, *others]


def test_a_compiler_means_native_kernels() -> None:
    """An install that silently fell back to the reference would pass all other tests."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler: the reference kernels serve here")
    assert isa_levels()[-1] == "portable"


@pytest.mark.skipif(not isa_levels(), reason="the compiled kernels are not installed")
def test_they_are_the_default_and_pack_full_chunks(folder: Path) -> None:
    runner = load(folder)
    assert runner.kernels.name == "cpu"
    streams = shared_prefix(runner, 30)
    packed = runner.pool.packed
    assert packed[streams[0].blocks[:4]].all()
    assert not packed[streams[1].blocks[-1]].any(), "an open tail stays in plain order"
    assert set(runner.kernels.counters.calls) == {
        *("write_kv", "decode_attention", "prefill_attention"),
        *("linear", "gated_linear", "rms_norm", "add_rms_norm"),
    }


@pytest.mark.skipif(not isa_levels(), reason="the compiled kernels are not installed")
def test_greedy_tokens_equal_the_reference(folder: Path) -> None:
    native = shared_prefix(load(folder, kernels="cpu"), 40)
    reference = shared_prefix(load(folder, kernels="reference"), 40)
    for mine, theirs in zip(native, reference, strict=True):
        different = [
            i for i, pair in enumerate(zip(mine.output, theirs.output, strict=True)) if len(set(pair)) > 1
        ]
        if different:
            top = np.sort(dense_logprobs(theirs.logprobs[different[0]], VOCAB_SIZE))[-2:]
            pytest.fail(f"token {different[0]} differs; the reference's two best are {top[1] - top[0]:.2e} apart")
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(dense_logprobs(a, VOCAB_SIZE), dense_logprobs(b, VOCAB_SIZE), atol=1e-4)


@pytest.mark.parametrize("kernels", ["reference", *(["cpu"] if isa_levels() else [])])
def test_bytes_read_and_plans_copied(kernels: str, folder: Path) -> None:
    """The shared prefix once per step for all rows; a plan for each change of rows and each filled chunk."""
    runner = load(folder, kernels=kernels)
    streams = shared_prefix(runner, 33)
    counters = runner.kernels.counters
    assert counters.decode_bytes_read == counters.decode_tokens_read * 2 * KV_HEADS * HEAD_DIM * 4
    alone = sum(LAYERS * sum(len(s.prompt) + n for n in range(1, 33)) for s in streams[1:])
    # While all three decode, two of three copies of 64 prefix tokens are saved. Fewer steps than 32: they join one
    # after the other, and whoever is done decodes on until all are.
    saved = LAYERS * 2 * 4 * CHUNK * 26
    assert counters.decode_tokens_read <= alone - saved
    steps = counters.calls["decode_attention"] // LAYERS
    assert steps < 45
    # Rows fill a chunk every 16 steps; rows join in three steps and leave in three.
    assert counters.decode_plans <= 3 * -(-steps // CHUNK) + 6
