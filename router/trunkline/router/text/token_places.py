"""Find the tokens that stand for a range of a text's characters. Pure.

    text     S e e ␣ 2 3 ° C .        characters [4, 8)
    tokens   |See|␣23|°|C.|           token 2 lies within; tokens 1 and 3 only begin or end there

Tokens are those that a prompt has, however they were made: they need not be what the tokenizer makes of the text
today. A token that stands for other characters, too, is not within the range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trunkline.router.text.borders import Places
from trunkline.router.text.detokenizer import TokenVocabulary
from trunkline.router.text.marked_text import LeftOut, left_out
from trunkline.router.text.truncation import TokenSpan

Int64Array = npt.NDArray[np.int64]


class TokenPlaces(NamedTuple):
    """The characters of a text that each token stands for, in whole or in part. Both arrays ascend."""

    starts: Int64Array
    """Index of each token's first character; shape [tokens]."""
    stops: Int64Array
    """Index behind each token's last character; shape [tokens]."""

    @classmethod
    def of_offsets(cls, offsets: Sequence[tuple[int, int]]) -> TokenPlaces:
        """Return the places that a tokenizer has told."""
        pairs = np.array(offsets, np.int64).reshape(-1, 2)
        return cls(np.maximum.accumulate(pairs[:, 0]), np.maximum.accumulate(pairs[:, 1]))

    @classmethod
    def of_bytes(cls, text: str, tokens: Sequence[int], vocabulary: TokenVocabulary) -> TokenPlaces | None:
        """Return the places of tokens whose bytes are the text's; None if the text is not made of their bytes."""
        data = text.encode("utf-8", "replace")
        bytes_of = {token: vocabulary.token_bytes(token) for token in set(tokens)}
        pieces = [bytes_of[token] for token in tokens]
        if b"".join(pieces) != data:
            return None
        stops = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
        starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]]) if pieces else stops
        if len(data) == len(text):
            return cls(starts, stops)
        begins = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80  # where a character begins
        characters = np.concatenate([np.zeros(1, np.int64), np.cumsum(begins)])
        inside = np.append(~begins, False)
        return cls(characters[starts] - inside[starts], characters[stops])

    @classmethod
    def of_segments(cls, text: str, tokens: Sequence[int], borders: Places, place: Placing) -> TokenPlaces:
        """Return the places of tokens of which some may be those of another text that reads the same, as a model
        wrote it. Each of them stands for all characters between two borders.

        Args:
            borders: Places where the text and its tokens can be split.
            place: Returns the places of the tokens of a text; None if they are those of another text.
        """
        ends = [(0, 0), *map(tuple, borders.tolist()), (len(text), len(tokens))]
        starts, stops = [], []
        for (start, first), (stop, last) in pairwise(ends):
            found = place(text[start:stop], tokens[first:last])
            if found is None:
                found = cls(np.zeros(last - first, np.int64), np.full(last - first, stop - start))
            starts.append(found.starts + start)
            stops.append(found.stops + start)
        return cls(np.concatenate(starts), np.concatenate(stops))

    def within(self, start: int, stop: int) -> TokenSpan:
        """Return the tokens that stand for nothing but characters `[start, stop)`; an empty span if there are
        none."""
        first = int(np.searchsorted(self.starts, start, "left"))
        last = int(np.searchsorted(self.stops, stop, "right"))
        return TokenSpan(first, max(first, last))

    def has_borders(self, start: int, stop: int) -> bool:
        """Return whether a token begins at character `start`, and one ends in front of character `stop`."""
        return _holds(self.starts, start) and _holds(self.stops, stop)


Placing = Callable[[str, Sequence[int]], TokenPlaces | None]


def _holds(ascending: Int64Array, value: int) -> bool:
    place = int(np.searchsorted(ascending, value))
    return place < len(ascending) and int(ascending[place]) == value


class RemainingText:
    """A text from which pieces are taken out, one after the other, and the tokens of these pieces."""

    def __init__(self, text: str, places: TokenPlaces) -> None:
        self.text = text
        """The text that is left."""
        self._places = places
        self._kept = [TokenSpan(0, len(text))]
        """The characters of the whole text that are left: ascending ranges."""

    def reduce(self, rest: str) -> list[TokenSpan] | None:
        """Take out the piece without which `rest` is left.

        Of the places where it may begin, the first one counts at which a token begins, if a token ends where the
        piece does, too.

        Returns:
            The tokens that stand for nothing but the piece; None if what is left is not `rest` for any piece.
        """
        found = left_out(self.text, rest)
        return None if found is None else self._take_out(found, rest)

    def cut(self, start: int, stop: int) -> list[TokenSpan]:
        """Take out the characters `[start, stop)`, or a shifted piece that leaves the same text, as `reduce`."""
        text, first, last, length = self.text, start, start, stop - start
        while first and text[first - 1] == text[first - 1 + length]:
            first -= 1
        while last + length < len(text) and text[last] == text[last + length]:
            last += 1
        return self._take_out(LeftOut(first, last, length), text[:start] + text[stop:])

    def _take_out(self, found: LeftOut, rest: str) -> list[TokenSpan]:
        candidates = (start for start in range(found.first, found.last + 1) if self._is_whole(start, found.length))
        start = next(candidates, found.first)
        pieces = self._taken(start, start + found.length)
        kept = [*self._taken(0, start), *self._taken(start + found.length, len(self.text))]
        self.text, self._kept = rest, kept
        return [self._places.within(*piece) for piece in pieces]

    def _is_whole(self, start: int, length: int) -> bool:
        return all(self._places.has_borders(*piece) for piece in self._taken(start, start + length))

    def _taken(self, start: int, stop: int) -> list[TokenSpan]:
        """Return the characters of the whole text that `[start, stop)` of what is left are."""
        taken: list[TokenSpan] = []
        before = 0
        for begin, end in self._kept:
            first, last = max(begin, begin + start - before), min(end, begin + stop - before)
            if first < last:
                taken.append(TokenSpan(first, last))
            before += end - begin
            if before >= stop:
                break
        return taken
