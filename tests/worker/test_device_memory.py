"""How a GPU's memory is divided: the arithmetic, and the steps that are run to measure it, here on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from kernels.cuda_emulated import CXX, H200, configure, make_emulated
from worker.checkpoints import make_checkpoint
from worker.driver import generate, run_config

from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.cuda_library import AttentionCall
from trunkline.kernels.live_plan import LiveDecodePlan
from trunkline.kvstore.chunks import unpack_int32
from trunkline.worker import loading
from trunkline.worker.batch.batch import BatchBuilder
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.config import WorkerConfig
from trunkline.worker.device import (
    OUTSIDE_BYTES_MAX,
    POOL_BLOCKS,
    MemoryUse,
    StepLimits,
    blocks_that_fit,
    graph_bytes,
    measured,
    rehearsal,
)
from trunkline.worker.errors import WorkerConfigError, WorkerError
from trunkline.worker.loading import load_runner
from trunkline.worker.model.decoder import Decoder
from trunkline.worker.sampling.sampler import Sampler

GIB = 1 << 30
MIB = 1 << 20
USE = MemoryUse(total=80 * GIB, free=60 * GIB, weights=16 * GIB, step=3 * GIB, kept=1 * GIB, outside=1 * GIB)
"""Of 80 GiB, 16 + 1 + 1 are taken by this rank, 2 by others; the largest step needs 2 more."""


def gpu_config(**fields: object) -> WorkerConfig:
    return msgspec.structs.replace(run_config(Path("unused"), device="cuda", gpu=0, pool_blocks=0), **fields)


class FakeMemory:
    """Numbers of a GPU, in the order in which they are asked for."""

    def __init__(self, total: int = 80 * GIB, free: int = 60 * GIB) -> None:
        self.total, self.free = total, free
        self.calls: list[str] = []
        self.peak_bytes = 3 * GIB

    def total_and_free(self) -> tuple[int, int]:
        self.calls.append("free")
        return self.total, self.free

    def held(self) -> int:
        self.calls.append("held")
        return 2 * GIB

    def begin_peak(self) -> None:
        self.calls.append("begin")

    def peak(self) -> int:
        self.calls.append("peak")
        return self.peak_bytes


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"gpu_memory_fraction": 0.9}, 72 - 20),
        ({"gpu_memory_fraction": 0.5}, 40 - 20),
        ({"gpu_memory_fraction": 1.0}, 58),  # of 60 that are left, but only so much is free
        ({"kv_memory_bytes": 10 * GIB}, 10),
        ({"kv_memory_bytes": 55 * GIB, "gpu_memory_fraction": 0.5}, 55),  # what is asked for wins
        ({"pool_blocks": 7 * 128}, 7),
    ],
)
def test_the_pool_gets_what_weights_and_steps_leave(fields: dict[str, object], left: int) -> None:
    assert blocks_that_fit(USE, gpu_config(**fields), 8 * MIB) == left * 128


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"gpu_memory_fraction": 0.25},
            "no room for KV: this GPU has 80.00 GiB, of which --gpu-memory-fraction 0.25 allows 20.00; the "
            "weights take 16.00, the largest step (1024 tokens, 256 rows) 3.00, graphs of steps 0.00, NCCL and "
            "kernels 1.00, so 0.00 are left, and 2 blocks of 8 tokens take 0.02. Give a larger "
            "--gpu-memory-fraction, more GPUs",
        ),
        (
            {"kv_memory_bytes": 61 * GIB},
            "the KV pool is to have 61.00 GiB, but this GPU has 80.00 GiB; the weights take 16.00, the largest "
            "step (1024 tokens, 256 rows) 3.00, graphs of steps 0.00, NCCL and kernels 1.00, so 60.00 are left. "
            "Give a smaller --kv-memory",
        ),
    ],
)
def test_what_can_never_fit_is_a_mistake_in_the_configuration(fields: dict[str, object], words: str) -> None:
    with pytest.raises(WorkerConfigError) as caught:
        blocks_that_fit(USE, gpu_config(**fields), 8 * MIB)
    assert words in str(caught.value)


def test_graphs_are_counted_before_the_pool() -> None:
    """They are there while the pool is sized, and gone again; the step's own memory is not counted twice."""
    meter = FakeMemory(free=70 * GIB)

    def capture() -> None:
        meter.free -= 5 * GIB

    assert graph_bytes(capture, meter) == 5 * GIB
    with_graphs = replace(USE, graphs=5 * GIB)
    assert blocks_that_fit(with_graphs, gpu_config(gpu_memory_fraction=0.9), 8 * MIB) == (72 - 20 - 5) * 128
    assert with_graphs.available == USE.available - 5 * GIB


