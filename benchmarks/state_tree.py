"""A radix tree for models whose layers partly have a recurrent state: a prototype, pure and without tensors.

Layers of linear attention and Mamba layers keep one state of fixed size per sequence, which each token changes in
place. A prefix can be gone on with only where a copy of its state, a *snapshot*, was taken; the KV of the layers
with attention is needed up to there, too. So the cache consists of snapshots, and KV lives for their sake:

- A chunk is in the tree as long as it or a chunk behind it has a snapshot. KV behind the last one is of no use.
- A prompt finds the deepest snapshot on its path. What its path has behind that is computed again, and where the
  path leaves the tree is a *branch*: a place that two prompts passed, known before the computation gets there.
- What leaves is always a snapshot, and with it the chunks that only it held. A snapshot saves what would have to
  be computed from the next one above it, and costs its own bytes and those of the chunks that only it holds.

`places` says where snapshots are taken; an `Order` says which leaves first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

PROMPT: Final = "prompt"
"""A snapshot behind the last whole chunk of a prompt."""
ANSWER: Final = "answer"
"""Behind the last whole chunk of an answer."""
BRANCH: Final = "branch"
"""Where prompts part."""
GRID: Final = "grid"
"""At a multiple of some length."""


@dataclass(slots=True, eq=False)
class Node:
    """A chunk whose KV is held; the root stands for the empty prefix."""

    parent: Node | None
    name: bytes
    depth: int
    """Chunks up to its end."""
    children: int = 0
    snapshot: Snapshot | None = None


@dataclass(slots=True, eq=False)
class Snapshot:
    """The recurrent state at the end of a chunk."""

    node: Node
    kind: str
    last_use: float
    """When it was taken or found last, in seconds."""
    counted: float
    """Up to when `Returns` knows of it, in seconds."""

    @property
    def is_inner(self) -> bool:
        """Whether the tree goes on behind it: a later prompt was longer, or another one parted here."""
        return self.node.children > 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What things weigh; any unit that is the same for both."""

    chunk: float
    """The KV of one chunk."""
    state: float
    """One snapshot."""


@dataclass(slots=True)
class Counts:
    """What happened so far."""

    taken: int = 0
    """Snapshots."""
    evicted: int = 0
    most: float = 0.0
    """Most bytes at once."""


class Order(Protocol):
    """Which snapshot leaves first."""

    def found(self, snapshot: Snapshot, now: float) -> None:
        """The snapshot was found by a prompt; its `last_use` is still the one before."""

    def keys(self, tree: StateTree, now: float) -> Mapping[Snapshot, float]:
        """Return a number for each snapshot; the lowest leaves first."""


@dataclass(slots=True)
class StateTree:
    """The tree. All times are seconds of one clock, and never run backwards."""

    sizes: Sizes
    room: float
    """Bytes, of the unit of `sizes`."""
    order: Order
    root: Node = field(default_factory=lambda: Node(None, b"", 0))
    nodes: dict[bytes, Node] = field(default_factory=dict)
    """By name, which also tells what stands before."""
    snapshots: dict[Snapshot, None] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    @property
    def held(self) -> float:
        """Bytes."""
        return len(self.nodes) * self.sizes.chunk + len(self.snapshots) * self.sizes.state

    def find(self, names: Sequence[bytes], now: float) -> tuple[int, int]:
        """Return how many chunks of a prompt the tree has, and how many lie before its deepest snapshot there."""
        low, high = 0, len(names)
        while low < high:  # a chunk is never without those before it
            middle = (low + high + 1) // 2
            low, high = (middle, high) if names[middle - 1] in self.nodes else (low, middle - 1)
        node = self.nodes[names[low - 1]] if low else self.root
        while node.snapshot is None and node.parent is not None:
            node = node.parent
        if node.snapshot is not None:
            self.order.found(node.snapshot, now)
            node.snapshot.last_use = now
        return low, node.depth

    def add(self, names: Sequence[bytes], places: Mapping[int, str], now: float) -> None:
        """Store what a prompt and its answer have computed, and evict what is too much.

        Args:
            names: Of the chunks of both.
            places: By a number of chunks: the kind of the snapshot that was taken behind so many.
        """
        deepest = max(places, default=0)
        node = self.root
        for depth, name in enumerate(names[:deepest], 1):
            known = self.nodes.get(name)
            if known is None:
                node.children += 1
                known = self.nodes[name] = Node(node, name, depth)
            node = known
            if depth in places and node.snapshot is None:
                node.snapshot = Snapshot(node, places[depth], now, now)
                self.snapshots[node.snapshot] = None
                self.counts.taken += 1
        self._evict(now)
        self.counts.most = max(self.counts.most, self.held)

    def saved(self, snapshot: Snapshot) -> int:
        """Return how many chunks lie between the next snapshot above this one, or the root, and this one."""
        node = snapshot.node.parent
        while node is not None and node.parent is not None and node.snapshot is None:
            node = node.parent
        return snapshot.node.depth - (node.depth if node else 0)

    def freed(self, snapshot: Snapshot) -> float:
        """Return the bytes that leave with this snapshot."""
        return self.sizes.state + self.sizes.chunk * sum(1 for _ in _only_for(snapshot))

    def _evict(self, now: float) -> None:
        if self.held <= self.room:
            return
        keys = self.order.keys(self, now)
        for snapshot in sorted(self.snapshots, key=lambda each: keys[each]):
            if self.held <= 0.99 * self.room:  # one sort serves several requests
                return
            self.drop(snapshot)

    def drop(self, snapshot: Snapshot) -> None:
        """Give up a snapshot and the chunks that only it holds."""
        gone = list(_only_for(snapshot))
        snapshot.node.snapshot = None
        del self.snapshots[snapshot]
        self.counts.evicted += 1
        for node in gone:
            del self.nodes[node.name]
            assert node.parent is not None
            node.parent.children -= 1

    def check(self) -> None:
        """Raise AssertionError unless what stands at the top of this file holds."""
        children: dict[Node | None, int] = {}
        for name, node in self.nodes.items():
            assert node.name == name
            assert node.parent is not None
            assert node.parent is self.root or self.nodes[node.parent.name] is node.parent
            assert node.depth == node.parent.depth + 1
            assert node.children or node.snapshot, "a chunk without a snapshot at its end or behind it"
            children[node.parent] = children.get(node.parent, 0) + 1
        for node in [self.root, *self.nodes.values()]:
            assert node.children == children.get(node, 0)
            assert node.snapshot is None or (node.snapshot.node is node and node.snapshot in self.snapshots)
        assert all(snapshot.node.snapshot is snapshot for snapshot in self.snapshots)


