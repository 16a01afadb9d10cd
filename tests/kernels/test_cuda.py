"""The CUDA kernels in the conformance tests of all implementations: emulated everywhere, on a GPU where one is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernels import (
    test_decode,
    test_dense,
    test_module_prompts,
    test_pool,
    test_prefill,
    test_quantisation,
    test_write_kv,
)
from kernels.cuda_emulated import (
    A100,
    ADA,
    CXX,
    H200,
    configure,
    emulated_library,
    gpu_missing,
    make_emulated,
    make_gpu,
)
from kernels.forests import Forest, Range, Shape, one_row, pool_data, random_forest
from kernels.implementations import HALF_TYPES
from kernels.oracle import HEAD_DIMS, assert_as_exact_as, decode_oracle, make_spec
from kernels.test_decode import Case, decode, make_case, random_case

from trunkline.kernels import cuda_library, native
from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.cuda_build import CudaBuildError
from trunkline.kernels.cuda_library import CudaError
from trunkline.kernels.cuda_work import Workspace
from trunkline.kernels.ops import Kernels, KvPool, QkNorm
from trunkline.kernels.plan import WritePlan

F32 = torch.float32

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")


@pytest.fixture(
    params=["emulated", pytest.param("gpu", marks=pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing()))]
)
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(where: str, *, invariant: bool = False) -> Kernels:
    return make_gpu(invariant=invariant) if where == "gpu" else make_emulated(invariant=invariant)


@pytest.fixture
def kernels(where: str) -> Kernels:
    if where == "emulated":
        configure(H200, 0)
    return make(where)


# Tests of all implementations that take the fixture above; the longest have shorter relatives below.
test_a_shared_prefix_is_read_once = test_decode.test_a_shared_prefix_is_read_once
test_rows_with_different_shifts_share_a_read = test_decode.test_rows_with_different_shifts_share_a_read
test_a_wrong_run_costs_reads_not_results = test_decode.test_a_wrong_run_costs_reads_not_results
test_layers_of_one_plan_may_differ = test_decode.test_layers_of_one_plan_may_differ
test_a_row_that_sees_nothing_gives_zeros = test_decode.test_a_row_that_sees_nothing_gives_zeros
test_a_row_without_tokens_gives_zeros = test_decode.test_a_row_without_tokens_gives_zeros
test_a_broken_row_does_not_touch_others = test_decode.test_a_broken_row_does_not_touch_others
test_heads_of_tiny_models = test_decode.test_heads_of_tiny_models
test_shifts_need_positions = test_decode.test_shifts_need_positions
test_prefill_layers_may_differ = test_prefill.test_layers_of_one_plan_may_differ
test_queries_that_see_nothing_give_zeros = test_prefill.test_queries_that_see_nothing_give_zeros
test_a_sequence_does_not_depend_on_its_neighbours = test_prefill.test_a_sequence_does_not_depend_on_its_neighbours
test_prefill_shifts_need_positions = test_prefill.test_shifts_need_positions
test_splits_normalises_rotates_and_stores = test_write_kv.test_splits_normalises_rotates_and_stores
test_tokens_one_at_a_time_fill_a_block = test_pool.test_tokens_one_at_a_time_fill_a_block
test_part_of_a_full_block_is_copied = test_pool.test_part_of_a_full_block_is_copied_to_an_open_one_and_back
test_copies_outside_the_pool_are_refused = test_pool.test_copies_outside_the_pool_are_refused
test_norms = test_dense.test_norms
test_linear = test_dense.test_linear
test_gated_linear = test_dense.test_gated_linear
test_int8_linear = test_quantisation.test_linear
test_int8_gated_linear = test_quantisation.test_gated_linear
test_large_products_of_gates = test_dense.test_large_products_of_gates


@pytest.mark.parametrize("seed", range(20))
def test_random_forests(seed: int, kernels: Kernels) -> None:
    test_decode.check(kernels, random_case(seed), seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20, 400))
def test_more_random_forests(seed: int, kernels: Kernels) -> None:
    test_decode.check(kernels, random_case(seed), seed)


@pytest.mark.parametrize("seed", range(20))
def test_random_sequences(seed: int, where: str, kernels: Kernels) -> None:
    if where == "emulated" and seed in (3, 6, 9, 14):
        pytest.skip("long; float32 and large heads are met in shorter ones")
    test_prefill.test_random_sequences(seed, kernels)


@pytest.mark.parametrize("kind", test_module_prompts.KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_prompts_with_modules(seed: int, kind: str, kernels: Kernels) -> None:
    test_module_prompts.test_new_tokens_stand_between_modules(seed, kind, kernels)


@pytest.mark.parametrize("kind", test_module_prompts.KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_rows_share_modules(seed: int, kind: str, kernels: Kernels) -> None:
    test_module_prompts.test_rows_share_modules_in_any_subset(seed, kind, kernels)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20, 400))
def test_more_random_sequences(seed: int, kernels: Kernels) -> None:
    test_prefill.test_random_sequences(seed, kernels)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_every_tile_of_the_matrix_kernels(rows: int, head_dim: int, dtype: torch.dtype, kernels: Kernels) -> None:
    """Tiles of 16, 32 and 64 query vectors, the last partly filled, on one prefix; tails of their own."""
    chunk_size, shared = 32, 20
    forest = Forest(
        chunk_size, [one_row(chunk_size, shared * chunk_size) for _ in range(rows)], test_decode.no_runs()
    )
    for index, row in enumerate(forest.rows):
        count = 1 + index % chunk_size
        row.ranges.append(Range(shared, shared + index, 0, count, shared * chunk_size, 0))
        row.position += count
    forest.runs = np.array([[0, rows, 0, shared]], dtype=np.int32)
    forest.blocks = shared + rows
    case = make_case(forest, make_spec(2, 1, head_dim), dtype, rows)
    assert_as_exact_as(
        decode(kernels, case, KvPool.wrap(case.data)), case.exact, case.plain, sum_terms=case.sum_terms
    )


@pytest.mark.parametrize("seed", range(4))
def test_invariant_mode_ignores_the_batch(seed: int, where: str) -> None:
    """Bit by bit: a row alone, among sharers of its prefix, in another order, so in tiles of other sizes."""
    rng, spec = np.random.default_rng(seed), make_spec(8, 2, (64, 128)[seed % 2], window=(0, 700)[seed // 2])
    forest = random_forest(rng, Shape(12, 64, depth_max=16, private_max=3, shifts=seed > 0, holes=seed > 1))
    case = make_case(forest, spec, HALF_TYPES[seed % 2], seed)
    pool = KvPool.wrap(case.data)
    whole = decode(make(where, invariant=True), case, pool)
    assert_as_exact_as(whole, case.exact, case.plain, sum_terms=case.sum_terms)
    for order in [[0], [3], [11], rng.permutation(12).tolist(), [7, 2, 4]]:
        rows = [forest.rows[row] for row in order]
        run = [[0, len(rows), 0, max(len(row.ranges) for row in rows)]]
        part = Forest(64, rows, np.array(run, dtype=np.int32), forest.blocks)
        if where == "emulated":
            configure(A100, seed)
        again = decode(make(where, invariant=True), replace(case, forest=part, q=case.q[order]), pool)
        assert torch.equal(again, whole[order]), f"rows {order}"


def growing_case(chunk_size: int, spare: int) -> Case:
    forest = random_forest(np.random.default_rng(5), Shape(6, chunk_size))
    for row in forest.rows:
        tail = row.ranges[-1]
        row.ranges[-1] = tail._replace(tokens=2)
        row.position += 2 - tail.tokens
    spec = make_spec(4, 2, 64)
    data = pool_data(forest, spec, torch.bfloat16, 5, spare=spare)
    case = make_case(forest, spec, torch.bfloat16, 5)
    return replace(case, data=data)


def test_plans_move_to_the_device_only_when_they_change(where: str) -> None:
    """Steps are counted there; another plan and back again is right, and costs a copy each."""
    kernels, case = make(where), growing_case(16, 6)
    plan, other = case.forest.decode_plan(), random_case(4)
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
            out = decode(kernels, other, other_pool, other_plan)
            assert_as_exact_as(out, other.exact, other.plain, sum_terms=other.sum_terms)
        want = make_case(case.forest, case.spec, torch.bfloat16, 5)
        exact, plain = decode_oracle(case.forest, case.q, case.data, 1, case.spec)
        assert_as_exact_as(decode(kernels, case, pool, plan), exact, plain, sum_terms=want.sum_terms)
        assert kernels.counters.decode_plans == copies


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
        exact, plain = decode_oracle(self.case.forest, self.q, self.case.data, 1, self.case.spec)
        assert_as_exact_as(self.out, exact, plain, sum_terms=self.case.sum_terms)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Replayed:
    configure(H200, 0)
    case = growing_case(16, 9)
    return Replayed(make_emulated(), case, KvPool.wrap(case.data), monkeypatch)


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
    case.forest.runs = test_decode.no_runs()
    step.plan = case.forest.decode_plan()
    for grown in (0, 1, 1):
        step.grow(grown)
        step.replay()
        step.check()
    assert (kernels.graph_generation, kernels.counters.decode_plans) == (generation, 2)


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
    """What a device holds is known to whoever put it there, not to the plan."""
    case, plan, others = step.case, step.plan, (step.kernels, make_emulated(), make_emulated(share=False))
    for _ in range(3):
        for kernels in others:
            exact, plain = decode_oracle(case.forest, case.q, case.data, 1, case.spec)
            assert_as_exact_as(decode(kernels, case, step.pool, plan), exact, plain, sum_terms=case.sum_terms)
        step.grow()
    tokens = [kernels.counters.decode_tokens_read for kernels in others]
    assert tokens[0] == tokens[1] < tokens[2]


def test_head_sizes_of_one_kernel_keep_its_largest_limit() -> None:
    """The general kernel serves all of them: asking about a small one must not take memory from a large one."""
    for device in (H200, ADA):
        configure(device, 0)
        kernels = make_emulated()
        for head_dim in (256, 24, 256):
            case = make_case(
                Forest(8, [one_row(8, 12)], test_decode.no_runs(), 2), make_spec(2, 1, head_dim), F32, 0
            )
            out = decode(kernels, case, KvPool.wrap(case.data))
            assert_as_exact_as(out, case.exact, case.plain, sum_terms=case.sum_terms)


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


@pytest.mark.parametrize("device", [A100, ADA])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_devices_with_less_shared_memory(head_dim: int, device: tuple[int, int, int]) -> None:
    """Other tiles, stages and numbers of thread blocks, and warps in other orders: the same results."""
    forest = random_forest(np.random.default_rng(head_dim), Shape(11, 64, depth_max=12, shifts=True, holes=True))
    case = make_case(forest, make_spec(8, 2, head_dim), torch.bfloat16, head_dim)
    for seed in range(3):
        configure(device, seed)
        kernels = make_emulated()
        shape = emulated_library().attention_shape(torch.bfloat16, head_dim)
        assert shape.is_matrix
        assert shape.stages >= 2
        assert shape.shared_bytes <= device[1]
        out = decode(kernels, case, KvPool.wrap(case.data))
        assert_as_exact_as(out, case.exact, case.plain, sum_terms=case.sum_terms)


@pytest.mark.parametrize("heads", [(71, 1), (128, 1)])
def test_groups_larger_than_a_tile(heads: tuple[int, int], kernels: Kernels) -> None:
    forest = random_forest(np.random.default_rng(0), Shape(3, 16))
    for dtype in (torch.bfloat16, torch.float32):
        case = make_case(forest, make_spec(*heads, 64), dtype, 0)
        out = decode(kernels, case, KvPool.wrap(case.data))
        assert_as_exact_as(out, case.exact, case.plain, sum_terms=case.sum_terms)


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


def test_what_cannot_be_computed_is_refused() -> None:
    kernels = make_emulated()
    forest = Forest(8, [one_row(8, 12)], test_decode.no_runs(), 2)
    for dtype, head_dim, kind, sentence in (
        (torch.float64, 64, ValueError, "float32, float16, bfloat16"),
        (torch.float32, 512, CudaError, "invalid argument"),
    ):
        case = make_case(forest, make_spec(4, 2, head_dim), dtype, 0)
        with pytest.raises(kind, match=sentence):
            decode(kernels, case, KvPool.wrap(case.data))
    case = make_case(forest, make_spec(4, 2, 64), torch.float32, 0)
    with pytest.raises(ValueError, match="the KV pool is"):
        decode(kernels, replace(case, q=case.q.half()), KvPool.wrap(case.data))
    qkv, norm = torch.zeros(1, 8 * 64, dtype=torch.float16), QkNorm(torch.ones(64), torch.ones(64), 1e-5)
    plan = WritePlan(8, np.zeros(1, dtype=np.int32))
    with pytest.raises(ValueError, match="qkv must be"):
        kernels.write_kv(plan, qkv, None, KvPool.wrap(case.data), 0, case.spec, norm)


def test_what_lies_outside_is_refused_before_anything_is_written() -> None:
    kernels, spec = make_emulated(), make_spec(4, 2, 64)
    case = make_case(Forest(8, [one_row(8, 12), one_row(8, 9)], test_decode.no_runs(), 2), spec, torch.float16, 0)
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
    case = make_case(Forest(8, [one_row(8, 12)], test_decode.no_runs(), 2), spec, F32, 0)
    plan = case.forest.decode_plan()
    for value in vars(plan).values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    found = decode(kernels, case, KvPool.wrap(case.data), plan)
    assert_as_exact_as(found, case.exact, case.plain, sum_terms=case.sum_terms)


@pytest.mark.skipif(not gpu_missing(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(CudaBuildError, match="no CUDA device"):
        CudaKernels()
