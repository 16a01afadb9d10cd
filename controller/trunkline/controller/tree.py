"""The chunk tree: every cached chunk of a group, found by its tokens (ChunkAttention §3.1, design.md §4).

      root (per salt)
       ├── [64 tokens]──[64]──[64]──[17]      a finished session; its tail is a partial leaf
       │        └───────[64]──[64]            shares one chunk with it
       └── [64]──[64 pending]                 being computed; whoever needs it waits

A node is a chunk: its key is the bytes of its token ids, so a path is matched by one dictionary lookup per
chunk, and the sorted list of a node's keys finds, by bisection, the child that agrees longest with a prompt
that no child matches whole. Full chunks hold `chunk_size` tokens; shorter ones are leaves.

A chunk is *resident* on the device (it has a block), in the host pool (it has a slot), or in both: chunks are
immutable, so both copies stay valid. Swapping (PagedAttention §4.5) is nothing but residency: a preempted sequence
lets go of its path and *claims* it; when the block of a claimed chunk is needed, the chunk sinks to the host
instead of vanishing, and whoever matches it later (the sequence that comes back, or anybody) has it loaded.

      root ──[device]──[device + host]──[host]──[host]        a path: device first, then host only

Invariants (checked by `integrity`):
- a node that is held, or has a held node below, is *active*; only inactive nodes without children on the device
  are evicted, so a chunk stays while anything below it stays, and above one on the device all are there;
- a pending node has only pending nodes below it, and the sequence that produces it holds the last one;
- a claim covers a path from its root on, and no more chunks are claimed than the host pool has slots: each
  of them finds one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

from trunkline.controller.block_pool import BlockPool
from trunkline.kvstore.host_slots import HostSlots
from trunkline.kvstore.layout import NO_BLOCK, BlockId, SlotId
from trunkline.kvstore.names import ChunkName, chunk_name, root_name

TOKEN_BYTES: Final = 4
PENDING: Final = 1 << 62
"""`ready_step` of a chunk whose computation is not planned yet."""
NO_SLOT: Final = SlotId(-1)
"""Not in the host pool."""


class Node:
    """A chunk in the tree. Owned by `ChunkTree`; others read it and pass it back."""

    __slots__ = (
        "active",
        "block",
        "children",
        "claims",
        "device_children",
        "holders",
        "key",
        "last_use",
        "name",
        "parent",
        "ready_step",
        "slot",
        "sorted_keys",
    )

    def __init__(self, parent: Node | None, key: bytes, name: ChunkName, block: BlockId) -> None:
        self.parent = parent
        self.key = key
        """Little-endian int32 token ids."""
        self.name = name
        self.block = block
        """`NO_BLOCK`: in the host pool only."""
        self.slot = NO_SLOT
        self.children: dict[bytes, Node] = {}
        self.sorted_keys: list[bytes] = []
        self.holders = 0
        """Sequences (and plans) that hold exactly this node."""
        self.active = 0
        """Holders plus active children."""
        self.device_children = 0
        """Children that have a block."""
        self.claims = 0
        """Preempted sequences that want to find it again."""
        self.last_use = 0.0
        self.ready_step = PENDING
        """Readable by every step after this one."""

    @property
    def token_count(self) -> int:
        return len(self.key) // TOKEN_BYTES

    @property
    def on_device(self) -> bool:
        return self.block != NO_BLOCK


class Moves(Protocol):
    """The plan being made, as far as chunks move between device and host in it."""

    step: int
    saves: list[tuple[int, int, int]]
    """(block, slot, generation), as in `StepPlan`."""
    loads: list[tuple[int, int, int]]


@dataclass(slots=True)
class Match:
    """What the tree knows of a prompt."""

    path: list[Node]
    """Whole chunks from the root, ready to read: those on the device first, then those on the host only."""
    pending: Node | None
    """The next whole chunk, if somebody is computing it now."""
    partial: Node | None
    """Otherwise the ready child of the path's end whose head agrees longest with what follows."""
    partial_tokens: int
    """Tokens of `partial` that agree; 0 without one."""


