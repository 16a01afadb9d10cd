"""A chunk as the tiers below the device see it.

The controller's tree node is a `TieredChunk`; the simulations use bare ones. Everything here but `last_use` is written
by the directory only.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from trunkline.kvstore.extents import NO_SLOT
from trunkline.kvstore.names import ChunkName

QueueKey = tuple[float, ...]
"""A waiting job's place in the queue, smallest first: unique, and all of the same length."""


class CopyLocations:
    """Where the copies of a chunk are.

    A copy is *ready* when it may be read: a planned save at once, because loads are planned after it; what the
    background moves bring only when every rank has verified it. Until then its slot is reserved.
    """

    __slots__ = ("arrived", "busy", "disk", "disk_ready", "host", "host_ready", "remote")

    def __init__(self) -> None:
        self.host = NO_SLOT
        self.disk = NO_SLOT
        self.host_ready = False
        self.disk_ready = False
        self.remote = False
        self.busy = 0
        """Background moves in flight that read or write a copy."""
        self.arrived = 0
        """When it came into the tiers, as a serial number (the FIFO policy's); 0: it is not there."""

    @property
    def is_stored(self) -> bool:
        """Whether some tier below the device has a ready copy."""
        return self.host_ready or self.disk_ready or self.remote


class TieredChunk(CopyLocations):
    """A chunk: where its copies are, who needs it, and what hangs below it."""

    __slots__ = (
        "claims",
        "depth",
        "expires",
        "is_forgotten",
        "last_use",
        "name",
        "parent",
        "pins",
        "stored_below",
        "wants",
    )

    def __init__(self, parent: TieredChunk | None, name: ChunkName) -> None:
        super().__init__()
        self.parent = parent
        """None for a root, which has no copies."""
        self.name = name
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.last_use = 0.0
        self.expires = 0.0
        """When its copies are given up; 0 or infinity: never. Set by `Directory.keep`."""
        self.claims = 0
        """Preempted sequences that want to find it in host memory."""
        self.pins = 0
        self.stored_below = 0
        """Children that have a copy here, or a descendant that has: these leave first."""
        self.is_forgotten = False
        """Its owner has removed it; moves in flight may still use its slots."""
        self.wants: list[tuple[QueueKey, int]] = []
        """Waiting jobs that will use it, in the order of the queue: (key, job)."""

    @property
    def on_device(self) -> bool:
        """Whether the device holds it, too. False here: the tree's node knows."""
        return False

    @property
    def token_count(self) -> int:
        """For costs and statistics. 1 here: the tree's node knows."""
        return 1


ChunkT = TypeVar("ChunkT", bound=TieredChunk)


class ChangeLog(Generic[ChunkT]):
    """Chunks whose whereabouts may have changed since somebody looked; nothing is noted before somebody does."""

    def __init__(self) -> None:
        self._items: dict[ChunkT, None] | None = None

    def start(self) -> None:
        """From now on somebody takes them regularly."""
        if self._items is None:
            self._items = {}

    @property
    def is_on(self) -> bool:
        return self._items is not None

    def note(self, chunk: ChunkT) -> None:
        """It may be in other tiers than before; once too often does no harm."""
        if self._items is not None:
            self._items[chunk] = None

    def __contains__(self, chunk: ChunkT) -> bool:
        return self._items is not None and chunk in self._items

    def take(self) -> dict[ChunkT, None]:
        """Those since the last call, in the order in which they were noted first."""
        taken = self._items
        if not taken:
            return {}
        self._items = {}
        return taken
