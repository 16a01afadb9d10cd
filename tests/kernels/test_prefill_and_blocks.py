"""Reference prefill attention, KV writes, block copies, and the small ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels.forests import Row, dense_attention, poisoned_pool, random_forest, rotate
from kernels.test_decode import CHUNK, make_spec
from torch import Tensor

from trunkline.kernels.ops import make_angles
from trunkline.kernels.plan import PrefillPlan, WritePlan
from trunkline.kernels.reference import ReferenceKernels


@pytest.mark.parametrize("seed", range(12))
def test_prefill_equals_dense_attention(seed: int) -> None:
    """Several entries of different lengths: the last tokens of random rows are the queries."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = [(4, 4), (4, 2), (4, 1)][seed % 3]
    spec = make_spec(heads, kv_heads)
    shifts, holes = seed % 2 == 1, seed % 4 == 1
    forest = random_forest(rng, 4, CHUNK, shifts=shifts, holes=holes)
    pool = poisoned_pool(forest, spec, 2, CHUNK, seed=seed)
    counts = [int(rng.integers(1, row.segments[-1][3] + 1)) for row in forest.rows]
    table = np.array([s for row in forest.rows for s in row.segments], dtype=np.int32)
    plan = PrefillPlan(
        chunk_size=CHUNK,
        query_indptr=np.cumsum([0, *counts], dtype=np.int32),
        query_position=np.concatenate(
            [np.arange(r.position - n + 1, r.position + 1) for r, n in zip(forest.rows, counts, strict=True)]
        ).astype(np.int32),
        item_indptr=np.cumsum([0, *(len(row.segments) for row in forest.rows)], dtype=np.int32),
        block=table[:, 1],
        first=table[:, 2],
        count=table[:, 3],
        base=table[:, 4],
        shift=table[:, 5],
    )
    q = torch.randn(sum(counts), heads, spec.head_dim, dtype=torch.float64)
    out = torch.full_like(q, float("nan"))
    ReferenceKernels().prefill_attention(plan, q, pool, 1, spec, out)
    query = 0
    for row, count in zip(forest.rows, counts, strict=True):
        for position in range(row.position - count + 1, row.position + 1):
            seen = Row(visible(row, position), position)
            want = dense_attention(seen, q[query], pool, 1, spec)
            torch.testing.assert_close(out[query], want, rtol=1e-9, atol=1e-9)
            query += 1


def visible(row: Row, position: int) -> list[tuple[int, int, int, int, int, int]]:
    """The segments' parts that act at `position` or before."""
    parts = []
    for index, block, first, count, base, shift in row.segments:
        seen = min(count, position - base - shift + 1)
        if seen > 0:
            parts.append((index, block, first, seen, base, shift))
    return parts


def test_whole_prompt_without_context_is_causal() -> None:
    spec = make_spec()
    row = Row([(0, 1, 0, CHUNK, 0, 0), (1, 0, 0, 5, CHUNK, 0)], CHUNK + 4)
    forest = random_forest(np.random.default_rng(0), 1, CHUNK)
    forest.rows, forest.blocks = [row], 2
    pool = poisoned_pool(forest, spec, 2, CHUNK)
    length = CHUNK + 5
    zero = np.zeros(2, dtype=np.int32)
    plan = PrefillPlan(
        CHUNK,
        np.array([0, length], dtype=np.int32),
        np.arange(length, dtype=np.int32),
        np.array([0, 2], dtype=np.int32),
        np.array([1, 0], dtype=np.int32),
        zero,
        np.array([CHUNK, 5], dtype=np.int32),
        np.array([0, CHUNK], dtype=np.int32),
        zero,
    )
    q = torch.randn(length, 4, 8, dtype=torch.float64)
    out = torch.empty_like(q)
    ReferenceKernels().prefill_attention(plan, q, pool, 0, spec, out)
    for position in range(length):
        want = dense_attention(Row(visible(row, position)), q[position], pool, 0, spec)
        torch.testing.assert_close(out[position], want, rtol=1e-9, atol=1e-9)


