"""Turn a controller's `TreeDescription` into the nodes that the dashboard draws: in preorder, with their texts and
the sessions that they belong to.

Decoding texts is the expensive part. Most nodes are the same as at the last request, so texts are remembered by
the names of chunks, which change with the tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from trunkline.kvstore.chunks import NAME_BYTES
from trunkline.router.messages import NodeFlag, TreeDescription

NODES_DEFAULT: Final = 3000
NODES_MAX: Final = 10_000
HEAD_TOKENS: Final = 32
TEXT_CHARACTERS_MAX: Final = 80
SESSIONS_MAX: Final = 8
"""Largest number of sessions that are named at one node."""
_TEXTS_MAX: Final = 30_000
_ID_BYTES: Final = 8
_KINDS: Final = ((NodeFlag.MODULE, "module"), (NodeFlag.OWN, "own"), (NodeFlag.CUT, "cut"))
_SALTED: Final = int(NodeFlag.SALTED)
_COMPUTING: Final = int(NodeFlag.COMPUTING)


def _kind(flags: int) -> str:
    return next((kind for flag, kind in _KINDS if flags & flag), "prefix")


_KIND_OF: Final = [_kind(flags) for flags in range(256)]
"""Table of the kind of a node by the node's flags. A table is faster than an enumeration, and there are thousands
of nodes."""


class Texts:
    """The first words of nodes, remembered by the name of the node's first chunk."""

    def __init__(self, decode: Callable[[Sequence[int]], str], texts_max: int = _TEXTS_MAX) -> None:
        self._decode = decode
        self._texts_max = texts_max
        self._known: OrderedDict[tuple[bytes, int], str] = OrderedDict()

    def text(self, name: bytes, tokens: Sequence[int]) -> str:
        """Return the text of a node that begins with these tokens."""
        key = name, len(tokens)
        text = self._known.get(key)
        if text is None:
            text = self._known[key] = self._decode(tokens)[:TEXT_CHARACTERS_MAX]
            if len(self._known) > self._texts_max:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return text


class TreeView:
    """Makes the nodes of one answer, in portions, so that the router's streams do not stop meanwhile."""

    def __init__(self, found: TreeDescription, texts: Texts, sessions: Mapping[bytes, Sequence[str]]) -> None:
        """
        Args:
            sessions: Ids of sessions, by the names of the chunks that they have.
        """
        self._found = found
        self._texts = texts
        self._sessions = sessions
        self._parents = _ints(found.parents)
        self._heads = _ints(found.heads)
        self._columns = tuple(map(_ints, (found.tokens, found.chunks, found.users, found.hidden)))
        self._ages: list[float] = np.frombuffer(found.ages, "<f4").tolist()
        self.nodes: list[dict[str, Any]] = []

    def portions(self, size: int) -> Iterator[None]:
        """Make the nodes; yield after each `size` of them."""
        starts = [0]
        for count in self._found.head_tokens:
            starts.append(starts[-1] + count)
        places: dict[int, int] = {-1: -1}
        for index in preorder(self._parents):
            places[index] = len(self.nodes)
            self.nodes.append(self._node(index, places[self._parents[index]], starts[index], starts[index + 1]))
            if len(self.nodes) % size == 0:
                yield

    def _node(self, index: int, parent: int, start: int, stop: int) -> dict[str, Any]:
        found = self._found
        name = found.names[index * NAME_BYTES : (index + 1) * NAME_BYTES]
        flags = found.flags[index]
        tokens, chunks, users, hidden = (column[index] for column in self._columns)
        return {
            "id": name[:_ID_BYTES].hex(),
            "parent": parent,
            "tokens": tokens,
            "chunks": chunks,
            "tiers": found.tiers[index],
            "users": users,
            "age_s": round(self._ages[index], 1),
            "kind": _KIND_OF[flags],
            "children_hidden": hidden,
            "text": self._texts.text(name, self._heads[start:stop]),
            "salted": bool(flags & _SALTED),
            "computing": bool(flags & _COMPUTING),
            "sessions": list(self._sessions.get(name, ()))[:SESSIONS_MAX],
        }


def _ints(packed: bytes) -> list[int]:
    numbers: list[int] = np.frombuffer(packed, "<i4").tolist()
    return numbers


def preorder(parents: Sequence[int]) -> Iterator[int]:
    """Yield the indices of nodes in preorder; children keep their order.

    Args:
        parents: For each node the index of its parent, which is smaller than its own; -1 for a root.
    """
    children: list[list[int]] = [[] for _ in parents]
    stack: list[int] = []
    for index, parent in enumerate(parents):
        (children[parent] if parent >= 0 else stack).append(index)
    stack.reverse()
    while stack:
        index = stack.pop()
        yield index
        stack.extend(reversed(children[index]))


def head_of(group: int, found: TreeDescription, now: float) -> dict[str, Any]:
    """Return the fields of an answer besides its nodes. `now`: seconds since the epoch."""
    shown = int(np.frombuffer(found.chunks, "<i4").sum())
    return {
        "group": group,
        "now": now,
        "chunk_size": found.chunk_size,
        "chunks": found.total_chunks,
        "chunks_shown": shown,
        "truncated": bool(np.frombuffer(found.hidden, "<i4").any()) or shown < found.total_chunks,
    }
