"""The runner on native kernels: they are used, pack full chunks, and say what the reference says."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from worker.checkpoints import make_checkpoint
from worker.driver import VOCAB_SIZE, Driver, Stream, run_config

from trunkline.kernels.native import isa_levels
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Sampling
from trunkline.worker.runner import Runner

CHUNK = 16
HEAD_DIM = 16
GREEDY = Sampling(temperature=0, logprobs=VOCAB_SIZE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Head size and chunk size are such that full chunks are packed."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / "model", hidden_size=64, head_dim=HEAD_DIM)


def load(folder: Path, **fields: object) -> Runner:
    runner = load_runner(run_config(folder, chunk_size=CHUNK, **fields), lambda *_: None)
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
    reference = shared_prefix(load(folder, kernels="reference"), 30)
    assert [stream.output for stream in streams] == [stream.output for stream in reference]
