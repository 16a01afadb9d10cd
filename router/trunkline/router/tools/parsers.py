"""From a model's text to text and calls, in whatever pieces it comes: one parser per style (`styles.py`).

A parser walks over the text character by character where a call may be, and by `str.find` elsewhere. What looks
like the beginning of a call is held back until it is certain: a call once its name is one of the functions offered
and its arguments begin; text as soon as a character does not fit, and then it is given out unchanged. A call that
has begun cannot be taken back: if its arguments go wrong later, they end there and the rest is text. White space
around calls belongs to their syntax and is dropped.

Since every decision depends on one character and a state, how the text is cut into pieces changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from trunkline.router.text.tool_styles import (
    ARGS,
    CALL_ID,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
    StyleName,
)
from trunkline.router.tools.call_object import ArgumentsReader, CallReader, ObjectReader
from trunkline.router.tools.json_scan import WHITESPACE, Progress
from trunkline.router.tools.pieces import CallArguments, CallStart, Piece, TextPiece, ToolParser, joined

_NAME_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_SYNTAX_CHARACTERS_MAX: Final = 256
"""Markers, names and white space held back at once outside the object of a call."""
_HELD_CHARACTERS_MAX: Final = 64 << 10
"""Held back at once in all: arguments that come before their name, for example."""

_Step = Callable[[str], bool]


class _Parser:
    """What the styles share: text, the marker at the front, the call, and what is held back meanwhile.

    A *step* takes one character in one state and returns whether it took it; if not, the next state gets it.
    """

    marker: str
    """Begins a call. Its first character does not occur in it again, so a mismatch needs no second look."""
    fillers: str = WHITESPACE
    """What may stand between calls without meaning anything if the text ends there."""

    def __init__(self, names: Collection[str], draw_id: Callable[[], str]) -> None:
        """`names`: of the functions offered; `draw_id` makes an id for each call."""
        self.calls = 0
        self._names = frozenset(names)
        self._draw_id = draw_id
        self._pieces: list[Piece] = []
        self._step: _Step | None = None
        """None: in the middle of text."""
        self._held = ""
        """Since what may become a call began; or, behind a call, what may belong to its end."""
        self._reader: CallReader | None = None
        self._announced = False
        """Whether the current call's start was given out."""
        self._bare = True
        """Whether only white space came since the beginning or the last call."""
        self._space = ""
        """That white space."""

    def feed(self, text: str) -> list[Piece]:
        """Take more of the model's text; what is certain now."""
        position = 0
        while position < len(text):
            if self._step is None:
                position = self._skip_text(text, position)
            elif self._step(text[position]):
                position += 1
        self._take_arguments()
        return self._drain()

    def finish(self) -> list[Piece]:
        """The text is over: what was held back comes out."""
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
        """Give out text up to the next possible call; where that is."""
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
        """What is held back is text after all; the current character is looked at anew."""
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
        """What is held back and the current character belong to the syntax; text follows."""
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
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>` among text."""

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
        """The text is over: a closing tag that is cut off is no text."""
        if self._step == self._behind_call and TOOL_CALL_END.startswith(self._held.strip(WHITESPACE)):
            self._drop()
        return super().finish()


class Llama3Parser(_Parser):
    """`{"name": …, "parameters": {…}}` with or without `<|python_tag|>`, separated by `;`."""

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
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` repeated."""

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
        """`name[ARGS]` or `name[CALL_ID]id[ARGS]`."""
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
    """For answers that a grammar holds to calls: what looks like text is a call that was cut off."""

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
    """A parser for one answer. `names`: of the functions offered; `draw_id` makes an id for each call.

    `demanded`: the answer follows a grammar by which it consists of calls.
    """
    parser = _PARSERS[style](names, draw_id)
    return _CallsOnly(parser) if demanded else parser


def parse(parser: ToolParser, text: str) -> list[Piece]:
    """A whole text at once."""
    return joined([*parser.feed(text), *parser.finish()])
