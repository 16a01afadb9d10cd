"""Prefill by a library beside the CUDA kernels, emulated: what these gather and join, and in how many launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_host_steps import Operations
from kernels.attention_cases import Case, check_prefill, make_case, own_tokens, prefill, with_rounded_kv
from kernels.cuda_emulated import CXX, make_emulated
from kernels.forests import Forest, Shape, no_runs, one_row, random_forest, wrap
from kernels.implementations import DTYPES
from kernels.library_cases import EVERYTHING, WAYS, plain_forest
from kernels.module_forest import KINDS, module_case
from kernels.oracle import make_spec, random_spec
from kernels.pairwise import pairwise
from seeds import seeds
from torch import Tensor

from trunkline.kernels.library_attention import FLASH_ON_CPU, Attended, LibraryPrefill, gather_rows, join
from trunkline.kernels.ops import KvPool
from trunkline.kvstore.chunk_format import KV_DTYPES

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")


@pairwise(
    seeded=True, chunk_size=(8, 16, 64), head_dim=(64, 128, 20), dtype=DTYPES, kv_dtype=KV_DTYPES, way=tuple(WAYS)
)
def test_beside_kernels_of_our_own(
    chunk_size: int, head_dim: int, dtype: torch.dtype, kv_dtype: str, way: str, seed: int
) -> None:
    """One batch, some of it the library's: sequences that are plain, shifted, with holes."""
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, Shape(3, chunk_size, depth_max=3, private_max=1, shifts=True, holes=True))
    plain, counts = plain_forest(rng, chunk_size, 2)
    for row in plain.rows:
        row.ranges = [r._replace(block=r.block + forest.blocks) for r in row.ranges]
        forest.rows.insert(int(rng.integers(0, len(forest.rows) + 1)), row)
    forest.blocks += plain.blocks
    forest.runs = no_runs()
    counts = [min(own_tokens(row), 30) for row in forest.rows]
    case = with_rounded_kv(make_case(forest, make_spec(4, 2, head_dim), dtype, seed, counts, kv_dtype))
    kernels = make_emulated(prefill=WAYS[way])
    check_prefill(kernels, case, seed)
    assert kernels.counters.calls.get("library_attention", 0) == int(head_dim != 20)


@pairwise(dtype=DTYPES, head_dim=(64, 84), kv_dtype=KV_DTYPES)
def test_gathered_rows_are_what_they_stand_for(dtype: torch.dtype, head_dim: int, kv_dtype: str) -> None:
    """To the bit, by one launch as by torch, and nothing else is written."""
    torch.manual_seed(head_dim)
    pool = wrap((torch.randn(5, 3, 2, 2, 7, head_dim) * torch.rand(5, 3, 2, 2, 7, 1)).to(dtype), kv_dtype)
    ranges = torch.tensor([(4, 5, 2, 0), (0, 0, 7, 2), (4, 0, 1, 10), (2, 3, 0, 11), (3, 2, 3, 11)]).int()
    found, expected = (torch.full((2, 2, 15, head_dim), float("nan"), dtype=dtype) for _ in range(2))
    make_emulated()._moves.gather_rows(pool, 1, ranges, found)
    gather_rows(pool, 1, ranges, expected)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert expected.isnan().sum() == 2 * 2 * 2 * head_dim


@pytest.mark.parametrize("seed", seeds(12))
def test_parts_are_joined_by_one_launch(seed: int) -> None:
    """As by torch, whatever the types and strides, parts without a key and with NaN among them."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    rows, heads, head_dim = (int(rng.choice(sizes)) for sizes in ((1, 5, 33), (1, 3), (8, 64, 136)))
    dtype, moves = DTYPES[seed % len(DTYPES)], make_emulated()._moves
    dtypes = [torch.float32 if rng.random() < 0.5 else dtype for _ in range(2)]

    def part(dtype: torch.dtype) -> Attended:
        across = torch.randn(heads, rows, head_dim + 8, generator=generator).to(dtype)[..., :head_dim]
        lse = 3 * torch.randn(heads, rows, generator=generator)
        lse[torch.rand(heads, rows, generator=generator) < 0.2] = -torch.inf
        across[lse == -torch.inf] = 0
        return Attended(across.transpose(0, 1), lse)

    a, b = part(dtypes[0]), part(dtype)
    b.lse[0, -1] = float("inf" if seed % 2 else "nan")
    b.out[-1, 0] = float("nan")
    found, expected = (torch.empty(rows, heads + 1, head_dim, dtype=dtypes[1])[:, 1:] for _ in range(2))
    with Operations() as operations:
        sums = moves.join(a, b, found)
    assert operations.calls == 0
    exact = join(a, b, expected)
    assert sums.out is found
    limit = 1e-6 if dtypes[1] == torch.float32 else torch.finfo(dtypes[1]).eps
    assert torch.allclose(found.float(), expected.float(), rtol=limit, atol=1e-6, equal_nan=True)
    assert torch.allclose(sums.lse, exact.lse, rtol=1e-6, atol=1e-6, equal_nan=True)
    odd = torch.empty(rows, heads * head_dim + 1, dtype=dtypes[1])[:, 1:].view(rows, heads, head_dim)
    moves.join(a, b, odd)
    assert torch.equal(odd.nan_to_num(), expected.nan_to_num()), "by torch"


WHOLE = ["gather_rows"], 1, 1
"""Launches of ours, the library's calls, and what else torch does: here a copy of the result."""


