"""Prefill by a library's attention: who is given to it, what is gathered, and how results are joined.

The library is the one that torch has for CPUs, which gives results and log-sum-exps as those for GPUs do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kernels.attention_cases import (
    CHUNKS,
    make_case,
    own_tokens,
    prefill,
    random_prefill_case,
    with_rounded_kv,
)
from kernels.forests import Forest, Row, Shape, no_runs, one_row, random_forest, wrap
from kernels.implementations import DTYPES
from kernels.library_cases import AMPLE, EVERYTHING, IN_PARTS, plain_forest
from kernels.oracle import HEAD_DIMS, HEADS, alibi_slopes, make_spec
from kernels.pairwise import pairwise
from seeds import seeds
from torch import Tensor

from trunkline.kernels import load
from trunkline.kernels.library_attention import (
    CUDA_LIBRARIES,
    CUDNN,
    FLASH,
    FLASH_ON_CPU,
    VARIABLE,
    Attended,
    AttentionLibrary,
    Lengths,
    LibraryPrefill,
    LibraryWork,
    PartOps,
    gathered_bytes,
    join,
    prefill_of_environment,
    rest,
    trial_problem,
)
from trunkline.kernels.load import KernelsUnavailableError, load_kernels
from trunkline.kernels.native import NativeLibraryError
from trunkline.kernels.ops import AttentionSpec, KvPool
from trunkline.kernels.plan import PrefillPlan
from trunkline.kernels.reference import ReferenceKernels
from trunkline.kvstore.chunk_format import KV_DTYPES


class WithLibrary(ReferenceKernels):
    """The reference, but for the entries that the library takes."""

    def __init__(self, prefill: LibraryPrefill = EVERYTHING, gather_bytes: int = AMPLE) -> None:
        super().__init__()
        self.taken = self.left = self.parts = 0
        self._prefill, self._gather_bytes = prefill, gather_bytes

    def prefill_attention(
        self, plan: PrefillPlan, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        entries = self._prefill.entries(plan, pool, spec, self._gather_bytes)
        left = rest(plan, entries) if entries else plan
        if left is not None:
            super().prefill_attention(left, q, pool, layer, spec, out)
        if entries:
            work = LibraryWork(self._prefill.library, plan, entries, pool, self._gather_bytes)
            self.parts += sum(len(parts) for _, parts in work.calls)
            around = torch.full((self._gather_bytes // 4 + 2,), float("nan"))
            work.attend(q, pool, layer, spec, out, PartOps(around[1:-1]))
            assert around[[0, -1]].isnan().all(), "written outside of the buffer"
        self.taken += len(entries)
        self.left += plan.num_entries - len(entries)


@pairwise(seeded=True, chunk_size=CHUNKS, head_dim=HEAD_DIMS, dtype=DTYPES)
def test_random_sequences(chunk_size: int, head_dim: int, dtype: torch.dtype, seed: int) -> None:
    """Of every kind, beside each other: shifts, holes, modules, windows, caps, biases."""
    case, kernels = random_prefill_case(seed, chunk_size, head_dim, dtype), WithLibrary()
    case.assert_result(prefill(kernels, case, strided=seed % 2 == 0))
    if case.spec.soft_cap or case.spec.alibi_slopes is not None:
        assert not kernels.taken


@pairwise(
    seeded=True,
    heads=HEADS,
    head_dim=HEAD_DIMS,
    dtype=DTYPES,
    chunk_size=(1, 16, 24, 64),
    kv_dtype=KV_DTYPES,
)
def test_plain_sequences(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, chunk_size: int, kv_dtype: str, seed: int
) -> None:
    """All of them are the library's, whatever the buffer: contexts in one piece, and in many."""
    rng = np.random.default_rng(seed)
    forest, counts = plain_forest(rng, chunk_size, 5)
    case = with_rounded_kv(make_case(forest, make_spec(*heads, head_dim), dtype, seed, counts, kv_dtype))
    pool = wrap(case.data, kv_dtype)
    token_bytes, longest = gathered_bytes(pool), max(row.tokens for row in forest.rows)
    assert kv_dtype != "auto" or token_bytes == pool.format.layer_token_bytes
    contexts = sum(count < row.tokens for count, row in zip(counts, forest.rows, strict=True))
    for prefill_by, calls in ((EVERYTHING, 1), (IN_PARTS, 5 + contexts)):
        found = []
        for tokens in (1000, longest, max(counts)):
            kernels = WithLibrary(prefill_by, tokens * token_bytes)
            case.assert_result(prefill(kernels, case, pool))
            assert (kernels.taken, kernels.left) == (5, 0)
            found.append(kernels.parts)
        assert found[0] == calls
        assert found[2] >= found[1] >= found[0]
        assert prefill_by is IN_PARTS or found[1] <= 5


