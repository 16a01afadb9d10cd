"""The work lists of a step: what attention reads, as flat int32 arrays that native kernels take unchanged.

An *item* is a token range of one block together with the rows (queries) that read it:

      item i:  block[i], tokens [first[i], first[i] + count[i]),  key positions base[i], base[i] + 1, …
               rows[row_indptr[i] : row_indptr[i + 1]],  shifts[same range]

Shared items (more than one row) come first, then private ones: the two phases of ChunkAttention §3.2. An
item is read once however many rows it has. Rows of one item may have different shifts.

Frame: positions are those at which keys were rotated. A row's query is rotated at `query_position`, in the
frame of the row's open extent; `shift` says how many positions later, in that frame, an item acts. So an
ordinary sequence, and a truncated one whose kept parts all moved alike, has shift 0 everywhere.

Invariant: arrays never change after the build. Only `steps` grows: it lengthens each row's `tail_item` and
advances its query, so a plan stays valid until a row joins, leaves or fills its block (`steps_left`), the
"lazy copy" of ChunkAttention §3.3.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.native import NativeLibraryError, library
from trunkline.kvstore.chunks import Int32Array

BoolArray = NDArray[np.bool_]


@dataclass
class Segments:
    """The token ranges that rows read: one entry per (row, token range of a block), ordered by row, then by
    position.

    All arrays are int32 `[segments]`. The last segment of each row is its tail, which grows with each step.
    """

    row: Int32Array
    """The row that reads each segment."""
    table_index: Int32Array
    """Index of each segment's block in its row's block table: the unit in which sharing runs are given."""
    block: Int32Array
    """Id of each segment's block."""
    first: Int32Array
    """Offset of each segment's first token within its block."""
    count: Int32Array
    """Number of each segment's tokens."""
    base: Int32Array
    """Position at which the key of each segment's first token was rotated."""
    shift: Int32Array
    """How many positions later each segment acts in its row's frame."""


@dataclass
class DecodePlan:
    """One query per row against its whole context. Valid for `steps` in `[0, steps_left]`. Arrays are int32."""

    chunk_size: int
    block: Int32Array
    """Id of each item's block, `[items]`."""
    first: Int32Array
    """Offset of each item's first token within its block, `[items]`."""
    count: Int32Array
    """Number of each item's tokens at `steps` 0, `[items]`."""
    base: Int32Array
    """Position at which the key of each item's first token was rotated, `[items]`."""
    row_indptr: Int32Array
    """Index in `rows` at which each item's rows begin, `[items + 1]`."""
    rows: Int32Array
    """Rows that read the items, `[entries]`, ascending within an item."""
    shifts: Int32Array
    """Shift of an item for each of its rows, in positions, `[entries]`."""
    shared_items: int
    """Number of shared items: items before this index have several rows."""
    tail_item: Int32Array
    """Index of each row's private item that grows by one token per step, `[rows]`."""
    query_position: Int32Array
    """Position of each row's query at `steps` 0, `[rows]`."""
    steps_left: int
    """Largest `steps` for which every tail still fits its block."""
    steps: int = 0
    """Number of decode steps since the build: as many tokens more than `count` are in each tail."""
    state: object = None
    """The data that the kernels derive from the plan that they execute (index tensors, device copies); private to
    them."""

    @property
    def num_rows(self) -> int:
        return len(self.query_position)

    @property
    def tokens_read(self) -> int:
        """Tokens of KV that one layer reads now. The tokens of a shared item count once."""
        return int(self.count.sum()) + self.steps * self.num_rows

    def advance(self) -> None:
        """Add one token to each row's tail.

        Raises:
            ValueError: A tail is full, so the plan must be built anew.
        """
        if self.steps >= self.steps_left:
            raise ValueError(f"decode plan is valid for {self.steps_left} more steps after its build, not more")
        self.steps += 1


