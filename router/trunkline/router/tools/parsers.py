"""Parse a model's streamed text into text and tool calls: one parser for each style (`text/tool_styles.py`).

A parser reads character by character where a call may be, and uses `str.find` elsewhere. The possible beginning of
a call is held back until it is certain. It is a call once it names an offered function and its arguments begin. It
is text as soon as a character does not fit, and then it is passed on unchanged. A call that has been announced
cannot be revoked: if its arguments go wrong later, they end there and the rest is text. White space around calls
belongs to their syntax and is dropped.

Every decision depends on one character and the state, so the result does not depend on how the text is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, Protocol

import msgspec

from trunkline.router.text.tool_styles import (
    ARGS,
    CALL_ID,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
    StyleName,
)
from trunkline.router.tools.call_object import WHITESPACE, ArgumentsReader, CallReader, ObjectReader, Progress


class TextPiece(msgspec.Struct, frozen=True):
    """A piece of text for the user."""

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


Piece = TextPiece | CallStart | CallArguments


class ToolParser(Protocol):
    """Finds calls in a text that comes in pieces of any size."""

    @property
    def calls(self) -> int:
        """Number of calls that have begun so far."""

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


_NAME_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_SYNTAX_CHARACTERS_MAX: Final = 256
"""Largest number of characters held back at once outside a call's object: markers, names, white space."""
_HELD_CHARACTERS_MAX: Final = 64 << 10
"""Largest number of characters held back at once anywhere, for example arguments that come before the name."""

_Step = Callable[[str], bool]


class _Parser:
    """The common part of the styles: text, the marker in front of a call, the call, and the text held back.

    A *step* is the method for one state. It reads a character and returns whether it consumed it; if not, the next
    state gets it.
    """

    marker: str
    """Text that begins a call. Its first character does not occur again in it, so a mismatch needs no second
    look."""
    fillers: str = WHITESPACE
    """Characters between calls, which are dropped if the text ends with them."""

    def __init__(self, names: Collection[str], draw_id: Callable[[], str]) -> None:
        """`names`: names of the offered functions; `draw_id`: makes the id of a call."""
        self.calls = 0
        self._names = frozenset(names)
        self._draw_id = draw_id
        self._pieces: list[Piece] = []
        self._step: _Step | None = None
        """Method for the current state; None within text."""
        self._held = ""
        """Text that is held back: the possible beginning of a call, or after a call its possible end."""
        self._reader: CallReader | None = None
        self._announced = False
        """Whether the start of the current call was passed on."""
        self._bare = True
        """Whether only white space came since the beginning of the text or since the last call."""
        self._space = ""
        """White space that came since the beginning of the text or since the last call."""

    def feed(self, text: str) -> list[Piece]:
        """Read more of the model's text; return the pieces that are certain now."""
        position = 0
        while position < len(text):
            if self._step is None:
                position = self._skip_text(text, position)
            elif self._step(text[position]):
                position += 1
        self._take_arguments()
        return self._drain()

    def finish(self) -> list[Piece]:
        """End the text; return the pieces that were held back."""
        self._take_arguments()
        if not self._announced and self._held.strip(self.fillers):
            self._release()
        if self._bare and not self.calls and self._space:
            self._pieces.append(TextPiece(self._space))
        self._held = self._space = ""
        return self._drain()

    def _drain(self) -> list[Piece]:
        pieces, self._pieces = joined(self._pieces), []
        return pieces

    def _skip_text(self, text: str, position: int) -> int:
        """Pass on text up to the next possible call; return its position."""
        found = self._find(text, position)
        self._give(text[position:found])
        if found < len(text):
            self._step = self._first_step(text[found])
        return found

    def _find(self, text: str, position: int) -> int:
        found = text.find(self.marker[0], position)
        return len(text) if found < 0 else found

    def _first_step(self, _: str) -> _Step:
        return self._in_marker

    def _give(self, text: str) -> None:
        if self._bare:
            stripped = text.lstrip(WHITESPACE)
            self._space += text[: len(text) - len(stripped)]
            if not stripped:
                return
            text, self._space, self._bare = self._space + stripped, "", False
        if text:
            self._pieces.append(TextPiece(text))

    def _release(self) -> bool:
        """Pass on the held text as text; the current character is read again."""
        held, self._held = self._held, ""
        self._step = self._reader = None
        self._give(held)
        return False

    def _hold(self, character: str, following: _Step) -> bool:
        if len(self._held) >= _SYNTAX_CHARACTERS_MAX:
            return self._release()
        self._held += character
        self._step = following
        return True

    def _drop(self) -> bool:
        """Drop the held text and the current character, which are syntax; text follows."""
        self._held = ""
        self._step = None
        return True

    def _in_marker(self, character: str) -> bool:
        if character != self.marker[len(self._held)]:
            return self._release()
        self._held += character
        if self._held == self.marker:
            self._step = self._behind_marker
        return True

    def _behind_marker(self, character: str) -> bool:
        return self._before_object(character)

    def _before_object(self, character: str) -> bool:
        if character in WHITESPACE:
            return self._hold(character, self._before_object)
        return self._open(ObjectReader(self._names)) if character == "{" else self._release()

    def _open(self, reader: CallReader) -> bool:
        self._reader, self._announced = reader, False
        self._step = self._in_call
        return False

    def _in_call(self, character: str) -> bool:
        reader = self._reader
        assert reader is not None
        closing = reader.complete
        progress = reader.feed(character)
        if progress is Progress.WRONG or len(self._held) >= _HELD_CHARACTERS_MAX:
            self._end_arguments()
            return self._release()
        if not self._announced or closing:
            self._held += character
        if not self._announced and reader.started:
            self._announce(reader)
        if progress is Progress.DONE:
            self._end_arguments()
            self._held = ""
            self._step = self._behind_call
        return True

    def _end_arguments(self) -> None:
        self._take_arguments()
        self._announced, self._reader = False, None

    def _announce(self, reader: CallReader) -> None:
        self._pieces.append(CallStart(self.calls, self._draw_id(), reader.name))
        self.calls += 1
        self._announced = self._bare = True
        self._held = self._space = ""

    def _take_arguments(self) -> None:
        if self._announced and self._reader is not None:
            text = self._reader.take()
            if text:
                self._pieces.append(CallArguments(self.calls - 1, text))

    def _behind_call(self, character: str) -> bool:
        raise NotImplementedError


