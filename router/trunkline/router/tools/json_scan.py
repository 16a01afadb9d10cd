"""Scan a JSON object character by character, to find its end or its first error.

Control characters inside strings are accepted: models write line ends there, and most parsers take them.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

DEPTH_MAX: Final = 200
"""Deepest nesting, as for request bodies. It bounds the stack if a model writes brackets without end."""
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
    """The effect of a character."""

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
        """The rest of a literal; or one character for each hexadecimal digit that an escape still needs."""

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
