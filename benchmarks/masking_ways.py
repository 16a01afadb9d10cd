"""Ways of making a context of documents: what each sees while it is computed, and where it acts (pml.md §3)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

from masking_texts import Task

Scope = Literal["plain", "none", "self", "ancestors", "scaffold"]
Gaps = Literal["no", "modules", "unions"]
Places = Literal["right", "moved on", "moved back", "stacked", "stacked, near", "restarted"]
WRONG: Final = ("stacked", "stacked, near", "restarted")
MOVED_BACK: Final = 512
"""Positions."""
UNION_GAP_MAX: Final = 64

RENEWED: Final = (4, 8, 16, 32)
"""Numbers of a moved document's first tokens that are computed again at its place."""


class Kept(Protocol):
    """The KV of a text."""

    def behind(self, count: int) -> Self:
        """Return the KV of all tokens but the first `count`."""


K = TypeVar("K", bound=Kept)
"""What a reader gives for a text that it has computed."""
R = TypeVar("R")
"""What it says of the text's tokens."""

Read = Callable[[list[int], int, list[tuple[K, int]]], tuple[K, R]]
"""Computes tokens from a position on, each of which sees those before it and other texts, which act from the given
positions on."""


class Way(NamedTuple):
    """How documents become a context.

    Scope: `plain` is one text, computed as a whole; `none` has no documents; `self`: a document sees itself only;
    `ancestors`: the root, too; `scaffold`: all before it.

    Gaps before each document, which nobody fills: as long as the document, as if a module there were not imported;
    or up to 64 tokens, as if a longer member of a union were not.

    Places: `right`: where it was computed; `moved on`: it was computed where the first one begins, and acts at its
    place by a shift; `moved back`: it was computed 512 positions behind its place.

    Wrong places: `stacked`: all were computed and act where the first one begins, and new text stands where it
    would otherwise; `stacked, near`: new text stands right behind the longest of them; `restarted`: documents are
    right, but new text stands where the first of them begins.

    Renewed: so many first tokens of each document are computed again where the document acts, seeing all before
    them, as a prompt's own tokens do; the rest is as it was kept.
    """

    scope: Scope
    gaps: Gaps = "no"
    places: Places = "right"
    renewed: int = 0

    @property
    def is_wrong(self) -> bool:
        """No rank accepts it."""
        return self.places in WRONG


WAYS: Final = (
    Way("plain"),
    Way("none"),
    Way("scaffold"),
    Way("ancestors"),
    Way("self"),
    Way("scaffold", "modules"),
    Way("ancestors", "modules"),
    Way("self", "modules"),
    Way("ancestors", "unions"),
    Way("ancestors", places="moved on"),
    *(Way("ancestors", places="moved on", renewed=count) for count in RENEWED),
    Way("ancestors", places="moved back"),
    Way("self", places="moved on"),
    Way("ancestors", places="stacked"),
    Way("self", places="stacked"),
    Way("ancestors", places="stacked, near"),
    Way("ancestors", places="restarted"),
)


class Context(NamedTuple, Generic[K]):
    """What a new text sees, and where it stands."""

    seen: list[tuple[K, int]]
    end: int


def build(read: Read[K, R], task: Task, way: Way, seed: int) -> Context[K]:
    """Compute root and documents.

    Args:
        seed: of gaps.
    """
    if way.scope == "plain":
        whole = [*task.root, *(token for document in task.documents for token in document)]
        return Context([(read(whole, 0, [])[0], 0)], len(whole))
    rng = random.Random(seed)
    root = (read(task.root, 0, [])[0], 0)
    seen, first = [root], len(task.root)
    end = longest = first
    for document in task.documents if way.scope != "none" else []:
        end += gap(way, document, rng)
        above = {"self": [], "ancestors": [root]}.get(way.scope, list(seen))
        is_stacked = way.places.startswith("stacked")
        computed_at = first if is_stacked or way.places == "moved on" else end
        kept, _ = read(document, computed_at + MOVED_BACK * (way.places == "moved back"), above)
        renewed = min(way.renewed, len(document) - 1)
        if renewed:
            seen.append((read(document[:renewed], end, list(seen))[0], end))
            seen.append((kept.behind(renewed), end + renewed))
        else:
            seen.append((kept, first if is_stacked else end))
        end += len(document)
        longest = max(longest, first + len(document))
    ends = {"stacked, near": longest, "restarted": first}
    return Context(seen, ends.get(way.places, end))


def gap(way: Way, document: list[int], rng: random.Random) -> int:
    """Positions that stay empty before a document."""
    return {"no": 0, "modules": len(document), "unions": rng.randrange(UNION_GAP_MAX + 1)}[way.gaps]
