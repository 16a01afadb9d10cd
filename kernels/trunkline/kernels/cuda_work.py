"""Work plans on the device: the buffer of the decode plan, and how prefill plans are made.

Decode: one buffer of fixed capacity holds [steps, padding, the plan's words]. It is overwritten only when the plan
changes, by a copy on the stream from one of two pinned staging buffers; between changes a kernel adds to `steps`.
A captured CUDA graph reads the plan and the step that the buffer holds when the graph is replayed. So the graph
stays valid until a buffer must grow (to the next power of two), which changes `generation`. The graph itself
changes neither plan nor step: `CudaKernels.prepare_replay` updates both before each replay. An update during a
capture is an error.

Prefill: plans have the same words as decode's, so one kernel serves both. A piece is a tile of consecutive queries
of an entry and a run of items with equal shift; its rows see keys up to their own position (`causal`). Prompts
over many shifted modules have so many partial results that these would take gigabytes. So a plan whose partials do
not fit the workspace is executed in parts, one after the other. Each part has some of the rows, with the same
pieces in the same order, so results are the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.cuda_library import CudaError
from trunkline.kernels.plan import DecodePlan, PrefillPlan

# Words of the header (csrc/common/work_plan.h, WorkHeader).
MAGIC: Final = 0x54504157
HEADER_WORDS: Final = 24
ROWS: Final = 5
PARTIALS: Final = 6
TOKENS: Final = 7
STEPS_WORDS: Final = 4
"""Number of words in front of the plan, so that it stays aligned to 16 bytes; the first word is the number of
steps."""
MIN_WORDS: Final = 1 << 14
WORKSPACE_BYTES: Final = 256 << 20
"""Bytes of the memory for partial results, allocated at the first use. Prefill never takes more; decode enlarges
the memory if it must: 256 rows of 32 heads of 128 values with 60 pieces each just fit."""
WORDS_ALIGNED: Final = 4
"""Alignment of the parts of a prefill plan: the words of each part begin at a multiple of this many words (16
bytes)."""


def grown(capacity: int, needed: int, least: int) -> int:
    """Return the capacity for `needed`: the present capacity if it suffices, else the next power of two."""
    return capacity if needed <= capacity else max(least, 1 << (needed - 1).bit_length())


def refuse_capture(refused: bool, why: str) -> None:
    """Refuse an operation that must not become part of a captured graph.

    Raises:
        CudaError: A graph is being captured.
    """
    if refused:
        raise CudaError(f"{why}: run the step once, or prepare_replay, before it is captured in a graph")


class WorkKey(NamedTuple):
    """Everything besides the plan itself that decides how a plan's work is cut and where it lies."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    tile_rows: int
    grid: int
    invariant_tokens: int
    share: bool


class CudaDecodeWork:
    """A decode plan's words; private to `CudaKernels`."""

    def __init__(self, plan: DecodePlan, key: WorkKey, words: Tensor) -> None:
        self.key = key
        self.words = words
        self.partials = int(words[PARTIALS])
        self.tokens = int(words[TOKENS])
        self.needs_merge = self.partials != plan.num_rows
        self.has_shifts = bool(plan.shifts.any())
        self.last_block = int(plan.block.max(initial=-1))


def partial_floats(heads: int, head_dim: int) -> int:
    """Return the float32 numbers of one partial result of a row: a sum and two statistics for each head."""
    return heads * (head_dim + 2)


class Workspace:
    """Memory for partial results of attention, float32. Layers share it, as each merges before the next begins."""

    def __init__(self, device: torch.device, least_bytes: int = WORKSPACE_BYTES) -> None:
        """Make an empty workspace. Its first use allocates `least_bytes`, so its size is known from then on."""
        self.generation = 0
        """Number of reallocations: graphs captured before the last reallocation are stale."""
        self._least = least_bytes // 4
        self._memory = torch.empty(0, dtype=torch.float32, device=device)

    def fits(self, partials: int, heads: int, head_dim: int) -> bool:
        return partials * partial_floats(heads, head_dim) <= len(self._memory) > 0

    def take(self, partials: int, heads: int, head_dim: int) -> tuple[int, int]:
        """Return the addresses of sums `[capacity, heads, head_dim]` and of statistics `[capacity, heads, 2]`.

        The addresses stay the same until the memory must grow, because captured graphs hold them.
        """
        each = partial_floats(heads, head_dim)
        size = grown(max(len(self._memory), self._least), partials * each, 1 << 20)
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.float32, device=self._memory.device)
            self.generation += 1
        capacity = size // each
        return self._memory.data_ptr(), self._memory.data_ptr() + 4 * capacity * heads * head_dim


