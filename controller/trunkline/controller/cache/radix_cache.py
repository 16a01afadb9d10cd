"""The chunk tree: where every chunk of the forest is, and how it leaves (design.md §4 and §7).

A chunk is *resident* on the device (it has a block) and may have *copies* below it: in a slot of the host pool,
in a slot of the disk tier, in the remote tier. Chunks are immutable, so all copies stay valid. Which copies
there are is the business of the directory (`trunkline.kvstore.directory`); here is how blocks come and go:

      computed ──full──► copied to the host beside the computation (asynchronous save, CachedAttention §3.2.2)
      block needed ──► a chunk with a copy loses its block; another is saved first if there is room, else dropped
      matched again ──► loaded into a block

Swapping (PagedAttention §4.5) is nothing but residency: a preempted sequence lets go of its path and *claims*
it, so that its copies on the host stay until it comes back.

Invariants (checked by `integrity`):
- a node that is held, or has a held node below, is *active*; only inactive nodes without children on the device
  are evicted, so a chunk stays while anything below it stays, and above one on the device all are there;
- a pending node is on the device, and none below it is; the sequence that produces it holds it or one below;
- a claim covers a path from its root on, and no more chunks are claimed than the host pool has slots.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import OrderedDict, deque
from itertools import count
from math import inf
from typing import Final, Protocol

from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.fences import Fences
from trunkline.controller.cache.radix_tree import PENDING, Node, RadixTree
from trunkline.kvstore.directory import Directory, DirectoryConfig
from trunkline.kvstore.extents import NO_BLOCK, BlockId, SlotId
from trunkline.kvstore.names import ChunkName
from trunkline.router.messages import MissReason

DEPARTED_MAX: Final = 1 << 15
"""Names of chunks that have gone which are remembered, to say why a prompt misses them."""
EXPIRED_AGAIN_S: Final = 1.0
"""A chunk whose time is over while somebody uses it is looked at again so much later."""
SAVES_PER_PLAN: Final = 64
"""Chunks that a plan saves at most beside those that it must: a burst must not fill the copy thread's queue."""


class TierCopyPlan(Protocol):
    """The plan being made, as far as chunks move between device and host in it."""

    step: int
    saves: list[tuple[int, int, int]]
    """(block, slot, generation), as in `StepPlan`."""
    late_saves: list[tuple[int, int, int]]
    loads: list[tuple[int, int, int]]


