"""Read the JSON object of a tool call, character by character.

The object must name one of the offered functions and may have no other fields than a call has. So text that only
looks like a call at first is recognised within a few characters.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final, Protocol

from trunkline.router.tools.json_scan import WHITESPACE, ObjectScanner, Progress

_ARGUMENTS: Final = ("arguments", "parameters")
_STRINGS: Final = ("name", "type", "id")
_STRING_CHARACTERS_MAX: Final = 256
"""Longest key or value besides the arguments, which is held back until it ends."""


class CallReader(Protocol):
    """Reads one call."""

    name: str

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