def test_a_context_is_read_in_parts() -> None:
    """As few as there may be, the new tokens with the last of them where the library can."""
    forest = Forest(16, [one_row(16, 700)], no_runs(), 44)
    case, size = make_case(forest, make_spec(4, 2, 64), torch.float32, 1, [20]), 2 * 2 * 64 * 4
    for tokens, whole, parts in ((20, 35, 1 + 34), (333, 3, 1 + 3), (680, 2, 1 + 1), (700, 1, 1 + 1)):
        for way, expected in ((EVERYTHING, whole), (IN_PARTS, parts)):
            kernels = WithLibrary(way, tokens * size)
            case.assert_result(prefill(kernels, case))
            assert kernels.parts == expected
    too_little = WithLibrary(gather_bytes=20 * size - 1)
    case.assert_result(prefill(too_little, case))
    assert (too_little.taken, too_little.left) == (0, 1), "new tokens must fit in"


def test_neighbours_are_one_call() -> None:
    """As long as their keys fit into the buffer together, and no other row lies between them."""
    case = make_case(
        Forest(16, [one_row(16, 40, 3 * row) for row in range(6)], no_runs(), 18),
        make_spec(4, 2, 64),
        torch.float32,
        1,
        [40, 3, 0, 40, 17, 1],
    )
    plan, pool = case.forest.prefill_plan(case.counts), KvPool.wrap(case.data)

    def calls(entries: list[int], tokens: int) -> list[tuple[int, int]]:
        work = LibraryWork(FLASH_ON_CPU, plan, entries, pool, tokens * gathered_bytes(pool))
        return [(queries.start, queries.stop) for queries, _ in work.calls]

    assert calls([0, 1, 3, 4, 5], 200) == [(0, 43), (43, 101)]
    assert calls([0, 1, 3, 4, 5], 119) == [(0, 43), (43, 100), (100, 101)]
    assert calls([0, 1, 4], 79) == [(0, 40), (40, 43), (83, 100)]
    kernels = WithLibrary(gather_bytes=100 * gathered_bytes(pool))
    case.assert_result(prefill(kernels, case))
    assert kernels.parts == 3


def is_plain_by_tokens(row: Row, count: int, chunk_size: int) -> bool:
    """Token by token: slots in front of each token's are used, the next token is at the next position."""
    offsets = np.concatenate([np.arange(r.first, r.first + r.tokens) for r in row.ranges])
    shifts = np.repeat([r.shift for r in row.ranges], [r.tokens for r in row.ranges])
    positions = row.key_positions()
    return bool(
        not shifts.any()
        and (offsets == np.arange(len(offsets)) % chunk_size).all()
        and (np.diff(positions) == 1).all()
        and (positions[-count:] == row.query_positions(count)).all()
    )


