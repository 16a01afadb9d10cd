"""The JSON object in which a model writes a call, read character by character.

It must name one of the functions that were offered, and may have nothing that a call does not have. So whatever
else looks like a call at first is known to be none within a few characters.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final, Protocol

from trunkline.router.tools.json_scan import WHITESPACE, ObjectScanner, Progress

_ARGUMENTS: Final = ("arguments", "parameters")
_STRINGS: Final = ("name", "type", "id")
_STRING_CHARACTERS_MAX: Final = 256
"""Longest key or value besides the arguments, as it is written; it is held back until it ends."""


class CallReader(Protocol):
    """Reads one call."""

    name: str

    @property
    def started(self) -> bool:
        """Whether it is certain that this is a call: its name is known and its arguments have begun."""

    @property
    def complete(self) -> bool:
        """Whether its arguments are over; what follows is only the object's end."""

    def feed(self, character: str) -> Progress:
        """Take the next character."""

    def take(self) -> str:
        """The arguments read since the last time."""


class ArgumentsReader:
    """A call whose name came before: only the object of its arguments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._scanner = ObjectScanner()
        self._characters: list[str] = []
        self.started = False
        self.complete = False

    def feed(self, character: str) -> Progress:
        """Take the next character."""
        progress = self._scanner.feed(character)
        if progress is not Progress.WRONG:
            self._characters.append(character)
            self.started = True
            self.complete = progress is Progress.DONE
        return progress

    def take(self) -> str:
        """The arguments read since the last time."""
        text = "".join(self._characters)
        self._characters.clear()
        return text


class ObjectReader:
    """`{"name": …, "arguments": {…}}`: fields in any order, arguments may be missing."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the functions that were offered."""
        self.name = ""
        self._names = names
        self._seen: set[str] = set()
        self._state = "begin"
        self._key = ""
        self._string = ""
        self._arguments: ArgumentsReader | None = None

    @property
    def started(self) -> bool:
        """Whether it is certain that this is a call."""
        return bool(self.name) and self._arguments is not None

    @property
    def complete(self) -> bool:
        """Whether its arguments are over."""
        return self._arguments is not None and self._arguments.complete

    def take(self) -> str:
        """The arguments read since the last time."""
        return self._arguments.take() if self._arguments is not None else ""

    def feed(self, character: str) -> Progress:
        """Take the next character."""
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
