"""The pieces in which an answer comes out of the parsers: text, thoughts, and calls. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Protocol

import msgspec
from msgspec.structs import replace


class TextPiece(msgspec.Struct, frozen=True):
    """A piece of text for the user."""

    text: str


class ThoughtPiece(msgspec.Struct, frozen=True):
    """A piece of the text in which the model thinks before it answers."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The beginning of a call."""

    index: int
    """Number of the call in its answer, from 0 on."""
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of a call's arguments. All pieces together are one JSON object."""

    index: int
    text: str


Piece = TextPiece | ThoughtPiece | CallStart | CallArguments


class AnswerParser(Protocol):
    """Reads an answer that comes in pieces of any size."""

    @property
    def calls(self) -> int:
        """Number of calls that have begun so far."""

    def feed(self, text: str) -> list[Piece]:
        """Read more of the model's text; return the pieces that are certain now."""

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """End the text; return the pieces that were held back. `cut`: the answer's length was at its limit, so a
        call that has not begun yet is no text."""


def is_half(text: str, mark: str) -> bool:
    """Return whether a text is the beginning of a mark, and at least half of it: at the end of an answer that was
    cut off, it hardly is anything else."""
    return bool(text) and mark.startswith(text) and 2 * len(text) >= len(mark)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbouring pieces: one piece for each text, one for each call's arguments."""
    result: list[Piece] = []
    for _, group in itertools.groupby(pieces, lambda piece: (type(piece), getattr(piece, "index", 0))):
        same = list(group)
        if isinstance(same[0], CallStart):
            result += same
        else:
            text = "".join([piece.text for piece in same if not isinstance(piece, CallStart)])
            result.append(replace(same[0], text=text))
    return result
