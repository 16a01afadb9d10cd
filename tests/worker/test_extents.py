"""Layouts of sequences against their description, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from seeds import seeds

from trunkline.kvstore.chunks import OPEN_COUNT, PLAIN_LAYOUT, Extent, pack_int32
from trunkline.worker.batch.sequences import PLAIN, BatchSequence, ContextLayout, segments_of
from trunkline.worker.errors import PlanError
from trunkline.worker.messages import Fork, Join, Sampling

Cell = tuple[int, int, int, int]
"""Table entry, offset in its block, position of rotation, shift relative to the open extent."""


def cells_of(extents: tuple[Extent, ...], length: int, chunk_size: int) -> list[Cell]:
    """Written from the description of `Extent` alone."""
    cells: list[Cell] = []
    for extent in extents:
        count = length - len(cells) if extent.token_count == OPEN_COUNT else extent.token_count
        for i in range(min(count, length - len(cells))):
            token = extent.first_token + i
            entry, offset = extent.table_start + token // chunk_size, token % chunk_size
            cells.append((entry, offset, extent.base_position + i, extent.shift - extents[-1].shift))
    return cells


def make_sequence(extents: tuple[Extent, ...], tokens: int, blocks: list[int], first: int = 0) -> BatchSequence:
    packed = b"" if extents == PLAIN_LAYOUT else pack_int32(np.array(extents, dtype=np.int32))
    ids = pack_int32(list(range(first, tokens)))
    return BatchSequence(Join(7, ids, first, tokens, pack_int32(blocks), Sampling(), packed))


def read_cells(sequences: list[BatchSequence], lengths: list[int], chunk_size: int) -> list[list[Cell]]:
    """What `segments_of` says, row by row, token by token; blocks are looked up in the tables."""
    segments = segments_of(sequences, np.array(lengths, dtype=np.int32), chunk_size)
    assert all(column.dtype == np.int32 for column in vars(segments).values())
    assert segments.row.tolist() == sorted(segments.row.tolist())
    rows: list[list[Cell]] = [[] for _ in sequences]
    for row, entry, block, first, count, base, shift in zip(*vars(segments).values(), strict=True):
        assert block == sequences[row].blocks[entry]
        assert 0 <= first < first + count <= chunk_size
        rows[row] += [(int(entry), int(first + i), int(base + i), int(shift)) for i in range(count)]
    return rows


def random_layout(rng: np.random.Generator, chunk_size: int) -> tuple[tuple[Extent, ...], int]:
    """Modules in any order and with any shifts, own runs between and behind them; and where the own ones begin."""
    read: list[Extent] = []
    own: list[Extent] = []
    position, entry, own_token, shift = 0, 0, 0, int(rng.integers(0, 30))
    for _ in range(int(rng.integers(0, 6))):
        position += int(rng.integers(0, 4))
        count = int(rng.integers(1, 3 * chunk_size))
        base = int(rng.integers(0, 2 * position + 1)) if rng.random() < 0.5 else position
        first = int(rng.integers(0, chunk_size))
        read.append(Extent(entry, first, count, base, position - base))
        entry += -(-(first + count) // chunk_size)
        position += count
        if rng.random() < 0.5:
            count = int(rng.integers(1, 2 * chunk_size))
            own.append(Extent(0, own_token, count, position, 0))
            own_token, position = own_token + count, position + count
    read = [read[index] for index in rng.permutation(len(read)).tolist()]
    position += int(rng.integers(0, 4))
    own.append(Extent(0, own_token, OPEN_COUNT, position, 0))
    # As after a cut, in which everything that is kept has moved.
    own = [e._replace(table_start=entry, base_position=e.base_position + shift, shift=-shift) for e in own]
    return (*read, *own), sum(extent.token_count for extent in read)


@pytest.mark.parametrize("seed", seeds(12))
def test_tokens_are_where_the_extents_say(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chunk_size = int(rng.choice([1, 3, 8, 16]))
    sequences, lengths, expected = [], [], []
    for _ in range(int(rng.integers(1, 5))):
        extents, own_start = random_layout(rng, chunk_size) if rng.random() < 0.8 else (PLAIN_LAYOUT, 0)
        known = sum(e.token_count for e in extents[:-1]) + int(rng.integers(1, 2 * chunk_size + 1))
        cells = cells_of(extents, known, chunk_size)
        blocks = rng.permutation(1000)[: 1 + max(entry for entry, *_ in cells)].tolist()
        sequence = make_sequence(extents, known, blocks, first=own_start)
        length = int(rng.integers(1, known + 1))
        sequences.append(sequence)
        lengths.append(length)
        expected.append(cells[:length])
        start = int(rng.integers(own_start, known))
        stop = int(rng.integers(start + 1, known + 1))
        slots = [blocks[entry] * chunk_size + offset for entry, offset, _, _ in cells[start:stop]]
        assert sequence.slots(start, stop, chunk_size).tolist() == slots
        positions = sequence.layout.frame_positions(start, stop)
        assert positions.dtype == np.int32
        assert positions.tolist() == [position for _, _, position, _ in cells[start:stop]]
    assert read_cells(sequences, lengths, chunk_size) == expected


def test_lengths_clip_extents() -> None:
    """An entry that ends within an extent reads it in part, and nothing of those behind it."""
    extents = (Extent(0, 0, 5, 10, 0), Extent(2, 0, 6, 0, 0), Extent(2, 6, OPEN_COUNT, 20, 0))
    sequence = make_sequence(extents, 14, [4, 9, 2, 6, 8], first=5)
    for length in range(1, 15):
        assert read_cells([sequence], [length], 4) == [cells_of(extents, length, 4)]


def test_forks_share_the_layout() -> None:
    extents = (Extent(0, 0, 5, 10, 0), Extent(2, 0, OPEN_COUNT, 20, 0))
    parent = make_sequence(extents, 8, [4, 9, 2], first=5)
    child = BatchSequence.forked(Fork(7, 8, pack_int32([4, 9, 3]), seed=1), parent)
    assert child.layout is parent.layout
    assert not child.layout.is_plain
    assert make_sequence(PLAIN_LAYOUT, 3, [1]).layout is PLAIN


OPEN = Extent(9, 0, OPEN_COUNT, 40, 0)


@pytest.mark.parametrize(
    ("extents", "message"),
    [
        ((), "exactly the last extent"),
        ((Extent(0, 0, 4, 0, 0),), "exactly the last extent"),
        ((OPEN, OPEN._replace(base_position=50)), "exactly the last extent"),
        ((Extent(0, 0, 0, 0, 0), OPEN), "others not empty"),
        ((Extent(0, 0, -2, 0, 0), OPEN), "others not empty"),
        ((Extent(-1, 0, 2, 0, 0), OPEN), "negative"),
        ((Extent(0, -1, 2, 0, 0), OPEN), "negative"),
        ((Extent(0, 0, 2, -1, 0), OPEN), "negative"),
        ((Extent(0, 0, 2, 5, -6), OPEN), "negative"),
        ((Extent(0, 0, 4, 0, 0), Extent(1, 0, 4, 3, 0), OPEN), r"one acts at \[0, 4\), another from 3 on"),
        ((Extent(0, 0, 4, 0, 30), Extent(1, 0, 4, 3, 27), OPEN), r"one acts at \[30, 34\), another from 30 on"),
        ((Extent(0, 0, 4, 37, 0), OPEN), r"one acts at \[37, 41\), another from 40 on"),
        ((Extent(0, 0, 4, 50, 0), OPEN), r"one acts at \[50, 54\), another from 40 on"),
    ],
)
def test_malformed_layouts(extents: tuple[Extent, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ContextLayout(extents)


def test_malformed_joins_and_entries() -> None:
    extents = (Extent(0, 0, 5, 10, 0), Extent(2, 0, 3, 0, 0), Extent(3, 0, 2, 30, 0), OPEN)
    with pytest.raises(PlanError, match="sequence 7: exactly the last extent"):
        make_sequence(extents[:1], 6, [1])
    with pytest.raises(PlanError, match="joins with 10 tokens; its open extent begins at index 10"):
        make_sequence(extents, 10, [1])
    sequence = make_sequence(extents, 12, [1, 2, 3])
    with pytest.raises(PlanError, match=r"sequence 7: .* \[4, 6\) .* before index 5 can only be read"):
        sequence.slots(4, 6, 4)
    with pytest.raises(PlanError, match=r"needs block-table entry 3 for indices \[8, 10\); it has 3"):
        sequence.slots(8, 10, 4)
    with pytest.raises(PlanError, match="sequence 7 needs block-table entry 3; it has 3"):
        segments_of([sequence], np.array([9], dtype=np.int32), 4)
    shifted = make_sequence((Extent(0, 0, 2, 9, -9), Extent(1, 0, 3, 9, -3), OPEN), 6, [1, 2])
    with pytest.raises(PlanError, match="before index 5 can only be read"):
        shifted.slots(4, 6, 4)
