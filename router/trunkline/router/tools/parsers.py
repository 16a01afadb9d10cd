"""Parse a model's streamed text into text and tool calls, in the form that `text/tool_styles.py` describes.

A parser reads character by character where a call may be, and looks for the first characters of markers elsewhere.
The possible beginning of a call is held back until it is certain. It is a call once it names an offered function
and its arguments begin. It is text as soon as a character does not fit, and then it is passed on unchanged. A call
that has been announced cannot be revoked: if its arguments go wrong later, they end there and the rest is text.
White space around calls belongs to their syntax and is dropped.

Every decision depends on one character and the state, so the result does not depend on how the text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from trunkline.router.text.tool_styles import (
    ARGS,
    CALL_ID,
    FORMS,
    StyleName,
    ToolForm,
)
from trunkline.router.tools.argument_readers import NAME_CHARACTERS, PythonReader, TagsReader
from trunkline.router.tools.call_object import WHITESPACE, ArgumentsReader, CallReader, ObjectReader, Progress
from trunkline.router.tools.harmony import HarmonyParser
from trunkline.router.tools.pieces import AnswerParser, CallArguments, CallStart, Piece, TextPiece, is_half, joined

_SYNTAX_CHARACTERS_MAX: Final = 256
"""Largest number of characters held back at once outside a call's object: markers, names, white space."""
_HELD_CHARACTERS_MAX: Final = 64 << 10
"""Largest number of characters held back at once anywhere, for example arguments that come before the name."""

_Step = Callable[[str], bool]
_Action = Callable[[str], None]
Functions = Mapping[str, Mapping[str, Any]]
"""JSON schemas of arguments, by the names of the functions that may be called."""


