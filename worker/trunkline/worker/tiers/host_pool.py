"""The host tier of one rank: KV blocks in main memory, outside the device pool (PagedAttention §4.5, swapping;
CachedAttention §3.3).

Which chunk is in which slot is the controller's business; a slot here knows the generation of its content, so that
a read never takes an older use's bytes for those it wants. Names are kept for peers only (`SlotNames`). A block is
kept in plain order, whatever order the kernels hold it in (`Kernels.gather_slots`), layer behind layer, so that
one can come before the next.
"""

from __future__ import annotations

import mmap
from itertools import groupby
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.large_pages import advise_large_pages
from trunkline.kernels.ops import Kernels, KvPool
from trunkline.kvstore.chunks import Int32Array, SlotId
from trunkline.kvstore.window_share import LoadedLayers
from trunkline.worker.errors import PlanError, WorkerConfigError
from trunkline.worker.tiers.slot_names import SlotNames

UInt8Array = NDArray[np.uint8]

_EMPTY: Final = -1
"""Generation of a slot without content; the controller's generations are not negative."""


class HostPool:
    """One area of memory in slots, and the copies between it and the device pool.

    Two sides: what a slot holds by the order of the plans (`begin_saves`, `begin_loads`: the thread that takes
    plans), and the bytes (`gather`, `scatter`: the copy threads; `view`: the threads of the tiers below). The
    `Copier` orders the two.
    """

    def __init__(self, capacity_slots: int, pool: KvPool) -> None:
        """Reserve address space; memory is taken page by page as slots are first written (on a GPU at once, as
        its copies need memory that stays where it is).

        Raises:
            WorkerConfigError: the system does not give that much.
        """
        data = pool.data
        self.capacity_slots = capacity_slots
        self.format = pool.format
        """What a slot's bytes are, which are in plain order."""
        self.slot_bytes = pool.format.chunk_bytes
        self.layers = pool.format.layers
        self.names = SlotNames()
        self._pool = pool
        self._bytes = _reserve(capacity_slots * self.slot_bytes).view(capacity_slots, -1)
        self._generations = np.full(capacity_slots, _EMPTY, dtype=np.int64)
        self._slots = self._bytes.view(data.dtype).view(capacity_slots, *data.shape[1:])
        self._rows: NDArray[np.uint8] = self._bytes.numpy().reshape(
            capacity_slots, pool.format.stretches, pool.format.heads, pool.format.head_bytes
        )
        self.is_pinned = data.is_cuda
        advise_large_pages(self._bytes)
        if self.is_pinned:  # this takes all of the memory, so in large pages if there are any
            _pin(self._bytes)

    # --- what the plans say

    def begin_saves(self, moves: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Note that, by the order of the plans, each slot holds the content of its block from now on.

        Args:
            moves: int32 `[n, 3]`: block, slot, generation; slots are distinct.

        Returns:
            Blocks and slots, in the order of the slots.

        Raises:
            PlanError: a block or a slot that does not exist, or a slot that has newer content.
        """
        blocks, slots, generations = self._check(moves, distinct=1)
        held = self._generations[slots]
        newer = (held > generations).nonzero()[0]
        if len(newer):
            late = int(newer[0])
            raise PlanError(
                f"save to slot {slots[late]} with generation {generations[late]}: it holds generation {held[late]}"
            )
        self.names.drop(slots.tolist())
        self._generations[slots] = generations
        return blocks, slots

    def begin_loads(
        self, moves: Int32Array, parts: UInt8Array | None = None
    ) -> tuple[Int32Array, Int32Array, UInt8Array | None]:
        """Check the loads of a plan. In later plans each of these blocks holds the contents of its slot.

        Args:
            moves: int32 `[n, 3]`: block, slot, generation; blocks are distinct.
            parts: uint8 `[n]`, for each move a `LoadedLayers`; None: all layers.

        Returns:
            Blocks, slots and parts, in the order of the slots.

        Raises:
            PlanError: a block or a slot that does not exist, or a slot that does not hold this generation; or
                parts where blocks always have memory for all layers.
        """
        blocks, slots, generations = self._check(moves, distinct=0)
        held = self._generations[slots]
        if (held != generations).any():
            wrong = int(np.flatnonzero(held != generations)[0])
            raise PlanError(
                f"load of generation {generations[wrong]} from slot {slots[wrong]}: it holds "
                + ("nothing" if held[wrong] == _EMPTY else f"generation {held[wrong]}")
            )
        if parts is not None:
            if len(parts) != len(moves) or parts.max() > max(LoadedLayers) or not self._pool.windowed:
                raise PlanError(
                    f"{len(moves)} loads of layers {parts.tolist()}, which this rank's pool does not allow"
                )
            parts = parts[np.argsort(moves[:, 1], kind="stable")]
        return blocks, slots, parts

    def _check(self, moves: Int32Array, *, distinct: int) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Return blocks, slots and generations, checked, in the order of the slots."""
        for what, column, limit in (("block", 0, self._pool.blocks), ("slot", 1, self.capacity_slots)):
            values = moves[:, column].tolist()
            if values and not 0 <= min(values) <= max(values) < limit:
                raise PlanError(f"{what}s {min(values)} to {max(values)} moved; there are {limit}")
            # Not by `np.unique`, whose first call imports much of NumPy: a rank checks moves before it is ready.
            if column == distinct and len(set(values)) < len(values):
                raise PlanError(f"a {what} is written twice by moves of one plan")
        if len(moves) > 1:
            moves = moves[np.argsort(moves[:, 1], kind="stable")]
        return moves[:, 0], moves[:, 1], moves[:, 2]

    # --- the copies

    def gather(self, kernels: Kernels, blocks: Int32Array, slots: Int32Array, layers: range) -> None:
        """Copy layers of blocks into slots. On a GPU this only enqueues on the current stream."""
        kernels.gather_slots(self._pool, blocks, layers, self._slots, slots)

    def scatter(self, kernels: Kernels, blocks: Int32Array, slots: Int32Array, layers: range) -> None:
        """Copy layers of slots into blocks. On a GPU this only enqueues on the current stream."""
        kernels.scatter_slots(self._pool, blocks, layers, self._slots, slots)

    def scatter_parts(
        self, kernels: Kernels, blocks: Int32Array, slots: Int32Array, layers: range, parts: UInt8Array
    ) -> None:
        """Copy layers of slots into blocks, of each block those that `parts` says.

        Args:
            parts: uint8 `[n]`, a `LoadedLayers` for each block.
        """
        for is_windowed, run in groupby(layers, self._pool.windowed.__getitem__):
            rows = parts != (LoadedLayers.PLAIN if is_windowed else LoadedLayers.WINDOWED)
            first, *others = run
            if rows.any():
                self.scatter(kernels, blocks[rows], slots[rows], range(first, first + 1 + len(others)))

    @property
    def memory(self) -> Tensor:
        """All slots, uint8 `[slots, slot_bytes]`."""
        return self._bytes

    # --- for the tiers below

    def generation(self, slot: int) -> int:
        """Return the generation of a slot's content; negative if it has none."""
        return int(self._generations[slot])

    def set_generation(self, slot: int, generation: int, name: bytes = b"") -> None:
        """Note that a slot's bytes were written through `view`, and are whole.

        Args:
            name: Name of the chunk that they are; empty: peers do not get it from here.
        """
        self._generations[slot] = generation
        if name:
            self.names.put(slot, name)

    def view(self, slot: int) -> memoryview:
        """Return a slot's bytes. The view must not be used after `close`."""
        return self.rows(slot).reshape(-1).data

    def rows(self, slot: int) -> NDArray[np.uint8]:
        """Return a slot's bytes as `[stretches, KV heads, bytes of a head]`, with the same validity as `view`."""
        rows: NDArray[np.uint8] = self._rows[slot]
        return rows

    def address(self, slot: int) -> int:
        """Return the address of a slot's bytes, with the same validity as `view`."""
        return self._bytes.data_ptr() + slot * self.slot_bytes

    def discard(self, slot: SlotId) -> None:
        """Forget a slot's content."""
        self.names.drop([slot])
        self._generations[slot] = _EMPTY

    def close(self) -> None:
        """Give the memory back. No copy may be under way."""
        if self._pool.data.is_cuda and self.capacity_slots:
            _cuda_runtime().cudaHostUnregister(self._bytes.data_ptr())
        self.capacity_slots = 0
        self._bytes = self._slots = torch.empty(0)
        self._generations, self._rows = self._generations[:0], self._rows[:0].copy()


def _reserve(size: int) -> Tensor:
    """Return zeros, uint8 `[size]`, page-aligned; the system gives a page when it is first written."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise WorkerConfigError(f"no memory for a host pool of {size} bytes: {error}") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(memory: Tensor) -> None:
    """Let a GPU copy to and from the memory by itself."""
    size = memory.numel()
    status = int(_cuda_runtime().cudaHostRegister(memory.data_ptr(), size, 0))
    if status != 0:
        raise WorkerConfigError(f"no pinned memory for a host pool of {size} bytes: CUDA error {status}")


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
