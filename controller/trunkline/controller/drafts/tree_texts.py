"""Texts behind a path of the radix tree: how other sequences went on that had the same tokens so far. Pure.

    path ─► [64]──[64]──[tail of the sequence …
                   └────[the same tail, 20 more]──[64]──[17]      another sequence: its next tokens are a draft

Only tokens are read, so it does not matter in which tier the chunks' KV is, or whether it is computed already.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np

from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.drafts.text_index import NO_TOKEN
from trunkline.kvstore.chunks import TOKEN_BYTES, Int32Array

CHILDREN_MAX: Final = 8
"""Number of a chunk's children that are looked at: many continuations of a path say little about the next one."""


class TreeText:
    """Tokens behind a path."""

    __slots__ = ("_view",)

    def __init__(self, tokens: Int32Array) -> None:
        self._view = tokens.data

    def token(self, place: int) -> int:
        """Return the token at a position; `NO_TOKEN`: it is not there."""
        return self._view[place] if place < len(self._view) else NO_TOKEN

    def tokens(self, place: int, count: int) -> list[int]:
        """Return up to `count` tokens from a position on."""
        found: list[int] = self._view[place : place + count].tolist()
        return found


def text_behind(node: Node, tail: Sequence[int]) -> TreeText | None:
    """Return how another sequence went on behind a chunk and `tail`; None: none did.

    Of several, the one that most requests have used counts.
    """
    begin = np.array(tail, "<i4").tobytes()
    found = _best_child(node, begin)
    if found is None:
        return None
    keys = [found.key[len(begin) :]]
    if (following := _best_child(found, b"")) is not None:
        keys.append(following.key)
    tokens = np.frombuffer(b"".join(keys), "<i4")
    gaps = np.flatnonzero(tokens < 0)
    return TreeText(tokens[: gaps[0]] if len(gaps) else tokens)


def _best_child(node: Node, begin: bytes) -> Node | None:
    """Return the child that most requests have used among those that begin with `begin` and go on."""
    keys = node.sorted_keys
    at = bisect_left(keys, begin)
    best: Node | None = None
    for key in keys[at : at + CHILDREN_MAX]:
        if not key.startswith(begin):
            break
        child = node.children[key]
        if len(key) >= len(begin) + TOKEN_BYTES and (best is None or child.uses > best.uses):
            best = child
    return best
