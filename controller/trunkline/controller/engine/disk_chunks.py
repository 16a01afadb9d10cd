"""Chunks on disk: the changes of a tree that the disk index notes, and the tree built again from the index. Pure.

    tree ── take_disk_changes ──► [DiskChange, …] ──► index file (`storage/tier_index.py`)
    tree ◄── restore_chunks ───── StoredChunks ◄───── index file

What a slot really holds is known only when it is read. If that is not what the index says, it is a cache miss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from xxhash import xxh3_64_digest

from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.kvstore.chunks import NO_BLOCK, ChunkName, SlotId, chunk_name
from trunkline.kvstore.root_keys import SALT_ROOT

_LONG_AGO: Final = 1e-9
"""A time, in seconds, that has passed on any controller's clock."""


class DiskChunk(NamedTuple):
    """A chunk in a slot of the disk tier."""

    slot: int
    generation: int
    name: bytes
    parent: bytes
    """Name of the chunk or root above this chunk."""
    tokens: bytes
    """Token ids of the chunk, little-endian int32."""
    last_use: float
    expires: float = 0.0
    """Time at which the chunk is forgotten; 0: never."""

    @property
    def digest(self) -> bytes:
        """Digest of the slot, generation, name and tokens, which belong together.

        SQLite notices a torn page, but not a flipped bit inside of a row: other tokens beside this name would be
        another prompt's KV. (A wrong parent is one that does not exist.)
        """
        numbers = b"%d,%d," % (self.slot, self.generation)
        return xxh3_64_digest(numbers + self.name + self.tokens)


class RootNoted(NamedTuple):
    """A root above chunks. Noting it again changes nothing. A root without chunks is gone after a restart."""

    name: bytes
    key: bytes
    """Key from which the root is made again (`RadixCache.restore_root`)."""


class SlotFreed(NamedTuple):
    """A slot holds nothing any more."""

    slot: int


class ChunkReparented(NamedTuple):
    """A chunk stands below another chunk or root than before."""

    name: bytes
    parent: bytes


class ChunkTouched(NamedTuple):
    """A chunk was used."""

    name: bytes
    last_use: float
    expires: float
    """Time at which the chunk is forgotten; 0: never."""


DiskChange = DiskChunk | RootNoted | SlotFreed | ChunkReparented | ChunkTouched
"""A change of the index. A `DiskChunk` says that all ranks have the chunk in its slot, and that no other slot has
it."""


@dataclass(frozen=True, slots=True)
class StoredChunks:
    """The chunks that the index lists."""

    roots: dict[bytes, bytes]
    """Keys of the roots that have chunks (`RootNoted`), by the roots' names."""
    chunks: list[DiskChunk]
    """The chunks, parents first. Some may have expired; `last_use` is never in the future."""
    dropped: int
    """Number of chunks that were deleted from the file: they could not be reached any more, were in slots that the
    tier no longer has, or had a damaged row."""


def take_disk_changes(tree: RadixCache) -> Sequence[DiskChange]:
    """Return what has changed on disk since the last call, in order."""
    events = tree.tiers.index_events()
    grafted, touched = tree.grafted, tree.touched
    if not (events or grafted or touched):
        return ()
    tree.grafted, tree.touched = [], {}
    if not tree.tiers.config.disk_slots:
        return ()
    changes: list[DiskChange] = []
    for node in grafted:
        if node.parent is not None and node.disk_ready:
            _note_root(changes, node.parent)
            changes.append(ChunkReparented(node.name, node.parent.name))
    for event in events:
        stored = event.chunk
        if stored is None or stored.parent is None:
            changes.append(SlotFreed(event.slot))
            continue
        _note_root(changes, stored.parent)
        changes.append(
            DiskChunk(
                slot=int(event.slot),
                generation=event.generation,
                name=stored.name,
                parent=stored.parent.name,
                tokens=stored.key,
                last_use=stored.last_use,
                expires=_expiry(stored),
            )
        )
    changes += [ChunkTouched(node.name, node.last_use, _expiry(node)) for node in touched if node.disk_ready]
    return changes


