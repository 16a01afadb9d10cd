"""Plans that go on compute what plans made from nothing compute, whatever happens to the rows.

Equal means, after every step: each row reads the same tokens at the same positions with the same shifts, each
once, and asks from the same position; in the batch-invariant mode its partial results (those pieces together that
go on from each other's states) are of the same tokens in
the same order, so they have the same bits; where no row has modules or is cut, and one worker takes all, the
pieces are the same: which rows read which tokens together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from kernels.work_words import Work, check_lists, check_loads, decode, random_times
from numpy.typing import NDArray
from seeds import seeds
from worker.row_world import RowWorld

from trunkline.kernels.live_plan import WORK_MADE, LiveWork
from trunkline.kernels.plan import DecodePlan, WorkOptions, build_decode_plan, plan_decode_work
from trunkline.worker.batch.decode_planner import LivePlanner
from trunkline.worker.batch.sequences import BatchSequence, segments_of

OPTIONS = WorkOptions(kv_heads=2, group=2, kv_token_bytes=512, partial_bytes=1024)
ALL = ("plain", "cut", "modules", "beams", "drafts")
PREFIXES = ("plain", "beams", "drafts")
NO_RUNS = np.zeros((0, 4), dtype=np.int32)
# Of csrc/common/work_plan.h.
ENTRY_CONTINUES, ENTRY_LEAVES, ENTRY_FIRST = 1 << 30, 1 << 29, 1 << 28
ENTRY_ORDINAL = ENTRY_FIRST - 1


def from_nothing(world: RowWorld, chunk: int) -> DecodePlan:
    """The plan that the world's rows have, whichever of them share blocks."""
    rows = world.rows if world.drafts is None else world.drafts.sequences
    own = np.array([row.known for row in world.rows], dtype=np.int32)
    lengths = own if world.drafts is None else world.drafts.lengths
    segments = segments_of(rows, lengths, chunk)
    frame = [frame_of(row, n) for row, n in zip(rows, lengths.tolist(), strict=True)]
    everything = np.array([[0, len(rows), 0, int(segments.table_index.max()) + 1]], dtype=np.int32)
    return build_decode_plan(segments, np.array(frame, dtype=np.int32), everything, chunk)


def frame_of(row: BatchSequence, length: int) -> int:
    return int(row.layout.frame_positions(length - 1, length)[0])


class Followed:
    """A live plan, and a mirror of its words that only ever gets the changes."""

    def __init__(self, chunk: int, options: tuple[WorkOptions, ...]) -> None:
        self.rows = LivePlanner(chunk)
        self.options = options
        self.mirrors: dict[WorkOptions, tuple[int, NDArray[np.int32]]] = {}
        self.uploaded = 0

    def step(self, world: RowWorld) -> None:
        if world.rows_changed:
            self.rows.rows_changed()
        self.rows.tables_changed(world.touched)
        if world.exchanged:
            self.rows.beams_changed()
        self.rows.step(world.rows, NO_RUNS, world.drafts)

    def words(self, options: WorkOptions) -> NDArray[np.int32]:
        """The mirror, which must be what the planner has."""
        plan = self.rows.plan
        live: LiveWork = plan.work(options, self)
        generation, mirror = self.mirrors.get(options, (-1, np.zeros(0, dtype=np.int32)))
        changes = live.take_changes()
        if generation != live.generation:
            mirror = live.array.copy()
            self.mirrors[options] = (live.generation, mirror)
            self.uploaded += len(mirror)
        else:
            mirror[changes[:, 0]] = changes[:, 1]
            self.uploaded += changes.size
        assert np.array_equal(mirror, live.array)
        return mirror


def read_by(work: Work) -> list[Counter[tuple[int, ...]]]:
    """What each row reads."""
    read: list[Counter[tuple[int, ...]]] = [Counter() for _ in work.query_position]
    for piece in work.pieces:
        rows = [row for row, _, _ in piece.entries]
        assert rows == sorted(set(rows))
        for row, shift, _ in piece.entries:
            read[row].update((*item[:4], shift) for item in piece.items if item[2])
    return read


def partials_of(work: Work, carry_tokens: int = 0) -> list[list[tuple[tuple[int, ...], ...]]]:
    """What each partial result of each row is of, in the order of pieces. Pieces that go on from each other's
    states make one."""
    partials: list[list[tuple[tuple[int, ...], ...]]] = [[] for _ in work.query_position]
    pieces, left = [0] * len(partials), [False] * len(partials)
    for piece in work.pieces:
        items = tuple(item[:4] for item in piece.items if item[2])
        for row, _, word in piece.entries:
            assert word & ENTRY_ORDINAL == pieces[row]
            continues = bool(word & ENTRY_CONTINUES)
            assert continues == left[row]
            if continues:
                assert sum(item[2] for item in partials[row][-1]) % carry_tokens == 0
                partials[row][-1] += items
            else:
                partials[row].append(items)
            assert bool(word & ENTRY_FIRST) == (continues and len(partials[row]) == 1)
            pieces[row], left[row] = pieces[row] + 1, bool(word & ENTRY_LEAVES)
    assert not any(left)
    assert np.diff(work.row_partials).tolist() == pieces
    return partials


