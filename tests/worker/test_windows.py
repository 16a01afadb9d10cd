"""What lies behind the window of all layers is not read, and everything in the window is, once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from kernels.work_words import decode
from seeds import seeds
from worker.row_world import RowWorld

from trunkline.kernels.plan import DecodePlan, WorkOptions
from trunkline.kvstore.chunks import pack_int32
from trunkline.kvstore.windows import all_chunks_behind, chunks_behind, window_blocks
from trunkline.worker.batch.decode_planner import DecodePlanner, LivePlanner, RebuildingPlanner
from trunkline.worker.batch.sequences import BatchSequence, entries_behind, segments_of
from trunkline.worker.errors import PlanError
from trunkline.worker.messages import Join, Sampling

OPTIONS = WorkOptions(kv_heads=2, group=2, kv_token_bytes=512, partial_bytes=1024)
NO_RUNS = np.zeros((0, 4), dtype=np.int32)

Token = tuple[int, int, int]
"""Block, place in it, position."""


def test_what_is_behind_is_what_no_later_query_sees() -> None:
    rng = np.random.default_rng(0)
    for _ in range(2000):
        size, window = int(rng.integers(1, 20)), int(rng.integers(1, 400))
        position = int(rng.integers(0, 2000))
        behind = chunks_behind(position, window, size)
        assert behind * size <= max(0, position - window + 1), "the query sees a token of it"
        assert all_chunks_behind(np.array([position], np.int32), window, size).tolist() == [behind]
        step = int(rng.integers(1, 300))
        needed = -(-(position + step) // size) - behind
        assert needed <= window_blocks(window, step, size)
        assert needed * size <= window + step + 2 * size + window // 8
    assert chunks_behind(10**6, 0, 64) == 0


def read_by_plan(plan: DecodePlan) -> list[Counter[Token]]:
    """The tokens that each row reads by a plan made from nothing."""
    read: list[Counter[Token]] = [Counter() for _ in range(plan.num_rows)]
    for item in range(len(plan.block)):
        rows = plan.rows[plan.row_indptr[item] : plan.row_indptr[item + 1]].tolist()
        for row in rows:
            count = int(plan.count[item]) + (plan.steps if item == plan.tail_item[row] else 0)
            for i in range(count):
                read[row][int(plan.block[item]), int(plan.first[item]) + i, int(plan.base[item]) + i] += 1
    return read


def read_by_live(rows: LivePlanner) -> list[Counter[Token]]:
    """The tokens that each row reads by a live plan."""
    work = decode(rows.plan.work(OPTIONS).array, rows.plan.steps)
    read: list[Counter[Token]] = [Counter() for _ in work.query_position]
    for piece in work.pieces:
        for row, _, _ in piece.entries:
            for block, first, count, base, *_ in piece.items:
                read[row].update((block, first + i, base + i) for i in range(count))
    return read


def check_window(rows: DecodePlanner, world: RowWorld, chunk: int, window: int) -> None:
    """Compare what the rows read with a plan of whole contexts."""
    own = np.array([row.known for row in world.rows], dtype=np.int32)
    drafted = world.drafts
    sequences = world.rows if drafted is None else drafted.sequences
    lengths = own if drafted is None else drafted.lengths
    whole = segments_of(sequences, lengths, chunk)
    read = read_by_live(rows) if isinstance(rows, LivePlanner) else read_by_plan(rows.plan)  # type: ignore[arg-type]
    for row, (sequence, length) in enumerate(zip(sequences, lengths.tolist(), strict=True)):
        query = int(rows.positions[row])
        seen: Counter[Token] = Counter()
        for at in np.flatnonzero(whole.row == row).tolist():
            for i in range(int(whole.count[at])):
                position = int(whole.base[at]) + i
                if position + int(whole.shift[at]) > query - window:
                    seen[int(whole.block[at]), int(whole.first[at]) + i, position] += 1
        assert not seen - read[row], "a token in the window is not read"
        assert max(read[row].values()) == 1, "a token is read twice"
        if sequence.layout.is_plain:
            # Rows are told anew when they get a block, so they may read a chunk more than they see, and drafts.
            blocks = {block for block, _, _ in read[row]}
            assert len(blocks) <= window_blocks(window, chunk + 4, chunk), (length, len(blocks))


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("live", [True, False])
def test_rows_read_their_windows(seed: int, live: bool) -> None:
    rng = np.random.default_rng(seed)
    chunk, window = int(rng.choice([1, 4, 16])), int(rng.integers(1, 70))
    kinds = ("plain", "cut", "beams", "drafts") if seed % 2 else ("plain", "drafts")
    world = RowWorld(rng, chunk, rows_max=6, kinds=kinds)
    rows: DecodePlanner = LivePlanner(chunk, window) if live else RebuildingPlanner(chunk, window)
    for _ in range(150):
        world.step()
        if not world.rows:
            continue
        if world.rows_changed:
            rows.rows_changed()
        rows.tables_changed(world.touched)
        if world.exchanged:
            rows.beams_changed()
        rows.step(world.rows, NO_RUNS, world.drafts)
        check_window(rows, world, chunk, window)


def joined(blocks: list[int], tokens: int) -> BatchSequence:
    return BatchSequence(Join(1, pack_int32([0] * tokens), 0, tokens, pack_int32(blocks), Sampling()))


def test_entries_behind_the_window_need_no_block() -> None:
    sequence = joined([-1, -1, 5, 6], 16)
    behind = entries_behind([sequence], np.array([15], np.int32), 8, 4)
    assert behind.tolist() == [2]
    segments = segments_of([sequence], np.array([16], np.int32), 4, behind)
    assert segments.block.tolist() == [5, 6]
    assert segments.base.tolist() == [8, 12]
    with pytest.raises(PlanError, match="reads block-table entry 0: it has no block"):
        segments_of([sequence], np.array([16], np.int32), 4)
    with pytest.raises(PlanError, match="not all of which have a block"):
        sequence.slots(7, 9, 4)
