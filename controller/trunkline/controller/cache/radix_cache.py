"""The radix cache: where every chunk of the radix tree is, and how it leaves.

A chunk is *resident* on the device if it has a block. It may have *copies* below: in a slot of the host pool, in a
slot of the disk tier, in the remote tier. Chunks are immutable, so all copies stay valid. The directory knows the
copies (`trunkline.kvstore.directory`); this file is about blocks:

      computed ──full──► copied to the host beside the computation (asynchronous save, CachedAttention §3.2.2)
      block needed ──► a chunk with a copy loses its block; another is saved first if there is room, else dropped
      matched again ──► loaded into a block

Swapping (PagedAttention §4.5) follows from this: a preempted sequence releases its path and *claims* it, so that
the copies in host memory stay until it resumes.

Invariants (checked by `integrity`):
- a node that is held, or has a held node below it, is *active*. Only idle nodes without children on the device are
  evicted, so all chunks above one on the device are on the device, too;
- a pending node is on the device, and the sequence that produces it holds it or a node below it;
- a claim covers a path from its root on, and no more chunks are claimed than the host pool has slots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from math import inf
from typing import Final

from trunkline.controller.cache.block_pool import BlockPool, Fences
from trunkline.controller.cache.host_saves import HostSaves, TierCopyPlan
from trunkline.controller.cache.idle_leaves import IdleLeaves
from trunkline.controller.cache.radix_tree import PENDING, Node, RadixTree
from trunkline.controller.totals import Totals
from trunkline.kvstore.chunks import NO_BLOCK, BlockId, ChunkName, SlotId
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.next_use import TurnEnd, wait_of
from trunkline.kvstore.peers import Peer
from trunkline.kvstore.shares import KvAccount
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_policy import DirectoryConfig, EvictionPolicy
from trunkline.kvstore.window_share import LoadedLayers
from trunkline.router.messages import MissReason

DEPARTED_MAX: Final = 1 << 15
"""Largest number of names of gone chunks to remember, to tell clients why a prompt misses them."""
EXPIRED_AGAIN_S: Final = 1.0
"""Seconds after which a chunk that expires while it is in use is checked again."""


class RadixCache(RadixTree):
    """The radix tree with its blocks and copies. Pure: time and step numbers are arguments."""

    window: int = 0
    """Number of tokens that a query sees, its own included; 0: all before it."""

    def __init__(
        self,
        pool: BlockPool,
        chunk_size: int,
        fingerprint: bytes = b"",
        dtype: str = "",
        tiers: DirectoryConfig | None = None,
        totals: Totals | None = None,
    ) -> None:
        """
        Args:
            tiers: the tiers below the device; None: there are none.
            totals: totals from which to count on; None: count from zero.
        """
        super().__init__(chunk_size, fingerprint, dtype)
        tiers = tiers or DirectoryConfig()
        self.totals = totals or Totals()
        self.tiers: Directory[Node] = Directory(tiers, self.totals.tiers, pool.num_blocks, self.is_thin)
        self.fences = Fences(pool.num_blocks, tiers.host_slots)
        self._pool = pool
        self.idle_leaves = IdleLeaves(self.tiers.shares, pool.num_blocks, self._is_idle_leaf, self._wait_of)
        self.saves = HostSaves(
            self.tiers,
            self.fences,
            pool.num_blocks,
            chunk_size,
            wants_copy=self._wants_copy,
            on_room=self.drop_lost,
        )
        self._departed: OrderedDict[ChunkName, MissReason] = OrderedDict()
        self.evictable = 0
        """Number of blocks that eviction could free now: those of idle chunks."""
        self.grafted: list[Node] = []
        """Chunks that have moved to another parent since this list was emptied."""
        self.changed = self.tiers.changed
        """Chunks that may have changed tiers, the device included."""
        self.touched: dict[Node, None] = {}
        """Chunks on disk whose last use or end of life the index has to learn."""

    @property
    def thinnable(self) -> int:
        """Number of blocks whose memory for layers with a window could be had now without touching a sequence."""
        return self.evictable

    def is_thin(self, node: Node) -> bool:
        """Return whether a chunk on the device lacks the KV of layers with a window
        (`trunkline.controller.cache.thin_cache`)."""
        del node
        return False

    def may_swap(self, node: Node) -> bool:
        """Return whether a chunk may get another block (`swap`): it is idle, and its own is thin."""
        return self.is_thin(node) and not node.active

    def swap(self, node: Node, block: BlockId) -> BlockId:
        """Give a chunk another block; return the old one, which the caller owns from now on."""
        assert self.may_swap(node)
        old, node.block = node.block, block
        node.spent = False
        self._note_idle(node)
        return old

    def thin(self, blocks: int, plan: TierCopyPlan | None = None) -> int:
        """Make up to so many blocks thin whose chunks have no readers; return how many became so.

        With a plan, chunks without a copy are saved in it if there is room.
        """
        del blocks, plan
        return 0

    # Adding chunks, and giving them blocks

    def insert(
        self, parent: Node, key: bytes, block: BlockId, ready_step: int, now: float, marker: bytes = b""
    ) -> Node:
        """Add a chunk that takes over `block`; `parent` must not have such a child."""
        node = self.attach(parent, key, block, ready_step, marker)
        node.last_use = now
        self.changed.note(node)
        self.evictable += 1
        if ready_step != PENDING:  # which is held by the sequence that computes it
            self._note_idle(node)
        return node

    def place(self, node: Node, block: BlockId) -> None:
        """Give a block to a chunk that is only in lower tiers. The chunk's parent is on the device."""
        assert node.parent is not None
        assert not node.on_device
        node.block = block
        self.tiers.placed(node)
        self.tiers.shares.count(node, TierKind.DEVICE, 1)
        self.changed.note(node)
        node.parent.device_children += 1
        self.evictable += not self.is_read(node)
        self._note_idle(node)

    def reserve_load(self, node: Node, plan: TierCopyPlan) -> tuple[SlotId, int]:
        """Reserve the host copy of a chunk, which the plan will `load`; return its slot and generation. Until then
        no save may take the slot."""
        return self.tiers.load(node, plan.step)

    def load(
        self,
        read: tuple[SlotId, int],
        block: BlockId,
        plan: TierCopyPlan,
        layers: LoadedLayers = LoadedLayers.ALL,
    ) -> None:
        """Add to the plan the load of a copy, for which `reserve_load` returned `read`, into a block: that of a
        chunk, or one of a sequence's own."""
        slot, generation = read
        self.fences.loaded(block, slot, plan.step)
        load = block, slot, generation
        if layers is LoadedLayers.WINDOWED and load in plan.loads:
            # Another sequence that is admitted in this plan reads the chunk in the other layers only.
            plan.load_layers[plan.loads.index(load)] = LoadedLayers.ALL
            return
        plan.loads.append(load)
        plan.load_layers.append(layers)

    def add_remote(
        self, parent: Node, key: bytes, now: float, marker: bytes = b"", name: ChunkName | None = None
    ) -> Node:
        """Add a chunk that was found in the remote tier; `marker` and `name` as in `attach`."""
        node = parent.children.get(key)
        if node is None:
            node = self.attach(parent, key, NO_BLOCK, 0, marker, name)
            node.last_use = now
        self.tiers.add_remote(node)
        return node

    def add_peer(
        self, parent: Node, key: bytes, peer: Peer, now: float, marker: bytes = b"", name: ChunkName | None = None
    ) -> Node:
        """Add a chunk that a peer is said to have, or note it of one that is there; `marker` and `name` as in
        `attach`.

        The caller makes a waiting job want the chunk before the next moves.
        """
        node = parent.children.get(key)
        if node is None:
            node = self.attach(parent, key, NO_BLOCK, 0, marker, name)
            node.last_use = now
        self.tiers.add_peer(node, peer)
        return node

    def computed(self, node: Node, step: int, plan: TierCopyPlan | None = None) -> None:
        """Let steps after `step` read a full chunk, and save it: at the end of `plan` if given, else later."""
        node.ready_step = step
        self.changed.note(node)
        self.absorb_prefixes(node)
        if plan is None or not (self._wants_copy(node) and self.saves.add(node, plan, is_late=True)):
            self.saves.later(node)

    def _wants_copy(self, node: Node) -> bool:
        """Return whether to copy a chunk to the host, if there is room: it has no copy yet, and the chunk above it
        has one, without which no request would find it."""
        if not self.tiers.config.host_slots or node.parent is None or not node.on_device or node.is_stored:
            return False
        return node.parent.parent is None or node.parent.is_stored

    # Moving chunks to another tree

    def graft(self, node: Node, root: Node) -> None:
        """Move an idle chunk, with everything below it, from its tree to the root of a cut."""
        assert not node.active
        assert not node.claims
        parent = self._unlink(node)
        self._link(root, node)
        self.tiers.moved(node, parent)
        self.grafted.append(node)
        self._note_idle(parent)
        self.prune_root(parent)

    def absorb_prefixes(self, node: Node) -> None:
        """Drop idle partial siblings that are prefixes of a ready chunk."""
        parent = node.parent
        assert parent is not None
        while (at := bisect_left(parent.sorted_keys, node.key)) > 0:
            sibling = parent.children[parent.sorted_keys[at - 1]]
            spared = sibling.active or sibling.children or sibling.claims or sibling.pins
            if spared or not node.key.startswith(sibling.key):
                return
            self._drop(sibling)

    # Keeping chunks

    def own(self, path: list[Node], account: KvAccount | None) -> None:
        """Give a tenant the chunks of a path that its request made or uses, if they belong to no tenant with a
        share. None: the tenant itself has none."""
        if account is not None:
            self.tiers.own(path, account)
            for node in path:
                self._note_idle(node)

    def keep(self, path: list[Node], now: float, ttl: float) -> None:
        """Keep the chunks of a path for `ttl` seconds from now on, because a sequence leaves; 0: no limit."""
        on_disk = [node for node in path if node.disk_ready]
        # In the index a chunk without an end of life lives forever, and a chunk that was written while its request
        # ran has none there yet. Otherwise the deepest chunk is enough: after a restart those above live as long.
        endless = [node for node in on_disk if not node.expires] if ttl else []
        self.touched |= dict.fromkeys([*endless, *on_disk[-1:]])
        self.tiers.used(path, now)
        self.tiers.keep(path, now + ttl if ttl else inf)
        for node in path:
            node.uses += 1
            self._note_idle(node)  # idle chunks have just become younger

    def ended(self, path: list[Node], end: TurnEnd, now: float) -> None:
        """Note that a request with this path has ended, if the policy goes by what may come next."""
        if self.tiers.config.policy is EvictionPolicy.PREDICTED:
            self.tiers.next_use.ended(path, end, now)
            for node in path:
                self._note_idle(node)

    def _wait_of(self, node: Node) -> float:
        return wait_of(node) if self.tiers.config.policy is EvictionPolicy.PREDICTED else 0.0

    def expire(self, now: float) -> None:
        """Drop idle chunks whose time to live is over, from all tiers, leaves first."""
        for node in self.tiers.expire(now):
            if node.parent is None:
                continue
            if node.active or node.children or node.claims:
                self.tiers.keep([node], now + EXPIRED_AGAIN_S)
            else:
                self._drop(node, MissReason.TTL)

    def claim(self, path: list[Node]) -> list[Node]:
        """Claim the chunks of a path, from its root on: they are saved when their blocks are needed.

        Returns:
            the chunks claimed now, for `unclaim`: the first ones, as many as the host pool has slots for.
        """
        for index, node in enumerate(path):
            if not self.tiers.claim(node):
                return path[:index]
        return list(path)

    def unclaim(self, claimed: list[Node]) -> None:
        """Undo one `claim` of these chunks. Copies without another claim stay until slots are needed."""
        for node in reversed(claimed):
            self.tiers.unclaim(node)

    # Removing chunks

    def remove(self, node: Node) -> BlockId:
        """Remove an idle leaf with all its copies; return its block (or `NO_BLOCK`), which the caller owns from
        now on."""
        assert not node.active
        assert not node.children
        self.tiers.forget(node)
        parent = self._unlink(node)
        self.node_count -= 1
        self.evictable -= node.on_device
        self.tiers.shares.count(node, TierKind.DEVICE, -node.on_device)
        parent.last_use = max(parent.last_use, node.last_use)
        self._note_idle(parent)
        self.prune_root(parent)
        return node.block

    def unplace(self, node: Node) -> BlockId:
        """Take the block of a chunk that is not read, and which stays in lower tiers or leads to others; return
        the block, which the caller owns from now on."""
        assert node.parent is not None
        assert node.on_device
        assert not self.is_read(node)
        assert self.window or not node.device_children
        block, node.block = node.block, NO_BLOCK
        self.tiers.shares.count(node, TierKind.DEVICE, -1)
        self.changed.note(node)
        self.tiers.left_device(node)
        self.evictable -= 1
        parent = node.parent
        parent.device_children -= 1
        parent.last_use = max(parent.last_use, node.last_use)
        self._note_idle(parent)
        return block

    # Every chunk of a path comes here at its request's start and end, so both spell out what `super()` does.

    def _now_active(self, node: Node) -> None:
        self.active_count += 1
        self.evictable -= node.block != NO_BLOCK

    def _now_idle(self, node: Node) -> None:
        self.active_count -= 1
        self.evictable += node.block != NO_BLOCK
        self._note_idle(node)

    def is_read(self, node: Node) -> bool:
        """Return whether a holder reads the chunk's KV, so that it must stay on the device."""
        return node.active > 0

    def leads_on(self, node: Node) -> bool:
        """Return whether a chunk without any KV stays in the tree, because of the chunks below it."""
        del node
        return False

    def _is_idle_leaf(self, node: Node) -> bool:
        """Return whether the chunk could be evicted from the device now."""
        return node.block != NO_BLOCK and not (node.active or node.device_children) and node.parent is not None

    def _note_idle(self, node: Node) -> None:
        if self._is_idle_leaf(node):
            self.idle_leaves.push(node)

    def evict(self, blocks: int, plan: TierCopyPlan | None = None) -> int:
        """Free up to `blocks` blocks of idle chunks, in the order of `IdleLeaves`; return how many were freed.

        With a plan, chunks without a copy are saved in it if there is room; otherwise they are dropped.
        """
        for changed in self.tiers.next_use.take_on_device():
            self._note_idle(changed)
        free, freed = self._pool.free_count, 0
        while freed < blocks and (node := self.idle_leaves.pop()) is not None:
            if plan is not None and self._wants_copy(node):
                self.saves.add(node, plan, forced=node.claims > 0 or node.pins > 0)
            if node.is_stored or self.leads_on(node):
                self._pool.release(self.unplace(node))
            else:
                self._drop(node, MissReason.EVICTED)
            freed = self._pool.free_count - free
        self.totals.tiers[TierKind.DEVICE].evictions += freed
        return freed

    def drop_lost(self) -> None:
        """Forget chunks whose last copy a tier has dropped, or could not read back, and those that only a peer had
        and that no job wants any more."""
        lost, unheld = self.tiers.lost(), self.tiers.take_unheld()
        for node in lost:
            is_somewhere = node.on_device or node.active or node.is_stored or self.leads_on(node)
            if node.parent is not None and not is_somewhere:
                is_lost = self.departed(node.name) is MissReason.LOST
                gone = None if node in unheld else MissReason.EVICTED
                self._drop(node, MissReason.LOST if is_lost else gone)

    def _drop(self, node: Node, reason: MissReason | None = None) -> None:
        """Forget an idle chunk and those below it, which could not be reached any more."""
        below = [node]
        for parent in below:
            below.extend(parent.children.values())
        for gone in reversed(below):
            if reason is not None:
                self.remember(gone, reason)
            block = self.remove(gone)
            if block != NO_BLOCK:
                self._pool.release(block)

    def drop_below(self, node: Node) -> None:
        """Forget the idle chunks below a chunk that is about to be removed; none of them is on the device."""
        for child in list(node.children.values()):
            self._drop(child)

    def remember(self, node: Node, reason: MissReason) -> None:
        """Remember why a chunk is gone, to tell clients whose prompts miss it."""
        self._departed[node.name] = reason
        self._departed.move_to_end(node.name)
        if len(self._departed) > DEPARTED_MAX:
            self._departed.popitem(last=False)

    def departed(self, name: ChunkName) -> MissReason | None:
        """Return the reason why a chunk is gone, if it is remembered."""
        return self._departed.get(name)

    def forget_path(self, path: list[Node]) -> list[ChunkName]:
        """Drop the last chunks of a path that nothing else uses, from all tiers; return their names.

        Requests that hold, claim or await a chunk use it, and so do pins and the chunks below it.
        """
        gone = []
        for node in reversed(path):
            if node.parent is None:
                continue  # it had no KV, led to the chunk below it only, and went with that
            if not (node.active or node.children or node.claims or node.pins or node.wants):
                gone.append(node.name)
                self._drop(node)
        return gone

    def flush(self) -> int:
        """Drop every chunk that is not held, claimed ones included, and their copies in all tiers but the remote.

        Returns:
            how many device blocks were freed.
        """
        free = self._pool.free_count
        for node in list(self.nodes()):
            if not node.active and node.parent is not None and (node.parent.active or node.parent.parent is None):
                self._drop(node)
        freed = self._pool.free_count - free
        self.totals.tiers[TierKind.DEVICE].evictions += freed
        return freed