@pytest.mark.parametrize(
    ("way", "context", "expected"),
    [
        ("whole", 0, WHOLE),
        ("whole", 300, WHOLE),
        ("in parts", 0, (["gather_rows"] * 2, 2, 2)),
        ("in parts", 300, (["gather_rows", "gather_rows", "join_parts"] * 2, 4, 0)),
    ],
)
def test_few_launches_a_layer(
    way: str, context: int, expected: tuple[list[str], int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two prompts whose plan is on the device. What torch does inside of the library's calls is not counted."""
    rows = [one_row(16, 100 + context), one_row(16, 50 + context, 30)]
    case = make_case(Forest(16, rows, no_runs(), 60), make_spec(4, 2, 64), torch.bfloat16, 3, [100, 50])
    inside: list[int] = []

    def call(*given: Any) -> tuple[Tensor, Tensor]:
        with Operations() as operations:
            results = FLASH_ON_CPU.call(*given)
        inside.append(operations.calls)
        return results

    kernels = make_emulated(prefill=LibraryPrefill(replace(WAYS[way].library, call=call), 0))
    plan, library, launched = case.forest.prefill_plan(case.counts), kernels._library, []
    case.assert_result(prefill(kernels, case, plan=plan))
    launch = library.call

    def counted(name: str, *given: Any) -> None:
        launched.append(name)
        launch(name, *given)

    monkeypatch.setattr(library, "call", counted)
    pool, out = KvPool.wrap(case.data), torch.empty_like(case.q)
    inside.clear()
    with Operations() as operations:
        kernels.prefill_attention(plan, case.q, pool, 1, case.spec, out)
    assert (launched, len(inside), operations.calls - sum(inside)) == expected
    case.assert_result(out)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_with_modules(kind: str) -> None:
    case = module_case(1, kind, True)
    check_prefill(make_emulated(prefill=EVERYTHING), case, 1)


def test_layers_with_windows_beside_layers_without() -> None:
    """One plan: each layer's rows go where its own rules send them, whatever layer came before."""
    case = plain_case()
    kernels, plan = make_emulated(prefill=EVERYTHING), case.forest.prefill_plan(case.counts)
    for spec in (case.spec, replace(case.spec, window=40), replace(case.spec, soft_cap=5.0), case.spec):
        own = make_case(case.forest, spec, torch.bfloat16, 3, case.counts)
        own.assert_result(prefill(kernels, own, plan=plan))
    assert kernels.counters.calls["library_attention"] == 3, "one of the rows is within the window"


def plain_case() -> Case:
    forest = Forest(16, [one_row(16, 100), one_row(16, 30, 7)], no_runs(), 9)
    return make_case(forest, make_spec(4, 2, 64), torch.bfloat16, 3, [20, 30])


def test_a_plan_serves_pools_of_other_sizes() -> None:
    """Where keys lie depends on how many layers a pool has."""
    case = plain_case()
    kernels, plan = make_emulated(prefill=EVERYTHING), case.forest.prefill_plan(case.counts)
    wide = torch.cat((case.data, torch.full_like(case.data, float("nan"))), dim=1)
    for data in (case.data, wide, case.data):
        case.assert_result(prefill(kernels, case, KvPool.wrap(data), plan))


def test_small_prompts_stay_with_our_kernel() -> None:
    """They would cost a library more launches than they save."""
    case = plain_case()
    kernels = make_emulated(prefill=LibraryPrefill(FLASH_ON_CPU))
    case.assert_result(prefill(kernels, case))
    assert "library_attention" not in kernels.counters.calls


def test_random_layers() -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        spec = random_spec(rng, 64)
        forest, counts = plain_forest(rng, 16, 3)
        case = make_case(forest, spec, torch.float32, seed, [min(count, 20) for count in counts])
        check_prefill(make_emulated(prefill=EVERYTHING), case, seed)