def _note_root(changes: list[DiskChange], node: Node) -> None:
    if node.parent is None:
        changes.append(RootNoted(node.name, node.key))


def _expiry(node: Node) -> float:
    """Return when the chunk expires, in the index's form: 0 is never."""
    return node.expires if math.isfinite(node.expires) else 0.0


@dataclass(slots=True)
class GoneTrees:
    """What trees that are gone, with their workers, leave to the next one."""

    changes: list[DiskChange] = field(default_factory=list)
    """Changes of the disk index that it has not been told of."""
    unwritten: set[ChunkName] = field(default_factory=set)
    """Chunks that were still to be written to the remote tier."""

    def add(self, tree: RadixCache) -> None:
        """Note what a tree leaves."""
        self.changes += take_disk_changes(tree)
        self.unwritten |= tree.tiers.unwritten()

    def restore(self, tree: RadixCache, stored: StoredChunks, now: float) -> None:
        """Put the chunks on disk into the next tree, as `restore_chunks` does."""
        self.changes += restore_chunks(tree, stored, now, self.unwritten)
        self.unwritten.clear()

    def take_changes(self, tree: RadixCache) -> list[DiskChange]:
        """Return what the disk index is still to be told, by trees that are gone and by this one."""
        changes = [*self.changes, *take_disk_changes(tree)]
        self.changes.clear()
        return changes


def restore_chunks(
    tree: RadixCache, stored: StoredChunks, now: float, unwritten: AbstractSet[ChunkName] = frozenset()
) -> list[SlotFreed]:
    """Put the chunks on disk into an empty tree; return the slots of those that do not fit into it.

    Args:
        unwritten: chunks that are still to be written to the remote tier.
    """
    nodes: dict[bytes, Node] = {}
    for name, key in stored.roots.items():
        above = tree.restore_root(key)
        if above is not None and above.name == name:  # else the file is wrong, and no prompt would match
            nodes[name] = above
    freed: list[SlotFreed] = []
    for chunk in stored.chunks:
        node = _restored(tree, nodes.get(chunk.parent), chunk)
        last_use = min(chunk.last_use, now)
        if node is None:
            freed.append(SlotFreed(chunk.slot))
        elif not tree.tiers.restore(node, SlotId(chunk.slot), chunk.generation, last_use):
            freed.append(SlotFreed(chunk.slot))
            tree.remove(node)
        else:
            nodes[chunk.name] = node
            if node.name in unwritten:
                tree.tiers.owe(node)
            # A time before this machine started is negative or 0 by its clock, but 0 means never.
            tree.tiers.keep([node], max(chunk.expires, _LONG_AGO) if chunk.expires else math.inf)
    _keep_above(tree, list(nodes.values()))
    for root in list(tree.roots()):
        tree.prune_root(root)
    return freed


def _keep_above(tree: RadixCache, nodes: list[Node]) -> None:
    """Make each chunk as recently used, and kept for at least as long, as the chunks below it.

    Args:
        nodes: all restored chunks and roots, parents before their children.
    """
    for node in reversed(nodes):
        parent = node.parent
        if parent is not None and parent.parent is not None:
            parent.last_use = max(parent.last_use, node.last_use)
            tree.tiers.keep([parent], node.expires)


def _restored(tree: RadixCache, parent: Node | None, chunk: DiskChunk) -> Node | None:
    """Attach the node of a chunk, if the chunk is what its name says and can stand there."""
    if parent is None or chunk.tokens in parent.children or len(chunk.tokens) > tree.chunk_bytes:
        return None
    exact = chunk.name == chunk_name(parent.name, chunk.tokens)
    if not exact and _sees_all(parent):
        return None  # a prompt that sees all of its tokens must not find it
    node = tree.attach(parent, chunk.tokens, NO_BLOCK, 0)
    node.name, node.exact = ChunkName(chunk.name), exact
    return node


def _sees_all(node: Node) -> bool:
    while node.parent is not None:
        node = node.parent
    return node.key.startswith(SALT_ROOT)