@pytest.mark.parametrize("seed", seeds(60))
def test_who_is_given_to_the_library(seed: int) -> None:
    """Of random sequences those that are plain, whose window hides nothing and who are worth it."""
    rng = np.random.default_rng(seed)
    shape = Shape(8, int(rng.choice([4, 16])), shifts=seed % 2 == 0, holes=seed % 3 == 0, modules=seed % 2)
    forest = random_forest(rng, shape)
    counts = [int(rng.integers(1, own_tokens(row) + 1)) for row in forest.rows]
    spec = make_spec(4, 2, 64, window=int(rng.choice([0, 30])))
    prefill = LibraryPrefill(FLASH_ON_CPU, float(rng.choice([0, 4 * 4 * 64 * 150])))
    pool = KvPool.wrap(torch.zeros(forest.blocks, 1, 2, 2, shape.chunk_size, 64))
    expected = []
    for index, (row, count) in enumerate(zip(forest.rows, counts, strict=True)):
        seen = sum(row.tokens - count + 1 + query for query in range(count))
        large = 4 * spec.heads * spec.head_dim * seen >= prefill.operations_min
        visible = not spec.window or row.tokens <= spec.window
        if is_plain_by_tokens(row, count, shape.chunk_size) and large and visible:
            expected.append(index)
    plan = forest.prefill_plan(counts)
    assert prefill.entries(plan, pool, spec, AMPLE) == expected
    left = rest(plan, expected)
    if left is None:
        assert len(expected) == len(counts)
        return
    sizes = np.diff(plan.item_indptr)
    sizes[expected] = 0
    assert np.array_equal(np.diff(left.item_indptr), sizes)
    for entry in set(range(len(counts))) - set(expected):
        before = slice(*plan.item_indptr[entry : entry + 2])
        after = slice(*left.item_indptr[entry : entry + 2])
        for name in ("block", "first", "count", "base", "shift"):
            assert np.array_equal(getattr(left, name)[after], getattr(plan, name)[before])


def test_layers_that_no_library_computes() -> None:
    spec, pool = make_spec(4, 2, 64), KvPool.wrap(torch.zeros(2, 1, 2, 2, 16, 64))
    plan = Forest(16, [one_row(16, 20)], no_runs(), 2).prefill_plan([20])

    def taken(spec: AttentionSpec, pool: KvPool = pool, library: LibraryPrefill = EVERYTHING) -> bool:
        return library.entries(plan, pool, spec, AMPLE) == [0]

    assert taken(spec)
    assert taken(replace(spec, window=20))
    for other in (
        replace(spec, window=19),
        replace(spec, soft_cap=30.0),
        replace(spec, span=64),
        replace(spec, latent_dim=32),
        replace(spec, sinks=torch.zeros(4)),
        replace(spec, alibi_slopes=alibi_slopes(4), inverse_frequencies=None),
        replace(spec, head_dim=20),
        replace(spec, head_dim=264),
    ):
        assert not taken(other)
    quantised = wrap(torch.zeros(2, 1, 2, 2, 16, 64), "int8")
    assert taken(spec, quantised)
    for wide in (pool, quantised):
        assert not taken(spec, wide, LibraryPrefill(FLASH, 0)), "float32"
    assert taken(spec, KvPool.wrap(pool.data.bfloat16()), LibraryPrefill(FLASH, 0))


# --- joining


def part_of(scores: Tensor, v: Tensor) -> Attended:
    """Of float64 scores `[heads, queries, keys]`, perhaps none."""
    lse = scores.logsumexp(dim=-1)
    out = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp() @ v
    return Attended(out.transpose(0, 1), lse)


def joined_to(a: Attended, b: Attended) -> Attended:
    return join(a, b, torch.empty_like(a.out))


