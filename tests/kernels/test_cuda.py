"""The host side of the CUDA kernels: plans on the device, graph replays, refusals; and each kernel once.

Emulated everywhere, on a GPU where there is one. The other tests of ops run on both as well, with small cases.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernels.attention_cases import (
    Case,
    check_decode,
    check_prefill,
    decode,
    kept,
    make_case,
    own_tokens,
    random_decode_case,
)
from kernels.cuda_emulated import A100, ADA, CXX, H200, configure, emulated_library, make_emulated
from kernels.dense_cases import check_norms
from kernels.forests import Forest, Shape, behind_prefix, no_runs, one_row, pool_data, random_forest, wrap
from kernels.implementations import CUDA, DTYPES, HALF_TYPES, make_kernels
from kernels.module_forest import KINDS, module_case
from kernels.oracle import HEAD_DIMS, attention_oracle, make_spec
from kernels.pairwise import pairwise
from kernels.work_words import decode as decoded

from trunkline.kernels import cuda_library, native
from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.cuda_build import CudaBuildError
from trunkline.kernels.cuda_library import CudaError
from trunkline.kernels.cuda_work import CudaDecodeWork, Workspace
from trunkline.kernels.ops import Kernels, KvPool, QkNorm, make_angles
from trunkline.kernels.plan import WritePlan
from trunkline.kernels.quantised_kv import to_rows
from trunkline.kvstore.chunk_format import KV_DTYPES

F32 = torch.float32

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")


cuda = pytest.mark.parametrize("implementation", CUDA)
"""A test runs on the emulation, and on the GPU where there is one."""


@pairwise(implementation=CUDA, head_dim=(*HEAD_DIMS, 20), dtype=DTYPES, kv_dtype=KV_DTYPES, seeded=True)
def test_every_kernel_once(
    implementation: str, head_dim: int, dtype: torch.dtype, kv_dtype: str, seed: int
) -> None:
    """Small random batches, decode and prefill; `test_cuda_conformance` has large ones."""
    decoded = random_decode_case(seed, 16, head_dim, dtype, kv_dtype, rows=3)
    check_decode(make_kernels(implementation), decoded, seed)
    forest = random_forest(np.random.default_rng(seed), Shape(2, 16, depth_max=2, private_max=1))
    counts = [min(own_tokens(row), 20) for row in forest.rows]
    prefilled = make_case(forest, make_spec(4, 2, head_dim), dtype, seed, counts, kv_dtype)
    check_prefill(make_kernels(implementation), prefilled, seed)
    check_norms(make_kernels(implementation), (8, 100)[seed % 2], dtype, 1.0)


@pairwise(implementation=CUDA, head_dim=(64, 80, 36), dtype=DTYPES, kv_dtype=KV_DTYPES[1:])
def test_keys_are_rounded_behind_norm_and_rotation(
    implementation: str, head_dim: int, dtype: torch.dtype, kv_dtype: str
) -> None:
    """To the bytes of the keys that a pool of their own type gets, rotated as a whole or in part."""
    torch.manual_seed(head_dim)
    kernels, spec = make_kernels(implementation), make_spec(3, 1, head_dim, rotary_dim=head_dim - 4)
    assert spec.inverse_frequencies is not None
    angles = make_angles(torch.tensor([3, 4, 0, 1000, 7]), spec.inverse_frequencies)
    norm = QkNorm(torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype), 1e-5)
    qkv, plan = torch.randn(5, 5 * head_dim).to(dtype), WritePlan(8, np.array([3, 9, -1, 15, 0], dtype=np.int32))
    data, queries = torch.zeros(2, 2, 2, 1, 8, head_dim, dtype=dtype), []
    plain, rounded = wrap(data), wrap(data, kv_dtype)
    for pool in (plain, rounded):
        queries.append(kernels.write_kv(plan, qkv.clone(), angles, pool, 1, spec, norm))
    assert torch.equal(*queries)
    assert torch.equal(rounded.data, to_rows(plain.data, kv_dtype))


@pairwise(implementation=CUDA, head_dim=(64, 256), dtype=HALF_TYPES, kv_dtype=KV_DTYPES[1:])
def test_small_values_keep_their_places(
    implementation: str, head_dim: int, dtype: torch.dtype, kv_dtype: str
) -> None:
    """Scales of values that float16 could not multiply with weights: they are below its normal numbers."""
    forest = behind_prefix(16, 6, [3, 7, 9])
    case, spec = make_case(forest, make_spec(4, 2, head_dim), dtype, 0), make_spec(4, 2, head_dim)
    for size in (1e-3, 3e4):
        data = case.data.clone()
        data[:, :, 1] *= size / 4
        expected = attention_oracle(forest, case.counts, case.q, kept(data, kv_dtype), 1, spec)
        small = Case(forest, case.counts, spec, data, case.q, *expected, kv_dtype)
        small.assert_result(decode(make_kernels(implementation), small, wrap(data, kv_dtype)))


@pairwise(implementation=CUDA, dtype=HALF_TYPES, kv_dtype=KV_DTYPES[1:], rows=(1, 20))
def test_every_byte_is_its_number(implementation: str, dtype: torch.dtype, kv_dtype: str, rows: int) -> None:
    """A single token's values, whose scale is 1, are the result: in narrow pieces and in wide ones."""
    numbers = torch.arange(256) - 127.0
    if kv_dtype == "fp8":
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers[~(numbers.abs() <= (448 if kv_dtype == "fp8" else 127))] = 0
    runs = np.array([[0, rows, 0, 1]], dtype=np.int32) if rows > 1 else no_runs()
    forest = Forest(16, [one_row(16, 1) for _ in range(rows)], runs, 1)
    case = make_case(forest, make_spec(4, 2, 256), dtype, 0)
    case.data[:, :, 1, :, 0] = numbers.to(dtype)
    out = decode(make_kernels(implementation), case, wrap(case.data, kv_dtype))
    assert torch.equal(out[:rows].float(), numbers.expand(rows, 4, 256))


