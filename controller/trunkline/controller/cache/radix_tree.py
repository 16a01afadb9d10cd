"""The radix tree: every cached chunk of a group of workers, found by its tokens (ChunkAttention §3.1).

      root (per salt)
       ├── [64 tokens]──[64]──[64]──[17]      a finished session; its tail is a partial leaf
       │        └───────[64]──[64]            shares one chunk with it
       └── [64]──[64 pending]                 being computed; requests that need it wait

      root (per cut)
       └── [64]──[64]──[41]                   what a session keeps behind the part that was cut off

A node is a chunk. Its key is the bytes of its token ids, so matching a path takes one dictionary lookup per chunk.
Where no child matches whole, bisection in the sorted list of keys finds the child that agrees longest. Full chunks
hold `chunk_size` tokens; shorter ones are leaves.

      root (per text)
       └── [64]──[17]                         a text of a module, shared by prompts wherever it stands in them

      root (per prompt with modules)
       └── [64]──[23]                         own tokens of those that see the same texts at the same places

This file has structure, matching and holding. `trunkline.kvstore.root_keys` says how roots are found;
`trunkline.controller.cache.radix_cache` adds where chunks are and how they leave.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trunkline.kvstore import root_keys
from trunkline.kvstore.chunks import (
    NO_BLOCK,
    NO_PEER,
    TOKEN_BYTES,
    BlockId,
    ChunkName,
    TieredChunk,
    chunk_name,
    root_name,
)
from trunkline.kvstore.cuts import cut_name
from trunkline.kvstore.root_keys import CUT_ROOT, PROMPT_ROOT, SALT_ROOT, TEXT_ROOT
from trunkline.kvstore.tier import TierKind

ALL_CHUNKS: Final = 1 << 62
"""Value for "all chunks above": no path has so many."""
PENDING: Final = 1 << 62
"""Value of `ready_step` for a chunk whose computation is not planned yet."""
_DEVICE, _HOST, _DISK, _REMOTE, _PEER = (1 << tier for tier in TierKind)


class Node(TieredChunk):
    """A chunk in the radix tree. Only `RadixCache` changes it; others read it and pass it back."""

    __slots__ = (
        "active",
        "announced",
        "block",
        "children",
        "device_children",
        "exact",
        "holders",
        "key",
        "readers",
        "ready_step",
        "sorted_keys",
        "spent",
        "text_name",
        "uses",
    )

    parent: Node | None

    def __init__(self, parent: Node | None, key: bytes, name: ChunkName, block: BlockId) -> None:
        super().__init__(parent, name)
        self.key = key
        """Key of the chunk: its token ids as little-endian int32. A root's key says of what it is the root."""
        self.block = block
        """Device block of the chunk; `NO_BLOCK`: the chunk is not on the device."""
        self.children: dict[bytes, Node] = {}
        self.sorted_keys: list[bytes] = []
        self.holders = 0
        """Number of sequences (and plans) that hold exactly this node."""
        self.active = 0
        """Number of holders plus active children; 0: the node is idle."""
        self.readers = 0
        """Number of holders that read the chunk's KV. Counted only in a tree with a window
        (`trunkline.controller.cache.window_cache`)."""
        self.spent = False
        """Whether the chunk lies behind the window of all requests that are known to come this way."""
        self.device_children = 0
        """Number of children that have a block."""
        self.ready_step = PENDING
        """The step behind which the chunk is ready: every later step may read it."""
        self.exact = True
        """Whether the chunk was computed with its whole history in sight (False: behind a cut)."""
        self.text_name: ChunkName | None = None
        """Name under which routers know a chunk of a module's text (`trunkline.kvstore.chunks`); None for other
        chunks."""
        self.uses = 0
        """Number of requests that used the chunk and have left."""
        self.announced = 0
        """Tiers in which routers were last told that the chunk is, as a bit mask
        (`trunkline.controller.cache.kv_events`)."""

    @property
    def token_count(self) -> int:
        return len(self.key) // TOKEN_BYTES

    @property
    def on_device(self) -> bool:
        return self.block != NO_BLOCK

    @property
    def tier_set(self) -> int:
        """The tiers in which the chunk is, as a sum of `1 << TierKind`."""
        return (
            (self.block != NO_BLOCK and _DEVICE)
            | (self.host_ready and _HOST)
            | (self.disk_ready and _DISK)
            | (self.remote and _REMOTE)
            | (self.peer != NO_PEER and _PEER)
        )

    @property
    def is_loadable(self) -> bool:
        """Whether a plan made now may use the chunk: it has a block, or can be loaded into one from host
        memory."""
        return self.block != NO_BLOCK or self.host_ready