class FormParser:
    """Finds calls of one form in a text.

    A *step* is the method for one state. It reads a character and returns whether it consumed it; if not, the next
    state gets it. In most states one of several texts is expected (`_expected`), each with what follows it.
    """

    def __init__(self, form: ToolForm, functions: Functions, draw_id: Callable[[], str]) -> None:
        """`functions`: those that are offered; `draw_id`: makes the id of a call."""
        self.calls = 0
        self._form = self._usual = form
        self._functions = functions
        self._draw_id = draw_id
        self._first = re.compile("[" + re.escape("".join({text[0] for text in self._triggers})) + "]")
        self._pieces: list[Piece] = []
        self._step: _Step | None = None
        """Method for the current state; None within text."""
        self._held = ""
        """Text that is held back: the possible beginning of a call, or after a call its possible end."""
        self._word = ""
        """The part of an expected text, or of a name, that was read."""
        self._expected: Mapping[str, _Action] = {}
        self._closers: tuple[str, ...] | None = None
        """Behind a call, the texts that may still follow the calls; None: not behind a call."""
        self._reader: CallReader | None = None
        self._announced = False
        """Whether the start of the current call was passed on."""
        self._space: str | None = ""
        """White space that came since the beginning of the text or since the last call; None: other text came."""

    @property
    def _triggers(self) -> list[str]:
        """The texts by which calls begin."""
        return [text for text in (*self._usual.begins, self._usual.bare) if text]

    def feed(self, text: str) -> list[Piece]:
        """Read more of the model's text; return the pieces that are certain now."""
        self._run(text)
        self._take_arguments()
        return self._drain()

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """End the text; return the pieces that were held back. `cut`: as in `AnswerParser`."""
        self._take_arguments()
        closing = (self._form.tail.strip(), *(self._closers or ()))
        if self._closers is not None and self._word and any(text.startswith(self._word) for text in closing):
            self._held = ""
        if self._announced or (cut and self._is_call()) or not self._held.strip(WHITESPACE + self._form.separator):
            self._held = ""
        while self._held:
            self._release()  # may find the beginning of another call in what was held
        if self._space and not self.calls:
            self._pieces.append(TextPiece(self._space))
        self._held, self._space = "", None
        return self._drain()

    def _is_call(self) -> bool:
        """Return whether the held text is the beginning of a call: certainly, because it follows one, or because
        it is half a marker."""
        named = self._reader is not None and self._reader.is_named
        follows = bool(self.calls) and self._space is not None
        held = self._held.lstrip()
        marked = any(held.startswith(marker) or is_half(held, marker) for marker in self._form.begins)
        return follows or named or marked

    def _run(self, text: str) -> None:
        position = 0
        while position < len(text):
            if self._step is None:
                found = self._first.search(text, position)
                at = found.start() if found else len(text)
                self._give(text[position:at])
                position = at
                if found:
                    self._expect(dict.fromkeys(self._triggers, self._begin))
            elif self._step(text[position]):
                position += 1

    def _drain(self) -> list[Piece]:
        pieces, self._pieces = joined(self._pieces), []
        return pieces

    def _give(self, text: str) -> None:
        """Pass on text, but the white space after a call only with what follows it."""
        if self._space is not None:
            stripped = text.lstrip(WHITESPACE)
            self._space += text[: len(text) - len(stripped)]
            if not stripped:
                return
            text, self._space = self._space + stripped, None
        if text:
            self._pieces.append(TextPiece(text))

    def _release(self) -> bool:
        """Pass on the held text as text; the current character is read again. Another marker in held syntax may
        begin a call."""
        held, self._held = self._held, ""
        syntax = self._reader is None and len(held) <= _SYNTAX_CHARACTERS_MAX
        self._step = self._reader = self._closers = None
        self._word = ""
        again = self._first.search(held, 1) if syntax else None
        if again is None:
            self._give(held)
        else:
            self._give(held[: again.start()])
            self._run(held[again.start() :])
        return False

    def _hold(self, character: str) -> bool:
        if len(self._held) >= _SYNTAX_CHARACTERS_MAX:
            return self._release()
        self._held += character
        return True

    # -- around calls

    def _expect(self, expected: Mapping[str, _Action]) -> None:
        self._expected, self._word, self._step = expected, "", self._match

    def _match(self, character: str) -> bool:
        """Read an expected text, white space before it included."""
        if not self._word and character in WHITESPACE:
            return self._hold(character)
        word = self._word + character
        if not any(text.startswith(word) for text in self._expected):
            return self._unexpected(character)
        if not self._hold(character):
            return False
        self._word = word
        if word in self._expected:
            self._expected[word](word)
        return True

    def _unexpected(self, character: str) -> bool:
        """Read a character that begins none of the expected texts; it may begin a name or an object."""
        if not self._word and "" in self._expected:
            if character in NAME_CHARACTERS and self._form.otherwise is not None:
                self._form = self._form.otherwise
            if character in NAME_CHARACTERS and self._form.body != "object":
                self._named()
                return False
            if character == "{" and self._form.body == "object":
                return self._open(ObjectReader(self._functions))
        return self._release()

    def _begin(self, word: str) -> None:
        """Go on behind a marker, or in front of a call without one."""
        self._closers, self._form = None, self._usual
        if word == self._form.bare:
            self._held = self._held[: len(self._held) - len(word)]
            self._before_first()
            self._run(word)
        else:
            self._before_first()

    def _before_first(self) -> None:
        opener = {self._form.opener: self._before_next} if self._form.opener else {}
        self._before_call(opener)

    def _before_next(self, _: str = "") -> None:
        self._before_call({})

    def _before_call(self, others: Mapping[str, _Action]) -> None:
        head = self._form.head.strip()
        self._expect({**others, **({head: self._named} if head else {"": _nothing})})

    def _named(self, _: str = "") -> None:
        self._word, self._step = "", self._in_name

    def _in_name(self, character: str) -> bool:
        if character in NAME_CHARACTERS:
            self._word += character
            return self._hold(character)
        name = self._word
        if name not in self._functions:
            return self._release() if name or character not in WHITESPACE else self._hold(character)
        ending = self._form.name_end.strip()
        if not ending:
            self._open(self._make_reader(name))
            return False

        def end(_: str) -> None:
            self._before_body(name)

        expected: dict[str, _Action] = {ending: end}
        if ending == ARGS:
            expected[CALL_ID] = lambda _: self._expect_id(name)
        self._expect({":": lambda _: self._expect_number(expected)} if self._form.numbered else expected)
        return False

    def _expect_number(self, expected: Mapping[str, _Action]) -> None:
        def step(character: str) -> bool:
            if character.isascii() and character.isdigit():
                return self._hold(character)
            self._expect(expected)
            return False

        self._step = step

    def _expect_id(self, name: str) -> None:
        def step(character: str) -> bool:
            if character == "[":
                self._expect({ARGS: lambda _: self._before_body(name)})
                return False
            return self._hold(character) if character in NAME_CHARACTERS else self._release()

        self._step = step

    def _before_body(self, name: str) -> None:
        if self._form.body != "json":
            self._open(self._make_reader(name))
            return

        def step(character: str) -> bool:
            if character in WHITESPACE:
                return self._hold(character)
            return self._open(ArgumentsReader(name)) if character == "{" else self._release()

        self._step = step

    def _make_reader(self, name: str) -> CallReader:
        tags = self._form.tags
        return PythonReader(name) if tags is None else TagsReader(name, self._functions[name], tags)

    def _behind(self, closers: tuple[str, ...]) -> None:
        """Go on behind a call, or behind one of the texts that close calls."""
        form = self._form
        closed = closers != form.closers or not form.closers
        self._held, self._closers = "", closers
        if closed and not closers:
            self._step = self._closers = None  # text follows
            return
        expected: dict[str, _Action] = {}
        for index, closer in enumerate(closers):
            expected[closer] = lambda _, rest=closers[index + 1 :]: self._behind(rest)  # type: ignore[misc]
        if not closed:
            expected |= dict.fromkeys(form.begins, self._begin)
            if form.tail.strip():
                expected[form.tail.strip()] = lambda _: self._behind(closers)
            if form.separator.strip():
                expected[form.separator.strip()] = self._before_next
            if form.head.strip():
                expected[form.head.strip()] = self._named
            elif form.body == "object":
                expected[""] = _nothing
        self._expect(expected)

    # -- calls

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
            self._take_arguments()
            self._announced = False
            return self._release()
        if not self._announced or closing:
            self._held += character
        if not self._announced and reader.started:
            self._announce(reader)
        if progress is Progress.DONE:
            self._take_arguments()
            self._announced, self._reader = False, None
            self._behind(self._form.closers)
        return True

    def _announce(self, reader: CallReader) -> None:
        self._pieces.append(CallStart(self.calls, self._draw_id(), reader.name))
        self.calls += 1
        self._announced = True
        self._held = self._space = ""

    def _take_arguments(self) -> None:
        if self._announced and self._reader is not None:
            text = self._reader.take()
            if text:
                self._pieces.append(CallArguments(self.calls - 1, text))


def _nothing(_: str) -> None:
    """Stand for a name or an object among expected texts."""


def make_parser(style: StyleName, functions: Functions, draw_id: Callable[[], str]) -> AnswerParser:
    """Make the parser for one answer.

    Args:
        functions: The functions that may be called.
        draw_id: Makes the id of a call.
    """
    if style == "harmony":
        return HarmonyParser(functions, draw_id)
    return FormParser(FORMS[style], functions, draw_id)


def parse(parser: AnswerParser, text: str) -> list[Piece]:
    """Parse a whole text."""
    return joined([*parser.feed(text), *parser.finish()])
