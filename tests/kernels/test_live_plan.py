"""Attention by plans that go on, on the CPU and on a device that only gets the words that change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernels.cuda_emulated import CXX, H200, configure, emulated_library, make_emulated
from kernels.forests import wrap
from kernels.implementations import make_kernels
from kernels.oracle import make_spec
from seeds import seeds
from torch import Tensor
from worker.row_world import RowWorld

from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.cpu_plans import WORK_ENTRIES
from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.live_plan import ROWS, AnyDecodePlan, LiveDecodePlan, LiveWork
from trunkline.kernels.native import isa_levels
from trunkline.kernels.ops import AttentionSpec, Kernels, KvPool
from trunkline.kernels.plan import DecodePlan, WorkOptions
from trunkline.kernels.reference import ReferenceKernels
from trunkline.worker.batch.decode_planner import LivePlanner

NO_RUNS = np.zeros((0, 4), dtype=np.int32)
BLOCKS = 700
# Of csrc/common/work_plan.h.
WORK_ENTRY_ORDINAL, CONTINUES, LEAVES = 18, 1 << 30, 1 << 29


def only_read(data: Tensor, plan: DecodePlan) -> Tensor:
    """The pool with NaN wherever no row reads."""
    token = np.arange(data.shape[4])
    read = np.zeros((len(data), data.shape[4]), dtype=bool)
    np.logical_or.at(
        read, plan.block, (token >= plan.first[:, None]) & (token < (plan.first + plan.count)[:, None])
    )
    hidden = torch.from_numpy(~read)[:, None, None, None, :, None]
    return data.masked_fill(hidden, float("nan"))


def take_step(world: RowWorld, rows: LivePlanner) -> None:
    world.step()
    if world.rows_changed:
        rows.rows_changed()
    rows.tables_changed(world.touched)
    if world.exchanged:
        rows.beams_changed()
    if world.rows:
        rows.step(world.rows, NO_RUNS, world.drafts)


def check_attention(
    kernels: Kernels, seed: int, steps: int, head_dim: int, dtype: torch.dtype, kv_dtype: str = "auto"
) -> None:
    rng, chunk = np.random.default_rng(seed), 16
    world, rows = RowWorld(rng, chunk, rows_max=5), LivePlanner(chunk)
    spec, reference = make_spec(4, 2, head_dim), ReferenceKernels()
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(BLOCKS, 1, 2, 2, chunk, head_dim, generator=generator).to(dtype)
    for _ in range(steps):
        take_step(world, rows)
        if not world.rows:
            continue
        plan = rows.plan
        q = torch.randn(plan.num_rows, 4, head_dim, generator=generator).to(dtype)
        pool = wrap(only_read(data, plan.rebuilt()), kv_dtype)
        out, expected = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
        kernels.decode_attention(plan, q, pool, 0, spec, out)
        reference.decode_attention(plan, q, pool, 0, spec, expected)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=5e-3)
        if isinstance(kernels, CudaKernels):
            check_mirror(kernels, plan)


def check_mirror(kernels: CudaKernels, plan: LiveDecodePlan) -> None:
    """The device's buffer is what the host's planner has."""
    (device,) = kernels._decode_plans._devices.values()
    assert device.resident is not None
    live = device.resident.live
    assert isinstance(live, LiveWork)
    assert int(device._buffer[0]) == plan.steps == live.version
    assert np.array_equal(device._buffer[4:][: len(live.array)].numpy(), live.array)


@pytest.mark.parametrize("seed", seeds(2))
def test_attention_on_the_cpu(seed: int) -> None:
    check_attention(make_kernels(isa_levels()[0]), seed, 40, 32, torch.float32)


def decode_alike(kernels: Kernels, plan: AnyDecodePlan, q: Tensor, pool: KvPool, spec: AttentionSpec) -> Tensor:
    out = torch.full_like(q, float("nan"))
    kernels.decode_attention(plan, q, pool, 0, spec, out)
    return out


@pytest.mark.skipif(not isa_levels(), reason="the compiled kernels are not installed")
@pytest.mark.parametrize(("chunk", "kv_dtype"), [(32, "auto"), (64, "auto"), (64, "int8")])
@pytest.mark.parametrize("seed", seeds(1, always=(1,)))
def test_a_state_that_is_carried_on_changes_no_bit(chunk: int, kv_dtype: str, seed: int) -> None:
    """In the batch-invariant mode rows may share a part of a cut; they have the same bits as if each had read its
    cut alone, with any number of threads."""
    rng = np.random.default_rng(seed)
    world, rows = RowWorld(rng, chunk, rows_max=9), LivePlanner(chunk)
    dtype = torch.float32 if chunk == 32 else torch.bfloat16
    spec = make_spec(4, 2, 32, window=int(rng.choice([0, 700])))
    data = torch.randn(BLOCKS, 1, 2, 2, chunk, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)
    every = [CpuKernels(threads=threads, invariant=True) for threads in (1, 2)]
    alone = CpuKernels(invariant=True, merge="buffer")  # which carries nothing on
    continued = left = 0
    for _ in range(30):
        take_step(world, rows)
        if not world.rows:
            continue
        plan = rows.plan
        q = torch.randn(plan.num_rows, 4, 32, dtype=dtype)
        pool = wrap(only_read(data, plan.rebuilt()), kv_dtype)
        expected = decode_alike(alone, plan, q, pool, spec)
        assert not expected.isnan().any()
        assert torch.equal(decode_alike(every[0], plan.rebuilt(), q, pool, spec), expected)
        for kernels in every:
            assert torch.equal(decode_alike(kernels, plan, q, pool, spec), expected)
            words = plan.work(kernels.planning.options(spec, pool.format.row_bytes)).array
            ordinals = words[words[WORK_ENTRY_ORDINAL] :][: words[WORK_ENTRIES]]
            continued += int(np.count_nonzero(ordinals & CONTINUES))
            left += int(np.count_nonzero(ordinals & LEAVES))
    assert continued == left
    assert seed != 1 or continued > 20


@pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")
@pytest.mark.parametrize(("kv_dtype", "seed"), list(zip(("auto", "int8"), seeds(2), strict=True)))
def test_attention_over_the_mirror_of_a_device(kv_dtype: str, seed: int) -> None:
    configure(H200, seed % 7)
    check_attention(make_emulated(), seed, 20 if kv_dtype == "auto" else 10, 64, torch.float16, kv_dtype)


@pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")
def test_no_plan_is_read_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step's layers only the first finds a plan that was just copied, patched or told a step: it may not be
    read before the stream has come to it. The others may read theirs ahead."""
    configure(H200, 0)
    world, rows = RowWorld(np.random.default_rng(3), 16, rows_max=5), LivePlanner(16)
    pool, spec = KvPool.wrap(torch.zeros(BLOCKS, 1, 2, 2, 16, 64, dtype=torch.float16)), make_spec(4, 2, 64)
    kernels, library = make_emulated(), emulated_library()
    launch, told, writes = library.call, list[int](), set[str]()

    def record(name: str, *arguments: Any) -> None:
        if name == "attention":
            told.append(arguments[0]._obj.plan_is_there)
        else:
            writes.add(name)
        launch(name, *arguments)

    monkeypatch.setattr(library, "call", record)
    copies = 0
    for _ in range(30):
        take_step(world, rows)
        if not world.rows:
            continue
        q, anew = torch.zeros(rows.plan.num_rows, 4, 64, dtype=torch.float16), rows.plan.rebuilt()
        for plan, grows in ((rows.plan, False), (anew, False), (anew, True)):
            if grows and anew.steps == anew.steps_left:
                continue
            if grows:
                anew.advance()
            for _ in range(3):  # layers
                kernels.decode_attention(plan, q, pool, 0, spec, torch.empty_like(q))
            assert told == [0, 1, 1]
            told.clear()
            copies += plan is anew and not grows
    assert copies > 15
    assert writes - {"attention_shape"} == {"add_steps", "patch_words"}


@pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")
def test_nothing_is_uploaded_while_rows_only_grow() -> None:
    """And little where one gets a block or leaves."""
    configure(H200, 0)
    world = RowWorld(np.random.default_rng(0), 16, rows_max=6, kinds=("plain",))
    # So long that what 20 steps add is not cut anew.
    world.rows = [
        world._sequence([world._block() for _ in range(30 + n)], 16 * (29 + n) + 3, []) for n in range(4)
    ]
    rows, kernels, spec = LivePlanner(16), make_emulated(), make_spec(4, 2, 64)
    pool = KvPool.wrap(torch.zeros(BLOCKS, 1, 2, 2, 16, 64, dtype=torch.float16))

    def uploaded() -> int:
        before = kernels.uploaded_words
        rows.step(world.rows, NO_RUNS, None)
        q = torch.zeros(len(world.rows), 4, 64, dtype=torch.float16)
        kernels.decode_attention(rows.plan, q, pool, 0, spec, torch.empty_like(q))
        check_mirror(kernels, rows.plan)
        return kernels.uploaded_words - before

    for row in world.rows:
        while len(row.blocks) < row.known // 16 + 3:
            row.set_block(len(row.blocks), world._block())
    whole = uploaded()
    for _ in range(20):  # over a chunk's border in every row
        for row in world.rows:
            row.append(0)
        assert uploaded() == 0
    grown = world.rows[1]
    grown.append(0)
    grown.set_block(len(grown.blocks), world._block())
    rows.tables_changed([grown.id])
    others = [row for row in world.rows if row is not grown]
    for row in others:
        row.append(0)
    assert 0 < uploaded() <= 2 * 10
    for row in world.rows:
        row.append(0)
    world.rows = others
    rows.rows_changed()
    assert 0 < uploaded() < whole / 4


def test_changes_that_contradict_the_plan_are_refused() -> None:
    options = WorkOptions(kv_heads=2, group=2, kv_token_bytes=512, partial_bytes=1024)
    row = [2, 0, 5, 1, 0, 0, 0, 0, 2**31 - 1, 0]
    for changes, sentence in (
        ([1, 9], "unknown change"),
        ([1, ROWS, 3, -1], "end too early"),
        ([1, ROWS, 1, 0], "row 0 changes; there are 0"),
        ([1, ROWS, 1, -1], "was not told"),
        ([1, ROWS, 1, -1, *row, 1, -4], "negative block"),
        ([1, ROWS, 1, -1, *row, 0], "open part of a row is empty"),
        ([1, ROWS, 1, -1, *row[:2], 17, *row[3:], 1, 3], "needs another block"),
        ([1, ROWS, 1, -1, *row, 1, 3, ROWS, 2, 0, 0], "goes on as two"),
        ([1, ROWS, 1, -1, *row, 1, 3, 5, 0, 0, 5], "cannot be like itself"),
        ([-1], "steps do not go back"),
    ):
        with pytest.raises(ValueError, match=sentence):
            LiveWork(options, 16, keep_changes=False).apply(np.array(changes, dtype=np.int32))