@dataclass(slots=True)
class Match:
    """The longest part of a prompt that is in one tree."""

    path: list[Node]
    """Whole computed chunks from the root on. Some may be in lower tiers only."""
    pending: Node | None
    """The next whole chunk behind the path, if another sequence is computing it now."""
    partial: Node | None
    """If no chunk is pending: the chunk behind the path, on the device or in host memory, whose beginning agrees
    longest with the prompt."""
    partial_tokens: int
    """Number of tokens of `partial` that agree; 0 without one."""


def common_tokens(left: bytes, right: bytes) -> int:
    """Return the length of the common prefix of two token strings, in tokens."""
    if left[:TOKEN_BYTES] != right[:TOKEN_BYTES]:
        return 0
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    while low < high:  # bisection over memcmp beats a loop over tokens
        middle = (low + high + 1) // 2
        if left[: middle * TOKEN_BYTES] == right[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


class RadixTree:
    """All trees of chunks: one per salt, cut, text, and prompt with modules. Pure: time and steps are
    arguments."""

    def __init__(self, chunk_size: int, fingerprint: bytes, dtype: str) -> None:
        self.chunk_size = chunk_size
        self.chunk_bytes = chunk_size * TOKEN_BYTES
        self._identity = (fingerprint, dtype)
        self._roots: dict[bytes, Node] = {}
        """The roots, by the places of their keys."""
        self._cuts: dict[ChunkName, dict[bytes, None]] = {}
        """Keys of the roots of cuts, by the chunk after which they stand, in order of creation."""
        self.node_count = 0
        self.active_count = 0

    # Roots

    def root(self, salt: bytes) -> Node:
        """Return the root of a salt's tree; make it if need be. The root stays while it is held or has chunks."""
        return self.find_root(salt) or self._root(SALT_ROOT + salt, self.root_name(salt))

    def root_name(self, salt: bytes) -> ChunkName:
        """Return the name of a salt's root, whether it exists or not."""
        return root_name(*self._identity, self.chunk_size, salt)

    def find_root(self, salt: bytes) -> Node | None:
        """Return the root of a salt's tree, if there is one."""
        return self._roots.get(SALT_ROOT + salt)

    def cut_root(self, after: ChunkName, drops: bytes) -> Node:
        """Return the root of the chunks behind a cut; make it if need be.

        Args:
            after: plain name of the history's last chunk before the cut.
            drops: the ranges of the history that are not seen behind the cut, packed.
        """
        name = cut_name(after, drops)
        return self._root(root_keys.cut_key(name, after, drops), name)

    def find_cut(self, name: ChunkName) -> Node | None:
        """Return the root of the cut with this name (`cut_name`); None: the tree has none."""
        return self._roots.get(CUT_ROOT + name)

    def cuts_after(self, after: ChunkName) -> list[Node]:
        """Return the roots of cuts after the same history, the latest first."""
        return [self._roots[key] for key in reversed(self._cuts.get(after, {}))]

    def text_root(self, name: ChunkName, position: int) -> Node:
        """Return the root of a module's text; make it if need be.

        Args:
            name: name of what the text sees and how it begins.
            position: position at which the text's first token will be computed, if the root is new
                (`root_keys.position_of`).
        """
        root = self.find_text_root(name)
        if root is None:
            root = self._root(root_keys.text_key(name, position), root_keys.text_root_name(name, position))
            root.text_name = name
        return root

    def find_text_root(self, name: ChunkName) -> Node | None:
        """Return the root of a text, if there is one."""
        return self._roots.get(TEXT_ROOT + name)

    def prompt_root(self, name: ChunkName) -> Node:
        """Return the root for the own tokens of prompts with the same modules at the same places; make it if need
        be."""
        return self._root(root_keys.prompt_key(name), name)

    def find_prompt_root(self, name: ChunkName) -> Node | None:
        """Return the root for the own tokens of a prompt with modules, if there is one."""
        return self._roots.get(PROMPT_ROOT + name)

    def restore_root(self, key: bytes) -> Node | None:
        """Return the root for a key that another run stored; None if the key is not valid."""
        name = root_keys.name_in(key)
        if name is None:
            return None
        match key[:1]:
            case root_keys.SALT_ROOT:
                return self.root(key[len(SALT_ROOT) :])
            case root_keys.TEXT_ROOT:
                return self.text_root(name, root_keys.position_of(key))
            case _:
                return self._root(key, name)

    def _root(self, key: bytes, name: ChunkName) -> Node:
        place = root_keys.place_of(key)
        root = self._roots.get(place)
        if root is None:
            root = self._roots[place] = Node(None, key, name, NO_BLOCK)
            if key.startswith(CUT_ROOT):
                self._cuts.setdefault(root_keys.after_of(key), {})[place] = None
        return root

    def prune_root(self, node: Node) -> None:
        """Forget an empty tree that is not held: clients choose salts, which must not pile up."""
        if node.parent is not None or node.children or node.holders:
            return
        place = root_keys.place_of(node.key)
        if self._roots.pop(place, None) is not None and node.key.startswith(CUT_ROOT):
            after = root_keys.after_of(node.key)
            del self._cuts[after][place]
            if not self._cuts[after]:
                del self._cuts[after]

    def roots(self) -> Iterator[Node]:
        return iter(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """Iterate over all chunks, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    # Matching

    def match(self, root: Node, tokens: bytes, step: int) -> Match:
        """Return the longest cached prefix of `tokens` (int32 bytes) below `root`, for use in step `step`.

        Exact to the token: whole chunks by lookup, then the beginning of the best child. One lookup per chunk.
        """
        path, pending = self._walk(root, tokens, step)
        if pending is not None:
            return Match(path, pending, None, 0)
        size = self.chunk_bytes
        start = len(path) * size
        partial, agreed = self.best_partial(path[-1] if path else root, tokens[start : start + size], step)
        return Match(path, None, partial, agreed)

    def whole_tokens(self, root: Node, tokens: bytes, step: int) -> int:
        """Return how many tokens `match` finds in whole chunks."""
        return len(self._walk(root, tokens, step)[0]) * self.chunk_size

    def _walk(self, root: Node, tokens: bytes, step: int) -> tuple[list[Node], Node | None]:
        """Return the whole computed chunks of `tokens` below `root`, and the next one if it is being computed."""
        path, node, size = list[Node](), root, self.chunk_bytes
        for offset in range(0, len(tokens) - size + 1, size):
            child = node.children.get(tokens[offset : offset + size])
            if child is None:
                break
            if child.ready_step >= step:
                return path, child
            path.append(child)
            node = child
        return path, None

    def best_partial(self, node: Node, rest: bytes, step: int) -> tuple[Node | None, int]:
        """Return the usable child that agrees longest with `rest`, and for how many tokens.

        In a sorted list it is one of the two neighbours of `rest`. Pending neighbours do not count, because
        waiting for a part of a chunk costs more than computing it; nor do those on disk or further away. Of two
        that agree equally, one on the device is preferred.
        """
        if not rest or not node.sorted_keys:
            return None, 0
        best, best_rank, keys = None, (0, True), node.sorted_keys
        at = bisect_left(keys, rest)
        for key in keys[max(0, at - 1) : at + 1]:
            child = node.children[key]
            rank = common_tokens(child.key, rest), child.on_device
            if child.ready_step < step and child.is_loadable and rank > best_rank:
                best, best_rank = child, rank
        return best, best_rank[0]

    def most_similar_child(self, node: Node, rest: bytes, step: int) -> tuple[Node | None, int]:
        """Return the child that agrees longest with `rest`, and for how many tokens, as `best_partial` does, but
        among children in any tier."""
        best, best_agreed, keys = None, 0, node.sorted_keys
        at = bisect_left(keys, rest)
        for key in keys[max(0, at - 1) : at + 1]:
            child = node.children[key]
            agreed = common_tokens(child.key, rest)
            if child.ready_step < step and agreed > best_agreed:
                best, best_agreed = child, agreed
        return best, best_agreed

    def beginnings(self, node: Node, rest: bytes) -> list[Node]:
        """Return the children that are beginnings of `rest`, or all of it, in any tier."""
        ends = range(TOKEN_BYTES, len(rest) + 1, TOKEN_BYTES)
        return [node.children[rest[:end]] for end in ends if rest[:end] in node.children]

    def covered_by_sibling(self, parent: Node, key: bytes) -> Node | None:
        """Return a child of `parent` whose key begins with `key`, if there is one."""
        at = bisect_left(parent.sorted_keys, key)
        if at < len(parent.sorted_keys) and parent.sorted_keys[at].startswith(key):
            return parent.children[parent.sorted_keys[at]]
        return None

    # Structure

    def attach(
        self,
        parent: Node,
        key: bytes,
        block: BlockId,
        ready_step: int,
        marker: bytes = b"",
        name: ChunkName | None = None,
    ) -> Node:
        """Add a chunk below `parent`, which must not have such a child.

        Args:
            marker: name of the cut behind which the chunk is computed; empty: its whole history is seen.
            name: name of a chunk that was moved to another group's cut; None: the name follows from all this.
        """
        node = Node(parent, key, name or chunk_name(parent.name, marker + key), block)
        node.ready_step = ready_step
        node.exact = not marker if name is None else name == chunk_name(parent.name, key)
        if parent.text_name is not None:
            node.text_name = chunk_name(parent.text_name, key)
        self._link(parent, node)
        self.node_count += 1
        return node

    def append(self, parent: Node, key: bytes, block: BlockId, now: float, marker: bytes = b"") -> Node:
        """Add a chunk below `parent`, and let the sequence that computed it hold it instead of `parent`: `attach`,
        `hold` and `release` in one act. Not for trees that count readers
        (`trunkline.controller.cache.reader_cache`)."""
        node = self.attach(parent, key, block, 0, marker)
        node.holders = node.active = 1  # `parent` has an active child now instead of a holder
        self.active_count += 1
        parent.holders -= 1
        assert parent.holders >= 0
        parent.last_use = max(parent.last_use, now)
        node.last_use = now
        return node

    def _link(self, parent: Node, node: Node) -> None:
        node.parent = parent
        parent.children[node.key] = node
        insort(parent.sorted_keys, node.key)
        parent.device_children += node.on_device

    def _unlink(self, node: Node) -> Node:
        """Take a node out of its parent's children; return the parent."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del parent.sorted_keys[bisect_left(parent.sorted_keys, node.key)]
        parent.device_children -= node.on_device
        node.parent = None
        return parent

    # Holding

    def hold(self, node: Node, chunks: int = ALL_CHUNKS) -> None:
        """Keep `node` and everything above it from being evicted, or a root from being pruned.

        Only while a plan is made may a held chunk be in lower tiers; between plans it is on the device.

        Args:
            chunks: number of the last chunks, `node` included, that the holder reads. It matters only in a tree
                with a window (`trunkline.controller.cache.window_cache`); others keep all.
        """
        node.holders += 1
        current: Node | None = node
        while current is not None and current.parent is not None:
            current.active += 1
            if current.active > 1:
                return
            self._now_active(current)
            current = current.parent

    def release(self, node: Node, now: float, chunks: int = ALL_CHUNKS) -> None:
        """Undo one `hold` of as many chunks."""
        node.holders -= 1
        assert node.holders >= 0
        node.last_use = max(node.last_use, now)
        current: Node | None = node
        while current is not None and current.parent is not None:
            current.active -= 1
            if current.active > 0:
                break
            self._now_idle(current)
            current = current.parent
        self.prune_root(node)

    def _now_active(self, node: Node) -> None:
        """Account for a node that has become active."""
        self.active_count += 1

    def _now_idle(self, node: Node) -> None:
        """Account for a node that has become idle."""
        self.active_count -= 1
