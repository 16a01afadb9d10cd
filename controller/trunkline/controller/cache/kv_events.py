"""Tell routers which chunks a controller has: numbered batches of changes, and snapshots for late routers.

    tree.changed ──follow──► batch 7, 8, 9 … ──► PUB socket            may be lost on the way
                               │      └─► ring of the last ones ──┐
                               ▼                                  ├──► EventsReply, to a router that asks
                             announced: name → tiers ──snapshot───┘

Code that moves a chunk does not decide what is announced: it only notes that the chunk *may* have changed tiers
(`trunkline.kvstore.chunks.ChangeLog`). Once per turn the tiers of the noted chunks are compared with those
announced last (`Node.announced`), and the differences are the next batch. So no change is announced twice, and no
change that was undone within its turn.

Announced are full chunks, under their names, and all chunks of texts (`trunkline.kvstore.chunks`). A chunk that is
being computed counts as on the device: a second request for it would wait for it. Two chunks may have one name,
one of them behind a cut: then the name is in all the tiers in which one of them is.

Invariant (`problem_of_log`): a chunk that is not noted as changed is in the tiers that were announced. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.messages import EventsCall
from trunkline.kvstore.chunks import NAME_BYTES, ChunkName
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import EventsReply

PAGE_CHUNKS: Final = 16_384
"""Largest number of chunks in one message: a router must not keep its streams waiting while it reads one."""
RING_BYTES: Final = 4 << 20
"""Bytes of batches that are kept for routers that miss some. A snapshot is not much larger, so more would not
pay."""
BATCH_BYTES: Final = 200
"""Estimate of the bytes of a batch besides its names and tiers."""
SNAPSHOT_SECONDS: Final = 30.0
"""Seconds after which a snapshot is forgotten if no router asks for a page of it."""
SNAPSHOTS_MAX: Final = 4
"""Largest number of snapshots that are kept; routers that start together share one."""
_ANNOUNCED: Final = 1 << TierKind.DEVICE | 1 << TierKind.HOST | 1 << TierKind.DISK
"""Tiers that routers are told of. The remote tier is not among them, because all controllers share it."""


def announced_tiers(node: Node, tree: RadixCache) -> int:
    """Return the tiers of a chunk that routers are told, as a bit mask; 0 for chunks that are not announced.

    Routers look for chunks from the first one on. So in a tree with a window a hollow chunk counts as on the
    device: the way to those below it leads over it, and costs no time.
    """
    if node.parent is None or (len(node.key) != tree.chunk_bytes and node.text_name is None):
        return 0
    leads_on = tree.window and node.children
    return node.tier_set & _ANNOUNCED or (leads_on and 1 << TierKind.DEVICE) or 0


class EventBatch(NamedTuple):
    """The changes of one turn, as a `KvEvents` message carries them."""

    seq: int
    names: bytes
    tiers: bytes


class Announced:
    """The tiers in which each chunk name is, as routers were told last."""

    def __init__(self) -> None:
        self.tiers: dict[ChunkName, int] = {}
        self._shared: dict[ChunkName, list[int]] = {}
        """For each name that several chunks have: how many of these chunks are in each combination of tiers (0 to
        7)."""

    def move(self, name: ChunkName, before: int, after: int) -> None:
        """Note that a chunk of this name, which was announced in the tiers `before`, is in the tiers `after`."""
        shared = self._shared.get(name)
        if shared is None:
            others = self.tiers.get(name, 0) if not before else 0
            if not (others and after):
                self._put(name, after or others)
                return
            shared = self._shared[name] = [0] * 8
            shared[others] = 1
        if before:
            shared[before] -= 1
        if after:
            shared[after] += 1
        union = 0
        for value, times in enumerate(shared):
            union |= value if times else 0
        if sum(shared) == 1:
            del self._shared[name]
        self._put(name, union)

    def _put(self, name: ChunkName, tiers: int) -> None:
        if tiers:
            self.tiers[name] = tiers
        else:
            self.tiers.pop(name, None)

    def clear(self) -> None:
        """Forget everything."""
        self.tiers.clear()
        self._shared.clear()


@dataclass(slots=True)
class _Snapshot:
    names: bytes
    tiers: bytes
    asked: float


class KvEventLog:
    """Makes event batches of a radix cache's changes, and answers routers that missed some of them."""

    def __init__(self, stream: bytes, *, ring_bytes: int = RING_BYTES, page_chunks: int = PAGE_CHUNKS) -> None:
        """
        Args:
            stream: 8 random bytes that tell this log from those of earlier processes.
            ring_bytes: bytes of batches that are kept.
            page_chunks: largest number of chunks in one batch or reply.
        """
        self.stream = stream
        self.seq = 0
        """Number of the last batch."""
        self.announced = Announced()
        self._tree: RadixCache | None = None
        self._ring: deque[EventBatch] = deque()
        """The last batches, without a gap between them."""
        self._ring_bytes = 0
        self._ring_bytes_max = ring_bytes
        self._page_chunks = page_chunks
        self._snapshots: dict[int, _Snapshot] = {}
        """The kept snapshots, by the number of the last batch that is in them."""

    # Announcing

    def has_followed(self, tree: RadixCache) -> bool:
        """Return whether nothing has changed since the last call of `follow`."""
        return tree is self._tree and tree.changed.is_empty

    def follow(self, tree: RadixCache, *, look_again: bool = False) -> list[EventBatch]:
        """Return what has changed since the last call, in as many batches as needed; often none.

        Args:
            tree: the radix cache. If it differs from that of the last call, chunks that are not in it are gone.
            look_again: compare all chunks, also those that were not noted as changed.
        """
        before: dict[ChunkName, int] = {}
        if tree is not self._tree:
            before.update(self.announced.tiers)
            self._begin(tree)
        elif look_again:
            _note_all(tree)
        known = self.announced.tiers
        for node in tree.changed.take():
            now = announced_tiers(node, tree)
            if now != node.announced:
                name = node.text_name or node.name
                before.setdefault(name, known.get(name, 0))
                self.announced.move(name, node.announced, now)
                node.announced = now
        names = [name for name, tiers in before.items() if known.get(name, 0) != tiers]
        return [self._emit(names[at : at + self._page_chunks]) for at in range(0, len(names), self._page_chunks)]

    def _begin(self, tree: RadixCache) -> None:
        self._tree = tree
        self.announced.clear()
        tree.changed.start()
        for node in tree.nodes():
            node.announced = 0
        _note_all(tree)

    def _emit(self, names: list[ChunkName]) -> EventBatch:
        self.seq += 1
        known = self.announced.tiers
        batch = EventBatch(self.seq, b"".join(names), bytes([known.get(name, 0) for name in names]))
        self._ring.append(batch)
        self._ring_bytes += _size(batch)
        while self._ring_bytes > self._ring_bytes_max:
            self._ring_bytes -= _size(self._ring.popleft())
        return batch

    # Answering

    def answer(self, call: EventsCall, seq: int, now: float) -> EventsReply:
        """Return the events that a router missed, or a page of a snapshot.

        Args:
            seq: number of the reply.
            now: time in seconds.
        """
        self.forget_old(now)
        if call.page <= 0 and call.stream == self.stream and self._has_after(call.after):
            return self._replay(call, seq)
        upto, page = call.upto, call.page
        # If nothing has changed since a forgotten snapshot, one taken now has the same pages.
        is_known = call.stream == self.stream and (upto in self._snapshots or upto == self.seq)
        snapshot = self._snapshot(upto, now) if page > 0 and is_known else None
        if snapshot is None or page * self._page_chunks >= len(snapshot.tiers):
            upto, page = self.seq, 0
            snapshot = self._snapshot(upto, now)
        first, stop = page * self._page_chunks, (page + 1) * self._page_chunks
        return EventsReply(
            seq=seq,
            ticket=call.ticket,
            stream=self.stream,
            upto=upto,
            snapshot=True,
            names=snapshot.names[first * NAME_BYTES : stop * NAME_BYTES],
            tiers=snapshot.tiers[first:stop],
            more=stop < len(snapshot.tiers),
        )

    def _has_after(self, after: int) -> bool:
        first = self._ring[0].seq if self._ring else self.seq + 1
        return first - 1 <= after <= self.seq

    def _replay(self, call: EventsCall, seq: int) -> EventsReply:
        found: dict[bytes, int] = {}
        upto = call.after
        known = call.after + 1 - self._ring[0].seq if self._ring else 0
        for seq_of, names, tiers in islice(self._ring, known, None):
            if found and len(found) + len(tiers) > self._page_chunks:
                break
            upto = seq_of
            for at, value in enumerate(tiers):
                found[names[at * NAME_BYTES : (at + 1) * NAME_BYTES]] = value
        return EventsReply(
            seq=seq,
            ticket=call.ticket,
            stream=self.stream,
            upto=upto,
            snapshot=False,
            names=b"".join(found),
            tiers=bytes(found.values()),
            more=upto < self.seq,
        )

    def _snapshot(self, upto: int, now: float) -> _Snapshot:
        """Return the kept snapshot up to this batch, or else make one of the present state."""
        snapshot = self._snapshots.get(upto)
        if snapshot is None:
            known = self.announced.tiers
            snapshot = self._snapshots[upto] = _Snapshot(b"".join(known), bytes(known.values()), now)
            while len(self._snapshots) > SNAPSHOTS_MAX:
                del self._snapshots[min(self._snapshots, key=lambda key: self._snapshots[key].asked)]
        snapshot.asked = now
        return snapshot

    def forget_old(self, now: float) -> None:
        """Forget snapshots that no router asks for any more."""
        for upto in [u for u, kept in self._snapshots.items() if now - kept.asked > SNAPSHOT_SECONDS]:
            del self._snapshots[upto]


def _note_all(tree: RadixCache) -> None:
    for node in tree.nodes():
        tree.changed.note(node)


def _size(batch: EventBatch) -> int:
    return len(batch.names) + len(batch.tiers) + BATCH_BYTES


def problem_of_log(tree: RadixCache) -> str:
    """Return what is wrong with what was announced of a tree's chunks; "" if nothing, or if no log follows it."""
    if not tree.changed.is_on:
        return ""
    for node in tree.nodes():
        present = announced_tiers(node, tree)
        if present != node.announced and node not in tree.changed:
            return (
                f"a chunk is in the tiers {present:#b}, was announced in {node.announced:#b}, "
                "and the change was not noted"
            )
    return ""