@pairwise(implementation=CUDA, kind=KINDS)
def test_prompts_with_modules(implementation: str, kind: str) -> None:
    variant = {"rotary": 0, "alibi": 3, "learned": 4}[kind]
    check_prefill(make_kernels(implementation), module_case(variant, kind, True), variant)
    check_decode(make_kernels(implementation), module_case(variant, kind, False), variant)


def growing_case(chunk_size: int, spare: int, kv_dtype: str = "auto") -> Case:
    forest = random_forest(np.random.default_rng(5), Shape(6, chunk_size))
    for row in forest.rows:
        tail = row.ranges[-1]
        row.ranges[-1] = tail._replace(tokens=2)
        row.position += 2 - tail.tokens
    spec = make_spec(4, 2, 64)
    data = pool_data(forest, spec, torch.bfloat16, 5, spare=spare)
    case = make_case(forest, spec, torch.bfloat16, 5, kv_dtype=kv_dtype)
    return replace(case, data=data)


@cuda
def test_plans_move_to_the_device_only_when_they_change(kernels: Kernels) -> None:
    """Steps are counted there; another plan and back again is right, and costs a copy each."""
    case = growing_case(16, 6)
    plan, other = case.forest.decode_plan(), random_decode_case(4, 8, 64, torch.float16)
    other_plan, other_pool = other.forest.decode_plan(), KvPool.wrap(other.data)
    pool = KvPool.wrap(case.data)
    for step, copies in enumerate([1, 1, 3, 3, 3]):
        if step in (2, 3):  # two steps at once, as after graph replays that nobody looked at
            plan.advance()
            [row.grow() for row in case.forest.rows]
        if step:
            plan.advance()
            [row.grow() for row in case.forest.rows]
        if step == 2:
            other.assert_result(decode(kernels, other, other_pool, other_plan))
        grown(case).assert_result(decode(kernels, case, pool, plan))
        assert kernels.counters.decode_plans == copies


def grown(case: Case) -> Case:
    """The case with the results that its rows have now."""
    data = kept(case.data, case.kv_dtype)
    exact, plain = attention_oracle(case.forest, case.counts, case.q, data, 1, case.spec)
    return replace(case, exact=exact, plain=plain)


