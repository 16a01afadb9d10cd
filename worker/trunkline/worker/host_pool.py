"""The host tier of one rank: KV blocks in main memory, outside the device pool (PagedAttention §4.5, swapping).

Which chunk is in which slot is the controller's business; a slot here only knows the generation of its
content, so that a read never takes an older use's bytes for those it wants. A block is kept in plain order,
whatever order the kernels hold it in (`Kernels.gather_blocks`).

      pool ──gather_blocks──► staging ──► slots
      pool ◄─scatter_blocks── staging ◄── slots

Large blocks of a CPU's pool go without staging, as many at once as have slots side by side.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels.large_pages import advise_large_pages
from trunkline.kernels.ops import Kernels, KvPool
from trunkline.kvstore.layout import Int32Array, SlotId
from trunkline.kvstore.tier import SlotKey, TierKind
from trunkline.worker.errors import ConfigError, PlanError

_EMPTY: Final = -1
"""Generation of a slot without content; the controller's are not negative."""

_STAGING_BYTES: Final = 64 << 20
"""Staged at once; a single larger block is staged whole."""

_DIRECT_BYTES: Final = 64 << 10
"""From this size on, another call of the kernels costs less than copying a block once more."""

_MEASURED_BLOCKS: Final = 8
_MEASURED_ROUNDS: Final = 3


