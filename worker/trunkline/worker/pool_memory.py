"""A rank's KV pools on the device and in host memory: how many blocks fit, making the pools, and taking their
memory from the system before blocks are written."""

from __future__ import annotations

import mmap
from typing import Final

import torch
from torch import Tensor

from trunkline.kernels.large_pages import LARGE_PAGE_BYTES, take_pages
from trunkline.kernels.ops import KvPool
from trunkline.kernels.thin_memory import ThinMemory, ThinMemoryError
from trunkline.kvstore.chunks import Int32Array, unpack_int32
from trunkline.kvstore.window_share import blocks_within, whole_blocks
from trunkline.worker.config import WorkerConfig
from trunkline.worker.device import choose_kernels
from trunkline.worker.errors import PlanError, WorkerConfigError
from trunkline.worker.messages import StepPlan
from trunkline.worker.model.decoder import make_kv_pool
from trunkline.worker.model.model_config import ModelConfig
from trunkline.worker.tiers.copier import Copier
from trunkline.worker.tiers.copy_lane import CopyOptions
from trunkline.worker.tiers.host_pool import HostPool

AHEAD_BYTES: Final = 16 << 20
"""How much memory of a pool an idle rank takes ahead of the blocks in use, at least: what a prompt of 2,048 tokens
of a small model needs on each of two ranks."""
MOST_AHEAD_BYTES: Final = 64 << 20
"""As much at most. Large models compute prompts so slowly that first writes do not count."""
_PAUSE_MS: Final = 20
"""How long no message must have come before more memory is taken. Within a request messages come faster."""


class PoolMaker:
    """Makes the KV pool of a rank, whose blocks can be thin if the configuration says so."""

    def __init__(self, config: WorkerConfig, model: ModelConfig, device: torch.device) -> None:
        """
        Raises:
            WorkerConfigError: blocks are to be thin, and the model has no layers with a window beside others.
        """
        self._config = config
        self._device = device
        self._windowed = [own.window > 0 for own in model.attention[: model.kv_layers]]
        if config.window_share < 1 and not model.part_window:
            raise WorkerConfigError(
                f"window_share is {config.window_share:g}, but not some of the model's layers have a window while "
                "others see all tokens; use 1"
            )
        self.part = model.chunk_format(config.chunk_size, config.dtype, config.kv_dtype).of_rank(config.tp)
        """The format of a chunk's part on this rank."""

    @property
    def fitting(self) -> int:
        """Number of blocks that fit into the memory that the configuration gives."""
        config = self._config
        return config.pool_blocks or blocks_within(
            config.kv_memory_bytes, self.part, self._windowed, config.window_share, mmap.PAGESIZE
        )

    def make(self, blocks: int) -> KvPool:
        """Return a pool of so many blocks.

        Raises:
            WorkerConfigError: its blocks cannot be thin.
        """
        if self._config.window_share == 1:
            return make_kv_pool(blocks, self.part, self._device)
        try:
            return ThinMemory(blocks, self.part, self._windowed).pool
        except ThinMemoryError as error:
            raise WorkerConfigError(str(error)) from error


class PagesAhead:
    """Memory of one pool that is taken ahead of the highest item (block or slot) in use. Pools hand out items in
    ascending order, so the memory behind that item is the next to be written."""

    def __init__(self, memory: Tensor, item_bytes: int) -> None:
        """
        Args:
            memory: All items of the pool, one behind the other; contiguous, in host memory.
            item_bytes: Size of an item.
        """
        self._bytes = memory.view(torch.uint8).flatten()
        self._item_bytes = item_bytes
        self._used = 0
        """Bytes up to the end of the highest item in use."""
        self._taken = 0
        """Bytes up to the end of the memory that was taken or is in use."""
        self._used_before = 0
        """What `_used` was when memory was last ahead as wanted."""
        self._burst = 0
        """The most bytes that came into use between two times when memory was ahead as wanted."""

    @property
    def is_short(self) -> bool:
        """Whether less is taken ahead than ever came into use between two times when it was enough, within
        `AHEAD_BYTES` and `MOST_AHEAD_BYTES`."""
        return self._lacks(min(max(self._burst, AHEAD_BYTES), MOST_AHEAD_BYTES))

    @property
    def is_bare(self) -> bool:
        """Whether the next block to be written may have to wait for a page."""
        return self._lacks(LARGE_PAGE_BYTES)

    def _lacks(self, wanted: int) -> bool:
        return self._taken < min(self._used + wanted, len(self._bytes))

    def note(self, items: Int32Array) -> None:
        """Note the numbers of items that are in use now."""
        self._used = max(self._used, (int(items.max(initial=-1)) + 1) * self._item_bytes)
        self._taken = max(self._taken, self._used)
        self._burst = max(self._burst, self._used - self._used_before)

    def take(self) -> None:
        """Take the memory up to the end of the next large page."""
        start, address = self._taken, self._bytes.data_ptr()
        # At least a small page, so that there is something to take.
        end = (address + start + mmap.PAGESIZE) // LARGE_PAGE_BYTES + 1
        self._taken = min(end * LARGE_PAGE_BYTES - address, len(self._bytes))
        if not take_pages(self._bytes[start : self._taken]):
            self._taken = len(self._bytes)  # the system cannot do it: first writes take memory as ever
        if not self.is_short:
            self._used_before = self._used