class Replayed:
    """A captured step: the launches of a call, made again with the arguments they had."""

    def __init__(self, kernels: CudaKernels, case: Case, pool: KvPool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels, self.case, self.pool = kernels, case, pool
        self.plan = case.forest.decode_plan()
        self.q, self.out = case.q.clone(), torch.empty_like(case.q)
        self.launches: list[tuple[str, tuple[Any, ...]]] = []
        self._monkeypatch = monkeypatch

    def capture(self) -> None:
        library = emulated_library()
        launch = library.call

        def record(name: str, *arguments: Any) -> None:
            self.launches.append((name, arguments))
            launch(name, *arguments)

        with self._monkeypatch.context() as patch:
            patch.setattr(self.kernels, "_is_capturing", lambda: True)
            patch.setattr(library, "call", record)
            self.kernels.decode_attention(self.plan, self.q, self.pool, 1, self.case.spec, self.out)

    def grow(self, tokens: int = 1) -> None:
        for _ in range(tokens):
            self.plan.advance()
            for row in self.case.forest.rows:
                row.grow()

    def replay(self) -> None:
        """What an engine does for every step."""
        self.kernels.prepare_replay(self.plan, self.pool, self.case.spec)
        self.out.fill_(float("nan"))
        for name, arguments in self.launches:
            emulated_library().call(name, *arguments)

    def check(self) -> None:
        grown(self.case).assert_result(self.out)


@pytest.fixture
def kv_dtype() -> str:
    return "auto"


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch, kv_dtype: str) -> Replayed:
    configure(H200, 0)
    case = growing_case(16, 9, kv_dtype)
    return Replayed(make_emulated(), case, wrap(case.data, kv_dtype), monkeypatch)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_captured_step_follows_the_plan(step: Replayed) -> None:
    """Replays see their step and whatever plan is in the buffer: never the one of the capture."""
    kernels, case = step.kernels, step.case
    kernels.prepare_replay(step.plan, step.pool, case.spec)
    step.capture()
    # Only attention, with its merge: nothing that would count or copy again in every replay.
    assert [name for name, _ in step.launches] == ["attention"]
    assert step.launches[0][1][0]._obj.partial_acc is not None
    step.check()
    generation = kernels.graph_generation
    for grown in (0, 1, 1, 2):
        step.grow(grown)
        step.replay()
        step.check()
    assert kernels.counters.decode_plans == 1
    # Another batch of as many rows in the same pool, no sharing planned: other pieces, other partials. It is
    # first replayed as it is, then grown.
    case.forest.rows.reverse()
    case.forest.runs = no_runs()
    step.plan = case.forest.decode_plan()
    for grown in (0, 1, 1):
        step.grow(grown)
        step.replay()
        step.check()
    assert (kernels.graph_generation, kernels.counters.decode_plans) == (generation, 2)


def prefix_case(shared: int, rows: int = 12, head_dim: int = 128) -> Case:
    """Rows that share some blocks, in a pool that has room for all of them to share none."""
    spec = make_spec(4, 2, head_dim)
    forest = behind_prefix(16, shared, [1 + index for index in range(rows)])
    if not shared:
        forest = Forest(16, [one_row(16, 1 + index, index) for index in range(rows)], no_runs(), rows)
    forest.blocks = 40
    return make_case(forest, spec, torch.bfloat16, 5)