@pytest.mark.parametrize("fields", [{}, {"kv_memory_bytes": 55 * GIB}])
def test_memory_that_others_use_may_be_there_the_next_time(fields: dict[str, object]) -> None:
    use = MemoryUse(total=80 * GIB, free=1 * GIB, weights=16 * GIB, step=3 * GIB, kept=1 * GIB, outside=1 * GIB)
    with pytest.raises(WorkerError, match=r"other processes have left 0\.00 GiB of this GPU's 80\.00") as caught:
        blocks_that_fit(use, gpu_config(**fields), 8 * MIB)
    assert not isinstance(caught.value, WorkerConfigError)


def test_what_is_taken_outside_torch_is_measured_within_reason() -> None:
    meter = FakeMemory(free=76 * GIB)
    use = measured(meter, free_at_start=79 * GIB, weights=1 * GIB, peak=5 * GIB)
    assert (use.weights, use.step, use.kept, use.outside) == (1 * GIB, 4 * GIB, 1 * GIB, 1 * GIB)
    meter.free = 30 * GIB  # another process has come meanwhile
    assert measured(meter, 79 * GIB, 1 * GIB, 5 * GIB).outside == OUTSIDE_BYTES_MAX
    meter.free = 79 * GIB  # another one has gone
    assert measured(meter, 79 * GIB, 1 * GIB, 5 * GIB).outside == 0


LIMITS = [
    StepLimits(token_budget=1024, max_rows=256, longest=2048, chunk_size=64),
    StepLimits(token_budget=70, max_rows=8, longest=64, chunk_size=8),
    StepLimits(token_budget=300, max_rows=5, longest=9, chunk_size=8),
    StepLimits(token_budget=20, max_rows=1, longest=2, chunk_size=1),
    StepLimits(token_budget=2, max_rows=9, longest=40, chunk_size=16),
]


@pytest.mark.parametrize("limits", LIMITS)
def test_the_first_plan_is_as_large_as_a_step_can_be(limits: StepLimits) -> None:
    first, second, *_ = rehearsal(limits, 1)
    rows = unpack_int32(first.rows or b"")
    counts = unpack_int32(first.prefill, columns=5)[:, 2]
    assert len(rows) + counts.sum() == limits.token_budget
    assert len(rows) == min(limits.max_rows, limits.token_budget - 1)
    for join in first.joins:
        assert join.first + len(unpack_int32(join.tokens)) <= limits.longest
        assert set(unpack_int32(join.blocks)) <= set(range(POOL_BLOCKS))
    assert second.rows is None, "the same rows go on"