def pieces_of(work: Work) -> Counter[tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int], ...]]]:
    """Which tokens are read by which rows together."""
    return Counter(
        (
            tuple(item[:4] for item in piece.items if item[2]),
            tuple((row, shift) for row, shift, _ in piece.entries),
        )
        for piece in work.pieces
    )


def options_of(rng: np.random.Generator) -> WorkOptions:
    return WorkOptions(
        kv_heads=int(rng.integers(1, 9)),
        group=int(rng.integers(1, 5)),
        kv_token_bytes=int(rng.integers(1, 1000)),
        partial_bytes=int(rng.integers(1, 3000)),
        tile_rows=int(rng.choice([0, 8, 16])),
        workers=int(rng.choice([1, 1, 2, 132])),
        piece_tokens_min=int(rng.choice([1, 64])),
        share=bool(rng.random() < 0.8),
        unit_vectors=int(rng.choice([0, 48])),
        dealt=bool(rng.random() < 0.7),
        narrow_vectors=int(rng.choice([0, 4, 16])),
        **random_times(rng),
    )


def check_steps(seed: int, steps: int, kinds: tuple[str, ...]) -> int:
    """Random steps; each plan against the one made from nothing. Returns how often a state is carried on."""
    rng = np.random.default_rng(seed)
    chunk = int(rng.choice([1, 4, 16]))
    world = RowWorld(rng, chunk, rows_max=int(rng.choice([2, 6, 12])), kinds=kinds)
    chosen = options_of(rng)
    carrying = replace(chosen, invariant_tokens=64, carry_tokens=int(rng.choice([4, 16])), partial_bytes=1)
    options = (
        chosen,
        replace(chosen, invariant_tokens=int(rng.choice([8, 64]))),
        replace(OPTIONS, workers=1),
        carrying,
    )
    followed = Followed(chunk, options)
    made, carried = [0] * len(options), 0
    for step in range(steps):
        world.step()
        if not world.rows:
            continue
        followed.step(world)
        plan = from_nothing(world, chunk)
        assert np.array_equal(followed.rows.positions, plan.query_position)
        last = plan.first[plan.tail_item] + plan.count[plan.tail_item] - 1
        assert np.array_equal(followed.rows.slots, plan.block[plan.tail_item] * chunk + last)
        mirrors = [followed.words(each) for each in options]
        shown = step % len(options)
        work = decode(mirrors[shown], followed.rows.plan.steps)
        check_lists(work, options[shown])
        now = [int(mirror[WORK_MADE]) for mirror in mirrors]
        is_new = now[shown] != made[shown]  # by what pieces cost now
        if is_new and options[shown].dealt:
            check_loads(work, options[shown])
        made = now
        plain = not {"cut", "modules"} & set(kinds)
        compare(work, plan, options[shown], same_pieces=plain and (is_new or options[shown].workers == 1))
        carried += sum(bool(word & ENTRY_CONTINUES) for piece in work.pieces for _, _, word in piece.entries)
    return carried


def compare(work: Work, plan: DecodePlan, options: WorkOptions, *, same_pieces: bool) -> None:
    expected = decode(plan_decode_work(plan, options).numpy())
    assert read_by(work) == read_by(expected)
    assert work.query_position == expected.query_position
    assert work.tokens == sum(piece.tokens for piece in work.pieces)
    partials = partials_of(work, options.carry_tokens)
    if options.invariant_tokens:
        assert partials == partials_of(expected)
    if same_pieces and not options.carry_tokens:
        assert pieces_of(work) == pieces_of(expected)
        assert work.tokens == expected.tokens


@pytest.mark.parametrize("seed", seeds(4))
def test_random_steps(seed: int) -> None:
    check_steps(seed, 300, ALL)


@pytest.mark.parametrize("seed", seeds(4))
def test_random_steps_of_prefixes_beams_and_drafts(seed: int) -> None:
    check_steps(seed, 300, PREFIXES)


def test_states_are_carried_on_where_rows_share() -> None:
    assert sum(check_steps(seed, 60, PREFIXES) for seed in range(4)) > 100


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", seeds(40))
def test_a_hundred_thousand_steps(seed: int) -> None:
    check_steps(seed, 2500, (ALL, PREFIXES)[seed % 2])
