"""The chunk tree: every cached chunk of a group, found by its tokens (ChunkAttention §3.1, design.md §4).

      root (per salt)
       ├── [64 tokens]──[64]──[64]──[17]      a finished session; its tail is a partial leaf
       │        └───────[64]──[64]            shares one chunk with it
       └── [64]──[64 pending]                 being computed; whoever needs it waits

A node is a chunk: its key is the bytes of its token ids, so a path is matched by one dictionary lookup per
chunk, and the sorted list of a node's keys finds, by bisection, the child that agrees longest with a prompt
that no child matches whole. Full chunks hold `chunk_size` tokens; shorter ones are leaves.

Invariants (checked by `integrity`):
- a node that is held, or has a held node below, is *active*; only inactive leaves are evicted, so a node
  stays while anything below it stays;
- a pending node has only pending nodes below it, and the sequence that produces it holds the last one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from trunkline.controller.block_pool import BlockPool
from trunkline.kvstore.layout import NO_BLOCK, BlockId
from trunkline.kvstore.names import ChunkName, chunk_name, root_name

TOKEN_BYTES: Final = 4
PENDING: Final = 1 << 62
"""`ready_step` of a chunk whose computation is not planned yet."""


class Node:
    """A chunk in the tree. Owned by `ChunkTree`; others read it and pass it back."""

    __slots__ = (
        "active",
        "block",
        "children",
        "holders",
        "key",
        "last_use",
        "name",
        "parent",
        "ready_step",
        "sorted_keys",
    )

    def __init__(self, parent: Node | None, key: bytes, name: ChunkName, block: BlockId) -> None:
        self.parent = parent
        self.key = key
        """Little-endian int32 token ids."""
        self.name = name
        self.block = block
        self.children: dict[bytes, Node] = {}
        self.sorted_keys: list[bytes] = []
        self.holders = 0
        """Sequences (and plans) that hold exactly this node."""
        self.active = 0
        """Holders plus active children."""
        self.last_use = 0.0
        self.ready_step = PENDING
        """Readable by every step after this one."""

    @property
    def token_count(self) -> int:
        return len(self.key) // TOKEN_BYTES


@dataclass(slots=True)
class Match:
    """What the tree knows of a prompt."""

    path: list[Node]
    """Whole chunks from the root, ready to read."""
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

    def __init__(self, pool: BlockPool, chunk_size: int, fingerprint: bytes = b"", dtype: str = "") -> None:
        self.chunk_size = chunk_size
        self._chunk_bytes = chunk_size * TOKEN_BYTES
        self._pool = pool
        self._identity = (fingerprint, dtype)
        self._roots: dict[bytes, Node] = {}
        self._idle_leaves: list[tuple[float, int, Node]] = []
        """Heap by last use; entries are checked when popped, because leaves come back to use."""
        self._serial = count()
        self.node_count = 0
        self.active_count = 0
        self.evicted_blocks = 0

    @property
    def evictable(self) -> int:
        """Blocks that eviction could free now."""
        return self.node_count - self.active_count

    def root(self, salt: bytes) -> Node:
        """The root of a salt's tree; it stays while it is held or has chunks."""
        root = self._roots.get(salt)
        if root is None:
            name = root_name(*self._identity, self.chunk_size, salt)
            root = self._roots[salt] = Node(None, salt, name, NO_BLOCK)
        return root

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

        Pending neighbours are passed over: waiting for less than a chunk costs more than computing it.
        """
        if not rest or not node.sorted_keys:
            return None, 0
        keys = node.sorted_keys
        at = bisect_left(keys, rest)
        best, best_tokens = None, 0
        for index in (at - 1, at):
            if 0 <= index < len(keys):
                child = node.children[keys[index]]
                if child.ready_step < step and (agreed := _common_tokens(child.key, rest)) > best_tokens:
                    best, best_tokens = child, agreed
        return best, best_tokens

    def insert(self, parent: Node, key: bytes, block: BlockId, ready_step: int, now: float) -> Node:
        """Add a chunk that takes over `block`. The caller has checked that `parent` has no such child."""
        node = Node(parent, key, chunk_name(parent.name, key), block)
        node.ready_step = ready_step
        node.last_use = now
        parent.children[key] = node
        insort(parent.sorted_keys, key)
        self.node_count += 1
        self._note_idle(node)
        return node

    def absorb_prefixes(self, node: Node) -> None:
        """Free idle partial siblings that say nothing `node` does not: a ready chunk covers its own prefixes."""
        parent = node.parent
        assert parent is not None
        while (at := bisect_left(parent.sorted_keys, node.key)) > 0:
            sibling = parent.children[parent.sorted_keys[at - 1]]
            if sibling.active or sibling.children or not node.key.startswith(sibling.key):
                return
            self._pool.release(self.remove(sibling))

    def covered_by_sibling(self, parent: Node, key: bytes) -> Node | None:
        """A child of `parent` whose key begins with `key`, if there is one."""
        at = bisect_left(parent.sorted_keys, key)
        if at < len(parent.sorted_keys) and parent.sorted_keys[at].startswith(key):
            return parent.children[parent.sorted_keys[at]]
        return None

    def remove(self, node: Node) -> BlockId:
        """Take an inactive leaf out; its block now belongs to the caller."""
        parent = node.parent
        assert parent is not None
        assert not node.active
        assert not node.children
        del parent.children[node.key]
        del parent.sorted_keys[bisect_left(parent.sorted_keys, node.key)]
        node.parent = None
        self.node_count -= 1
        parent.last_use = max(parent.last_use, node.last_use)
        self._note_idle(parent)
        self._prune_root(parent)
        return node.block

    def hold(self, node: Node) -> None:
        """Keep `node` and, since it stays, everything above it (a root's empty tree, too)."""
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
            current = current.parent

    def _deactivate(self, node: Node) -> None:
        current: Node | None = node
        while current is not None and current.parent is not None:
            current.active -= 1
            if current.active > 0:
                return
            self.active_count -= 1
            self._note_idle(current)
            current = current.parent

    def _note_idle(self, node: Node) -> None:
        if node.active or node.children or node.parent is None:
            return
        heapq.heappush(self._idle_leaves, (node.last_use, next(self._serial), node))
        if len(self._idle_leaves) > 4 * self.node_count + 64:
            self._idle_leaves = [
                (leaf.last_use, next(self._serial), leaf)
                for leaf in self.nodes()
                if not leaf.active and not leaf.children
            ]
            heapq.heapify(self._idle_leaves)

    def evict(self, blocks: int) -> int:
        """Free up to `blocks` blocks of inactive chunks, least recently used leaves first; how many it was."""
        freed = 0
        while freed < blocks and self._idle_leaves:
            last_use, _, node = heapq.heappop(self._idle_leaves)
            if node.parent is None or node.active or node.children or node.last_use != last_use:
                continue
            self._pool.release(self.remove(node))
            freed += 1
        self.evicted_blocks += freed
        return freed