def _common_tokens(left: bytes, right: bytes) -> int:
    """Length of the common prefix of two token strings, in tokens."""
    limit = min(len(left), len(right))
    low, high = 0, limit // TOKEN_BYTES
    while low < high:  # bisection over memcmp beats a loop over tokens
        middle = (low + high + 1) // 2
        if left[: middle * TOKEN_BYTES] == right[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


class ChunkTree:
    """A forest of chunks with one root per salt. Pure: time and step numbers are arguments."""

    def __init__(
        self,
        pool: BlockPool,
        chunk_size: int,
        fingerprint: bytes = b"",
        dtype: str = "",
    ) -> None:
        self.chunk_size = chunk_size
        self.host: HostSlots[Node] = HostSlots(0)
        self._chunk_bytes = chunk_size * TOKEN_BYTES
        self._pool = pool
        self._identity = (fingerprint, dtype)
        self._roots: dict[bytes, Node] = {}
        self._idle_leaves: list[tuple[float, int, Node]] = []
        """Heap by last use; entries are checked when popped, because leaves come back to use."""
        self._serial = count()
        self.node_count = 0
        self.active_count = 0
        self.claimed_count = 0
        self.evictable = 0
        """Blocks that eviction could free now: those of inactive chunks."""
        self.evicted_blocks = 0

    def add_host_pool(self, slots: int) -> None:
        """Chunks can be copied to a host pool from now on."""
        assert not self.host.used_count
        self.host = HostSlots(slots)

    @property
    def saved_blocks(self) -> int:
        """Blocks copied to the host pool since the start."""
        return self.host.writes

    @property
    def loaded_blocks(self) -> int:
        """Blocks copied from the host pool since the start."""
        return self.host.reads

    def root(self, salt: bytes) -> Node:
        """The root of a salt's tree; it stays while it is held or has chunks."""
        root = self._roots.get(salt)
        if root is None:
            name = root_name(*self._identity, self.chunk_size, salt)
            root = self._roots[salt] = Node(None, salt, name, NO_BLOCK)
        return root

    def find_root(self, salt: bytes) -> Node | None:
        """The root of a salt's tree, if there is one."""
        return self._roots.get(salt)

    def nodes(self) -> Iterator[Node]:
        """All chunks, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def roots(self) -> Iterator[Node]:
        return iter(self._roots.values())

    def match(self, root: Node, tokens: bytes, step: int) -> Match:
        """The longest known prefix of `tokens` (int32 bytes), for use in step `step`.

        Token-granular: whole chunks by lookup, then the head of the best child. O(chunks) lookups.
        """
        path: list[Node] = []
        node, size, offset = root, self._chunk_bytes, 0
        end = len(tokens) - len(tokens) % size
        while offset < end:
            child = node.children.get(tokens[offset : offset + size])
            if child is None:
                break
            if child.ready_step >= step:
                return Match(path, child, None, 0)
            path.append(child)
            node = child
            offset += size
        partial, agreed = self._best_partial(node, tokens[offset : offset + size], step)
        return Match(path, None, partial, agreed)

    def _best_partial(self, node: Node, rest: bytes, step: int) -> tuple[Node | None, int]:
        """In a sorted list the longest common prefix with `rest` is at one of its two neighbours.

        Pending neighbours are passed over: waiting for less than a chunk costs more than computing it. Of two
        that agree as long, one on the device is taken.
        """
        if not rest or not node.sorted_keys:
            return None, 0
        keys = node.sorted_keys
        at = bisect_left(keys, rest)
        best, best_rank = None, (0, True)
        for index in (at - 1, at):
            if 0 <= index < len(keys):
                child = node.children[keys[index]]
                rank = _common_tokens(child.key, rest), child.on_device
                if child.ready_step < step and rank > best_rank:
                    best, best_rank = child, rank
        return best, best_rank[0]

    def insert(self, parent: Node, key: bytes, block: BlockId, ready_step: int, now: float) -> Node:
        """Add a chunk that takes over `block`. The caller has checked that `parent` has no such child."""
        node = Node(parent, key, chunk_name(parent.name, key), block)
        node.ready_step = ready_step
        node.last_use = now
        parent.children[key] = node
        insort(parent.sorted_keys, key)
        self.node_count += 1
        parent.device_children += 1
        self.evictable += 1
        self._note_idle(node)
        return node

    def place(self, node: Node, block: BlockId) -> None:
        """A chunk that is on the host only gets a block, which it takes over. Its parent is on the device."""
        assert node.parent is not None
        assert not node.on_device
        node.block = block
        node.parent.device_children += 1
        self.evictable += not node.active
        self._note_idle(node)

    def load(self, node: Node, block: BlockId, moves: Moves) -> None:
        """Have the host's copy of a chunk loaded into `block`, whoever owns that."""
        moves.loads.append((block, node.slot, self.host.read(node.slot, moves.step)))

    def absorb_prefixes(self, node: Node) -> None:
        """Free idle partial siblings that say nothing `node` does not: a ready chunk covers its own prefixes."""
        parent = node.parent
        assert parent is not None
        while (at := bisect_left(parent.sorted_keys, node.key)) > 0:
            sibling = parent.children[parent.sorted_keys[at - 1]]
            spared = sibling.active or sibling.children or sibling.claims
            if spared or not node.key.startswith(sibling.key):
                return
            self._drop(sibling)

    def covered_by_sibling(self, parent: Node, key: bytes) -> Node | None:
        """A child of `parent` whose key begins with `key`, if there is one."""
        at = bisect_left(parent.sorted_keys, key)
        if at < len(parent.sorted_keys) and parent.sorted_keys[at].startswith(key):
            return parent.children[parent.sorted_keys[at]]
        return None

    def remove(self, node: Node) -> BlockId:
        """Take an inactive leaf out and free its slot; its block, if it has one, now belongs to the caller."""
        parent = node.parent
        assert parent is not None
        assert not node.active
        assert not node.children
        del parent.children[node.key]
        del parent.sorted_keys[bisect_left(parent.sorted_keys, node.key)]
        node.parent = None
        self.node_count -= 1
        self.claimed_count -= node.claims > 0
        if node.slot != NO_SLOT:
            self.host.release(node.slot)
            node.slot = NO_SLOT
        if node.on_device:
            parent.device_children -= 1
            self.evictable -= 1
        parent.last_use = max(parent.last_use, node.last_use)
        self._note_idle(parent)
        self._prune_root(parent)
        return node.block

    def hold(self, node: Node) -> None:
        """Keep `node` and, since it stays, everything above it (a root's empty tree, too).

        What is held may be on the host only while a plan is made; between plans it is on the device.
        """
        node.holders += 1
        self._activate(node)

    def release(self, node: Node, now: float) -> None:
        """Undo one `hold`."""
        node.holders -= 1
        assert node.holders >= 0
        node.last_use = max(node.last_use, now)
        self._deactivate(node)
        self._prune_root(node)

    def _prune_root(self, node: Node) -> None:
        """Forget an empty tree nobody holds: salts come from clients and must not pile up."""
        if node.parent is None and not node.children and not node.holders:
            self._roots.pop(node.key, None)

    def _activate(self, node: Node) -> None:
        current: Node | None = node
        while current is not None and current.parent is not None:
            current.active += 1
            if current.active > 1:
                return
            self.active_count += 1
            self.evictable -= current.on_device
            current = current.parent

    def _deactivate(self, node: Node) -> None:
        current: Node | None = node
        while current is not None and current.parent is not None:
            current.active -= 1
            if current.active > 0:
                return
            self.active_count -= 1
            self.evictable += current.on_device
            self._note_idle(current)
            current = current.parent

    def claim(self, path: list[Node]) -> list[Node]:
        """Ask for the chunks of a path, from its root on, to be saved when their blocks are needed.

        Returns:
            those that are claimed now, for `unclaim`: as many of the first ones as the host pool has slots for.
        """
        for index, node in enumerate(path):
            if not node.claims:
                if self.claimed_count >= self.host.capacity:
                    return path[:index]
                self.claimed_count += 1
                if node.slot != NO_SLOT:
                    self.host.keep(node.slot)
            node.claims += 1
        return list(path)

    def unclaim(self, claimed: list[Node]) -> None:
        """Undo one `claim`. Copies that nobody else wants stay until slots are needed; the deepest go first."""
        for node in reversed(claimed):
            node.claims -= 1
            if not node.claims and node.parent is not None:
                self.claimed_count -= 1
                if node.slot != NO_SLOT:
                    self.host.offer(node.slot)

    def _is_idle_leaf(self, node: Node) -> bool:
        """Whether the device could lose the chunk now."""
        return node.on_device and not (node.active or node.device_children) and node.parent is not None

    def _note_idle(self, node: Node) -> None:
        if not self._is_idle_leaf(node):
            return
        heapq.heappush(self._idle_leaves, (node.last_use, next(self._serial), node))
        if len(self._idle_leaves) > 4 * self.node_count + 64:
            self._idle_leaves = [
                (leaf.last_use, next(self._serial), leaf) for leaf in self.nodes() if self._is_idle_leaf(leaf)
            ]
            heapq.heapify(self._idle_leaves)

    def evict(self, blocks: int, moves: Moves | None = None) -> int:
        """Free up to `blocks` blocks of inactive chunks, least recently used leaves first; how many it was.

        With `moves`, claimed chunks are saved in that plan. A chunk without a copy on the host is dropped.
        """
        free, freed = self._pool.free_count, 0
        while freed < blocks and self._idle_leaves:
            last_use, _, node = heapq.heappop(self._idle_leaves)
            if node.last_use != last_use or not self._is_idle_leaf(node):
                continue
            self._evict_chunk(node, moves)
            freed = self._pool.free_count - free
        self.evicted_blocks += freed
        return freed

    def _evict_chunk(self, node: Node, moves: Moves | None) -> None:
        if node.slot == NO_SLOT and node.claims and moves is not None:
            self._save(node, moves)
        if node.slot == NO_SLOT:
            self._drop(node)
            return
        parent = node.parent
        assert parent is not None
        self._pool.release(node.block)
        node.block = NO_BLOCK
        self.evictable -= 1
        parent.device_children -= 1
        parent.last_use = max(parent.last_use, node.last_use)
        self._note_idle(parent)

    def _save(self, node: Node, moves: Moves) -> None:
        """Copy a chunk to the host, if there is a slot: a free one, or that of a copy which nobody claims."""
        slot = self.host.allocate(node, moves.step)
        if slot is None:
            for candidate in self.host.droppable(moves.step):
                owner = self.host.owner(candidate)
                if owner.on_device or not owner.active:
                    self._drop_copy(owner)
                    slot = self.host.allocate(node, moves.step)
                    break
        if slot is not None:
            node.slot = slot
            moves.saves.append((node.block, slot, self.host.generation(slot)))

    def _drop_copy(self, node: Node) -> None:
        """Give up a host copy; where it is the only one, the chunk with it."""
        if node.on_device:
            self.host.release(node.slot)
            node.slot = NO_SLOT
        else:
            self._drop(node)

    def _drop(self, node: Node) -> None:
        """Forget an inactive chunk, and those below it: they are on the host only and nobody could reach them."""
        below = [node]
        for parent in below:
            below.extend(parent.children.values())
        for gone in reversed(below):
            block = self.remove(gone)
            if block != NO_BLOCK:
                self._pool.release(block)

    def flush(self) -> int:
        """Drop every chunk that nobody holds, claimed ones and copies on the host too; blocks freed."""
        free = self._pool.free_count
        for node in list(self.nodes()):
            if not node.active and node.parent is not None and (node.parent.active or node.parent.parent is None):
                self._drop(node)
        freed = self._pool.free_count - free
        self.evicted_blocks += freed
        return freed