class HermesParser(_Parser):
    """Parses `<tool_call>{"name": …, "arguments": {…}}</tool_call>` within text."""

    marker = TOOL_CALL

    def _behind_call(self, character: str) -> bool:
        held = self._held.lstrip(WHITESPACE) + character
        if held == TOOL_CALL_END:
            return self._drop()
        if TOOL_CALL_END.startswith(held) or held in WHITESPACE:
            return self._hold(character, self._behind_call)
        # Some models forget the closing tag, or write several objects between the tags.
        if held == "{":
            return self._open(ObjectReader(self._names))
        if TOOL_CALL.startswith(held):
            self._held = self._held.lstrip(WHITESPACE)
            self._step = self._in_marker
            return False
        return self._release()

    def finish(self) -> list[Piece]:
        """End the text; a closing tag that is cut off is dropped."""
        if self._step == self._behind_call and TOOL_CALL_END.startswith(self._held.strip(WHITESPACE)):
            self._drop()
        return super().finish()


class Llama3Parser(_Parser):
    """Parses `{"name": …, "parameters": {…}}` with or without `<|python_tag|>`, separated by `;`."""

    marker = PYTHON_TAG
    fillers = WHITESPACE + ";"

    def _find(self, text: str, position: int) -> int:
        brace = text.find("{", position)
        return super()._find(text[: len(text) if brace < 0 else brace], position)

    def _first_step(self, character: str) -> _Step:
        return self._before_object if character == "{" else self._in_marker

    def _behind_call(self, character: str) -> bool:
        if character in WHITESPACE or (character == ";" and ";" not in self._held):
            return self._hold(character, self._behind_call)
        return self._open(ObjectReader(self._names)) if character == "{" else self._release()


class MistralParser(_Parser):
    """Parses `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` repeated."""

    marker = TOOL_CALLS
    fillers = WHITESPACE + ","

    def __init__(self, names: Collection[str], draw_id: Callable[[], str]) -> None:
        super().__init__(names, draw_id)
        self._in_list = False

    def _behind_marker(self, character: str) -> bool:
        if character in WHITESPACE:
            return self._hold(character, self._behind_marker)
        self._in_list = character == "["
        if self._in_list:
            return self._hold(character, self._before_object)
        return self._in_header(character)

    def _in_header(self, character: str) -> bool:
        """Read `name[ARGS]` or `name[CALL_ID]id[ARGS]`."""
        header = self._held[len(self.marker) :].lstrip(WHITESPACE) + character
        name, bracket, rest = header.partition("[")
        rest = bracket + rest
        known = name in self._names if rest else _NAME_CHARACTERS.issuperset(name)
        if not known:
            return self._release()
        if rest == ARGS or (rest.startswith(CALL_ID) and rest.endswith(ARGS)):
            return self._hold(character, self._before_arguments)
        if ARGS.startswith(rest) or CALL_ID.startswith(rest):
            return self._hold(character, self._in_header)
        identity, bracket, end = rest[len(CALL_ID) :].partition("[")
        fits = _NAME_CHARACTERS.issuperset(identity) and ARGS.startswith(bracket + end)
        return self._hold(character, self._in_header) if rest.startswith(CALL_ID) and fits else self._release()

    def _before_arguments(self, character: str) -> bool:
        if character in WHITESPACE:
            return self._hold(character, self._before_arguments)
        if character != "{":
            return self._release()
        return self._open(ArgumentsReader(self._held[len(self.marker) :].lstrip(WHITESPACE).partition("[")[0]))

    def _behind_call(self, character: str) -> bool:
        if not self._in_list:
            return self._release()
        if character in WHITESPACE:
            return self._hold(character, self._behind_call)
        if character == "]":
            return self._drop()
        return self._hold(character, self._before_object) if character == "," else self._release()


_PARSERS: Final[dict[StyleName, type[_Parser]]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}


class _CallsOnly:
    """Drops text, for answers that a grammar restricts to calls: there, text is a call that was cut off."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    @property
    def calls(self) -> int:
        return self._parser.calls

    def feed(self, text: str) -> list[Piece]:
        return [piece for piece in self._parser.feed(text) if not isinstance(piece, TextPiece)]

    def finish(self) -> list[Piece]:
        return [piece for piece in self._parser.finish() if not isinstance(piece, TextPiece)]


def make_parser(
    style: StyleName, names: Collection[str], draw_id: Callable[[], str], *, demanded: bool = False
) -> ToolParser:
    """Make the parser for one answer.

    Args:
        names: Names of the offered functions.
        draw_id: Makes the id of a call.
        demanded: Whether a grammar restricts the answer to calls.
    """
    parser = _PARSERS[style](names, draw_id)
    return _CallsOnly(parser) if demanded else parser


def parse(parser: ToolParser, text: str) -> list[Piece]:
    """Parse a whole text."""
    return joined([*parser.feed(text), *parser.finish()])
