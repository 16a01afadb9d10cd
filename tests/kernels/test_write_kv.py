"""Storing keys and values: split, norm, rotation; and decoding that reads what was stored, across full blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernels.forests import Forest, Row, Shape, contents, pool_data, random_forest, same_bits, write_slots
from kernels.implementations import CPU, CUDA, DTYPES, make_kernels
from kernels.oracle import alibi_slopes, assert_as_exact_as, attention_oracle, make_spec
from kernels.pairwise import pairwise
from torch import Tensor

from trunkline.kernels.ops import Angles, AttentionSpec, Kernels, KvPool, QkNorm, make_angles, swap_halves
from trunkline.kernels.plan import WritePlan


def normalised_and_turned(x: Tensor, weight: Tensor | None, eps: float, angles: Angles | None) -> Tensor:
    """In the precision of `x`, rounded after each step."""
    if weight is not None:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        x = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
    if angles is None:
        return x
    width = angles.cos.shape[-1]
    turned = x[..., :width] * angles.cos + swap_halves(x[..., :width]) * angles.sin
    return torch.cat((turned, x[..., width:]), dim=-1)


SHAPES = (
    *((4, 2, 64, 64), (4, 4, 80, 32), (8, 1, 96, 96), (3, 1, 128, 64), (2, 2, 256, 256), (4, 2, 64, 0)),
    *((4, 2, 8, 8), (71, 1, 64, 64), (8, 8, 64, 16), (4, 4, 80, 20), (4, 4, 96, 24), (4, 1, 8, 2)),
    *((4, 4, 16, 4), (3, 1, 20, 20), (2, 2, 20, 10), (2, 1, 36, 6)),
)
"""Heads, KV heads, head size and rotated part: those of model families, and odd ones."""


@pairwise(shape=SHAPES, implementation=(*CPU, *CUDA), dtype=DTYPES)
def test_splits_normalises_rotates_and_stores(
    shape: tuple[int, int, int, int], implementation: str, dtype: torch.dtype
) -> None:
    for normed in (False, True):
        check_write(make_kernels(implementation), shape, dtype, normed)


def check_write(kernels: Kernels, shape: tuple[int, int, int, int], dtype: torch.dtype, normed: bool) -> None:
    heads, kv_heads, head_dim, rotary_dim = shape
    torch.manual_seed(head_dim)
    spec, chunk = make_spec(heads, kv_heads, head_dim, rotary_dim=rotary_dim), 8
    qkv = torch.randn(6, (heads + 2 * kv_heads) * head_dim).to(dtype)
    split = torch.split(qkv.clone().view(6, -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
    exact_angles = angles = None
    if spec.inverse_frequencies is not None:
        made = make_angles(torch.tensor([3, 4, 0, 1000, 7, 2]), spec.inverse_frequencies)
        angles = Angles(made.cos.to(dtype), made.sin.to(dtype))
        exact_angles = Angles(angles.cos.double(), angles.sin.double())
    norm = QkNorm(torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype), 1e-5) if normed else None
    pool = KvPool.wrap(torch.full((3, 2, 2, kv_heads, chunk, head_dim), float("nan"), dtype=dtype))
    slots = [2 * chunk + 3, -1, 0, chunk - 1, chunk, -1]
    plan = WritePlan(chunk, np.array(slots, dtype=np.int32))
    q = kernels.write_kv(plan, qkv, angles, pool, 1, spec, norm)
    assert q.shape == (6, heads, head_dim)
    assert q.data_ptr() == qkv.data_ptr(), "the queries stay where they were"
    stored = [(token, slot) for token, slot in enumerate(slots) if slot >= 0]
    after = contents(kernels, pool)
    tokens = [token for token, _ in stored]
    keys = torch.stack([after[slot // chunk, 1, 0, :, slot % chunk] for _, slot in stored])
    weights = (None, None) if norm is None else (norm.q_weight, norm.k_weight)
    for got, before, weight in ((q, split[0], weights[0]), (keys, split[1][tokens], weights[1])):
        chosen = [*range(6)] if got is q else tokens
        own, exact_own = (
            None if a is None else Angles(a.cos[chosen], a.sin[chosen]) for a in (angles, exact_angles)
        )
        exact_weight = None if weight is None else weight.double()
        exact = normalised_and_turned(before.double(), exact_weight, 1e-5, exact_own)
        if not normed and angles is None:
            assert torch.equal(got, before)
        plain = normalised_and_turned(before, weight, 1e-5, own)
        assert_as_exact_as(got, exact, plain, sum_terms=head_dim if normed else 1)
    for token, slot in stored:
        assert torch.equal(after[slot // chunk, 1, 1, :, slot % chunk], split[2][token]), "values are not changed"
    assert int((~after.isnan()).sum()) == 4 * 2 * kv_heads * head_dim, "nothing else was written"
    assert torch.equal(qkv.view(6, -1, head_dim)[:, heads + kv_heads :], split[2])
    assert kernels.counters.calls["write_kv"] == 1


def test_float64_of_the_reference_rotates_the_same_way_as_shifts() -> None:
    """A key rotated where it is written, and one rotated elsewhere that is shifted there, are the same."""
    spec = make_spec(2, 1, 16)
    assert spec.inverse_frequencies is not None
    x = torch.randn(1, 2, 16, dtype=torch.float64)
    near, far = (make_angles(torch.tensor([position]), spec.inverse_frequencies) for position in (5, 47))
    moved = make_angles(torch.tensor([42]), spec.inverse_frequencies)
    here = normalised_and_turned(normalised_and_turned(x, None, 0.0, near), None, 0.0, moved)
    torch.testing.assert_close(here, normalised_and_turned(x, None, 0.0, far))


def decode_specs(dtype: torch.dtype) -> list[AttentionSpec]:
    """One per layer: an ordinary one, and one with a window, a bias and a cap."""
    base = make_spec(4, 2, 64 if dtype == torch.float32 else 80)
    return [base, replace(base, window=20, alibi_slopes=alibi_slopes(4), soft_cap=20.0)]


@pairwise(implementation=CPU, dtype=DTYPES, chunk_size=(4, 16, 32))
def test_decoding_across_full_blocks(implementation: str, dtype: torch.dtype, chunk_size: int) -> None:
    """Tails grow by the counter alone until one is full, then a new plan; each step's KV is stored before it."""
    torch.manual_seed(chunk_size)
    kernels = make_kernels(implementation)
    rng, specs = np.random.default_rng(chunk_size), decode_specs(dtype)
    forest = random_forest(rng, Shape(5, chunk_size, depth_max=3, shifts=True, holes=True, modules=1))
    data = pool_data(forest, specs[0], dtype, chunk_size)
    used = np.flatnonzero(forest.covered().reshape(-1))
    extra = 5 * 4
    room = torch.full((extra, *data.shape[1:]), float("nan"), dtype=dtype)
    data = torch.cat((data, room))
    pool = KvPool.wrap(torch.full_like(data, float("nan")))
    write_slots(kernels, pool, used, data[used // chunk_size, :, :, :, used % chunk_size], specs[0])
    # The step that stores a new tail's first token is step 0 of its plan.
    plan, builds = forest.decode_plan(), 0
    for step in range(chunk_size + 3):
        if step == 0 or plan.steps == plan.steps_left:
            for row in forest.rows:
                _open_tail_if_full(row, forest)
            plan, builds = forest.decode_plan(), builds + 1
            offsets = [_last_offset(row) for row in forest.rows]
        else:
            plan.advance()
            offsets = [row.grow() for row in forest.rows]
        blocks = [row.ranges[-1].block for row in forest.rows]
        new = torch.randn(5, *data.shape[1:4], data.shape[-1]).to(dtype)
        data[blocks, :, :, :, offsets] = new
        write_slots(kernels, pool, np.array(blocks) * chunk_size + np.array(offsets), new, specs[0])
        is_near_a_build = min(plan.steps, plan.steps_left - plan.steps) <= 1
        for layer, spec in enumerate(specs) if is_near_a_build else ():
            q = torch.randn(5, 4, spec.head_dim).to(dtype)
            out = torch.full_like(q, float("nan"))
            kernels.decode_attention(plan, q, pool, layer, spec, out)
            exact, plain = attention_oracle(forest, [1] * 5, q, data, layer, spec)
            assert_as_exact_as(out, exact, plain, sum_terms=max(row.tokens for row in forest.rows))
    assert kernels.counters.decode_plans == builds
    assert same_bits(contents(kernels, pool), data)


def _open_tail_if_full(row: Row, forest: Forest) -> None:
    """The next token's place: the tail, or a new block behind a full one."""
    tail = row.ranges[-1]
    if tail.first + tail.tokens < forest.chunk_size:
        row.grow()
        return
    position = row.position + 1
    row.ranges.append(type(tail)(tail.table_index + 1, forest.blocks, 0, 1, position, 0))
    row.position = position
    forest.blocks += 1


def _last_offset(row: Row) -> int:
    tail = row.ranges[-1]
    return tail.first + tail.tokens - 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_last_slot_named_twice_is_sealed_once(dtype: torch.dtype, kernels: Kernels) -> None:
    torch.manual_seed(1)
    spec, chunk = make_spec(2, 2, 32), 16
    qkv = torch.randn(chunk, 6 * 32).to(dtype)
    pool = KvPool.wrap(torch.zeros(1, 1, 2, 2, chunk, 32, dtype=dtype))
    slots = np.array([*range(chunk), chunk - 1], dtype=np.int32)
    kernels.write_kv(WritePlan(chunk, slots), torch.cat((qkv, qkv[-1:])), None, pool, 0, spec)
    held = torch.empty(1, 1, 2, 2, chunk, 32, dtype=dtype)
    kernels.gather_blocks(pool, np.zeros(1, dtype=np.int32), range(1), held)
    expected = qkv.view(chunk, 3, 2, 32)[:, 1:].permute(1, 2, 0, 3)
    assert same_bits(held[0, 0], expected)