@dataclass
class PrefillPlan:
    """Several queries per entry, against paged context and causally among themselves.

    The step's own keys are in the pool before attention runs, so context and new tokens are read alike; a
    query at position p sees keys whose acting position (`base + i + shift`) is at most p. Arrays are int32.
    """

    chunk_size: int
    query_indptr: Int32Array
    """For each entry, where its queries begin among those given to `prefill_attention`, `[entries + 1]`."""
    query_position: Int32Array
    """Position of each query, `[queries]`."""
    item_indptr: Int32Array
    """Index at which each entry's items begin, `[entries + 1]`."""
    block: Int32Array
    """Id of each item's block, `[items]`."""
    first: Int32Array
    """Offset of each item's first token within its block, `[items]`."""
    count: Int32Array
    """Number of each item's tokens, `[items]`."""
    base: Int32Array
    """Position at which the key of each item's first token was rotated, `[items]`."""
    shift: Int32Array
    """Shift of each item, in positions, `[items]`."""
    state: object = None
    """As `DecodePlan.state`."""

    @property
    def num_entries(self) -> int:
        return len(self.query_indptr) - 1


@dataclass
class WritePlan:
    """The slots of the step's keys and values: `block * chunk_size + offset`; -1: not stored."""

    chunk_size: int
    slots: Int32Array
    """Slot of each token, int32 `[tokens]`."""
    state: object = None
    """As `DecodePlan.state`."""


def build_decode_plan(
    segments: Segments, query_position: Int32Array, runs: Int32Array, chunk_size: int
) -> DecodePlan:
    """Build a decode plan: one item per distinct token range within the controller's runs.

    Args:
        segments: What each row reads; every row of the batch has at least its tail.
        query_position: int32 `[rows]`.
        runs: int32 `[n, 4]`, `StepPlan.runs`. A hint: where the rows' tables differ (one row uses a part of a
            module), the differing ranges become separate items. So a wrong run costs time, but changes no result.
        chunk_size: tokens per block.

    Raises:
        ValueError: A row has no segment, or a run lies outside the batch.
    """
    num_rows, total = len(query_position), len(segments.row)
    is_tail = np.ones(total, dtype=bool)
    np.not_equal(segments.row[1:], segments.row[:-1], out=is_tail[:-1])
    tails = np.flatnonzero(is_tail)
    if len(tails) != num_rows:
        raise ValueError(f"{num_rows} rows, but segments for {len(tails)} of them")
    key, shared = _group(segments, np.flatnonzero(_in_runs(segments, num_rows, runs) > is_tail), chunk_size)
    order = key.argsort(kind="stable")
    sorted_key = key[order]
    is_head = np.ones(total + 1, dtype=bool)
    np.not_equal(sorted_key[1:], sorted_key[:-1], out=is_head[1:-1])
    row_indptr = is_head.nonzero()[0].astype(np.int32)
    heads = order[row_indptr[:-1]]
    # Behind the shared items each segment is an item of its own, the tails among them.
    tail_item = sorted_key.searchsorted(key[tails]) + (shared - row_indptr[shared])
    first, count = segments.first, segments.count
    return DecodePlan(
        chunk_size=chunk_size,
        block=segments.block[heads],
        first=first[heads],
        count=count[heads],
        base=segments.base[heads],
        row_indptr=row_indptr,
        rows=segments.row[order],
        shifts=segments.shift[order],
        shared_items=shared,
        tail_item=tail_item.astype(np.int32),
        query_position=query_position,
        steps_left=int(chunk_size - (first[tails] + count[tails]).max()) if num_rows else 0,
    )


def _in_runs(segments: Segments, num_rows: int, runs: Int32Array) -> BoolArray:
    """Return which segments lie in a run."""
    width = int(segments.table_index.max(initial=-1)) + 1
    covered = np.zeros((num_rows, width), dtype=bool)
    for row_start, row_stop, table_start, table_stop in runs.tolist():
        if not (0 <= row_start < row_stop <= num_rows and 0 <= table_start < table_stop):
            raise ValueError(f"run {[row_start, row_stop, table_start, table_stop]} outside {num_rows} rows")
        covered[row_start:row_stop, table_start:table_stop] = True
    inside: BoolArray = covered.ravel()[segments.row * width + segments.table_index]
    return inside


