"""Split an answer into the thought at its beginning and the rest, in which calls are looked for. Pure."""

from __future__ import annotations

from trunkline.router.text.reasoning_styles import ReasoningStyle, ThoughtState
from trunkline.router.tools.call_object import WHITESPACE
from trunkline.router.tools.pieces import AnswerParser, Piece, TextPiece, ThoughtPiece, joined


class ThoughtParser:
    """Reads an answer that may begin with a thought. White space around the thought is dropped."""

    def __init__(self, style: ReasoningStyle, state: ThoughtState, rest: AnswerParser | None) -> None:
        """`rest`: reads what follows the thought; None: all of it is text."""
        self._style = style
        self._rest = rest
        self._state = state
        self._held = ""
        """Text that may be a part of a mark, and white space."""
        self._opened = False
        """Whether it is known whether the answer begins with a mark."""
        self._bare = False
        """Whether white space that comes next is dropped: right behind a mark."""

    @property
    def calls(self) -> int:
        """Number of calls that have begun so far."""
        return 0 if self._rest is None else self._rest.calls

    def feed(self, text: str) -> list[Piece]:
        """As in `AnswerParser`."""
        pieces: list[Piece] = []
        if self._state != "closed":
            text, self._held = self._held + text, ""
            if not self._opened:
                text = self._begin(text)
            if self._opened and self._state == "inside":
                text = self._think(text, pieces)
        if text:
            pieces += self._answer(text)
        return joined(pieces)

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """As in `AnswerParser`."""
        held, self._held = self._held, ""
        pieces: list[Piece] = []
        if held and self._state == "inside":
            if held.strip(WHITESPACE):
                pieces.append(ThoughtPiece(held.rstrip(WHITESPACE)))
        elif held:
            pieces += self._answer(held)
        return joined([*pieces, *(self._rest.finish(cut=cut) if self._rest is not None else [])])

    def _answer(self, text: str) -> list[Piece]:
        text = self._stripped(text)
        if not text:
            return []
        self._bare = False
        return [TextPiece(text)] if self._rest is None else self._rest.feed(text)

    def _stripped(self, text: str) -> str:
        return text.lstrip(WHITESPACE) if self._bare else text

    def _begin(self, text: str) -> str:
        """Read a mark at the beginning, which the model may write even if the prompt has one. Return the text
        behind it; while the mark is not certain, it is held back."""
        begin = self._style.begin
        stripped = text.lstrip(WHITESPACE)
        if begin.startswith(stripped) and stripped != begin:
            self._held = text
            return ""
        self._opened = True
        self._bare = self._state == "inside" or stripped.startswith(begin)
        self._state = "inside" if self._bare else "closed"
        return stripped.removeprefix(begin) if self._bare else text

    def _think(self, text: str, pieces: list[Piece]) -> str:
        """Pass on the thought; return the text behind it."""
        end = self._style.end
        text = self._stripped(text)
        found = text.find(end)
        if found >= 0:
            thought, rest = text[:found].rstrip(WHITESPACE), text[found + len(end) :]
            self._state, self._bare = "closed", True
        else:
            kept = next((size for size in range(len(end) - 1, 0, -1) if text.endswith(end[:size])), 0)
            thought = text[: len(text) - kept].rstrip(WHITESPACE)
            self._held, rest = text[len(thought) :], ""
            self._bare = self._bare and not thought
        if thought:
            pieces.append(ThoughtPiece(thought))
        return rest
