"""Work plans on the device: the buffer of the decode plan, and how prefill plans are made.

Decode: one buffer of fixed capacity holds [steps, padding, the plan's words]. It is overwritten, or single words
of it (`cuda_decode`), only when the plan changes, by a copy on the stream from one of two pinned staging buffers;
between changes a kernel adds to `steps`.
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

import dataclasses
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels.cuda_library import CudaError, CudaLibrary
from trunkline.kernels.library_attention import LibraryWork
from trunkline.kernels.live_plan import LiveWork
from trunkline.kernels.native import NativeLibraryError, library
from trunkline.kernels.plan import PrefillPlan, WorkOptions
from trunkline.kvstore.chunks import Int32Array

# Words of the header (csrc/common/work_plan.h, WorkHeader).
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
_NO_CHANGES: Final = np.zeros((0, 2), dtype=np.int32)


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
    narrow_rows: int
    tile_tokens: int
    grid: int
    invariant_tokens: int
    share: bool


class CudaDecodeWork:
    """A decode plan's words; private to `CudaKernels`."""

    def __init__(
        self, options: WorkOptions, words: Tensor, has_shifts: bool, live: LiveWork | None = None
    ) -> None:
        """
        Args:
            live: What the words follow; None: they do not change.
        """
        self.options = options
        self.words = words
        self.live = live
        self.made = 0 if live is None else live.made
        self.partials = int(words[PARTIALS])
        self.tokens = int(words[TOKENS])
        self.needs_merge = self.partials != int(words[ROWS])
        self.has_shifts = has_shifts
        self.last_block = -1
        """A bound of the blocks that the plan reads."""


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

    def memory(self) -> Tensor:
        """Return all of the memory, for data that is needed during one call only."""
        if not len(self._memory):
            self.take(0, 1, 1)
        return self._memory

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


class Staging:
    """Two host buffers that take turns: words on their way to the device, pinned where there is a GPU."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._buffers = [torch.zeros(capacity, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._copied: list[torch.cuda.Event] = (
            [torch.cuda.Event() for _ in range(2)] if on_gpu else []  # type: ignore[no-untyped-call]
        )
        self._turn = 0

    def take(self) -> Tensor:
        """Return the buffer to write next, after the copy from it that was enqueued before the last one."""
        self._turn ^= 1
        if self._copied:
            self._copied[self._turn].synchronize()  # almost always long done
        return self._buffers[self._turn]

    def send(self, staged: Tensor, to: Tensor) -> None:
        """Enqueue the copy of the front of the buffer that was taken last."""
        to[: len(staged)].copy_(staged, non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()

    def wait(self) -> None:
        """Wait until all copies are done."""
        for event in self._copied:
            event.synchronize()


class DeviceWork:
    """The device buffer of the decode plan."""

    def __init__(self, device: torch.device) -> None:
        self.generation = 0
        """Number of reallocations of the buffer: graphs captured before the last reallocation are stale."""
        self.resident: CudaDecodeWork | None = None
        """The plan that the buffer holds."""
        self.steps = 0
        """The step that the buffer holds."""
        self.is_current = False
        """Whether all that the plan has changed up to this step is in the buffer."""
        self.uploaded_words = 0
        """Number of words that were copied to the device so far."""
        self.is_written = False
        """Whether the buffer was written, by a launch or a copy, since attention was last launched. The next
        launch must not read the plan while what was enqueued before it still runs."""
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.int32, device=device)
        self._changes = self._buffer
        self._generation = -1
        """That of the live plan's words, of which the buffer is a mirror."""
        self._staging: Staging | None = None

    @property
    def steps_address(self) -> int:
        return self._buffer.data_ptr()

    @property
    def words_address(self) -> int:
        return self._buffer.data_ptr() + 4 * STEPS_WORDS

    def follow(self, work: CudaDecodeWork, steps: int, library: CudaLibrary, stream: int) -> None:
        """Make the buffer hold the plan at a step, in stream order: work that was enqueued before still reads what
        was there."""
        live, resident = work.live, self.resident
        if live is None:
            changes = None if resident is not work else _NO_CHANGES
        else:
            changes = live.take_changes()
            if resident is None or resident.live is not live or self._generation != live.generation:
                changes = None
            self._generation = live.generation
        self.is_written |= changes is None or len(changes) > 0 or steps != self.steps
        if changes is None or 4 * len(changes) > len(work.words):
            self._upload(work.words, steps)
        elif len(changes):
            self._patch(changes, steps, library, stream)
        elif steps != self.steps:
            library.call("add_steps", self.steps_address, steps - self.steps, stream)
        self.resident, self.steps, self.is_current = work, steps, True

    def _upload(self, words: Tensor, steps: int) -> None:
        """Replace the plan."""
        needed = STEPS_WORDS + len(words)
        if needed > len(self._buffer):
            self._grow(needed)
        staging = self._taken()
        staging[0] = steps
        staging[STEPS_WORDS:needed] = words
        self._send(staging[:needed], self._buffer)

    def _patch(self, changes: Int32Array, steps: int, library: CudaLibrary, stream: int) -> None:
        """Write single words, the step among them."""
        staging, count = self._taken(), len(changes) + 1
        pairs = staging[: 2 * count].numpy().reshape(-1, 2)
        pairs[0] = 0, steps
        pairs[1:] = changes
        pairs[1:, 0] += STEPS_WORDS
        self._send(staging[: 2 * count], self._changes)
        library.call("patch_words", self._buffer.data_ptr(), self._changes.data_ptr(), count, stream)

    def reserve(self, words: int) -> None:
        """Make room for plans of so many words, so that graphs stay valid for all of them."""
        if STEPS_WORDS + words > len(self._buffer):
            self._grow(STEPS_WORDS + words)
            self.resident = None

    def replayed(self) -> None:
        """Note that a graph has let the buffer go on by one step."""
        self.steps += 1
        self.is_current = False

    def _taken(self) -> Tensor:
        assert self._staging is not None
        return self._staging.take()

    def _send(self, staged: Tensor, to: Tensor) -> None:
        assert self._staging is not None
        self._staging.send(staged, to)
        self.uploaded_words += len(staged)

    def _grow(self, needed: int) -> None:
        capacity = grown(len(self._buffer), needed, MIN_WORDS)
        if self._staging is not None:
            self._staging.wait()
        self._buffer = torch.empty(capacity, dtype=torch.int32, device=self._device)
        self._changes = torch.empty(capacity, dtype=torch.int32, device=self._device)
        self._staging = Staging(capacity, self._device)
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
    word: int
    """Index of the part's first word, a multiple of 4 (16 bytes)."""

    @property
    def needs_merge(self) -> bool:
        return self.partials > self.row_stop - self.row_start