def _group(segments: Segments, chosen: NDArray[np.int64], chunk_size: int) -> tuple[NDArray[np.int64], int]:
    """Return a key for each segment: equal within an item, and in the order of the items.

    Plans of beam searches are built anew at each step, so this is little more than two sorts.

    Args:
        chosen: Segments that may share an item with others, ascending.

    Returns:
        The keys (shared items first, each kind in order of appearance) and the number of shared items.
    """
    total = len(segments.row)
    key = np.arange(total, 2 * total)
    if len(chosen) < 2:
        return key, 0
    place = segments.block[chosen].astype(np.int64) * chunk_size + segments.first[chosen]
    place = place * (chunk_size + 1) + segments.count[chosen]
    order = place.argsort(kind="stable")
    chosen, place = chosen[order], place[order]
    is_like_previous = np.zeros(len(chosen) + 1, dtype=bool)
    np.equal(place[1:], place[:-1], out=is_like_previous[1:-1])
    row = segments.row[chosen]
    is_again = np.zeros(len(chosen), dtype=bool)
    np.logical_and(is_like_previous[1:-1], row[1:] == row[:-1], out=is_again[1:])
    if is_again.any():
        # A row that reads a range at several places, each with its own shift, is in several items: one for the
        # first reading of all rows, one for the second, and so on.
        number = np.arange(len(chosen))
        reading = number - np.maximum.accumulate(np.where(is_again, 0, number))
        order = np.lexsort((reading, place))
        chosen, place, reading = chosen[order], place[order], reading[order]
        is_like_previous[1:-1] = (place[1:] == place[:-1]) & (reading[1:] == reading[:-1])
    starts = (is_like_previous[:-1] < is_like_previous[1:]).nonzero()[0]
    members = is_like_previous[:-1] | is_like_previous[1:]
    # Segments of one place follow each other in order of appearance: the first of them names the item.
    number = (~is_like_previous[:-1])[members].cumsum() - 1
    key[chosen[members]] = chosen[starts][number]
    return key, len(starts)


@dataclass(frozen=True)
class WorkOptions:
    """Options for cutting a decode plan into pieces; `WorkOptions` in `csrc/common/work_plan.h` documents the
    fields."""

    kv_heads: int
    group: int
    kv_token_bytes: int
    partial_bytes: int
    tile_rows: int = 0
    workers: int = 1
    pieces_per_worker: int = 4
    piece_tokens_min: int = 64
    invariant_tokens: int = 0
    share: bool = True
    vectors_per_read: int = 16
    unit_vectors: int = 0
    dealt: bool = False
    narrow_vectors: int = 0
    narrow_unit_ns: int = 0
    wide_unit_ns: int = 0
    tile_tokens: int = 0
    narrow_tile_ns: int = 0
    wide_tile_ns: int = 0
    partial_bytes_per_ns: int = 0
    carry_tokens: int = 0


option_values = operator.attrgetter(*WorkOptions.__dataclass_fields__)


def plan_decode_work(plan: DecodePlan, options: WorkOptions) -> Tensor:
    """Cut a decode plan into pieces of work (`csrc/common/work_plan.h`).

    Returns:
        int32 words, the buffer that `WorkView` reads.

    Raises:
        ValueError: Items contradict each other.
        NativeLibraryError: The library is not installed.
    """
    module = library()
    if module is None:
        raise NativeLibraryError("the compiled CPU kernels, which hold the planner, are not installed")
    items, entries, rows = len(plan.block), len(plan.rows), len(plan.query_position)
    if not len(plan.first) == len(plan.count) == len(plan.base) == len(plan.row_indptr) - 1 == items:
        raise ValueError("block, first, count and base must be equally long, row_indptr longer by one")
    if not len(plan.shifts) == entries == plan.row_indptr[-1]:
        raise ValueError("rows and shifts must be as long as row_indptr says")
    if len(plan.tail_item) != rows:
        raise ValueError("tail_item and query_position must be equally long")
    # All arrays in one tensor: passing a tensor costs as much as planning a row.
    arrays = (plan.block, plan.first, plan.count, plan.base, plan.row_indptr, plan.rows, plan.shifts)
    words = torch.from_numpy(np.concatenate((*arrays, plan.tail_item, plan.query_position), dtype=np.int32))
    sizes = [items, entries, rows, plan.shared_items]
    made = module.plan_work(words, [*sizes, *map(int, option_values(options))])
    return torch.from_numpy(np.from_dlpack(made))
