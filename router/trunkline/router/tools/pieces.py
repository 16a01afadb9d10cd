"""The pieces of an answer that may call tools: text and calls, in the order in which the model wrote them."""

from __future__ import annotations

from typing import Protocol

import msgspec


class TextPiece(msgspec.Struct, frozen=True):
    """A piece of text for the user."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The beginning of a call."""

    index: int
    """Counts the calls of an answer from 0."""
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of a call's arguments. All pieces together are one JSON object."""

    index: int
    text: str


Piece = TextPiece | CallStart | CallArguments


class ToolParser(Protocol):
    """Finds calls in a text that comes in pieces of any size."""

    @property
    def calls(self) -> int:
        """Calls that have begun so far."""

    def feed(self, text: str) -> list[Piece]:
        """Read more of the model's text; return the pieces that are certain now."""

    def finish(self) -> list[Piece]:
        """End the text; return the pieces that were held back."""


def joined(pieces: list[Piece]) -> list[Piece]:
    """Join neighbouring pieces: one piece for each text, one for each call's arguments."""
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