@pytest.mark.parametrize("seed", seeds(20))
def test_parts_are_joined_to_the_whole(seed: int) -> None:
    """However keys are dealt out, parts without any among them: as one softmax, to float64's last places."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 5, 40, generator=generator, dtype=torch.float64) * float(rng.choice([1, 30, 400]))
    v = torch.randn(3, 40, 8, generator=generator, dtype=torch.float64)
    owner = torch.from_numpy(rng.integers(0, 6, size=40))
    parts = [part_of(scores[..., owner == part], v[:, owner == part]) for part in rng.permutation(8).tolist()]
    joined = parts[0]
    for part in parts[1:]:
        joined = joined_to(joined, part)
    assert torch.allclose(joined.out.transpose(0, 1), scores.softmax(dim=-1) @ v, rtol=1e-12, atol=1e-12)
    assert torch.allclose(joined.lse, scores.logsumexp(dim=-1), rtol=1e-12, atol=1e-12)


def test_nothing_joined_to_nothing() -> None:
    """Is nothing, and not NaN; joined to something it leaves that as it is, bit by bit."""
    nothing = Attended(torch.zeros(3, 2, 4), torch.full((2, 3), -torch.inf))
    something = Attended(torch.randn(3, 2, 4), torch.tensor([[-1e30, 0.0, 5.0], [1e30, -80.0, 80.0]]))
    both = joined_to(nothing, nothing)
    assert torch.equal(both.out, nothing.out)
    assert torch.equal(both.lse, nothing.lse)
    for joined in (
        joined_to(nothing, something),
        joined_to(something, nothing),
        joined_to(both, something),
    ):
        assert torch.equal(joined.out, something.out)
        assert torch.equal(joined.lse, something.lse)


def test_a_part_that_is_nan_is_not_lost() -> None:
    good = Attended(torch.ones(1, 1, 2), torch.zeros(1, 1))
    for lse in (torch.nan, torch.inf):  # FlashAttention-2 says inf of a row whose scores are NaN
        bad = Attended(torch.full((1, 1, 2), torch.nan), torch.full((1, 1), lse))
        assert joined_to(good, bad).out.isnan().all()
        assert joined_to(joined_to(bad, good), good).out.isnan().all()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_librarys_log_sum_exp(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """Natural, of scaled scores, one for each query head, also where heads share keys."""
    torch.manual_seed(0)
    group = heads[0] // heads[1]
    q, k, v = (torch.randn(1, count, 9, 16).to(dtype) for count in (heads[0], heads[1], heads[1]))
    exact = q.double() @ k.double().repeat_interleave(group, dim=1).transpose(-1, -2) * 0.3
    for causal in (False, True):
        hidden = torch.ones(9, 9, dtype=torch.bool).triu(1) & causal
        scores = exact.masked_fill(hidden, -torch.inf)
        rows = [x[0].transpose(0, 1) for x in (q, k, v)]
        out, lse = FLASH_ON_CPU.call(rows[0], rows[1], rows[2], causal, 0.3, None)
        assert lse.dtype == torch.float32
        assert torch.allclose(lse.double(), scores.logsumexp(dim=-1)[0], rtol=1e-4, atol=1e-4)
        expected = (scores.softmax(dim=-1) @ v.double().repeat_interleave(group, dim=1))[0].transpose(0, 1)
        assert torch.allclose(out.double(), expected, rtol=0, atol=max(4 * torch.finfo(dtype).eps, 3e-6))


# --- on GPUs


@pytest.mark.parametrize("library", CUDA_LIBRARIES.values(), ids=CUDA_LIBRARIES.keys())
def test_what_torch_is_asked_for_on_a_gpu(library: AttentionLibrary) -> None:
    """Without one: the arguments are those of torch's function, which has no version for this device."""
    q, k = torch.zeros(7, 8, 64, dtype=torch.bfloat16), torch.zeros(7, 2, 64, dtype=torch.bfloat16)
    names = {"flash": "_flash_attention_forward", "cudnn": "_scaled_dot_product_cudnn_attention"}
    function = getattr(torch.ops.aten, names[library.name]).default
    results = [result.name for result in function._schema.returns[:2]]
    assert results in (["output", "logsumexp"], ["output", "softmax_logsumexp"])
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    for causal in (False, True):
        for lengths in (None, Lengths(ends, ends, 4, 4))[: 1 + library.at_end]:
            with pytest.raises(NotImplementedError, match=f"'{function._schema.name}' .* from the 'CPU' backend"):
                library.call(q, k, k, causal, 0.3, lengths)


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    available = [True]
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: available[0])
    for value, library in (("", FLASH), ("flash", FLASH), ("cudnn", CUDNN)):
        monkeypatch.setenv(VARIABLE, value)
        assert prefill_of_environment() == LibraryPrefill(library)
    monkeypatch.setenv(VARIABLE, "own")
    assert prefill_of_environment() is None
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(NativeLibraryError, match=f"{VARIABLE} is 'fast'; allowed: own, flash, cudnn"):
        prefill_of_environment()
    with pytest.raises(KernelsUnavailableError, match=f"correct or unset {VARIABLE}"):
        load_kernels("auto", "cuda")
    monkeypatch.delenv(VARIABLE)
    available[0] = False
    assert prefill_of_environment() is None


