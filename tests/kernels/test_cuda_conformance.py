"""The CUDA kernels over large random batches: every tile, device and way of cutting work, emulated at length.

The emulation takes minutes for what a GPU does in a blink, so these run when the kernels changed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernels.attention_cases import (
    CHUNKS,
    check_decode,
    check_prefill,
    decode,
    make_case,
    random_decode_case,
    random_prefill_case,
)
from kernels.cuda_emulated import A100, ADA, configure, emulated_library, make_emulated
from kernels.forests import Forest, Shape, behind_prefix, random_forest, wrap
from kernels.implementations import CUDA, DTYPES, EMULATED, HALF_TYPES, make_kernels
from kernels.module_forest import KINDS, module_case
from kernels.oracle import HEAD_DIMS, make_spec
from kernels.pairwise import pairwise
from seeds import seeds

from trunkline.kernels.ops import Kernels
from trunkline.kvstore.chunk_format import KV_DTYPES

pytestmark = pytest.mark.area("cuda")


@pairwise(
    seeded=True, chunk_size=CHUNKS, head_dim=HEAD_DIMS, dtype=DTYPES, kv_dtype=KV_DTYPES, implementation=CUDA
)
def test_random_forests(
    chunk_size: int, head_dim: int, dtype: torch.dtype, kv_dtype: str, implementation: str, seed: int
) -> None:
    case = random_decode_case(seed, chunk_size, head_dim, dtype, kv_dtype)
    check_decode(make_kernels(implementation), case, seed)


@pairwise(
    seeded=True,
    chunk_size=CHUNKS[::2],
    head_dim=HEAD_DIMS[:4],
    dtype=HALF_TYPES,
    kv_dtype=KV_DTYPES,
    implementation=CUDA,
)
def test_random_sequences(
    chunk_size: int, head_dim: int, dtype: torch.dtype, kv_dtype: str, implementation: str, seed: int
) -> None:
    """float32 and the largest heads take long; `test_cuda` has small ones of them."""
    case = random_prefill_case(seed, chunk_size, head_dim, dtype, kv_dtype)
    check_prefill(make_kernels(implementation), case, seed)


@pairwise(variant=range(6), kind=KINDS, implementation=CUDA)
def test_prompts_with_modules(variant: int, kind: str, implementation: str) -> None:
    check_prefill(make_kernels(implementation), module_case(variant, kind, True), variant)
    check_decode(make_kernels(implementation), module_case(variant, kind, False), variant)


@pytest.mark.soak
@pytest.mark.parametrize("implementation", CUDA)
@pytest.mark.parametrize("seed", seeds(400))
def test_more_random_batches(seed: int, implementation: str) -> None:
    chunk_size, head_dim, dtype = CHUNKS[seed * 7 % 12], HEAD_DIMS[seed % 5], DTYPES[seed % 3]
    kv_dtype = KV_DTYPES[seed // 3 % 3]
    decoded = random_decode_case(seed, chunk_size, head_dim, dtype, kv_dtype)
    check_decode(make_kernels(implementation), decoded, seed)
    prefilled = random_prefill_case(seed, chunk_size, head_dim, dtype, kv_dtype)
    check_prefill(make_kernels(implementation), prefilled, seed)


@pairwise(rows=(1, 9, 40), head_dim=HEAD_DIMS, dtype=HALF_TYPES, kv_dtype=KV_DTYPES, implementation=CUDA)
def test_every_tile_of_the_matrix_kernels(
    rows: int, head_dim: int, dtype: torch.dtype, kv_dtype: str, implementation: str
) -> None:
    """Tiles of 16, 32 and 64 query vectors, the last partly filled, on one prefix; tails of their own."""
    forest = behind_prefix(32, 20, [1 + index % 32 for index in range(rows)])
    case = make_case(forest, make_spec(2, 1, head_dim), dtype, rows, kv_dtype=kv_dtype)
    case.assert_result(decode(make_kernels(implementation), case, wrap(case.data, kv_dtype)))


@pairwise(implementation=CUDA, variant=range(4), kv_dtype=("auto", "fp8"))
def test_invariant_mode_ignores_the_batch(variant: int, kv_dtype: str, implementation: str) -> None:
    """Bit by bit: a row alone, among sharers of its prefix, in another order, so in tiles of other sizes."""
    rng = np.random.default_rng(variant)
    spec = make_spec(8, 2, (64, 128)[variant % 2], window=(0, 700)[variant // 2])
    shape = Shape(12, 64, depth_max=16, private_max=3, shifts=variant > 0, holes=variant > 1)
    forest = random_forest(rng, shape)
    case = make_case(forest, spec, HALF_TYPES[variant % 2], variant, kv_dtype=kv_dtype)
    pool = wrap(case.data, kv_dtype)
    whole = decode(make_kernels(implementation, invariant=True), case, pool)
    case.assert_result(whole)
    for order in [[0], [3], [11], rng.permutation(12).tolist(), [7, 2, 4]]:
        rows = [forest.rows[row] for row in order]
        run = [[0, len(rows), 0, max(len(row.ranges) for row in rows)]]
        part = Forest(64, rows, np.array(run, dtype=np.int32), forest.blocks)
        kernels = make_kernels(implementation, invariant=True)
        if implementation == EMULATED:
            configure(A100, variant)
        again = decode(kernels, replace(case, forest=part, q=case.q[order]), pool)
        assert torch.equal(again, whole[order]), f"rows {order}"


@pairwise(device=(A100, ADA), head_dim=HEAD_DIMS, kv_dtype=KV_DTYPES)
def test_devices_with_less_shared_memory(
    head_dim: int, device: tuple[int, int, int], kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tiles, stages and numbers of thread blocks, and warps in other orders: the same results."""
    forest = random_forest(np.random.default_rng(head_dim), Shape(11, 64, depth_max=12, shifts=True, holes=True))
    case = make_case(forest, make_spec(8, 2, head_dim), torch.bfloat16, head_dim, kv_dtype=kv_dtype)
    for order in range(3):
        configure(device, order)
        monkeypatch.setattr("trunkline.kernels.cuda.NARROW_LAYOUT", order != 1)
        kernels = make_emulated()
        shape = emulated_library().attention_shape(torch.bfloat16, head_dim, kv_dtype)
        assert shape.is_matrix
        assert shape.stages >= 2
        assert shape.shared_bytes <= device[1]
        case.assert_result(decode(kernels, case, wrap(case.data, kv_dtype)))


@pytest.mark.parametrize("implementation", CUDA)
@pytest.mark.parametrize("heads", [(71, 1), (128, 1)])
def test_groups_larger_than_a_tile(heads: tuple[int, int], kernels: Kernels) -> None:
    forest = random_forest(np.random.default_rng(0), Shape(3, 16))
    for dtype in (torch.bfloat16, torch.float32):
        case = make_case(forest, make_spec(*heads, 64), dtype, 0)
        case.assert_result(decode(kernels, case))