class PrefillWork:
    """The words of a prefill plan (`csrc/common/prefill_plan.h`), part by part, and their sizes."""

    def __init__(self, plan: PrefillPlan, cut: PrefillCut) -> None:
        """
        Raises:
            ValueError: Arrays of the plan contradict each other.
            NativeLibraryError: The library is not installed.
        """
        module: Any = library()
        if module is None:
            raise NativeLibraryError("the compiled CPU kernels, which hold the planner, are not installed")
        items = (plan.block, plan.first, plan.count, plan.base, plan.shift)
        arrays = (plan.query_indptr, plan.item_indptr, plan.query_position, *items)
        sizes = (plan.num_entries, len(plan.query_position), len(plan.block))
        words, parts = module.plan_prefill(
            torch.from_numpy(np.concatenate(arrays, dtype=np.int32)), [*sizes, *dataclasses.astuple(cut)]
        )
        self.words = torch.from_numpy(np.from_dlpack(words))
        """The int32 words of all parts, on the host."""
        rows = np.asarray(np.from_dlpack(parts), dtype=np.int32).reshape(-1, 6)
        self.parts = tuple(PrefillPart(*map(int, row)) for row in rows)


class PrefillDeviceWork:
    """A prefill plan's work on the device; private to `CudaKernels`."""

    def __init__(
        self, plan: PrefillPlan, own: PrefillWork | None, library: LibraryWork | None, device: torch.device
    ) -> None:
        """
        Args:
            plan: The whole plan.
            own: What our kernel computes of it; comes first.
            library: What a library computes of it.
        """
        self.library = library
        self._parts = () if own is None else own.parts
        self._words = torch.empty(0) if own is None else own.words.to(device)
        self.has_shifts = bool(plan.shift.any())
        self.last_block = int(plan.block.max(initial=-1))
        self.tokens_read = int(plan.count.sum())

    @property
    def parts(self) -> list[tuple[PrefillPart, int]]:
        """The parts of our kernel's work, each with the address of its words."""
        base = self._words.data_ptr()
        return [(part, base + 4 * part.word) for part in self._parts]


class PrefillWorks(dict[tuple[WorkKey, int, int | None], PrefillDeviceWork]):
    """A prefill plan's works on the device, by all that decides them besides the plan: sizes, layers of the pool,
    and the longest context that a library takes. Layers of one model may differ in them."""
