"""Split an answer into the thought at its beginning and the rest, in which calls are looked for. Pure."""

from __future__ import annotations

from trunkline.router.text.reasoning_styles import ReasoningStyle, ThoughtState
from trunkline.router.tools.call_object import WHITESPACE
from trunkline.router.tools.pieces import AnswerParser, Piece, TextPiece, ThoughtPiece, is_half, joined


def _without_beginning(text: str, mark: str) -> str:
    """Return a text without the beginning of a mark at its end, and without white space there."""
    kept = next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
    return text[: len(text) - kept].rstrip(WHITESPACE)


class MarkedAnswer:
    """Reads an answer between two marks, which are dropped, with white space around them. Without the first mark,
    the answer is read as it is."""

    def __init__(self, marks: tuple[str, str], rest: AnswerParser | None) -> None:
        """`rest`: reads the answer; None: all of it is text."""
        self._begin, self._end = marks
        self._rest = rest
        self._held = ""
        """Text that may be a part of a mark, and white space."""
        self._is_marked: bool | None = None
        """Whether there are marks; None: it is not known yet."""
        self._bare = False
        """Whether white space that comes next is dropped: right behind the first mark."""

    @property
    def calls(self) -> int:
        """Number of calls that have begun so far."""
        return 0 if self._rest is None else self._rest.calls

    def feed(self, text: str) -> list[Piece]:
        """As in `AnswerParser`."""
        text, self._held = self._held + text, ""
        if self._is_marked is None:
            stripped = text.lstrip(WHITESPACE)
            if self._begin.startswith(stripped) and stripped != self._begin:
                self._held = text
                return []
            self._is_marked = self._bare = stripped.startswith(self._begin)
            text = stripped.removeprefix(self._begin) if self._is_marked else text
        if self._is_marked:
            text = text.lstrip(WHITESPACE) if self._bare else text
            ended = text.rstrip(WHITESPACE)
            if ended.endswith(self._end):
                shown = ended.removesuffix(self._end).rstrip(WHITESPACE)
            else:
                shown = _without_beginning(text, self._end)
            self._bare = self._bare and not text
            text, self._held = shown, text[len(shown) :]
        return self._answer(text)

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """As in `AnswerParser`."""
        held, self._held = self._held, ""
        stripped = held.strip(WHITESPACE)
        ends = bool(self._is_marked) and stripped == self._end
        if not (ends or (cut and is_half(stripped, self._end if self._is_marked else self._begin))):
            pieces = self._answer(held)
        else:
            pieces = []
        return joined([*pieces, *(self._rest.finish(cut=cut) if self._rest is not None else [])])

    def _answer(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [TextPiece(text)] if self._rest is None else self._rest.feed(text)


class ThoughtParser:
    """Reads an answer that may begin with a thought. White space around the thought is dropped."""

    def __init__(self, style: ReasoningStyle, state: ThoughtState, rest: AnswerParser | None) -> None:
        """`rest`: reads what follows the thought; None: all of it is text."""
        self._style = style
        self._rest = rest if style.answer is None else MarkedAnswer(style.answer, rest)
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
        elif held and not (cut and is_half(held.strip(WHITESPACE), self._style.begin)):
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
            thought = _without_beginning(text, end)
            self._held, rest = text[len(thought) :], ""
            self._bare = self._bare and not thought
        if thought:
            pieces.append(ThoughtPiece(thought))
        return rest
