"""A chunk as the tiers below the device see it: where its copies are, and which requests need it.

The controller's tree node is a `TieredChunk`; the simulations use bare ones. Its owner writes `last_use`;
everything else here is written by the directory only.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from trunkline.kvstore.extents import NO_SLOT
from trunkline.kvstore.names import ChunkName

QueueKey = tuple[float, ...]
"""A waiting job's place in the queue, smallest first. Keys are unique and all of the same length."""


class CopyLocations:
    """Where the copies of a chunk are.

    A copy is *ready* when it may be read. The copy of a planned save is ready at once, because loads are planned
    after it. The copy that a background move brings is ready when every rank has verified it; until then its slot
    is reserved.
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
        """Serial number of the chunk's arrival in the tiers, for the FIFO policy; 0: no tier has it."""

    @property
    def is_stored(self) -> bool:
        """Whether some tier below the device has a ready copy."""
        return self.host_ready or self.disk_ready or self.remote


class TieredChunk(CopyLocations):
    """A chunk with its copies, the requests that need it, and its place in a path of chunks."""

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
        """Children that have a copy in a tier, or a descendant that has one: these leave first."""
        self.is_forgotten = False
        """Its owner has removed it; moves in flight may still use its slots."""
        self.wants: list[tuple[QueueKey, int]] = []
        """Waiting jobs that will use it, in the order of the queue: (key, job)."""

    @property
    def on_device(self) -> bool:
        """Whether the device has a copy as well. The tree's node overrides this."""
        return False

    @property
    def token_count(self) -> int:
        """Tokens of the chunk, for costs and statistics. The tree's node overrides this."""
        return 1


ChunkT = TypeVar("ChunkT", bound=TieredChunk)


class ChangeLog(Generic[ChunkT]):
    """Chunks that may be in other tiers than at the last look. Empty until `start` is called."""

    def __init__(self) -> None:
        self._items: dict[ChunkT, None] | None = None

    def start(self) -> None:
        """Note changes from now on; the caller takes them regularly."""
        if self._items is None:
            self._items = {}

    @property
    def is_on(self) -> bool:
        return self._items is not None

    def note(self, chunk: ChunkT) -> None:
        """Note that a chunk may be in other tiers than before. A needless note does no harm."""
        if self._items is not None:
            self._items[chunk] = None

    def __contains__(self, chunk: ChunkT) -> bool:
        return self._items is not None and chunk in self._items

    def take(self) -> dict[ChunkT, None]:
        """Return the chunks noted since the last call, in the order in which they were noted first."""
        taken = self._items
        if not taken:
            return {}
        self._items = {}
        return taken