def off_by(part: int, factor: float) -> AttentionLibrary:
    """A library one of whose results, the attention or its log-sum-exps, is wrong."""

    def call(*given: Any) -> tuple[Tensor, Tensor]:
        results = list(FLASH_ON_CPU.call(*given))
        results[part] = results[part] * factor
        return results[0], results[1]

    return replace(FLASH_ON_CPU, call=call)


def with_another(place: int, value: Any) -> AttentionLibrary:
    """A library that takes one of its arguments for another value."""

    def call(*given: Any) -> tuple[Tensor, Tensor]:
        changed = list(given)
        changed[place] = value
        return FLASH_ON_CPU.call(*changed)

    return replace(FLASH_ON_CPU, call=call)


def aligned_at_the_start(*given: Any) -> tuple[Tensor, Tensor]:
    """As cuDNN's mask is: the i-th query sees keys up to the i-th."""
    q, k, v, causal, *others = given
    seen = min(len(q), len(k)) if causal else len(k)
    return FLASH_ON_CPU.call(q, k[:seen], v[:seen], causal, *others)


CPU_DEVICE = torch.device("cpu")


def test_a_trial_finds_what_does_not_work() -> None:
    """Another base of the logarithm, no mask, a call that is refused."""
    assert trial_problem(FLASH_ON_CPU, CPU_DEVICE) == ""
    assert trial_problem(off_by(0, 1.05), CPU_DEVICE) == "flash-on-cpu gives a wrong result"
    assert trial_problem(off_by(1, 1.4427), CPU_DEVICE) == "flash-on-cpu gives wrong log-sum-exps"
    for wrong in (
        with_another(3, False),
        with_another(5, None),
        replace(FLASH_ON_CPU, call=aligned_at_the_start),
    ):
        assert trial_problem(wrong, CPU_DEVICE) == "flash-on-cpu gives a wrong result"
    in_parts = replace(FLASH_ON_CPU, call=aligned_at_the_start, at_end=False)
    assert trial_problem(in_parts, CPU_DEVICE) == "", "it is never asked for more"
    assert "flash fails: Could not run 'aten::_flash" in trial_problem(FLASH, CPU_DEVICE)


def test_a_library_that_does_not_work_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning if nobody asked for it, else with an error that names it."""
    made: list[LibraryPrefill | None] = []

    def make(prefill: LibraryPrefill | None = None) -> None:
        made.append(prefill)

    monkeypatch.setattr(load, "CudaKernels", make)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.delenv(VARIABLE, raising=False)
    load.cuda_kernels(CPU_DEVICE)  # where torch has no such function
    assert made == [LibraryPrefill(FLASH), None]
    monkeypatch.setenv(VARIABLE, "cudnn")
    with pytest.raises(NativeLibraryError, match=f"{VARIABLE} is 'cudnn', but cudnn fails: Could not run"):
        load.cuda_kernels(CPU_DEVICE)
    monkeypatch.setitem(CUDA_LIBRARIES, "cudnn", FLASH_ON_CPU)
    made.clear()
    load.cuda_kernels(CPU_DEVICE)
    assert made == [LibraryPrefill(FLASH_ON_CPU)]