class RadixCache(RadixTree):
    """The forest with its blocks and copies. Pure: time and step numbers are arguments."""

    def __init__(
        self,
        pool: BlockPool,
        chunk_size: int,
        fingerprint: bytes = b"",
        dtype: str = "",
        tiers: DirectoryConfig | None = None,
    ) -> None:
        """
        Args:
            tiers: what there is below the device; None: nothing.
        """
        super().__init__(chunk_size, fingerprint, dtype)
        tiers = tiers or DirectoryConfig()
        self.tiers: Directory[Node] = Directory(tiers)
        self.fences = Fences(pool.num_blocks, tiers.host_slots)
        self._pool = pool
        self._idle_leaves: list[tuple[float, int, Node]] = []
        """Heap by last use; entries are checked when popped, because leaves come back to use."""
        self._serial = count()
        self._unsaved: deque[Node] = deque()
        """Full chunks that were computed and not yet copied, in the order in which they filled."""
        self._departed: OrderedDict[ChunkName, MissReason] = OrderedDict()
        self.evictable = 0
        """Blocks that eviction could free now: those of inactive chunks."""
        self.evicted_blocks = 0
        self.saved_blocks = 0
        """Blocks copied to the host pool since the start, …"""
        self.loaded_blocks = 0
        """… and back."""
        self.grafted: list[Node] = []
        """Chunks that hang from another parent since somebody emptied this list."""
        self.changed = self.tiers.copies.changes.log
        """Chunks that may be in other tiers than before, the device among them."""
        self.touched: dict[Node, None] = {}
        """Likewise chunks on disk that were used: of each path the deepest, for those above are used no less."""

    # Coming

    def insert(
        self, parent: Node, key: bytes, block: BlockId, ready_step: int, now: float, marker: bytes = b""
    ) -> Node:
        """Add a chunk that takes over `block`. The caller has checked that `parent` has no such child."""
        node = self.attach(parent, key, block, ready_step, marker)
        node.last_use = now
        self.changed.note(node)
        self.evictable += 1
        self._note_idle(node)
        return node

    def place(self, node: Node, block: BlockId) -> None:
        """A chunk that is in lower tiers only gets a block, which it takes over. Its parent is on the device."""
        assert node.parent is not None
        assert not node.on_device
        node.block = block
        self.changed.note(node)
        node.parent.device_children += 1
        self.evictable += not node.active
        self._note_idle(node)

    def read(self, node: Node, plan: TierCopyPlan) -> tuple[SlotId, int]:
        """The plan will load the host's copy of a chunk, which stays there until then (see `load`)."""
        return self.tiers.load(node, plan.step)

    def load(self, read: tuple[SlotId, int], block: BlockId, plan: TierCopyPlan) -> None:
        """Have what was announced by `read` loaded into `block`, whoever owns that."""
        slot, generation = read
        self.fences.loaded(block, slot, plan.step)
        plan.loads.append((block, slot, generation))
        self.loaded_blocks += 1

    def add_remote(self, parent: Node, key: bytes, now: float, marker: bytes = b"") -> Node:
        """A chunk that the remote tier was found to have; `marker` as in `attach`."""
        node = parent.children.get(key)
        if node is None:
            node = self.attach(parent, key, NO_BLOCK, 0, marker)
            node.last_use = now
        self.tiers.add_remote(node)
        return node

    def computed(self, node: Node, step: int, plan: TierCopyPlan | None = None) -> None:
        """A chunk is full, and can be read after the plan of `step`; with `plan`, which is that plan."""
        node.ready_step = step
        self.absorb_prefixes(node)
        if plan is not None and self._wants_copy(node) and self._reserve(node, plan, plan.late_saves):
            return
        self.save_later(node)

    def save_later(self, node: Node, *, partial: bool = False) -> None:
        """Copy a chunk to the host in one of the next plans; one that is not full only if it will not grow
        (`partial`)."""
        if not self.tiers.config.host_slots or (node.token_count < self.chunk_size and not partial):
            return
        if len(self._unsaved) > 2 * self._pool.num_blocks + 64:
            self._unsaved = deque(dict.fromkeys(other for other in self._unsaved if other.on_device))
        self._unsaved.append(node)

    @property
    def has_unsaved(self) -> bool:
        """Whether some plan has still to copy something."""
        return bool(self._unsaved)

    def save_waiting(self, plan: TierCopyPlan) -> None:
        """Copy chunks that have filled, oldest first, as long as there is room for them."""
        for _ in range(min(len(self._unsaved), SAVES_PER_PLAN)):
            node = self._unsaved[0]
            if node.ready_step >= plan.step and node.parent is not None:
                return  # this very plan computes it
            if self._wants_copy(node) and not self._reserve(node, plan, plan.saves):
                if not self.tiers.mover.can_sink():
                    self._unsaved.popleft()  # it gets another chance when its block is needed
                return  # else writes under way make room: without this one nothing below it would be saved
            self._unsaved.popleft()

    def _wants_copy(self, node: Node) -> bool:
        """Not if there is one, nor below a chunk without any: whoever looks for it would not get that far."""
        if node.parent is None or not node.on_device or node.is_stored:
            return False
        return node.parent.parent is None or node.parent.is_stored

    def _reserve(
        self, node: Node, plan: TierCopyPlan, saves: list[tuple[int, int, int]], forced: bool = False
    ) -> bool:
        place = self.tiers.save(node, plan.step, forced=forced)
        if place is None:
            return False
        slot, generation = place
        self.drop_lost()
        self.fences.saved(node.block, slot, plan.step)
        saves.append((node.block, slot, generation))
        self.saved_blocks += 1
        return True

    # Changing place in the forest

    def graft(self, node: Node, root: Node) -> None:
        """Move an idle chunk, with all that is below it, from its tree to the root of a cut."""
        assert not node.active
        assert not node.claims
        parent = self._unlink(node)
        self._link(root, node)
        self.tiers.moved(node, parent)
        self.grafted.append(node)
        self._note_idle(parent)
        self.prune_root(parent)

    def absorb_prefixes(self, node: Node) -> None:
        """Free idle partial siblings that say nothing `node` does not: a ready chunk covers its own prefixes."""
        parent = node.parent
        assert parent is not None
        while (at := bisect_left(parent.sorted_keys, node.key)) > 0:
            sibling = parent.children[parent.sorted_keys[at - 1]]
            spared = sibling.active or sibling.children or sibling.claims or sibling.pins
            if spared or not node.key.startswith(sibling.key):
                return
            self._drop(sibling)

    # Use

    def keep(self, path: list[Node], now: float, ttl: float) -> None:
        """A sequence that holds a path ends its stay: the chunks are kept for `ttl` seconds from now on, 0: for
        ever (C10)."""
        self.tiers.used(path, now, hit=False)
        self.tiers.keep(path, now + ttl if ttl else inf)
        for node in path:
            self._note_idle(node)  # what nobody holds has just become younger
        deepest = next((node for node in reversed(path) if node.disk_ready), None)
        if deepest is not None:
            self.touched[deepest] = None

    def expire(self, now: float) -> None:
        """Drop idle chunks whose time is over, wherever they are, leaves first."""
        for node in self.tiers.expire(now):
            if node.parent is None:
                continue
            if node.active or node.children or node.claims:
                self.tiers.keep([node], now + EXPIRED_AGAIN_S)
            else:
                self._drop(node, MissReason.TTL)

    def claim(self, path: list[Node]) -> list[Node]:
        """Ask for the chunks of a path, from its root on, to be saved when their blocks are needed.

        Returns:
            those that are claimed now, for `unclaim`: as many of the first ones as the host pool has slots for.
        """
        for index, node in enumerate(path):
            if not self.tiers.claim(node):
                return path[:index]
        return list(path)

    def unclaim(self, claimed: list[Node]) -> None:
        """Undo one `claim`. Copies that nobody else wants stay until slots are needed."""
        for node in reversed(claimed):
            self.tiers.unclaim(node)

    # Leaving

    def remove(self, node: Node) -> BlockId:
        """Take an inactive leaf out, with all its copies; its block, if it has one, now belongs to the caller."""
        assert not node.active
        assert not node.children
        self.tiers.forget(node)
        parent = self._unlink(node)
        self.node_count -= 1
        self.evictable -= node.on_device
        parent.last_use = max(parent.last_use, node.last_use)
        self._note_idle(parent)
        self.prune_root(parent)
        return node.block

    def unplace(self, node: Node) -> BlockId:
        """Take the block of an inactive chunk, which stays in the tiers below; it now belongs to the caller."""
        assert node.parent is not None
        assert node.on_device
        assert not node.active
        assert not node.device_children
        block, node.block = node.block, NO_BLOCK
        self.changed.note(node)
        self.tiers.left_device(node)
        self.evictable -= 1
        parent = node.parent
        parent.device_children -= 1
        parent.last_use = max(parent.last_use, node.last_use)
        self._note_idle(parent)
        return block

    def _now_active(self, node: Node) -> None:
        super()._now_active(node)
        self.evictable -= node.on_device

    def _now_idle(self, node: Node) -> None:
        super()._now_idle(node)
        self.evictable += node.on_device
        self._note_idle(node)

    def _is_idle_leaf(self, node: Node) -> bool:
        """Whether the device could lose the chunk now."""
        return node.on_device and not (node.active or node.device_children) and node.parent is not None

    def _note_idle(self, node: Node) -> None:
        if not self._is_idle_leaf(node):
            return
        heapq.heappush(self._idle_leaves, (node.last_use, next(self._serial), node))
        if len(self._idle_leaves) > 4 * self._pool.num_blocks + 64:
            present = {entry[2]: entry for entry in self._idle_leaves if self._is_current(entry)}
            self._idle_leaves = list(present.values())
            heapq.heapify(self._idle_leaves)

    def _is_current(self, entry: tuple[float, int, Node]) -> bool:
        last_use, _, node = entry
        return node.last_use == last_use and self._is_idle_leaf(node)

    def evict(self, blocks: int, plan: TierCopyPlan | None = None) -> int:
        """Free up to `blocks` blocks of inactive chunks, least recently used leaves first; how many it was.

        With `plan`, chunks without a copy are saved in that plan, if there is room. Otherwise they are dropped.
        """
        free, freed = self._pool.free_count, 0
        while freed < blocks and self._idle_leaves:
            entry = heapq.heappop(self._idle_leaves)
            if self._is_current(entry):
                self._evict_chunk(entry[2], plan)
            freed = self._pool.free_count - free
        self.evicted_blocks += freed
        return freed

    def _evict_chunk(self, node: Node, plan: TierCopyPlan | None) -> None:
        if plan is not None and self._wants_copy(node):
            self._reserve(node, plan, plan.saves, forced=node.claims > 0 or node.pins > 0)
        if node.is_stored:
            self._pool.release(self.unplace(node))
        else:
            self._drop(node, MissReason.EVICTED)

    def drop_lost(self) -> None:
        """Forget chunks whose last copy a tier has given up, or could not give back."""
        for node in self.tiers.lost():
            if node.parent is not None and not (node.on_device or node.active or node.is_stored):
                lost = self.departed(node.name) is MissReason.LOST
                self._drop(node, MissReason.LOST if lost else MissReason.EVICTED)

    def _drop(self, node: Node, reason: MissReason | None = None) -> None:
        """Forget an inactive chunk, and those below it: none is on the device and nobody could reach them."""
        below = [node]
        for parent in below:
            below.extend(parent.children.values())
        for gone in reversed(below):
            if reason is not None:
                self.remember(gone, reason)
            block = self.remove(gone)
            if block != NO_BLOCK:
                self._pool.release(block)

    def remember(self, node: Node, reason: MissReason) -> None:
        """Why whoever looks for the chunk will not find it."""
        self._departed[node.name] = reason
        self._departed.move_to_end(node.name)
        if len(self._departed) > DEPARTED_MAX:
            self._departed.popitem(last=False)

    def departed(self, name: ChunkName) -> MissReason | None:
        """Why a chunk that was here is not any more, if that is remembered."""
        return self._departed.get(name)

    def flush(self) -> int:
        """Drop every chunk that nobody holds, claimed ones and copies in all tiers but the remote; blocks
        freed."""
        free = self._pool.free_count
        for node in list(self.nodes()):
            if not node.active and node.parent is not None and (node.parent.active or node.parent.parent is None):
                self._drop(node)
        freed = self._pool.free_count - free
        self.evicted_blocks += freed
        return freed


__all__ = ["PENDING", "Node", "RadixCache", "TierCopyPlan"]
