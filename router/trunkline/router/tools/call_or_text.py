"""Read answers that a grammar restricts to calls, or to either calls or a text. Pure."""

from __future__ import annotations

from trunkline.router.tools.pieces import AnswerParser, Piece, TextPiece, joined


class CallsOnly:
    """Drops text, for answers that a grammar restricts to calls: there, text is a call that was cut off."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    @property
    def calls(self) -> int:
        """Number of calls that have begun so far."""
        return self._parser.calls

    def feed(self, text: str) -> list[Piece]:
        """As in `AnswerParser`."""
        return _without_text(self._parser.feed(text))

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """As in `AnswerParser`."""
        return _without_text(self._parser.finish(cut=cut))


class CallsOrText:
    """Reads answers that a grammar restricts to calls or to a text of another form, JSON for example.

    The beginning decides. What looks like a call within the text (in a string of the JSON, or an object of it) is
    none.
    """

    def __init__(self, parser: AnswerParser) -> None:
        """`parser`: finds calls."""
        self._parser = parser
        self._text: str | None = ""
        """The text so far, while the beginning is undecided; None: it is decided."""
        self._is_text = False

    @property
    def calls(self) -> int:
        """Number of calls that have begun so far."""
        return 0 if self._is_text else self._parser.calls

    def feed(self, text: str) -> list[Piece]:
        """As in `AnswerParser`."""
        pieces: list[Piece] = []
        position = 0
        while self._text is not None and position < len(text):
            self._text += text[position]
            pieces += self._decided(self._parser.feed(text[position]))
            position += 1
        rest = text[position:]
        if rest:
            pieces += [TextPiece(rest)] if self._is_text else _without_text(self._parser.feed(rest))
        return joined(pieces)

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """As in `AnswerParser`."""
        if self._text is not None:
            return self._decided(self._parser.finish(cut=cut))
        return [] if self._is_text else _without_text(self._parser.finish(cut=cut))

    def _decided(self, found: list[Piece]) -> list[Piece]:
        """Return what is certain after the parser has found pieces, maybe none."""
        if not found:
            return []
        text, self._text = self._text or "", None
        self._is_text = isinstance(found[0], TextPiece)
        return [TextPiece(text)] if self._is_text else found


def _without_text(pieces: list[Piece]) -> list[Piece]:
    return [piece for piece in pieces if not isinstance(piece, TextPiece)]
