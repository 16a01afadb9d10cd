"""A chunk as the controller sees it: a node of the tree, a block on the device, and copies in the tiers below."""

from __future__ import annotations

from typing import Final

from trunkline.kvstore.directory import TieredChunk
from trunkline.kvstore.extents import NO_BLOCK, BlockId
from trunkline.kvstore.names import ChunkName

TOKEN_BYTES: Final = 4
PENDING: Final = 1 << 62
"""`ready_step` of a chunk whose computation is not planned yet."""


class Node(TieredChunk):
    """A chunk in the tree. Owned by `ChunkTree`; others read it and pass it back."""

    __slots__ = (
        "active",
        "block",
        "children",
        "device_children",
        "exact",
        "holders",
        "key",
        "ready_step",
        "sorted_keys",
        "text_name",
        "told",
    )

    parent: Node | None

    def __init__(self, parent: Node | None, key: bytes, name: ChunkName, block: BlockId) -> None:
        super().__init__(parent, name)
        self.key = key
        """Little-endian int32 token ids; of a root, what it is the root of."""
        self.block = block
        """`NO_BLOCK`: not on the device."""
        self.children: dict[bytes, Node] = {}
        self.sorted_keys: list[bytes] = []
        self.holders = 0
        """Sequences (and plans) that hold exactly this node."""
        self.active = 0
        """Holders plus active children."""
        self.device_children = 0
        """Children that have a block."""
        self.ready_step = PENDING
        """Readable by every step after this one."""
        self.exact = True
        """Whether it was computed with all the tokens of its history in sight (False: behind a cut)."""
        self.text_name: ChunkName | None = None
        """In the tree of a text: the name under which routers are told of it (`trunkline.kvstore.names`)."""
        self.told = 0
        """In which tiers routers have been told that it is (`trunkline.controller.cache.kv_events`)."""

    @property
    def token_count(self) -> int:
        return len(self.key) // TOKEN_BYTES

    @property
    def on_device(self) -> bool:
        return self.block != NO_BLOCK

    @property
    def is_loadable(self) -> bool:
        """Whether a plan made now may use it: it has a block, or can be loaded into one."""
        return self.block != NO_BLOCK or self.host_ready
