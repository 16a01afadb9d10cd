"""Read the JSON object of a tool call, character by character, to find its end or its first error.

`ObjectScanner` reads any JSON object. `ObjectReader` reads a call: its object must name one of the offered
functions and may have no other fields than a call has, so text that only looks like a call at first is recognised
within a few characters. Control characters inside strings are accepted: models write line ends there, and most
parsers take them.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum
from typing import Final, Protocol

DEPTH_MAX: Final = 200
"""Deepest nesting of a call's arguments, as for request bodies. It bounds the stack if a model writes brackets
without end."""
WHITESPACE: Final = " \t\n\r"

_LITERALS: Final = {"t": "rue", "f": "alse", "n": "ull"}
_DIGITS: Final = "0123456789"
_NUMBER: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "minus": (("0", "zero"), (_DIGITS, "integer")),
    "zero": ((".", "point"), ("eE", "exponent")),
    "integer": ((_DIGITS, "integer"), (".", "point"), ("eE", "exponent")),
    "point": ((_DIGITS, "fraction"),),
    "fraction": ((_DIGITS, "fraction"), ("eE", "exponent")),
    "exponent": (("+-", "sign"), (_DIGITS, "power")),
    "sign": ((_DIGITS, "power"),),
    "power": ((_DIGITS, "power"),),
}
_NUMBER_MAY_END: Final = frozenset({"zero", "integer", "fraction", "power"})


class Progress(Enum):
    """The effect of a character on the object that is read."""

    MORE = 0
    DONE = 1
    """The character ends the object."""
    WRONG = 2
    """The character is an error here; it was not read."""


class ObjectScanner:
    """Scans one JSON object, from its `{` to its `}`."""

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._state = "begin"
        self._rest = ""
        """Characters that a literal still needs; or one character for each hexadecimal digit that an escape still
        needs."""

    def feed(self, character: str) -> Progress:
        """Read the next character."""
        state = self._state
        if state == "string":
            if character == "\\":
                self._state = "escape"
            elif character == '"':
                self._state = "after"
            return Progress.MORE
        if state in _NUMBER:
            for characters, following in _NUMBER[state]:
                if character in characters:
                    self._state = following
                    return Progress.MORE
            if state not in _NUMBER_MAY_END:
                return Progress.WRONG
            state = self._state = "after"
        if state in ("key_string", "key_escape", "escape", "hex", "key_hex", "literal"):
            return self._inside(state, character)
        if character in WHITESPACE and state != "begin":
            return Progress.MORE
        return self._between(state, character)

    def _inside(self, state: str, character: str) -> Progress:
        if state == "key_string":
            if character == "\\":
                self._state = "key_escape"
            elif character == '"':
                self._state = "colon"
        elif state in ("escape", "key_escape"):
            within = "string" if state == "escape" else "key_string"
            if character == "u":
                self._state, self._rest = ("hex" if state == "escape" else "key_hex"), "0000"
            elif character in '"\\/bfnrt':
                self._state = within
            else:
                return Progress.WRONG
        elif state == "literal":
            if character != self._rest[0]:
                return Progress.WRONG
            self._rest = self._rest[1:]
            if not self._rest:
                self._state = "after"
        else:
            if character not in "0123456789abcdefABCDEF":
                return Progress.WRONG
            self._rest = self._rest[1:]
            if not self._rest:
                self._state = "string" if state == "hex" else "key_string"
        return Progress.MORE

    def _between(self, state: str, character: str) -> Progress:
        closers = self._closers
        if character in "}]":
            ends = {"}": ("after", "first_key"), "]": ("after", "first_value")}[character]
            if state not in ends or closers[-1] != character:
                return Progress.WRONG
            closers.pop()
            self._state = "after"
            return Progress.MORE if closers else Progress.DONE
        if state == "after":
            if character != ",":
                return Progress.WRONG
            self._state = "key" if closers[-1] == "}" else "value"
        elif state == "colon":
            if character != ":":
                return Progress.WRONG
            self._state = "value"
        elif state in ("key", "first_key"):
            if character != '"':
                return Progress.WRONG
            self._state = "key_string"
        elif state == "begin":
            if character != "{":
                return Progress.WRONG
            return self._open("}")
        else:
            return self._value(character)
        return Progress.MORE

    def _value(self, character: str) -> Progress:
        if character in "{[":
            return self._open("}" if character == "{" else "]")
        if character == '"':
            self._state = "string"
        elif character in _LITERALS:
            self._state, self._rest = "literal", _LITERALS[character]
        elif character == "-":
            self._state = "minus"
        elif character in _DIGITS:
            self._state = "zero" if character == "0" else "integer"
        else:
            return Progress.WRONG
        return Progress.MORE

    def _open(self, closer: str) -> Progress:
        if len(self._closers) >= DEPTH_MAX:
            return Progress.WRONG
        self._closers.append(closer)
        self._state = "first_key" if closer == "}" else "first_value"
        return Progress.MORE


_ARGUMENTS: Final = ("arguments", "parameters")
_STRINGS: Final = ("name", "type", "id")
_STRING_CHARACTERS_MAX: Final = 256
"""Largest length of a call's key, or of a value other than the arguments. Each is held back until it ends."""


