"""Sums over the GPUs of one host through memory that each of them reads by itself: torch's symmetric memory.

A decode step sums messages of a few kilobytes to a few megabytes twice a layer. NCCL takes its time for what is
around these bytes; here one kernel reads the other GPUs' parts directly. Which way a message takes follows from
its size and type alone, so it is the same on every rank:

      one-shot    each rank reads all parts and adds them: least waiting, `ranks - 1` messages read by each
      multimem    each rank lets the switch between the GPUs add its share, and write the sum to all (NVLink SHARP)
      two-shot    each rank adds its share of all parts and writes the sum to all
      (none)      NCCL: what is larger or of another type

Every way adds the parts in the order of the ranks, or once for all of them: the sum is the same bits everywhere.
That is needed: ranks that route tokens to experts must agree.

Torch's kernels wait for each other by atomic changes in each other's memory. GPUs that only PCIe joins may read
each other's memory, but mostly not change it so: kernels would wait for ever. So the driver is asked first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import CDLL, byref, c_int
from enum import StrEnum
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

BUFFER_BYTES: Final = 8 << 20
"""Memory for a message on each rank, and the largest message."""
ONE_SHOT_BYTES: Final = 1 << 20
"""Largest number of bytes that a rank reads of others in one shot. Chosen, not measured."""
_ALIGNED_BYTES: Final = 16
TYPES: Final = (torch.bfloat16, torch.float32)
"""Types of numbers that torch's kernels add."""
_SHARED_GPU_VARIABLE: Final = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Torch's variable that lets ranks share a GPU, for tests."""
_TRIED_BYTES: Final = (256, BUFFER_BYTES)
"""Messages of all ways that there are for a group."""
_DRIVER: Final = "libcuda.so.1"
_NATIVE_ATOMICS: Final = 3
"""The driver's number of what two GPUs can do (`CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED`)."""


class Way(StrEnum):
    """How a message is summed."""

    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    MULTIMEM = "multimem"


class Place(NamedTuple):
    """Where a rank runs."""

    host: str
    """An id of the running kernel, the same for all processes of a host; "": unknown."""
    gpu: str
    """The GPU's id."""
    reachable: tuple[str, ...]
    """GPUs whose memory the rank's can read and change atomically."""


def way_of(size_bytes: int, dtype: torch.dtype, ranks: int, *, multicast: bool) -> Way | None:
    """Return how a message of each rank is summed; None: not through symmetric memory.

    Args:
        multicast: Whether the switch between the GPUs can add.
    """
    if dtype not in TYPES or not 0 < size_bytes <= BUFFER_BYTES or size_bytes % _ALIGNED_BYTES:
        return None
    if (ranks - 1) * size_bytes <= ONE_SHOT_BYTES:
        return Way.ONE_SHOT
    return Way.MULTIMEM if multicast else Way.TWO_SHOT


def why_apart(places: Sequence[Place], *, may_share: bool) -> str:
    """Return why ranks at these places have no memory in common; empty if they can have.

    Args:
        may_share: Whether several ranks may use one GPU.
    """
    hosts = {place.host for place in places}
    if len(hosts) > 1 or "" in hosts:
        return "the ranks are not on one host"
    if not may_share and len({place.gpu for place in places}) < len(places):
        return "two ranks use one GPU"
    for rank, place in enumerate(places):
        for other, theirs in enumerate(places):
            if theirs.gpu not in (place.gpu, *place.reachable):
                return (
                    f"the GPU of rank {rank} cannot read and atomically change the memory of rank {other}'s, as "
                    "GPUs joined by NVLink can"
                )
    return ""


def place_of(device: torch.device, host: str) -> Place:
    """Return this rank's place.

    Args:
        device: its GPU, with index.
        host: `Place.host`.
    """
    count, own = torch.cuda.device_count(), device.index
    ids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    reachable = [
        ids[i]
        for i in range(count)
        if i != own and torch.cuda.can_device_access_peer(own, i) and changes_atomically(own, i)
    ]
    return Place(host, ids[own], tuple(reachable))


def changes_atomically(own: int, other: int, library: str = _DRIVER) -> bool:
    """Return whether a GPU can change another one's memory atomically; False also if the driver does not say.

    Args:
        own: index of a GPU that this process sees.
        other: index of another one.
        library: the driver's, initialised if it is the real one.
    """
    try:
        driver = CDLL(library)
        devices, found = (c_int(), c_int()), c_int()
        for device, index in zip(devices, (own, other), strict=True):
            if driver.cuDeviceGet(byref(device), index):
                return False
        failed = driver.cuDeviceGetP2PAttribute(byref(found), _NATIVE_ATOMICS, *devices)
    except (OSError, AttributeError):  # no such library or function
        return False
    return not failed and found.value == 1


def may_share_gpus() -> bool:
    """Return whether the environment lets ranks share a GPU."""
    return os.environ.get(_SHARED_GPU_VARIABLE) == "1"


class SymmetricSums:
    """A rank's part of the memory that its group shares. All ranks call `add` for the same messages."""

    def __init__(self, buffer: Tensor, group_name: str, ranks: int, *, multicast: bool) -> None:
        """
        Args:
            buffer: uint8 `[BUFFER_BYTES]`, over which the ranks have met.
        """
        self.multicast = multicast
        """Whether the switch between the GPUs is to add; the same on all ranks."""
        self._buffer = buffer
        self._name = group_name
        self._ranks = ranks

    @classmethod
    def meet(cls, device: torch.device, ranks: int) -> SymmetricSums:
        """Take memory and meet the others of the default process group over it.

        Raises:
            RuntimeError: This device, this driver or this system does not give such memory.
        """
        buffer = symmetric_memory.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        world = dist.group.WORLD
        assert world is not None
        handle = symmetric_memory.rendezvous(buffer, world)
        return cls(buffer, world.group_name, ranks, multicast=handle.multicast_ptr != 0)

    def add(self, tensor: Tensor) -> bool:
        """Sum a contiguous tensor over the ranks, in place, on the current stream; a graph can hold that.

        Returns:
            False: it is to be summed another way; nothing was done.
        """
        way = way_of(tensor.nbytes, tensor.dtype, self._ranks, multicast=self.multicast)
        if way is None or tensor.storage_offset() * tensor.itemsize % _ALIGNED_BYTES:
            return False
        own, shared, ops = tensor.view(-1), self._buffer[: tensor.nbytes].view(tensor.dtype), torch.ops.symm_mem
        if way is Way.ONE_SHOT:
            ops.one_shot_all_reduce_copy_out(shared, own, "sum", self._name, own)
            return True
        shared.copy_(own)
        sum_up = ops.multimem_all_reduce_ if way is Way.MULTIMEM else ops.two_shot_all_reduce_
        sum_up(shared, "sum", self._name)
        own.copy_(shared)
        return True

    def wrong_way(self, rank: int) -> str:
        """Sum known messages in every way that there is here; return what is wrong, empty if nothing is."""
        expected = self._ranks * (self._ranks + 1) / 2
        for dtype in TYPES:
            for size in _TRIED_BYTES:
                message = torch.full(
                    (size // dtype.itemsize,), rank + 1.0, dtype=dtype, device=self._buffer.device
                )
                if not self.add(message) or not bool((message == expected).all()):
                    way = way_of(size, dtype, self._ranks, multicast=self.multicast)
                    return f"a sum of {size} bytes by {way} is wrong"
        return ""
