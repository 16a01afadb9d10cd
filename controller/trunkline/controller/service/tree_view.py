"""Describe the radix tree for the dashboard. The tree is walked beside the steps, a little in each turn. Pure.

    DescribeTree ──► Descriptions.ask ──► TreeWalk.advance(UNITS_PER_TURN), turn by turn ──► TreeDescription

Chunks that follow each other without a branch, are in the same tiers and are used by the same sequences make one
node. So a description has about as many nodes as the tree has branches. Chunks in use come first, then the most
recently used ones, until there are as many nodes as were asked for. A node comes after the node above it.

The tree changes while it is walked. Each node is described as it was when the walk reached it, and chunks that are
gone by then are left out. If nothing changes, the description is exact (tests/controller/test_tree_view.py).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import PENDING, Node
from trunkline.controller.sequences.sequence import Sequence
from trunkline.kvstore.chunks import TOKEN_BYTES
from trunkline.kvstore.root_keys import CUT_ROOT, PROMPT_ROOT, SALT_ROOT, TEXT_ROOT
from trunkline.router.messages import NodeFlag, TreeDescription

NODES_MAX: Final = 10_000
"""Largest number of nodes of one description, however many are asked for."""
HEAD_TOKENS_MAX: Final = 64
"""Largest number of each node's first tokens that a description has."""
UNITS_PER_TURN: Final = 100
"""Number of units of work per turn. A unit takes a few microseconds, so a plan waits for less than half a
millisecond."""
_FLAGS: Final = {
    SALT_ROOT: 0,
    CUT_ROOT: int(NodeFlag.CUT),
    TEXT_ROOT: int(NodeFlag.MODULE),
    PROMPT_ROOT: int(NodeFlag.OWN),
}
_SALTED: Final = int(NodeFlag.SALTED)
_COMPUTING: Final = int(NodeFlag.COMPUTING)


class _Seen(NamedTuple):
    """The properties that all chunks of one node share: a chunk in which one differs begins a new node."""

    tiers: int
    users: int
    is_computed: bool