class CallReader(Protocol):
    """Reads one call."""

    name: str

    @property
    def is_named(self) -> bool:
        """Whether the name of a function was read, or in an object its beginning."""

    @property
    def started(self) -> bool:
        """Whether this certainly is a call: its name is known and its arguments have begun."""

    @property
    def complete(self) -> bool:
        """Whether the arguments are complete; only the end of the object follows."""

    def feed(self, character: str) -> Progress:
        """Read the next character."""

    def take(self) -> str:
        """Return the arguments read since the last call of `take`."""


class ArgumentsReader:
    """Reads the arguments of a call whose name is already known."""

    is_named: Final = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._scanner = ObjectScanner()
        self._characters: list[str] = []
        self.started = False
        self.complete = False

    def feed(self, character: str) -> Progress:
        """Read the next character."""
        progress = self._scanner.feed(character)
        if progress is not Progress.WRONG:
            self._characters.append(character)
            self.started = True
            self.complete = progress is Progress.DONE
        return progress

    def take(self) -> str:
        """Return the arguments read since the last call of `take`."""
        text = "".join(self._characters)
        self._characters.clear()
        return text


class ObjectReader:
    """Reads `{"name": …, "arguments": {…}}`, with fields in any order and maybe without arguments."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: names of the offered functions."""
        self.name = ""
        self._names = names
        self._seen: set[str] = set()
        self._state = "begin"
        self._key = ""
        self._string = ""
        self._arguments: ArgumentsReader | None = None

    @property
    def is_named(self) -> bool:
        """Whether the name of a function was read, or its beginning."""
        begun = self._state == "in_string" and self._key == "name" and bool(self._string)
        return bool(self.name) or (begun and any(name.startswith(self._string) for name in self._names))

    @property
    def started(self) -> bool:
        """Whether this certainly is a call."""
        return bool(self.name) and self._arguments is not None

    @property
    def complete(self) -> bool:
        """Whether the arguments are complete."""
        return self._arguments is not None and self._arguments.complete

    def take(self) -> str:
        """Return the arguments read since the last call of `take`."""
        return self._arguments.take() if self._arguments is not None else ""

    def feed(self, character: str) -> Progress:
        """Read the next character."""
        state = self._state
        if state == "arguments":
            assert self._arguments is not None
            progress = self._arguments.feed(character)
            if progress is Progress.DONE:
                self._state = "after"
                return Progress.MORE
            return progress
        if state in ("in_key", "in_string"):
            return self._inside(character)
        if character in WHITESPACE and state != "begin":
            return Progress.MORE
        return self._between(state, character)

    def _between(self, state: str, character: str) -> Progress:
        if state == "begin" and character == "{":
            self._state = "first_key"
        elif state in ("key", "first_key") and character == '"':
            self._state, self._string = "in_key", ""
        elif state == "colon" and character == ":":
            self._state = "value"
        elif state == "value" and self._key in _ARGUMENTS and character == "{":
            self._arguments = ArgumentsReader(self.name)
            self._arguments.feed(character)
            self._state = "arguments"
        elif state == "value" and self._key in _STRINGS and character == '"':
            self._state, self._string = "in_string", ""
        elif state == "after" and character == ",":
            self._state = "key"
        elif state == "after" and character == "}" and self.name:
            self._end()
            return Progress.DONE
        else:
            return Progress.WRONG
        return Progress.MORE

    def _end(self) -> None:
        if self._arguments is None:  # common for functions without parameters
            self._arguments = ArgumentsReader(self.name)
            for character in "{}":
                self._arguments.feed(character)

    def _inside(self, character: str) -> Progress:
        escaped = (len(self._string) - len(self._string.rstrip("\\"))) % 2 == 1
        if character != '"' or escaped:
            if len(self._string) >= _STRING_CHARACTERS_MAX:
                return Progress.WRONG
            self._string += character
            return Progress.MORE
        try:
            text = str(json.loads(f'"{self._string}"'))
        except ValueError:
            return Progress.WRONG
        return self._key_read(text) if self._state == "in_key" else self._string_read(text)

    def _key_read(self, key: str) -> Progress:
        kind = "arguments" if key in _ARGUMENTS else key
        if kind in self._seen or (key not in _ARGUMENTS and key not in _STRINGS):
            return Progress.WRONG
        self._seen.add(kind)
        self._key, self._state = key, "colon"
        return Progress.MORE

    def _string_read(self, text: str) -> Progress:
        if self._key == "name":
            if text not in self._names:
                return Progress.WRONG
            self.name = text
        self._state = "after"
        return Progress.MORE
