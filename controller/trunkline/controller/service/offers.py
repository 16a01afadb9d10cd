"""Lists the paths of the radix tree that other groups should have, too: the conversations of a group that leaves,
and what a group that is new will need first. Pure.

    OffersCall ──► Offering.ask ──► OfferList.advance(UNITS_PER_TURN), turn by turn ──► Offers, a page at a time

A path is offered by its last chunk:

- `live`: a chunk without a whole chunk below it, which is where a conversation ends. Chunks that running requests
  use come first, then those that were used last.
- `hot`: a pinned chunk, the end of a module's text, or a chunk behind which prompts part, if several requests have
  used it. What was used most comes first.

A chunk that is not full is left to be computed again; only the last chunk of a text is offered, too, because a
text of which a part is missing is of no use.

A path is known elsewhere by its root's key and its tokens. Chunks that were moved behind a cut have the names of
their old places (`RadixCache.graft`), which do not follow from that, so these names are told, too.

The tree changes while it is walked, and while its pages are asked for. Chunks that are gone by then are left out.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final

from trunkline.controller.cache.radix_tree import PENDING, RadixTree
from trunkline.controller.cache.radix_tree import Node as Chunk
from trunkline.controller.engine.engine import Engine
from trunkline.controller.messages import OffersCall
from trunkline.kvstore.chunks import chunk_name
from trunkline.kvstore.root_keys import CUT_ROOT, TEXT_ROOT
from trunkline.router.messages import OfferedPath, Offers

LIVE: Final = "live"
HOT: Final = "hot"
PATHS_MAX: Final = 16_384
"""Largest number of paths of a list; of more, those that come first."""
PAGE_BYTES: Final = 1 << 20
"""Size at which a page ends, in bytes of tokens. A page has at least one path."""
PAGE_PATHS_MAX: Final = 1024
HOT_USES: Final = 2
"""Number of requests that must have used a chunk that is `hot` without being pinned."""
UNITS_PER_TURN: Final = 100
"""Number of units of work per turn of the loop. A unit takes a few microseconds."""
LIST_SECONDS: Final = 60.0
"""Time in seconds after which a list is forgotten if no page of it was asked for. A router asks for the next one
when other groups have nearly fetched what it knows; what it does not get it does not hand over."""
LISTS_MAX: Final = 16
"""Largest number of lists that are kept."""
ASKED_MAX: Final = 64
"""Largest number of questions that wait; if there are more, the oldest get no answer."""
_END: Final = object()
_Rank = tuple[bool, float]


class OfferList:
    """One list of paths, made a bounded share of the work at a time. Pure."""

    def __init__(self, tree: RadixTree, kind: str, now: float, paths_max: int = PATHS_MAX) -> None:
        """
        Args:
            kind: `LIVE` or `HOT`; the list of another kind is empty.
            now: time of `Node.last_use`, in seconds.
        """
        self.tree = tree
        self.asked_at = now
        """Time at which a page was last asked for."""
        self._made_at = now
        self._rank = {LIVE: self._live_rank, HOT: self._hot_rank}.get(kind)
        self._paths_max = paths_max
        self._ends: list[Chunk] = []
        """The last chunk of each path, in the order of the list, once that is known."""
        self._starts = [0]
        """For each page that was made, and the next one: index of its first path."""
        self._work = self._walk()

    def advance(self, units: int) -> bool:
        """Do this many units of the work; return whether all of it is done."""
        return any(next(self._work, _END) is _END for _ in range(units))

    def page(self, number: int, ticket: int) -> Offers:
        """Return a page, once `advance` has returned that all is done. Pages are asked for in their order; those
        before may be asked for again."""
        if not 0 <= number < len(self._starts):
            return Offers(0, ticket, [], more=False)
        at, size = self._starts[number], 0
        paths: list[OfferedPath] = []
        while at < len(self._ends) and size < PAGE_BYTES and len(paths) < PAGE_PATHS_MAX:
            path = self._path(self._ends[at])
            at += 1
            if path is not None:
                paths.append(path)
                size += len(path.tokens)
        if number + 1 == len(self._starts):
            self._starts.append(at)
        return Offers(0, ticket, paths, more=at < len(self._ends))

    def _walk(self) -> Iterator[None]:
        best: list[tuple[_Rank, int, Chunk]] = []
        serial = 0
        for root in list(self.tree.roots()) if self._rank is not None else ():
            is_text = root.key.startswith(TEXT_ROOT)
            stack = list(root.children.values())
            while stack:
                yield
                chunk = stack.pop()
                if chunk.parent is None or not self._counts(chunk, is_text):
                    continue
                below = [child for child in chunk.children.values() if self._counts(child, is_text)]
                stack += below
                assert self._rank is not None
                rank = self._rank(chunk, below, is_text)
                if rank is not None:
                    serial -= 1  # of equals, the first one that was found comes first
                    push = heapq.heappush if len(best) < self._paths_max else heapq.heappushpop
                    push(best, (rank, serial, chunk))
        while best:
            yield
            self._ends.append(heapq.heappop(best)[2])
        self._ends.reverse()

    def _counts(self, chunk: Chunk, is_text: bool) -> bool:
        """Return whether a chunk may be a part of an offered path."""
        return chunk.ready_step != PENDING and (is_text or chunk.token_count == self.tree.chunk_size)

    @staticmethod
    def _live_rank(chunk: Chunk, below: list[Chunk], is_text: bool) -> _Rank | None:
        """Return how early a `live` path comes that ends with a chunk, the highest first; None: none does."""
        return None if below else (chunk.active > 0, chunk.last_use)

    @staticmethod
    def _hot_rank(chunk: Chunk, below: list[Chunk], is_text: bool) -> _Rank | None:
        """As `_live_rank`, of a `hot` path."""
        if chunk.pins:
            return None if any(child.pins for child in below) else (True, chunk.uses)
        parts = not below if is_text else len(chunk.children) > 1
        return (False, chunk.uses) if parts and chunk.uses >= HOT_USES else None

    def _path(self, end: Chunk) -> OfferedPath | None:
        """Return the path to a chunk; None: it is gone."""
        chunks: list[Chunk] = []
        chunk = end
        while chunk.parent is not None:
            chunks.append(chunk)
            chunk = chunk.parent
        root = chunk
        if root is end:
            return None
        chunks.reverse()
        moved = 0
        if root.key.startswith(CUT_ROOT):
            above = [root, *chunks]
            for index, (parent, chunk) in enumerate(zip(above, chunks, strict=False), start=1):
                if chunk.name != chunk_name(parent.name, root.name + chunk.key):
                    moved = index
        names = b"".join([chunk.name for chunk in chunks[:moved]])
        age = 0.0 if end.active else max(0.0, self._made_at - end.last_use)
        return OfferedPath(root.key, b"".join([chunk.key for chunk in chunks]), end.uses, age, names)


class Offering:
    """The lists that routers ask for, page by page."""

    def __init__(self) -> None:
        self._asked: deque[tuple[int, OffersCall]] = deque(maxlen=ASKED_MAX)
        self._lists: OrderedDict[tuple[int, str], OfferList] = OrderedDict()
        """By router and kind; the one that was asked for last is the last one."""

    @property
    def is_busy(self) -> bool:
        """Whether questions wait, so that `turn` should be called again at once."""
        return bool(self._asked)

    def ask(self, router: int, call: OffersCall) -> None:
        """Note the question of the router with this index."""
        self._asked.append((router, call))
        if call.page == 0:
            self._lists.pop((router, call.kind), None)

    def turn(self, engine: Engine | None, now: float) -> list[tuple[int, Offers]]:
        """Do a share of the work; return the answer to the oldest question if it is complete, with the router's
        index."""
        if not self._asked:
            return []
        tree = None if engine is None else engine.scheduler.kv.tree
        for key, found in list(self._lists.items()):
            if found.tree is not tree or now - found.asked_at > LIST_SECONDS:
                del self._lists[key]  # new workers have a new tree
        router, call = self._asked[0]
        key = router, call.kind
        wanted = self._lists.get(key)
        if wanted is None and tree is not None and call.page == 0:
            wanted = self._lists[key] = OfferList(tree, call.kind, now)
            if len(self._lists) > LISTS_MAX:
                self._lists.popitem(last=False)
        if wanted is not None:
            wanted.asked_at = now
            if not wanted.advance(UNITS_PER_TURN):
                return []
        self._asked.popleft()
        answer = Offers(0, call.ticket, [], more=False) if wanted is None else wanted.page(call.page, call.ticket)
        return [(router, answer)]