class HostPool:
    """A `Tier` over one area of memory, and the moves between it and the device pool. Not thread-safe."""

    kind = TierKind.HOST

    def __init__(self, capacity_slots: int, pool: KvPool, kernels: Kernels) -> None:
        """Reserve address space; memory is taken page by page as slots are first written (on a GPU at once, as
        its copies need memory that stays where it is).

        Raises:
            ConfigError: the system does not give that much.
        """
        data = pool.data
        self.capacity_slots = capacity_slots
        self.slot_bytes = data[0].numel() * data.element_size()
        self._pool = pool
        self._kernels = kernels
        self._bytes = _reserve(capacity_slots * self.slot_bytes).view(capacity_slots, -1)
        self._generations = np.full(capacity_slots, _EMPTY, dtype=np.int64)
        self._slots = self._bytes.view(data.dtype).view(capacity_slots, *data.shape[1:])
        self._staged = max(1, _STAGING_BYTES // self.slot_bytes)
        """Blocks that are staged at once; 0: none ever are."""
        if data.is_cuda:
            _pin(self._bytes)
        else:
            advise_large_pages(self._bytes)
            if self.slot_bytes >= _DIRECT_BYTES:
                self._staged = 0

    # --- the moves of a step plan

    def save(self, moves: Int32Array) -> None:
        """Device to host.

        Args:
            moves: int32 `[n, 3]`: block, slot, generation; slots are distinct.

        Raises:
            PlanError: a block or a slot that does not exist, or a slot that has newer content.
        """
        blocks, slots, generations = self._check(moves, distinct=1)
        held = self._generations[slots]
        if (held > generations).any():
            late = int(np.flatnonzero(held > generations)[0])
            raise PlanError(
                f"save to slot {slots[late]} with generation {generations[late]}: it holds generation {held[late]}"
            )
        self._generations[slots] = _EMPTY
        for start, stop in self._pieces(slots):
            if not self._staged:
                first = int(slots[start])
                self._gather(blocks[start:stop], self._slots[first : first + stop - start])
                continue
            staging = self._pool.data.new_empty((stop - start, *self._slots.shape[1:]))
            self._gather(blocks[start:stop], staging)
            self._to_slots(slots[start:stop], staging)
        self._generations[slots] = generations

    def load(self, moves: Int32Array) -> None:
        """Host to device.

        Args:
            moves: int32 `[n, 3]`: block, slot, generation; blocks are distinct.

        Raises:
            PlanError: a block or a slot that does not exist, or a slot that does not hold this generation.
        """
        blocks, slots, generations = self._check(moves, distinct=0)
        held = self._generations[slots]
        if (held != generations).any():
            wrong = int(np.flatnonzero(held != generations)[0])
            raise PlanError(
                f"load of generation {generations[wrong]} from slot {slots[wrong]}: it holds "
                + ("nothing" if held[wrong] == _EMPTY else f"generation {held[wrong]}")
            )
        for start, stop in self._pieces(slots):
            if not self._staged:
                first = int(slots[start])
                source = self._slots[first : first + stop - start]
            else:
                source = self._from_slots(slots[start:stop])
            layers = range(source.shape[1])
            self._kernels.scatter_blocks(self._pool, blocks[start:stop], layers, source)

    def _check(self, moves: Int32Array, *, distinct: int) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Blocks, slots and generations, in the order of the slots."""
        for what, column, limit in (("block", 0, self._pool.blocks), ("slot", 1, self.capacity_slots)):
            values = moves[:, column]
            if len(values) and not 0 <= values.min() <= values.max() < limit:
                raise PlanError(f"{what}s {values.min()} to {values.max()} moved; there are {limit}")
            if column == distinct and len(np.unique(values)) < len(values):
                raise PlanError(f"a {what} is written twice by moves of one plan")
        moves = moves[np.argsort(moves[:, 1], kind="stable")]
        return moves[:, 0], moves[:, 1], moves[:, 2]

    def _pieces(self, slots: Int32Array) -> Iterator[tuple[int, int]]:
        """Ranges of the moves that one call of the kernels carries out: as many as are staged at once, or whose
        slots lie side by side."""
        if not self._staged:
            yield from _runs(slots)
        else:
            for start in range(0, len(slots), self._staged):
                yield start, min(start + self._staged, len(slots))

    def _gather(self, blocks: Int32Array, out: Tensor) -> None:
        self._kernels.gather_blocks(self._pool, blocks, range(out.shape[1]), out)

    def _to_slots(self, slots: Int32Array, staging: Tensor) -> None:
        if not staging.is_cuda:
            self._slots.index_copy_(0, torch.from_numpy(slots.astype(np.int64)), staging)
            return
        for start, stop in _runs(slots):
            first = int(slots[start])
            self._slots[first : first + stop - start].copy_(staging[start:stop], non_blocking=True)
        # The slots may be read, and the staging memory used again, from now on.
        torch.cuda.current_stream().synchronize()

    def _from_slots(self, slots: Int32Array) -> Tensor:
        device = self._pool.data.device
        if device.type == "cpu":
            return self._slots.index_select(0, torch.from_numpy(slots.astype(np.int64)))
        staging = self._pool.data.new_empty((len(slots), *self._slots.shape[1:]))
        for start, stop in _runs(slots):
            first = int(slots[start])
            staging[start:stop].copy_(self._slots[first : first + stop - start], non_blocking=True)
        return staging

    def wait(self) -> None:
        """Until all moves are done, for measuring: a GPU's loads are only ordered before its later kernels."""
        if self._pool.data.is_cuda:
            torch.cuda.current_stream().synchronize()

    def measure(self) -> float:
        """Microseconds that one save and one load of a block take, found out with real blocks.

        What the device pool holds stays; the host pool must be empty.
        """
        count = min(_MEASURED_BLOCKS, self.capacity_slots, self._pool.blocks)
        if not count:
            return 0.0
        index = np.arange(count, dtype=np.int32)
        moves = np.stack([index, index, np.zeros_like(index)], axis=1)
        best = float("inf")
        self.save(moves)  # takes the pages
        for _ in range(_MEASURED_ROUNDS):
            started = time.perf_counter_ns()
            self.save(moves)
            self.load(moves)
            self.wait()
            best = min(best, (time.perf_counter_ns() - started) / 1000)
        self._generations[:] = _EMPTY
        return best / count

    # --- Tier

    def write(self, key: SlotKey, data: memoryview) -> None:
        """Store a block's bytes (see `Tier.write`)."""
        if len(data) != self.slot_bytes:
            raise OSError(f"{len(data)} bytes for a slot of {self.slot_bytes}")
        self._generations[key.slot] = _EMPTY
        self._bytes[key.slot].numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        self._generations[key.slot] = key.generation

    def read(self, key: SlotKey, into: memoryview) -> bool:
        """Fill `into` with a block's bytes (see `Tier.read`)."""
        if self._generations[key.slot] != key.generation:
            return False
        np.frombuffer(into, dtype=np.uint8)[:] = self._bytes[key.slot].numpy()
        return True

    def discard(self, slot: SlotId) -> None:
        """Forget a slot's content."""
        self._generations[slot] = _EMPTY

    def close(self) -> None:
        """Give the memory back."""
        if self._pool.data.is_cuda and self.capacity_slots:
            self.wait()
            _cuda_runtime().cudaHostUnregister(self._bytes.data_ptr())
        self.capacity_slots = 0
        self._bytes = self._slots = torch.empty(0)
        self._generations = self._generations[:0]


def _reserve(size: int) -> Tensor:
    """uint8 `[size]`, page-aligned, zero, and not there until it is written to."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"no memory for a host pool of {size} bytes: {error}") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(memory: Tensor) -> None:
    """Let a GPU copy to and from the memory by itself."""
    size = memory.numel()
    status = int(_cuda_runtime().cudaHostRegister(memory.data_ptr(), size, 0))
    if status != 0:
        raise ConfigError(f"no pinned memory for a host pool of {size} bytes: CUDA error {status}")


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _runs(slots: Int32Array) -> Iterator[tuple[int, int]]:
    """Ranges in which ascending slots are consecutive."""
    if not len(slots):
        return
    edges = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    yield from pairwise(edges)
