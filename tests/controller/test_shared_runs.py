"""Tree order and shared runs against a naive reading of the block tables."""

from __future__ import annotations

import random

import numpy as np
import pytest
from seeds import seeds

from trunkline.controller.sequences.tree_order import shared_runs, text_runs, tree_order
from trunkline.kvstore.chunks import NO_BLOCK, Int32Array


def random_tables(rng: random.Random, rows: int) -> tuple[Int32Array, Int32Array]:
    """Block tables of paths through a random forest; a block stands at one place of one path only."""
    paths: list[list[int]] = []
    fresh = iter(range(10_000))
    for _ in range(rows):
        base = rng.choice(paths)[: rng.randrange(6)] if paths and rng.random() < 0.8 else []
        paths.append([*base, *(next(fresh) for _ in range(rng.randrange(1, 5)))])
    rng.shuffle(paths)
    width = max(len(path) for path in paths)
    tables = np.full((rows, width), NO_BLOCK, np.int32)
    for row, path in enumerate(paths):
        tables[row, : len(path)] = path
    return tables, np.array([len(path) for path in paths], np.int32)


@pytest.mark.parametrize("seed", seeds(30))
def test_every_shared_block_is_in_exactly_one_run(seed: int) -> None:
    rng = random.Random(seed)
    tables, counts = random_tables(rng, rng.randrange(1, 30))
    order, depth = tree_order(tables)
    assert sorted(order.tolist()) == list(range(len(tables)))
    tables, counts = tables[order], counts[order]
    holders: dict[int, set[int]] = {}
    for row, (table, count) in enumerate(zip(tables.tolist(), counts.tolist(), strict=True)):
        for block in table[:count]:
            holders.setdefault(block, set()).add(row)
    seen: dict[int, set[int]] = {}
    for first, stop, start, end in shared_runs(tables[:, :depth], counts).tolist():
        for block in tables[first, start:end].tolist():
            assert block not in seen
            seen[block] = set(range(first, stop))
    assert seen == {block: rows for block, rows in holders.items() if len(rows) > 1}


def branching_tables(rng: random.Random) -> Int32Array:
    """Block tables whose rows branch off from each other now and then, from none of them to all, large or small;
    some are equal, some end early, and some have nothing at their beginning, as behind a window."""
    rows, width = rng.choice([(2, 3), (40, 30), (40, 300), (250, 40)])
    often, fresh = rng.choice([0.0, 0.02, 0.2, 0.7]), iter(range(1, 1 << 30))
    depths = rng.choice([[width - 2], [1, width // 2, width], list(range(width + 1))])
    tables = np.array([[next(fresh) for _ in range(width)] for _ in range(rows)], np.int32)
    for row in range(1, rows):
        if rng.random() >= often:
            above = rng.randrange(rng.choice([1, min(row, 8), row]))
            shared = rng.choice(depths)
            tables[row, :shared] = tables[above, :shared]
    for row in range(rows):
        if rng.random() < 0.2:
            tables[row, rng.randrange(1, width) :] = NO_BLOCK
    if rng.random() < 0.2:
        tables[:, : rng.randrange(width)] = NO_BLOCK
    if rng.random() < 0.2:
        tables[rng.randrange(rows), -1] = 0  # a block like others
    return tables[rng.sample(range(rows), rows)]


@pytest.mark.parametrize("seed", seeds(20))
def test_rows_are_in_the_order_of_byte_strings(seed: int) -> None:
    """However the order is found; and beyond the depth that it says, no two rows agree."""
    rng = random.Random(seed)
    for _ in range(20):
        tables = branching_tables(rng)
        order, depth = tree_order(tables)
        strings = [table.astype(">i4").tobytes() for table in tables]
        assert order.tolist() == sorted(range(len(tables)), key=strings.__getitem__)
        counts = (tables != NO_BLOCK).sum(axis=1).astype(np.int32)[order]
        runs = shared_runs(tables[order, :depth], counts)
        assert runs.tolist() == shared_runs(tables[order], counts).tolist()


def test_equal_tables_share_only_what_counts() -> None:
    tables = np.array([[1, 2, -1], [1, 2, -1], [5, 6, 7]], np.int32)
    runs = shared_runs(tables, np.array([2, 2, 3], np.int32))
    assert runs.tolist() == [[0, 2, 0, 2]]


def test_no_rows_and_one_row() -> None:
    assert len(shared_runs(np.empty((0, 0), np.int32), np.empty(0, np.int32))) == 0
    assert tree_order(np.array([[3]], np.int32))[0].tolist() == [0]


def test_rows_with_texts_are_named_one_by_one() -> None:
    """Others may have the same blocks anywhere in their tables, so the workers compare them all."""
    runs = text_runs(np.array([0, 3, 0, 5, 1], np.int32))
    assert runs.dtype == np.int32
    assert runs.tolist() == [[1, 2, 0, 3], [3, 4, 0, 5], [4, 5, 0, 1]]


@pytest.mark.parametrize("blocks", [[], [0, 0], [0, 4, 0]])
def test_texts_that_nobody_else_can_have_are_not_named(blocks: list[int]) -> None:
    assert text_runs(np.array(blocks, np.int32)).shape == (0, 4)