class TreeWalk:
    """Makes one description, a bounded share of the work at a time. Pure."""

    def __init__(
        self, tree: RadixCache, running: Iterable[Sequence], *, nodes_max: int, head_tokens: int, now: float
    ) -> None:
        """
        Args:
            running: sequences that hold chunks.
            nodes_max: largest number of nodes of the description.
            head_tokens: number of each node's first tokens to include, for the node's text.
            now: time of `Node.last_use`, in seconds.
        """
        self.tree = tree
        self._running = running
        self._nodes_max = max(1, min(nodes_max, NODES_MAX))
        self._head_bytes = max(0, min(head_tokens, HEAD_TOKENS_MAX)) * TOKEN_BYTES
        self._now = now
        self._users: dict[Node, int] = {}
        self._frontier: list[tuple[bool, float, int, Node, int, Node]] = []
        """Heap of the chunks to show next. An entry has: whether the chunk is idle, the time of its last use
        (negative), a serial number, the chunk, the index of the node above it (-1: none), and the chunk below
        which it was found.
        """
        self._serial = 0
        self._columns = _Columns()
        self._work = self._walk()

    def advance(self, units: int) -> bool:
        """Do this many units of the work; return whether all of it is done."""
        return any(next(self._work, _END) is _END for _ in range(units))

    def description(self, ticket: int) -> TreeDescription:
        """Return the description, once `advance` has returned that all is done."""
        columns = self._columns
        return TreeDescription(
            seq=0,
            ticket=ticket,
            chunk_size=self.tree.chunk_size,
            total_chunks=self.tree.node_count,
            names=b"".join(columns.names),
            parents=columns.parents.tobytes(),
            tokens=columns.tokens.tobytes(),
            chunks=columns.chunks.tobytes(),
            tiers=bytes(columns.tiers),
            flags=bytes(columns.flags),
            users=columns.users.tobytes(),
            ages=columns.ages.tobytes(),
            hidden=columns.hidden.tobytes(),
            heads=b"".join(columns.heads),
            head_tokens=bytes(columns.head_tokens),
        )

    def _walk(self) -> Iterator[None]:
        yield from self._count_users()
        for root in list(self.tree.roots()):
            yield
            yield from self._find(list(root.children.values()), -1, root)
        shown = self._columns
        while self._frontier and len(shown.parents) < self._nodes_max:
            yield
            *_, node, above, parent = heapq.heappop(self._frontier)
            if node.parent is not parent:  # the chunk is gone, or has another parent now
                if above >= 0:
                    shown.hidden[above] -= 1
                continue
            yield from self._show(node, above)

    def _count_users(self) -> Iterator[None]:
        """Count how many running sequences hold each chunk, or a chunk below it."""
        users = self._users
        deepest: list[tuple[int, int, Node]] = []

        def add(node: Node, count: int) -> None:
            if node not in users:
                users[node] = 0
                heapq.heappush(deepest, (-node.depth, len(users), node))
            users[node] += count

        for sequence in self._running:
            for node in {*sequence.stem.ends, sequence.anchor}:
                if node.parent is not None:
                    add(node, 1)
        while deepest:
            yield
            node = heapq.heappop(deepest)[2]  # all chunks below it have been counted: they are deeper
            if node.parent is not None and node.parent.parent is not None:
                add(node.parent, users[node])

    def _find(self, nodes: list[Node], above: int, parent: Node) -> Iterator[None]:
        for node in nodes:
            yield
            self._serial += 1
            entry = (node not in self._users, -node.last_use, self._serial, node, above, parent)
            heapq.heappush(self._frontier, entry)
            if above >= 0:
                self._columns.hidden[above] += 1

    def _show(self, first: Node, above: int) -> Iterator[None]:
        """Add the node that begins with a chunk, and note the chunks below it."""
        seen, last = self._seen(first), first
        tokens, chunks = first.token_count, 1
        head = [first.key[: self._head_bytes]]
        missing = self._head_bytes - len(head[0])
        while len(last.children) == 1:
            yield
            child = next(iter(last.children.values()), None)
            if child is None or self._seen(child) != seen:
                break
            last = child
            tokens += child.token_count
            chunks += 1
            if missing:
                head.append(child.key[:missing])
                missing -= len(head[-1])
        shown = self._columns
        flags = self._flags(first, above) | (0 if seen.is_computed else _COMPUTING)
        index = shown.add(first.name, above, tokens, chunks, seen.tiers, flags, b"".join(head))
        shown.users[index] = seen.users
        shown.ages[index] = max(0.0, self._now - max(first.last_use, last.last_use))
        if above >= 0:
            shown.hidden[above] -= 1
        yield from self._find(list(last.children.values()), index, last)

    def _seen(self, node: Node) -> _Seen:
        return _Seen(node.tier_set, self._users.get(node, 0), node.ready_step != PENDING)

    def _flags(self, node: Node, above: int) -> int:
        """Return the flags of the tree that a chunk is in; a chunk below another one inherits them."""
        if above >= 0:
            return self._columns.flags[above] & ~_COMPUTING
        root = node.parent
        key = b"" if root is None else root.key
        return _FLAGS.get(key[:1], 0) or (_SALTED if len(key) > 1 else 0)


_END: Final = object()


class _Columns:
    """The fields of a `TreeDescription` as they grow."""

    __slots__ = (
        "ages",
        "chunks",
        "flags",
        "head_tokens",
        "heads",
        "hidden",
        "names",
        "parents",
        "tiers",
        "tokens",
        "users",
    )

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.parents, self.tokens, self.chunks = array("i"), array("i"), array("i")
        self.users, self.hidden, self.ages = array("i"), array("i"), array("f")
        self.tiers, self.flags, self.head_tokens = bytearray(), bytearray(), bytearray()
        self.heads: list[bytes] = []

    def add(self, name: bytes, above: int, tokens: int, chunks: int, tiers: int, flags: int, head: bytes) -> int:
        """Add a node whose users, age and children follow later; return its index."""
        self.names.append(name)
        self.parents.append(above)
        self.tokens.append(tokens)
        self.chunks.append(chunks)
        self.tiers.append(tiers)
        self.flags.append(flags)
        self.users.append(0)
        self.hidden.append(0)
        self.ages.append(0.0)
        self.heads.append(head)
        self.head_tokens.append(len(head) // TOKEN_BYTES)
        return len(self.parents) - 1