@pytest.mark.parametrize("narrow_layout", [False, True])
def test_a_captured_step_follows_wide_and_narrow_pieces(
    narrow_layout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From plans with both kinds to plans with one, and with few pieces for many thread blocks."""
    monkeypatch.setattr("trunkline.kernels.cuda.NARROW_LAYOUT", narrow_layout)
    configure(H200, 0)
    shape = emulated_library().attention_shape(torch.bfloat16, 128)
    assert (shape.narrow_rows, shape.stages, shape.narrow_stages) == (16, 2, 3)
    case = prefix_case(20, 12)
    step = Replayed(make_emulated(), case, KvPool.wrap(case.data), monkeypatch)
    step.kernels.prepare_replay(step.plan, step.pool, case.spec)
    step.capture()
    for shared, rows in ((20, 12), (0, 12), (20, 2), (24, 11), (1, 1)):
        case = prefix_case(shared, rows)
        step.case, step.plan = case, case.forest.decode_plan()
        step.pool.data.copy_(case.data)
        step.q[:rows] = case.q
        step.replay()
        case.assert_result(step.out[:rows])
        assert step.out[rows:].isnan().all()
        assert isinstance(step.plan.state, CudaDecodeWork)
        lists = decoded(step.plan.state.words.numpy()).lists
        assert any(wide for wide, _ in lists) == (rows * 2 > 16 and shared > 0)
        assert any(narrow for _, narrow in lists)
    # Another number of thread blocks than the plan has workers: each does several workers' units, or none.
    for grid in (1, 4, 9):
        step.launches[0][1][0]._obj.grid = grid
        step.replay()
        case.assert_result(step.out[:rows])


@pytest.mark.parametrize("device", [H200, A100, ADA])
def test_narrow_pieces_have_more_stages_or_no_layout_of_their_own(device: tuple[int, int, int]) -> None:
    configure(device, 0)
    for head_dim, kv_dtype in product(HEAD_DIMS, KV_DTYPES):
        shape = emulated_library().attention_shape(torch.float16, head_dim, kv_dtype)
        assert shape.narrow_stages == 0 or shape.stages < shape.narrow_stages <= 4
        assert shape.narrow_rows == 16, "with one layout, too: narrow tiles take less time"
        blocks = shape.grid // device[0]
        assert blocks * (shape.shared_bytes + 1024) <= device[2]


def test_nothing_is_brought_to_the_device_in_a_capture(step: Replayed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new plan, a new step, more memory, slots: each would be wrong in every replay, so it is refused."""
    kernels, spec = step.kernels, step.case.spec
    before = step.case.data.clone()
    with pytest.raises(CudaError, match="run the step once, or prepare_replay, before it is captured"):
        step.capture()
    kernels.prepare_replay(step.plan, step.pool, spec)
    step.grow()
    with pytest.raises(CudaError, match="plan or its step is not on the device"):
        step.capture()
    assert not step.launches
    kernels.prepare_replay(step.plan, step.pool, spec)
    monkeypatch.setattr(kernels, "_workspace", Workspace(torch.device("cpu")))
    with pytest.raises(CudaError, match="has to grow"):
        step.capture()
    monkeypatch.setattr(kernels, "_is_capturing", lambda: True)
    qkv = torch.ones(1, 8 * 64, dtype=torch.bfloat16)
    with pytest.raises(CudaError, match="indices are not on the device"):
        kernels.write_kv(WritePlan(16, np.zeros(1, dtype=np.int32)), qkv, None, step.pool, 0, spec)
    assert torch.equal(step.case.data.nan_to_num(), before.nan_to_num())


def test_two_users_of_a_plan_count_its_steps_apart(step: Replayed) -> None:
    """What a device holds is known to the kernels that put it there, not to the plan."""
    case, plan, others = step.case, step.plan, (step.kernels, make_emulated(), make_emulated(share=False))
    for _ in range(3):
        for kernels in others:
            grown(case).assert_result(decode(kernels, case, step.pool, plan))
        step.grow()
    tokens = [kernels.counters.decode_tokens_read for kernels in others]
    assert tokens[0] == tokens[1] < tokens[2]


def test_head_sizes_of_one_kernel_keep_its_largest_limit() -> None:
    """The general kernel serves all of them: asking about a small one must not take memory from a large one."""
    for device in (H200, ADA):
        configure(device, 0)
        kernels = make_emulated()
        for head_dim in (256, 24, 256):
            case = make_case(Forest(8, [one_row(8, 12)], no_runs(), 2), make_spec(2, 1, head_dim), F32, 0)
            case.assert_result(decode(kernels, case))


def test_the_planner_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(CudaBuildError, match="planner is not installed"):
        make_emulated()


def test_a_driver_that_refuses_is_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the message names the library and what CUDA said."""

    class Refusing:
        path = Path("library.so")

        def call(self, *_: object) -> None:
            raise CudaError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_library, "_library_for", lambda _: Refusing())
    with pytest.raises(CudaBuildError, match="driver version is insufficient"):
        CudaKernels()


@cuda
def test_gathers_and_scatters_are_copies(kernels: Kernels) -> None:
    data = torch.randn(6, 4, 2, 2, 3, 5).to(torch.bfloat16)  # sizes that are no multiples of 16 bytes
    pool, blocks = KvPool.wrap(data.clone()), np.array([5, 0, 3], dtype=np.int32)
    moved = torch.full((3, 2, 2, 2, 3, 5), float("nan"), dtype=data.dtype)
    kernels.gather_blocks(pool, blocks, range(1, 3), moved)
    assert torch.equal(moved, data[[5, 0, 3], 1:3])
    target = KvPool.wrap(torch.zeros_like(data))
    kernels.scatter_blocks(target, blocks, range(1, 3), moved)
    expected = torch.zeros_like(data)
    expected[[5, 0, 3], 1:3] = data[[5, 0, 3], 1:3]
    assert torch.equal(target.data, expected)
    with pytest.raises(ValueError, match="6 blocks"):
        kernels.gather_blocks(pool, np.array([6], dtype=np.int32), range(4), moved)
    host, slots = torch.zeros(4, *data.shape[1:], dtype=data.dtype), np.array([2, 3, 0], dtype=np.int32)
    kernels.gather_slots(pool, blocks, range(1, 3), host, slots)
    in_slots = torch.zeros_like(host)
    in_slots[[2, 3, 0], 1:3] = moved
    assert torch.equal(host, in_slots)
    target = KvPool.wrap(torch.zeros_like(data))
    kernels.scatter_slots(target, blocks, range(1, 3), host, slots)
    assert torch.equal(target.data, expected)


def test_slots_are_copied_by_one_launch_where_a_kernel_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else through a buffer on the device: the same bytes."""
    kernels, launches = make_emulated(), list[str]()
    library, data = emulated_library(), torch.randn(6, 4, 2, 2, 16, 64).to(torch.bfloat16)
    call = library.call

    def record(name: str, *arguments: Any) -> None:
        launches.append(name)
        call(name, *arguments)

    monkeypatch.setattr(library, "call", record)
    pool, blocks, slots = KvPool.wrap(data), np.array([5, 0, 3], np.int32), np.array([2, 3, 0], np.int32)
    near, wide = torch.zeros(4, *data.shape[1:]).bfloat16(), torch.zeros(4, 8, *data.shape[2:]).bfloat16()
    for host in (near, wide[:, :4]):
        kernels.gather_slots(pool, blocks, range(1, 4), host, slots)
        target = KvPool.wrap(torch.zeros_like(data))
        kernels.scatter_slots(target, blocks, range(1, 4), host, slots)
        assert torch.equal(target.data[[5, 0, 3], 1:], data[[5, 0, 3], 1:])
        assert torch.equal(host[[2, 3, 0], 1:], data[[5, 0, 3], 1:])
        assert not target.data[:, 0].any()
        assert not host[:, 0].any()
    assert launches == ["move_regions"] * 4
    monkeypatch.setattr("trunkline.kernels.cuda_moves.reaches", lambda *_: True)
    for bad, sentence in ((near.float(), "slots are torch.bfloat16"), (near[:3], "of 3 slots")):
        with pytest.raises(ValueError, match=sentence):
            kernels.gather_slots(pool, blocks, range(4), bad, slots)
    with pytest.raises(ValueError, match="6 blocks"):
        kernels.scatter_slots(pool, blocks + 1, range(4), near, slots)


def test_what_cannot_be_computed_is_refused() -> None:
    kernels = make_emulated()
    forest = Forest(8, [one_row(8, 12)], no_runs(), 2)
    for dtype, head_dim, kind, sentence in (
        (torch.float64, 64, ValueError, "float32, float16, bfloat16"),
        (torch.float32, 512, CudaError, "invalid argument"),
    ):
        case = make_case(forest, make_spec(4, 2, head_dim), dtype, 0)
        with pytest.raises(kind, match=sentence):
            decode(kernels, case)
    case = make_case(forest, make_spec(4, 2, 64), torch.float32, 0)
    with pytest.raises(ValueError, match="the KV pool is"):
        decode(kernels, replace(case, q=case.q.half()))
    qkv, norm = torch.zeros(1, 8 * 64, dtype=torch.float16), QkNorm(torch.ones(64), torch.ones(64), 1e-5)
    plan = WritePlan(8, np.zeros(1, dtype=np.int32))
    with pytest.raises(ValueError, match="qkv must be"):
        kernels.write_kv(plan, qkv, None, KvPool.wrap(case.data), 0, case.spec, norm)


def test_what_lies_outside_is_refused_before_anything_is_written() -> None:
    kernels, spec = make_emulated(), make_spec(4, 2, 64)
    case = make_case(Forest(8, [one_row(8, 12), one_row(8, 9)], no_runs(), 2), spec, torch.float16, 0)
    pool, before = KvPool.wrap(case.data), case.data.clone()

    def write(
        slots: list[int], tokens: int = 2, chunk_size: int = 8, layer: int = 0, kind: Any = np.int32
    ) -> None:
        qkv = torch.ones(tokens, 8 * 64, dtype=torch.float16)
        kernels.write_kv(WritePlan(chunk_size, np.array(slots, dtype=kind)), qkv, None, pool, layer, spec)

    end, layers = pool.blocks * 8, case.data.shape[1]
    for arguments, sentence in (
        (([1],), "1 slots for 2 tokens"),
        (([0, end],), f"the pool has {end}"),
        (([0, -2],), f"the pool has {end}"),
        (([0, 1], 2, 16), "for blocks of 16"),
        (([0, 1], 2, 8, layers), f"layer {layers}"),
        (([0, 1], 2, 8, 0, np.int64), "slots must be int32"),
    ):
        with pytest.raises(ValueError, match=sentence):
            write(*arguments)
    blocks, part = np.array([1], dtype=np.int32), torch.ones(1, 1, *case.data.shape[2:], dtype=torch.float16)
    for moved, of, sentence in (
        (part.expand(2, -1, -1, -1, -1, -1), range(1), "layers of blocks are"),
        (part, range(layers, layers + 1), "moved in order"),
        (part, range(-1, 0), "moved in order"),
        (part, range(0, 2, 2), "moved in order"),
    ):
        for move in (kernels.scatter_blocks, kernels.gather_blocks):
            with pytest.raises(ValueError, match=sentence):
                move(pool, blocks, of, moved)
    out = torch.empty_like(case.q)
    for q, to in ((case.q[:1], out), (case.q, out[:1])):
        with pytest.raises(ValueError, match="1 rows, the plan 2"):
            kernels.decode_attention(case.forest.decode_plan(), q, pool, 0, spec, to)
    small = KvPool.wrap(case.data[:1])
    with pytest.raises(ValueError, match="the pool has 1 blocks"):
        kernels.decode_attention(case.forest.decode_plan(), case.q, small, 0, spec, out)
    odd = torch.zeros(case.data.numel() + 1, dtype=torch.float16)[1:].view(case.data.shape)
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        kernels.copy_blocks(KvPool.wrap(odd), np.array([[0, 1, 0, 8]], dtype=np.int32))
    assert torch.equal(pool.data.nan_to_num(), before.nan_to_num())


@cuda
def test_arrays_may_be_read_only(kernels: Kernels) -> None:
    """As those that arrive in messages are."""
    pool, spec = KvPool.wrap(torch.zeros(3, 1, 2, 2, 8, 64)), make_spec(4, 2, 64)
    slots, copies, blocks = np.array([5], np.int32), np.array([[0, 1, 5, 1]], np.int32), np.array([1], np.int32)
    for array in (slots, copies, blocks):
        array.flags.writeable = False
    kernels.write_kv(WritePlan(8, slots), torch.ones(1, 8 * 64), None, pool, 0, spec)
    kernels.copy_blocks(pool, copies)
    out = torch.empty(1, 1, 2, 2, 8, 64)
    kernels.gather_blocks(pool, blocks, range(1), out)
    assert torch.equal(out[0], pool.data[1])
    assert int(out.sum()) == 2 * 2 * 64
    case = make_case(Forest(8, [one_row(8, 12)], no_runs(), 2), spec, F32, 0)
    plan = case.forest.decode_plan()
    for value in vars(plan).values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    case.assert_result(decode(kernels, case, plan=plan))