@pytest.mark.parametrize("limits", [(200, 24), (1024, 256)])
def test_the_largest_steps_run_before_the_pool_is_made(
    limits: tuple[int, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill behind a context, chunks that rows share, the sampler with limits: all of it in real plans."""
    budget, rows = limits
    seen: dict[str, int] = {"tokens": 0, "rows": 0, "shared": 0, "context": 0, "scored": 0, "limited": 0}
    pools: list[int] = []
    build, sample, init = BatchBuilder.build, Sampler.sample, Decoder.__init__

    def watched_build(self: BatchBuilder, plan: object) -> object:
        batch = build(self, plan)  # type: ignore[arg-type]
        seen["tokens"] = max(seen["tokens"], len(batch.ids))
        seen["rows"] = max(seen["rows"], batch.num_rows)
        if isinstance(batch.decode, LiveDecodePlan):
            seen["shared"] += batch.decode.rebuilt().shared_items
        seen["context"] += int(batch.prefill.query_position[0]) if batch.prefill else 0
        seen["scored"] += sum(len(entry.targets) for entry in batch.scored)
        return batch

    def watched_sample(
        self: Sampler, logits: torch.Tensor, samples: list[BatchSequence], *, changed: bool
    ) -> object:
        seen["limited"] += sum(s.sampling.top_p < 1 for s in samples)
        return sample(self, logits, samples, changed=changed)

    def watched_init(self: Decoder, *arguments: object) -> None:
        init(self, *arguments)  # type: ignore[arg-type]
        pools.append(self.pool.blocks)

    monkeypatch.setattr(BatchBuilder, "build", watched_build)
    monkeypatch.setattr(Sampler, "sample", watched_sample)
    monkeypatch.setattr(Decoder, "__init__", watched_init)
    meter = FakeMemory()
    config = run_config(folder, token_budget=budget, max_rows=rows, pool_blocks=64, host_memory_bytes=1 << 20)
    runner = load_runner(config, lambda *_: None, meter)
    assert (seen["tokens"], seen["rows"]) == (budget, rows)
    assert all(seen.values()), seen
    assert pools == [POOL_BLOCKS, 64]
    graphs = ["held", "free", "held", "free"]
    assert meter.calls == ["free", "held", "begin", "peak", *graphs, "held", "free"]
    assert runner.steps == 0
    assert runner.kernels.counters.decode_plans == 0
    outputs = [stream.output for stream in generate(runner)]
    plain = load_runner(run_config(folder), lambda *_: None)
    assert outputs == [stream.output for stream in generate(plain)]


@pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")
def test_nothing_of_the_cuda_kernels_is_left_for_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding whose partial results are merged, prefill behind a context: here with the emulated device code."""
    configure(H200, 0)
    kernels = make_emulated()
    merged: list[int] = []
    take = CudaKernels._take_workspace

    def watched(self: CudaKernels, call: AttentionCall, partials: int, device: torch.device) -> None:
        take(self, call, partials, device)
        merged.append(call.causal)

    monkeypatch.setattr(CudaKernels, "_take_workspace", watched)
    monkeypatch.setattr(loading, "choose_kernels", lambda *_: kernels)
    calls: dict[str, int] = {}
    monkeypatch.setattr(kernels.counters, "reset", lambda: calls.update(kernels.counters.calls))
    folder = make_checkpoint(tmp_path / "model", max_position_embeddings=2048)
    config = run_config(folder, token_budget=24, max_rows=6, chunk_size=64, pool_blocks=4, dtype="bfloat16")
    config = msgspec.structs.replace(config, cuda_graphs=False)
    load_runner(config, lambda *_: None, FakeMemory())
    assert set(merged) == {0, 1}, "both of decoding and of prefill"
    assert {"decode_attention", "prefill_attention", "write_kv", "copy_blocks"} <= set(calls)


def test_the_pool_takes_what_was_measured(folder: Path) -> None:
    """0.9 of 80 GiB would be a large pool; here the GPU has hardly more than weights and step."""
    meter = FakeMemory(total=4 * GIB, free=3 * GIB)
    config = run_config(folder, pool_blocks=0, kv_memory_bytes=1, gpu_memory_fraction=0.9)
    config = msgspec.structs.replace(config, kv_memory_bytes=0)
    runner = load_runner(config, lambda *_: None, meter)
    assert runner.num_blocks == (int(4 * GIB * 0.9) - 3 * GIB) // runner.block_bytes
    meter.peak_bytes = 4 * GIB
    with pytest.raises(WorkerConfigError, match=r"no room for KV: this GPU has 4\.00 GiB"):
        load_runner(config, lambda *_: None, meter)


def test_a_step_that_does_not_fit_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB.")

    monkeypatch.setattr(Decoder, "forward", fail)
    with pytest.raises(
        WorkerError, match=r"1024 tokens and 256 rows .* 2.00 GiB; .*--token-budget.*allocate 5.00"
    ):
        load_runner(run_config(folder), lambda *_: None, FakeMemory())
    monkeypatch.undo()

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(
            "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors"
        )

    monkeypatch.setattr(loading, "load_weights", refuse)
    with pytest.raises(WorkerConfigError, match=r"other GPUs than this one.*no kernel image is available"):
        load_runner(run_config(folder), lambda *_: None)
