"""Cuts against a naive reading, token by token: which tokens are in the table, which of them are seen, and where
they act."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.kvstore.chunks import OPEN_COUNT, ChunkName, chunk_name, root_name
from trunkline.kvstore.cuts import DROPS_MAX, ContextCut, cut_name, pack_drops, problem_of_drops

Drops = tuple[tuple[int, int], ...]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Drops, int, int]:
    """(drops, chunk size, length of the history)."""
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    edges = sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=12)))
    drops = tuple(zip(edges[::2], edges[1::2], strict=False))
    drops = tuple(d for i, d in enumerate(drops) if not i or drops[i - 1][1] < d[0])
    return drops, size, drops[-1][1] + draw(st.integers(1, 25))


def is_dropped(token: int, drops: Drops) -> bool:
    return any(start <= token < stop for start, stop in drops)


def kept_chunks(drops: Drops, size: int, length: int) -> list[int]:
    """Chunks with any token that is seen, and the one from which the open part goes on."""
    chunks = range(-(-length // size))
    open_chunk = drops[-1][1] // size
    return [
        chunk
        for chunk in chunks
        if chunk >= open_chunk
        or not all(is_dropped(token, drops) for token in range(chunk * size, (chunk + 1) * size))
    ]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(cases())
def test_the_table_holds_every_chunk_of_which_something_is_seen(case: tuple[Drops, int, int]) -> None:
    drops, size, length = case
    cut = ContextCut(drops, size)
    history = np.arange(1000, 1000 + length, dtype=np.int32)
    chunks = kept_chunks(drops, size, length)
    naive = [token for chunk in chunks for token in history[chunk * size : (chunk + 1) * size].tolist()]
    assert cut.table_tokens(history).tolist() == naive
    assert cut.seen(cut.table_tokens(history)).tolist() == [
        token for index, token in enumerate(history.tolist()) if not is_dropped(index, drops)
    ]
    unseen = [token for token in naive if is_dropped(token - 1000, drops)]
    assert cut.holes == len(unseen)
    # Holes lie before the last kept range: behind it, counting in the table and acting differ by a constant.
    assert naive[cut.first_open] == 1000 + drops[-1][1]
    assert not any(is_dropped(token - 1000, drops) for token in naive[cut.first_open :])


@settings(max_examples=150, derandomize=True, deadline=None)
@given(cases())
def test_extents_find_each_seen_token_at_its_position(case: tuple[Drops, int, int]) -> None:
    drops, size, length = case
    cut = ContextCut(drops, size)
    table = cut.table_tokens(np.arange(length, dtype=np.int32)).tolist()
    seen = [token for token in range(length) if not is_dropped(token, drops)]
    found: list[tuple[int, int, int]] = []
    for extent in cut.extents():
        begin = extent.table_start * size + extent.first_token
        assert extent.first_token < size
        count = extent.token_count if extent.token_count != OPEN_COUNT else len(table) - begin
        for index in range(count):
            position = extent.base_position + index
            found.append((table[begin + index], position, position + extent.shift))
    # The token, the position at which its key was rotated, and where it acts: without a gap from 0 on.
    assert found == [(token, token, acting) for acting, token in enumerate(seen)]
    assert [extent.token_count == OPEN_COUNT for extent in cut.extents()] == [False] * (len(cut.extents()) - 1) + [
        True
    ]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(cases())
def test_segments_are_the_runs_of_chunks_behind_the_same_drops(case: tuple[Drops, int, int]) -> None:
    drops, size, length = case
    cut = ContextCut(drops, size)
    flat: list[int] = []
    for segment in cut.segments:
        stop = segment.stop if segment.stop >= 0 else -(-length // size)
        assert segment.stop == -1 or segment.start <= segment.stop
        flat += range(segment.start, stop)
        for chunk in range(segment.start, stop):
            # It stands behind all that end before it, or within it: those could be cut off without moving it.
            assert segment.drops == sum(end // size <= chunk for _, end in drops)
    assert flat == kept_chunks(drops, size, length)
    assert [segment.stop for segment in cut.segments].count(-1) == 1
    assert cut.segments[-1].stop == -1
    assert cut.segments[-1].drops == len(drops)
    assert cut.table_start == sum(chunk < cut.segments[-1].start for chunk in flat)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(cases())
def test_closed_end_is_behind_the_last_seen_token_before_the_last_drop(case: tuple[Drops, int, int]) -> None:
    drops, size, length = case
    cut = ContextCut(drops, size)
    table = cut.table_tokens(np.arange(length, dtype=np.int32)).tolist()
    closed = [i for i, token in enumerate(table) if token < drops[-1][0] and not is_dropped(token, drops)]
    assert cut.closed_end == (closed[-1] + 1 if closed else 0)
    assert cut.closed_end <= cut.first_open


def test_the_chain_names_the_whole_history() -> None:
    root = root_name(b"f", "float32", 4, b"tenant")
    history = np.arange(40, dtype=np.int32)
    chain = ContextCut(((5, 22), (25, 30)), 4).chain(root, history)
    name, names = root, []
    for chunk in range(7):  # all before the chunk with token 30, dropped ones too
        name = chunk_name(name, history[4 * chunk : 4 * chunk + 4].tobytes())
        names.append(name)
    assert chain == names


def test_a_cut_is_named_by_the_history_and_by_what_is_dropped() -> None:
    rng = random.Random(5)
    names: dict[bytes, tuple[bytes, Drops]] = {}
    for _ in range(300):
        history = bytes(rng.randrange(2) for _ in range(16))
        edges = sorted(rng.sample(range(9), 4))
        drops = ((edges[0], edges[1]), (edges[2], edges[3]))[: rng.randrange(1, 3)]
        name = cut_name(ChunkName(history), pack_drops(drops))
        assert names.setdefault(name, (history, drops)) == (history, drops)
        assert len(name) == len(root_name(b"", "", 1, b""))
        assert name != ChunkName(history)
    assert len(names) > 200


@pytest.mark.parametrize(
    ("drops", "word"),
    [
        (((3, 3),), "not empty"),
        (((4, 3),), "ascending"),
        (((-1, 3),), "ascending"),
        (((0, 3), (3, 5)), "apart"),
        (((4, 6), (1, 2)), "ascending"),
        (((1, 10),), "must stay"),
        (((1, 9),), ""),
        (((0, 2), (3, 5), (6, 9)), ""),
        ((), ""),
        (tuple((2 * i, 2 * i + 1) for i in range(DROPS_MAX + 1)), "at most"),
    ],
)
def test_drops_that_make_no_sense(drops: Drops, word: str) -> None:
    problem = problem_of_drops(drops, 10)
    assert bool(problem) == bool(word)
    assert word in problem