def _only_for(snapshot: Snapshot) -> Iterable[Node]:
    """Yield the chunks that nothing but this snapshot holds, from its own upwards."""
    node, children = snapshot.node, snapshot.node.children
    while (parent := node.parent) is not None and not children and (node is snapshot.node or not node.snapshot):
        yield node
        node, children = parent, parent.children - 1


Places = Callable[[int, int, int, int], Mapping[int, str]]
"""Where snapshots are taken, from four numbers of chunks: the prompt's, those of prompt and answer, those before
the snapshot that was found, and those that the tree has. The computation passes all behind the third."""


def ends_and_branches(prompt: int, both: int, start: int, known: int) -> dict[int, str]:
    """Behind the prompt, behind the answer, and where the prompt leaves the tree."""
    return {at: kind for at, kind in {known: BRANCH, prompt: PROMPT, both: ANSWER}.items() if at > start}


def ends(prompt: int, both: int, start: int, known: int) -> dict[int, str]:
    """Behind the prompt and behind the answer: what a radix tree of finished requests has."""
    return {at: kind for at, kind in {prompt: PROMPT, both: ANSWER}.items() if at > start}


def branches(prompt: int, both: int, start: int, known: int) -> dict[int, str]:
    """Behind the answer, and where the prompt leaves the tree."""
    return {at: kind for at, kind in {known: BRANCH, both: ANSWER}.items() if at > start}


def grid(chunks: int) -> Places:
    """Return a rule that takes one at each multiple of so many chunks."""

    def places(prompt: int, both: int, start: int, known: int) -> dict[int, str]:
        return dict.fromkeys(range(start // chunks * chunks + chunks, both + 1, chunks), GRID)

    return places


class Oldest:
    """What was not used for longest leaves first."""

    def found(self, snapshot: Snapshot, now: float) -> None:
        pass

    def keys(self, tree: StateTree, now: float) -> dict[Snapshot, float]:
        return {snapshot: snapshot.last_use for snapshot in tree.snapshots}


class RecencyAndSavings:
    """Recency plus computation saved per byte, each from 0 to 1 over all snapshots (Marconi, section 4.2)."""

    def __init__(self, weight: float = 1.0) -> None:
        """`weight`: of what is saved."""
        self.weight = weight

    def found(self, snapshot: Snapshot, now: float) -> None:
        pass

    def keys(self, tree: StateTree, now: float) -> dict[Snapshot, float]:
        per_byte = {each: tree.saved(each) / tree.freed(each) for each in tree.snapshots}
        most = max(per_byte.values())
        oldest = min(each.last_use for each in tree.snapshots)
        span = max(now - oldest, 1e-9)
        return {
            each: (each.last_use - oldest) / span + self.weight * saved / most for each, saved in per_byte.items()
        }


class Returns:
    """Expected savings per byte and second: how often snapshots of a kind and an age are found, as learnt so far.

    Of each kind, apart for those behind which the tree goes on, and each power of two of seconds since the last
    use: how often one was found, and how long all of them were there.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, bool, int], int] = {}
        self._seconds: dict[tuple[str, bool, int], float] = {}

    def found(self, snapshot: Snapshot, now: float) -> None:
        self._lived(snapshot, now)
        cell = _cell(snapshot, now - snapshot.last_use)
        self._found[cell] = self._found.get(cell, 0) + 1

    def keys(self, tree: StateTree, now: float) -> dict[Snapshot, float]:
        found: dict[Snapshot, float] = {}
        for each in tree.snapshots:
            self._lived(each, now)
            rate = self._rate(_cell(each, now - each.last_use))
            found[each] = rate * tree.saved(each) / tree.freed(each)
        return found

    def _rate(self, cell: tuple[str, bool, int]) -> float:
        # Before anything is known, what was not found for a while is found about once in so long a while.
        return (self._found.get(cell, 0) + 1) / (self._seconds.get(cell, 0.0) + 60.0 + 2.0 ** cell[2])

    def _lived(self, snapshot: Snapshot, now: float) -> None:
        """Count the time since it was counted last, in the cells of the ages that it had."""
        at = snapshot.counted
        while at < now:
            cell = _cell(snapshot, at - snapshot.last_use)
            until = min(now, snapshot.last_use + 2.0 ** (cell[2] + 1) - 1)
            self._seconds[cell] = self._seconds.get(cell, 0.0) + until - at
            at = max(until, math.nextafter(at, math.inf))
        snapshot.counted = now


def _cell(snapshot: Snapshot, age_s: float) -> tuple[str, bool, int]:
    return snapshot.kind, snapshot.is_inner, int(math.log2(1 + age_s))
