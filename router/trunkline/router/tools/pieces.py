"""What a model's output comes to where tools are offered: text and calls, in the order they were written in."""

from __future__ import annotations

from typing import Protocol

import msgspec


class TextPiece(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A call begins."""

    index: int
    """Counts the calls of an answer from 0."""
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, as the model writes them: together they are one JSON object."""

    index: int
    text: str


Piece = TextPiece | CallStart | CallArguments


class ToolParser(Protocol):
    """Finds the calls in a text that comes in pieces of any size."""

    @property
    def calls(self) -> int:
        """Calls that have begun so far."""

    def feed(self, text: str) -> list[Piece]:
        """Take more of the model's text; what is certain now."""

    def finish(self) -> list[Piece]:
        """The text is over: what was held back comes out."""


def joined(pieces: list[Piece]) -> list[Piece]:
    """The same with neighbours joined: one piece per text, one per call's arguments."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, TextPiece) and isinstance(last, TextPiece):
            result[-1] = TextPiece(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            result[-1] = CallArguments(last.index, last.text + piece.text)
        else:
            result.append(piece)
    return result
