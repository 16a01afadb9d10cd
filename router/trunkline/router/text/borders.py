"""Where two texts part, and where a text can be split so that its parts can be encoded on their own. Pure.

A tokenizer takes its special tokens out of a text before it does anything else, and encodes what is between them
piece by piece. So the ids of a text are those of its part before a special token, followed by those of the part
that begins with it. Such a place is a *border*. Templates write special tokens around every message.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.chunks import Int32Array

if TYPE_CHECKING:
    from tokenizers import AddedToken

Places = NDArray[np.int64]
"""Borders in ascending order, `[n, 2]`: characters and tokens before each."""
NO_PLACES: Final[Places] = np.zeros((0, 2), np.int64)


class BorderTokens:
    """The special tokens of a tokenizer before which a text can be split."""

    def __init__(self, added: Mapping[int, AddedToken], ends: Iterable[int], unknown: int | None = None) -> None:
        """
        Args:
            added: The tokens that the tokenizer finds in a text before all others, by their ids.
            ends: The tokens that end an answer.
            unknown: The token for what has no other; None: there is none. It may stand where its text does not.
        """
        contents = sorted(token.content for token in added.values() if token.content)
        longer = {one for one, other in itertools.pairwise(contents) if other.startswith(one)}
        # A token that begins with a character within another one could overlap with it.
        inner = set().union(*(content[1:] for content in contents))
        self.contents: dict[int, str] = {
            number: token.content
            for number, token in added.items()
            if token.special
            and token.content
            and number != unknown
            and not (token.lstrip or token.single_word or token.normalized)
            and token.content not in longer
            and token.content[0] not in inner
        }
        """Their texts by their ids."""
        self.ends = self.of(ends)
        """Texts of those that end an answer."""
        self._ids = np.array(sorted(self.contents), np.int32)

    def places(self, text: str, ids: Int32Array) -> Places:
        """Return the borders of a text whose token ids these are; none if the two do not agree."""
        at = np.flatnonzero(np.isin(ids, self._ids))
        found = np.zeros((len(at), 2), np.int64)
        found[:, 1] = at
        place = 0
        for index, token in enumerate(ids[at].tolist()):
            content = self.contents[token]
            place = text.find(content, place)
            if place < 0:
                return NO_PLACES
            found[index, 0] = place
            place += len(content)
        return found

    def of(self, ids: Iterable[int]) -> frozenset[str]:
        """Return the texts of those of some tokens that make borders."""
        return frozenset(self.contents[token] for token in ids if token in self.contents)


def starts(text: str, contents: Iterable[str], start: int) -> Iterator[int]:
    """Yield the places from `start` on where one of some texts begins, ascending."""
    heads = [(text.find(content, start), content) for content in contents]
    heads = [head for head in heads if head[0] >= 0]
    while heads:
        place, content = min(heads)
        yield place
        heads.remove((place, content))
        following = text.find(content, place + len(content))
        if following >= 0:
            heads.append((following, content))


def joined(first: Places, rest: Places, characters: int, tokens: int) -> Places:
    """Return the borders of a text from those of its two parts.

    Args:
        characters: Those of the first part.
        tokens: Those of the first part.
    """
    moved: Any = rest + np.array([characters, tokens], np.int64)
    return np.concatenate((first, moved))


def agreed_length(one: str, other: str) -> int:
    """Return how many first characters of two texts agree. If one continues the other, nothing is copied."""
    if len(one) > len(other):
        one, other = other, one
    if other.startswith(one):
        return len(one)
    low, high = 0, len(one)
    while low < high:
        middle = (low + high + 1) // 2
        if other.startswith(one[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
