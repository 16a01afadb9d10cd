"""Decode plans as native kernels rely on them, and the states that partial results are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.forests import Forest, Range, Row, Shape, beam_forest, random_forest
from seeds import seeds

from trunkline.kernels.plan import Segments, build_decode_plan
from trunkline.kernels.reference_attention import SoftmaxState, attend, merge


@pytest.mark.parametrize("seed", seeds(8))
def test_items_hold_what_rows_read(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = Shape(int(rng.integers(1, 300)), 8, shifts=True, holes=True, modules=seed % 4)
    forest = random_forest(rng, shape)
    plan = forest.decode_plan()
    widths = np.diff(plan.row_indptr)
    assert (widths[: plan.shared_items] > 1).all()
    assert (widths[plan.shared_items :] == 1).all()
    arrays = [plan.block, plan.first, plan.count, plan.base, plan.row_indptr, plan.rows, plan.shifts]
    assert all(array.dtype == np.int32 for array in [*arrays, plan.tail_item, plan.query_position])
    assert plan.rows[plan.row_indptr[plan.tail_item]].tolist() == list(range(plan.num_rows))
    assert plan.tokens_read >= forest.distinct_tokens()
    item = np.repeat(np.arange(len(widths)), widths)
    entries = zip(
        plan.rows, plan.block[item], plan.first[item], plan.count[item], plan.base[item], plan.shifts, strict=True
    )
    read = sorted(tuple(int(x) for x in entry) for entry in entries)
    assert read == sorted((index, *r[1:]) for index, row in enumerate(forest.rows) for r in row.ranges)
    for start, stop in zip(plan.row_indptr[:-1], plan.row_indptr[1:], strict=True):
        assert (np.diff(plan.rows[start:stop]) > 0).all(), "rows ascend within an item"


def test_modules_of_scattered_rows_are_read_once() -> None:
    rng = np.random.default_rng(0)
    forest = random_forest(rng, Shape(30, 16, depth_max=0, modules=3, shifts=True))
    plan = forest.decode_plan()
    assert plan.tokens_read == forest.distinct_tokens()
    gaps = [
        np.diff(plan.rows[plan.row_indptr[i] : plan.row_indptr[i + 1]]).max() for i in range(plan.shared_items)
    ]
    assert max(gaps) > 1


def test_a_row_that_reads_a_block_twice_has_it_in_two_items() -> None:
    """The same text at two places of a prompt: what shares an item is the n-th reading of each row."""
    first = Row([Range(0, 5, 0, 8, 0, 0), Range(1, 5, 0, 8, 0, 8), Range(2, 1, 0, 3, 16, 0)], 18)
    second = Row([Range(0, 5, 0, 8, 0, 4), Range(1, 6, 0, 8, 20, 0), Range(2, 5, 0, 8, 0, 30)], 41)
    second.ranges.append(Range(3, 2, 0, 2, 40, 0))
    plan = Forest(8, [first, second], np.array([[0, 1, 0, 3], [1, 2, 0, 4]], dtype=np.int32), 7).decode_plan()
    assert plan.shared_items == 2
    assert plan.block.tolist() == [5, 5, 1, 6, 2]
    assert plan.rows.tolist() == [0, 1, 0, 1, 0, 1, 1]
    assert plan.shifts.tolist() == [0, 4, 8, 30, 0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    beams=st.integers(1, 8),
    blocks=st.integers(0, 12),
    others=st.integers(0, 5),
    chunk_size=st.sampled_from([1, 4, 16]),
)
def test_blocks_of_beams_are_read_once(seed: int, beams: int, blocks: int, others: int, chunk_size: int) -> None:
    """Whatever subset of rows holds a block, it is one item, and exactly these rows read it."""
    forest = beam_forest(np.random.default_rng(seed), beams, blocks, others, chunk_size)
    plan = forest.decode_plan()
    assert sorted(plan.block.tolist()) == sorted({r.block for row in forest.rows for r in row.ranges})
    assert plan.tokens_read == forest.distinct_tokens()
    for item, block in enumerate(plan.block.tolist()):
        readers = plan.rows[plan.row_indptr[item] : plan.row_indptr[item + 1]].tolist()
        assert readers == [i for i, row in enumerate(forest.rows) if any(r.block == block for r in row.ranges)]
        assert (item < plan.shared_items) == (len(readers) > 1)
    tails = [row.ranges[-1].block for row in forest.rows]
    assert plan.block[plan.tail_item].tolist() == tails
    assert plan.steps_left == chunk_size - max(row.ranges[-1].tokens for row in forest.rows)


def test_bad_batches_are_refused() -> None:
    forest = random_forest(np.random.default_rng(1), Shape(9, 8))
    for run in ([0, 10, 0, 1], [-1, 2, 0, 1], [3, 3, 0, 1], [0, 2, 1, 1]):
        forest.runs = np.array([run], dtype=np.int32)
        with pytest.raises(ValueError, match="outside 9 rows"):
            forest.decode_plan()
    segments = forest.segments()
    kept = segments.row != 4
    fewer = Segments(*(getattr(segments, name)[kept] for name in Segments.__dataclass_fields__))
    with pytest.raises(ValueError, match="9 rows, but segments for 8"):
        build_decode_plan(fewer, forest.positions, np.zeros((0, 4), dtype=np.int32), 8)


def test_a_full_plan_does_not_advance() -> None:
    plan = random_forest(np.random.default_rng(0), Shape(3, 8)).decode_plan()
    for _ in range(plan.steps_left):
        plan.advance()
    with pytest.raises(ValueError, match="decode plan is valid"):
        plan.advance()


def empty(*shape: int) -> SoftmaxState:
    return SoftmaxState(torch.zeros(*shape, 4), torch.full(shape, float("-inf")), torch.zeros(shape))


def test_empty_states_merge_without_nan() -> None:
    merged = merge(empty(3, 2), dim=0)
    assert torch.equal(merged.output(), torch.zeros(2, 4))
    assert bool((merged.peak == float("-inf")).all())
    assert not bool(merged.total.any())
    full = SoftmaxState(torch.ones(1, 2, 4), torch.zeros(1, 2), torch.full((1, 2), 2.0))
    both = merge(SoftmaxState(*map(torch.cat, zip(full, empty(2, 2), strict=True))), dim=0)
    assert torch.equal(both.output(), full.output()[0])


def test_peaks_far_apart_do_not_overflow() -> None:
    far = SoftmaxState(torch.ones(2, 1, 4), torch.tensor([[-1e30], [1e30]]), torch.ones(2, 1))
    assert torch.equal(merge(far, dim=0).output(), torch.ones(1, 4))


def test_merged_parts_are_the_whole() -> None:
    """Natural exponentials on both sides: a base mixed up would be off by a tenth and more."""
    torch.manual_seed(0)
    scores, v = 5 * torch.randn(3, 7, 40, dtype=torch.float64), torch.randn(3, 40, 4, dtype=torch.float64)
    scores[:, 2] = float("-inf")
    scores[:, 4, :30] = float("-inf")
    whole = attend(scores.clone(), v)
    cuts = [(0, 1), (1, 13), (13, 30), (30, 40)]
    parts = [attend(scores[..., a:b].clone(), v[:, a:b]) for a, b in cuts]
    merged = merge(SoftmaxState(*(torch.stack(x) for x in zip(*parts, strict=True))), dim=0)
    torch.testing.assert_close(merged.output(), whole.output())
    torch.testing.assert_close(merged.peak, whole.peak)
    torch.testing.assert_close(merged.total, whole.total)
    seen = scores[:, [0, 1, 3, 4, 5, 6]]
    torch.testing.assert_close(merged.output()[:, [0, 1, 3, 4, 5, 6]], seen.softmax(dim=-1) @ v)
    assert not bool(merged.output()[:, 2].any())