class MemoryAhead:
    """Takes memory for the next chunks of the CPU pool and the host pool while a rank has nothing to do.

    At first these pools are address space only. The system gives each page its memory at the first write to it,
    and clears it; a virtual machine may first have to ask its host, which takes 5 ms of a large page. That is
    time of a prompt for which a client waits. So an idle rank takes a page between two looks for messages: a plan
    that comes then waits for one page at most. An idle rank stays small: no more than `MOST_AHEAD_BYTES` of each
    pool are taken ahead. Behind a step the next page is taken at once if the step has used up what was ahead:
    a cached prompt, whose step is short, writes one block.
    """

    def __init__(self, pool: KvPool, host: HostPool | None) -> None:
        # A device's memory, and what is pinned for it, is there from the start. Thin blocks give theirs back.
        has_pages = pool.data.device.type == "cpu" and pool.thin is None
        self._blocks = PagesAhead(pool.data, pool.format.chunk_bytes) if has_pages else None
        self._slots = None if host is None or host.is_pinned else PagesAhead(host.memory, host.slot_bytes)
        self._areas = [area for area in (self._blocks, self._slots) if area is not None]

    @property
    def is_short(self) -> bool:
        """Whether less of a pool is taken ahead than should be (`PagesAhead.is_short`)."""
        return any(area.is_short for area in self._areas)

    def patience_ms(self, longest_ms: int) -> int:
        """Return how long to wait for a message before `touch`; `longest_ms` if nothing is to be taken."""
        return _PAUSE_MS if self.is_short else longest_ms

    def note(self, plan: StepPlan) -> None:
        """Note the blocks and host slots that a plan takes into use. It has been executed, so its numbers are
        within the pools."""
        if self._blocks is not None:
            for blocks in (*(join.blocks for join in plan.joins), *(fork.blocks for fork in plan.forks)):
                self._blocks.note(unpack_int32(blocks))
            if plan.blocks:
                self._blocks.note(unpack_int32(plan.blocks, columns=3)[:, 2])
        if self._slots is not None:
            for saves in filter(None, (plan.saves, plan.late_saves)):
                self._slots.note(unpack_int32(saves, columns=3)[:, 1])

    def cover(self) -> None:
        """Take the memory of the next block of each pool."""
        for area in self._areas:
            while area.is_bare:
                area.take()

    def touch(self) -> None:
        """Take the next memory of one pool that has less ahead than it should."""
        for area in self._areas:
            if area.is_short:
                area.take()
                return


def windows_of(model: ModelConfig, pool: KvPool, share: float) -> dict[str, int]:
    """Return what the controller has to know of a rank's windows, by the names of `WorkerReady`."""
    whole = whole_blocks(pool.blocks, share) if pool.thin is not None else 0
    return {"window": model.window, "part_window": model.part_window, "whole_blocks": whole}


def thin_blocks(pool: KvPool, blocks: Int32Array) -> None:
    """Give back the memory of blocks for layers with a window.

    Raises:
        PlanError: The pool keeps its memory, or does not have these blocks.
    """
    if pool.thin is None or not (blocks.min() >= 0 and blocks.max() < pool.blocks):
        raise PlanError(f"blocks {blocks.tolist()} are to become thin, which this rank's pool does not allow")
    pool.thin(blocks)


def make_copier(config: WorkerConfig, pool: KvPool, memory_bytes: int, options: CopyOptions) -> Copier | None:
    """Return the copier between the device pool and a new host pool of this size; None for 0 bytes.

    Raises:
        WorkerConfigError: The host pool has no room for a block.
    """
    if not memory_bytes:
        return None
    slots = memory_bytes // pool.format.chunk_bytes
    if slots < 1:
        raise WorkerConfigError("the host pool has no room for a single block; give it more memory, or none")
    return Copier(HostPool(slots, pool), pool.data.device, pool.blocks, lambda: choose_kernels(config, 1), options)