def test_write_kv_splits_rotates_and_skips() -> None:
    spec = make_spec(4, 2, 8)
    qkv = torch.randn(5, (4 + 2 * 2) * 8, dtype=torch.float64)
    heads = qkv.clone().view(5, 8, 8)
    q, k, v = heads[:, :4], heads[:, 4:6], heads[:, 6:]
    positions = torch.tensor([3, 4, 0, 100, 7])
    assert spec.inverse_frequencies is not None
    angles = make_angles(positions, spec.inverse_frequencies)
    pool = torch.full((3, 2, 2, 2, CHUNK, 8), float("nan"), dtype=torch.float64)
    slots = [2 * CHUNK + 3, -1, 0, CHUNK - 1, CHUNK]
    kernels = ReferenceKernels()
    plan = WritePlan(CHUNK, np.array(slots, dtype=np.int32))
    rotated = kernels.write_kv(plan, qkv, angles, pool, 1, spec)
    torch.testing.assert_close(rotated, rotate(q, positions, spec))
    keys = rotate(k, positions, spec)
    for token, slot in enumerate(slots):
        if slot >= 0:
            stored = pool[slot // CHUNK, 1, :, :, slot % CHUNK]
            torch.testing.assert_close(stored, torch.stack([keys[token], v[token]]))
    assert int((~pool.isnan()).sum()) == 4 * 2 * 2 * 8, "nothing else was written"
    assert kernels.counters.calls == {"write_kv": 1}


def test_copy_blocks_copies_token_ranges() -> None:
    pool = torch.randn(5, 2, 2, 1, CHUNK, 4)
    before = pool.clone()
    copies = np.array([[0, 3, 0, 5], [1, 4, 2, 6]], dtype=np.int32)
    ReferenceKernels().copy_blocks(pool, copies)
    expected = before.clone()
    expected[3, ..., :5, :] = before[0, ..., :5, :]
    expected[4, ..., 2:, :] = before[1, ..., 2:, :]
    assert torch.equal(pool, expected)
    for bad, reason in (([0, 5, 0, 1], "5 blocks"), ([0, 1, 4, 5], "a block has 8"), ([0, 1, 0, 0], "8")):
        with pytest.raises(ValueError, match=reason):
            ReferenceKernels().copy_blocks(pool, np.array([bad], dtype=np.int32))


def test_gather_and_scatter_layer_ranges() -> None:
    pool = torch.randn(6, 4, 2, 1, CHUNK, 4)
    blocks = np.array([5, 0, 3], dtype=np.int32)
    packed = torch.empty(3, 2, 2, 1, CHUNK, 4)
    kernels = ReferenceKernels()
    kernels.gather_blocks(pool, blocks, range(1, 3), packed)
    assert torch.equal(packed, pool[[5, 0, 3], 1:3])
    target = torch.zeros_like(pool)
    kernels.scatter_blocks(target, blocks, range(1, 3), packed)
    assert torch.equal(target[[5, 0, 3], 1:3], packed)
    assert float(target.abs().sum()) == pytest.approx(float(packed.abs().sum()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_small_ops(dtype: torch.dtype) -> None:
    kernels = ReferenceKernels()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]

    def close(actual: Tensor, want: Tensor) -> None:
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), want, rtol=tolerance, atol=tolerance)

    x, delta, weight = (torch.randn(3, 16).to(dtype), torch.randn(3, 16).to(dtype), torch.randn(16).to(dtype))

    def norm(y: Tensor) -> Tensor:
        y = y.double()
        return y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    close(kernels.rms_norm(x, weight, 1e-5), norm(x))
    residual = x.clone()
    close(kernels.add_rms_norm(delta, residual, weight, 1e-5), norm(x.double() + delta.double()))
    close(residual, x.double() + delta.double())
    gate, up = x[:, :8].double(), x[:, 8:].double()
    close(kernels.silu_mul(x), gate * torch.sigmoid(gate) * up)
    frequencies = torch.tensor([1.0, 0.3], dtype=torch.float64)
    angles = make_angles(torch.tensor([0, 1, 5]), frequencies)
    heads = x.view(3, 2, 8).clone()
    kernels.rotary(heads, type(angles)(angles.cos.to(dtype), angles.sin.to(dtype)))
    angle = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)[:, None, None] * frequencies
    a, b = x.view(3, 2, 8)[..., :2].double(), x.view(3, 2, 8)[..., 2:4].double()
    close(heads[..., :2], a * angle.cos() - b * angle.sin())
    close(heads[..., 2:4], b * angle.cos() + a * angle.sin())
    assert torch.equal(heads[..., 4:], x.view(3, 2, 8)[..., 4:]), "beyond rotary_dim nothing changes"