class DeviceWork:
    """The device buffer of the decode plan."""

    def __init__(self, device: torch.device) -> None:
        self.generation = 0
        """Number of reallocations of the buffer: graphs captured before the last reallocation are stale."""
        self.resident: CudaDecodeWork | None = None
        """The plan that the buffer holds."""
        self.steps = 0
        """The step that the buffer holds."""
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.int32, device=device)
        self._staging: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0

    @property
    def steps_address(self) -> int:
        return self._buffer.data_ptr()

    @property
    def words_address(self) -> int:
        return self._buffer.data_ptr() + 4 * STEPS_WORDS

    def upload(self, work: CudaDecodeWork, steps: int) -> None:
        """Replace the plan, in stream order: work that was enqueued before still reads the old one."""
        words = work.words
        needed = STEPS_WORDS + len(words)
        if needed > len(self._buffer):
            self._grow(needed)
        staging = self._staging[self._turn]
        if self._copied:
            self._copied[self._turn].synchronize()  # of the plan before the last one: almost always long done
        staging[0] = steps
        staging[STEPS_WORDS:needed] = words
        self._buffer[:needed].copy_(staging[:needed], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
        self._turn ^= 1
        self.resident, self.steps = work, steps

    def _grow(self, needed: int) -> None:
        capacity = grown(len(self._buffer), needed, MIN_WORDS)
        on_gpu = self._device.type == "cuda"
        for event in self._copied:
            event.synchronize()
        self._buffer = torch.empty(capacity, dtype=torch.int32, device=self._device)
        self._staging = [torch.zeros(capacity, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if on_gpu else []  # type: ignore[no-untyped-call]
        self.generation += 1


@dataclass(frozen=True)
class PrefillCut:
    """Options that decide how prefill work is cut."""

    rows_per_tile: int
    """Number of queries of a piece."""
    units_wanted: int
    """Number of pieces below which long contexts are cut, so that all processors have work."""
    piece_tokens_min: int
    piece_tokens: int = 0
    """Number of tokens of every piece, whatever the batch (batch-invariant mode); 0: pieces depend on the
    batch."""
    partials_max: int = 1 << 62
    """Largest number of partial results of one part of the work, unless a single tile has more."""


class PrefillPart(NamedTuple):
    """Rows of a prefill plan that are computed at once."""

    row_start: int
    row_stop: int
    piece_start: int
    piece_stop: int
    partials: int
    needs_merge: bool


class PrefillWork:
    """The words of a prefill plan (`work_plan.h`), part by part, and their sizes."""

    def __init__(self, plan: PrefillPlan, cut: PrefillCut) -> None:
        self._plan = plan
        self._items: list[NDArray[np.int64]] = []
        """For each piece, the indices of its items in the plan."""
        self._rows: list[tuple[int, int]] = []
        """For each piece, the range of its queries: start and stop."""
        self._shifts: list[int] = []
        self._ordinals: list[int] = []
        queries = len(plan.query_position)
        self._row_counts = np.zeros(queries, dtype=np.int64)
        tiles = [
            (entry, start, min(start + cut.rows_per_tile, int(plan.query_indptr[entry + 1])))
            for entry in range(plan.num_entries)
            for start in range(int(plan.query_indptr[entry]), int(plan.query_indptr[entry + 1]), cut.rows_per_tile)
        ]
        pieces_per_tile = -(-cut.units_wanted // max(1, len(tiles)))
        piece_ends: list[int] = []
        for entry, start, stop in tiles:
            self._add_tile(entry, (start, stop), cut, pieces_per_tile)
            piece_ends.append(len(self._items))
        self.tokens_read = int(plan.count.sum())
        self.parts = self._split([(start, stop) for _, start, stop in tiles], piece_ends, cut.partials_max)

    def _split(
        self, tiles: list[tuple[int, int]], piece_ends: list[int], partials_max: int
    ) -> tuple[PrefillPart, ...]:
        """Cut the work into parts of consecutive tiles; return the parts.

        A part has at most `partials_max` partial results, unless a single tile has more. If every row has only one
        partial result, nothing is merged, and there is one part.

        Args:
            tiles: The rows of each tile.
            piece_ends: For each tile, the index behind its last piece.
        """
        ends = np.concatenate([[0], np.cumsum(self._row_counts)])
        if int(ends[-1]) == len(self._row_counts):
            partials_max = int(ends[-1])
        parts: list[PrefillPart] = []
        row, piece = 0, 0
        for index, (_, stop) in enumerate(tiles):
            following = tiles[index + 1][1] if index + 1 < len(tiles) else stop
            is_last = index + 1 == len(tiles)
            if not is_last and int(ends[following] - ends[row]) <= partials_max:
                continue
            partials = int(ends[stop] - ends[row])
            parts.append(PrefillPart(row, stop, piece, piece_ends[index], partials, partials > stop - row))
            row, piece = stop, piece_ends[index]
        return tuple(parts)

    def _add_tile(self, entry: int, rows: tuple[int, int], cut: PrefillCut, pieces: int) -> None:
        plan = self._plan
        items = np.arange(int(plan.item_indptr[entry]), int(plan.item_indptr[entry + 1]))
        last = int(plan.query_position[rows[0] : rows[1]].max())
        items = items[plan.base[items].astype(np.int64) + plan.shift[items] <= last]
        tokens = int(plan.count[items].sum())
        length = cut.piece_tokens or max(cut.piece_tokens_min, -(-tokens // pieces))
        ordinal = 0
        # Runs of equal shift, each cut where its tokens pass a multiple of the length.
        shifts = plan.shift[items]
        breaks = np.flatnonzero(np.diff(shifts)) + 1
        for run in np.split(items, breaks) if len(items) else [items]:
            before = np.cumsum(plan.count[run]) - plan.count[run]
            for part in np.split(run, np.flatnonzero(np.diff(before // length)) + 1):
                self._items.append(part)
                self._rows.append(rows)
                self._shifts.append(int(plan.shift[part[0]]) if len(part) else 0)
                self._ordinals.append(ordinal)
                ordinal += 1
        self._row_counts[rows[0] : rows[1]] = ordinal

    def words(self) -> tuple[Tensor, list[int]]:
        """Return the int32 words of all parts, on the host, and the index at which each part begins."""
        parts = [self._words(part) for part in self.parts]
        lengths = [-(-len(words) // WORDS_ALIGNED) * WORDS_ALIGNED for words in parts]
        starts = np.cumsum([0, *lengths]).tolist()
        joined = np.zeros(starts[-1], dtype=np.int32)
        for start, words in zip(starts, parts, strict=False):
            joined[start : start + len(words)] = words
        return torch.from_numpy(joined), starts[:-1]

    def _words(self, part: PrefillPart) -> NDArray[np.int32]:
        """Return the words of one part, whose rows count from 0."""
        plan, pieces = self._plan, slice(part.piece_start, part.piece_stop)
        rows = self._rows[pieces]
        sizes = [len(items) for items in self._items[pieces]]
        widths = [stop - start for start, stop in rows]
        items = np.concatenate([*self._items[pieces], np.zeros(0, dtype=np.int64)]).astype(np.int64)
        entry_rows = [np.arange(start, stop) - part.row_start for start, stop in rows]
        arrays = (
            np.cumsum([0, *sizes]),
            np.cumsum([0, *widths]),
            plan.block[items],
            plan.first[items],
            plan.count[items],
            plan.base[items],
            np.zeros(len(items)),  # tails do not grow
            np.concatenate([*entry_rows, np.zeros(0, dtype=np.int64)]),
            np.repeat(self._shifts[pieces], widths),
            np.repeat(self._ordinals[pieces], widths),
            np.cumsum([0, *self._row_counts[part.row_start : part.row_stop].tolist()]),
            plan.query_position[part.row_start : part.row_stop],
        )
        offsets = np.cumsum([HEADER_WORDS, *map(len, arrays)])
        header = np.zeros(HEADER_WORDS, dtype=np.int32)
        row_count = part.row_stop - part.row_start
        counts = (len(sizes), len(items), sum(widths), row_count, part.partials, self.tokens_read)
        header[: len(counts) + 3] = [MAGIC, offsets[-1], *counts, max(widths, default=0)]
        header[len(counts) + 3 : len(counts) + 3 + len(arrays)] = offsets[:-1]
        return np.concatenate([header, *(array.astype(np.int32) for array in arrays)])


class PrefillDeviceWork:
    """A prefill plan's words on the device; private to `CudaKernels`."""

    def __init__(self, key: WorkKey, work: PrefillWork, plan: PrefillPlan) -> None:
        self.key = key
        self.work = work
        words, starts = work.words()
        self._words = words.to(key.device)
        self._starts = starts
        self.has_shifts = bool(plan.shift.any())
        self.last_block = int(plan.block.max(initial=-1))

    @property
    def parts(self) -> list[tuple[PrefillPart, int]]:
        """The parts, each with the address of its words."""
        base = self._words.data_ptr()
        return [(part, base + 4 * start) for part, start in zip(self.work.parts, self._starts, strict=True)]
