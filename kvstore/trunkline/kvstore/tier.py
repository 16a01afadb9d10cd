"""The interface of a storage tier below the device pool.

The controller's directory decides which chunk lies in which slot of which tier and orders the moves; a tier only
stores and returns bytes. Every rank keeps its own shard of a chunk under the same `SlotId`. The disk and
remote tiers implement `Tier`. The device pool and the host pool are not, because kernels and other tiers use their
memory in place.

To add a tier, write a class with these methods. A tier that several controllers share implements `SharedTier`; the
store below it is chosen by the scheme of its URL (`trunkline.kvstore.remote_stores`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

from trunkline.kvstore.chunks import ChunkName, SlotId


class TierKind(IntEnum):
    """The places where a chunk can be. The numbers are on the wire; up to `REMOTE` the faster one comes first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3
    PEER = 4
    """Host memory of another group, from which chunks can be pulled."""


@dataclass(slots=True)
class TierTotals:
    """Counts of what a tier has done since the start of its controller. The counts go on when workers are
    replaced."""

    writes: int = 0
    """Number of chunks that were copied into the tier. For the device: loads from host memory."""
    reads: int = 0
    """Number of chunks that were copied out of the tier. For the device: saves to host memory."""
    evictions: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier's size, its totals, and how well it works at present."""

    slots: int
    """Number of the tier's slots; 0: not known (remote, peer)."""
    used: int
    totals: TierTotals
    read_us: float = 0.0
    """Microseconds of one read while many are in flight; 0: nothing is read (host memory), or was yet (peers)."""
    problem: str = ""
    """Why the tier's moves fail; "": they do not."""


class SlotKey(NamedTuple):
    """The content that a slot must have for a read to succeed. Any other content is a miss, never wrong KV."""

    slot: SlotId
    name: ChunkName
    generation: int
    """Number of this use of the slot. It grows each time the controller hands the slot out, so that a late write
    cannot pass for a new one."""


class Tier(Protocol):
    """Bounded storage of one rank's chunk shards.

    Methods may block: movers call them off the thread that executes steps, several at the same time for
    different keys.
    """

    kind: TierKind
    capacity_slots: int
    """Number of slots of the tier; 0: it has no slots of its own."""
    slot_bytes: int

    def write(self, key: SlotKey, data: memoryview) -> None:
        """Store `data` (`slot_bytes` long) durably enough for this tier.

        Raises:
            OSError: the tier could not store it; the controller then never publishes the slot.
        """

    def read(self, key: SlotKey, into: memoryview) -> bool:
        """Fill `into` and return True, or return False if the slot does not hold exactly `key`, whole.

        `into` holds anything after False, or after an error.

        Raises:
            OSError: the tier could not be read.
        """

    def close(self) -> None:
        """Release files, connections and memory."""


@runtime_checkable
class SharedTier(Tier, Protocol):
    """Storage that other groups and controllers use as well.

    A chunk is found by its name alone and may be lost at any time. `SlotKey.slot` and `generation` are ignored.
    Several chunks travel in one round trip."""

    def write_many(self, chunks: Sequence[tuple[SlotKey, memoryview, float]]) -> None:
        """Store chunks, each with the seconds without use after which it may be forgotten; 0: the tier's own time.

        Raises:
            OSError: The tier cannot be reached; some may be stored.
        """

    def read_many(self, chunks: Sequence[tuple[SlotKey, memoryview]]) -> list[bool]:
        """Fill each buffer with its chunk; return for each whether it is there, whole (see `read`).

        Raises:
            OSError: The tier cannot be reached.
        """

    def present(self, names: Sequence[ChunkName]) -> int:
        """Return how many chunks from the first one on are stored now without a gap. This counts as their use.

        A store where each question takes long may overlook a gap; reading that chunk is then a miss.

        Raises:
            OSError: The tier cannot be reached.
        """

    def delete(self, names: Sequence[ChunkName]) -> None:
        """Delete chunks; those that are not there are left out.

        Raises:
            OSError: The tier cannot be reached; some may be deleted.
        """
