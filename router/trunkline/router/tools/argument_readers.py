"""Read arguments that are not written as JSON, character by character, and return them as JSON.

`TagsReader`: a pair of tags for each argument (`<parameter=city>Rome</parameter>`); the value's type comes from
the function's schema, because `7` may be a number or a text. Values that are texts stream.
`PythonReader`: keyword arguments as Python writes them (`city="Rome", days=[1, 2]`); each comes when it is whole.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from trunkline.router.text.tool_styles import Tags
from trunkline.router.tools.call_object import DEPTH_MAX, WHITESPACE, Progress

NAME_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_KEY_CHARACTERS_MAX: Final = 256
_SPACE_CHARACTERS_MAX: Final = 256
_ENDS_OF_STRINGS: Final = "\"'"


def is_text(schema: Any) -> bool:
    """Return whether values of a schema are texts only, and any text."""
    return isinstance(schema, dict) and schema.get("type") == "string" and not choices_of(schema)


def choices_of(schema: Any) -> list[str]:
    """Return the texts that a schema allows, if it lists them; else nothing."""
    values = schema.get("enum", [schema.get("const")]) if isinstance(schema, dict) else []
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


class _Arguments:
    """The JSON object that a reader makes, and what was not taken of it yet."""

    is_named: Final = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = False
        self.complete = False
        self._written: list[str] = []
        self._count = 0

    def take(self) -> str:
        """Return the arguments read since the last call of `take`."""
        text = "".join(self._written)
        self._written.clear()
        return text

    def _write_key(self, key: str) -> None:
        self._written.append(f"{', ' if self._count else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._count += 1

    def _end(self) -> Progress:
        self._written.append("}" if self._count else "{}")
        self.started = self.complete = True
        return Progress.DONE


class TagsReader(_Arguments):
    """Reads arguments as pairs of tags, and the text that ends them.

    A value ends only where its closing tag is followed by another argument or by the end, so it may contain the
    closing tag itself.
    """

    def __init__(self, name: str, schema: Mapping[str, Any], tags: Tags) -> None:
        """`schema`: JSON schema of the function's arguments."""
        super().__init__(name)
        properties = schema.get("properties")
        self._schemas: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self._tags = tags
        self._following = (tags.key, *tags.ends)
        self._state = "between"
        self._part = 0
        """Number of the text in `Tags.key_end` that is read."""
        self._read = ""
        """The tag, the name or the value that is read now; of a value, as far as it was not written."""
        self._tail = ""
        """Characters that may be the end of the value."""
        self._streams = False
        """Whether the current value is written as it comes."""
        self._choices: list[str] = []
        """The texts that the current value may be, if the schema lists them."""
        self._first = False
        """Whether the value's first character comes next."""

    def feed(self, character: str) -> Progress:
        """Read the next character."""
        if self._state == "value":
            return self._value(character)
        if self._state == "key":
            return self._key(character)
        if not self._read and character in WHITESPACE:
            return Progress.MORE
        self._read += character
        expected = self._following if self._state == "between" else (self._tags.key_end[self._part],)
        if not any(text.startswith(self._read) for text in expected):
            return Progress.WRONG
        if self._read not in expected:
            return Progress.MORE
        return self._between(self._read) if self._state == "between" else self._behind_key()

    def _between(self, tag: str) -> Progress:
        self.started = True
        self._read = ""
        if tag != self._tags.key:
            return self._end()
        self._state = "key"
        return Progress.MORE

    def _key(self, character: str) -> Progress:
        if character != self._tags.key_end[0][0]:
            self._read += character
            return Progress.MORE if len(self._read) <= _KEY_CHARACTERS_MAX else Progress.WRONG
        key, self._read = self._read.strip(WHITESPACE), ""
        self._write_key(key)
        self._streams = is_text(self._schemas.get(key))
        self._choices = choices_of(self._schemas.get(key))
        if self._streams:
            self._written.append('"')
        self._state, self._part = "behind_key", 0
        return self.feed(character)

    def _behind_key(self) -> Progress:
        self._read = ""
        self._part += 1
        if self._part == len(self._tags.key_end):
            self._state, self._first = "value", self._tags.lines
        return Progress.MORE

    def _value(self, character: str) -> Progress:
        if self._first:
            self._first = False
            if character == "\n":
                return Progress.MORE
        self._tail += character
        while self._tail:
            following = self._may_end(self._tail)
            if following in self._following:
                self._end_value()
                self._state = "between"
                return self._between(following)
            if following is not None:
                break
            self._add(self._tail[0])
            self._tail = self._tail[1:]
        return Progress.MORE

    def _may_end(self, tail: str) -> str | None:
        """Return the beginning of the tag behind the value's closing tag, maybe ""; None: `tail` does not end the
        value."""
        if self._tags.lines and tail[0] == "\n":
            tail = tail[1:]
        closing = self._tags.value_end
        if len(tail) <= len(closing):
            return "" if closing.startswith(tail) else None
        if not tail.startswith(closing) or len(tail) > len(closing) + _SPACE_CHARACTERS_MAX:
            return None
        rest = tail[len(closing) :].lstrip(WHITESPACE)
        return rest if any(text.startswith(rest) for text in self._following) else None

    def _add(self, character: str) -> None:
        if self._streams:
            self._written.append(json.dumps(character, ensure_ascii=False)[1:-1])
        else:
            self._read += character

    def _end_value(self) -> None:
        self._tail = ""
        if self._streams:
            self._written.append('"')
            return
        stripped = self._read.strip(WHITESPACE)
        if stripped in self._choices:  # white space around one of a few values is layout
            self._written.append(json.dumps(stripped, ensure_ascii=False))
        else:
            self._written.append(_json_or_text(self._read))
        self._read = ""


def _json_or_text(value: str) -> str:
    """Return a value as JSON: as it is if it is JSON or a constant of Python, else as a text."""
    stripped = value.strip(WHITESPACE)
    stripped = {"True": "true", "False": "false", "None": "null"}.get(stripped, stripped)
    try:
        return stripped if _finite(json.loads(stripped, parse_constant=_refuse)) else json.dumps(value)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


class PythonReader(_Arguments):
    """Reads keyword arguments in Python, and the parenthesis that closes them."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._state = "first_key"
        self._key = ""
        self._value: list[str] = []
        self._quote = ""
        self._escaped = False
        self._depth = 0

    def feed(self, character: str) -> Progress:
        """Read the next character."""
        if self._state != "value":
            return self._before_value(character)
        if self._quote:
            if not self._escaped and character == self._quote:
                self._quote = ""
            self._escaped = character == "\\" and not self._escaped
        elif character in _ENDS_OF_STRINGS:
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif self._depth:
            self._depth -= character in ")]}"
        elif character in ",)":
            return self._end_value(character)
        if self._depth > DEPTH_MAX:
            return Progress.WRONG
        self._value.append(character)
        return Progress.MORE

    def _before_value(self, character: str) -> Progress:
        if character in WHITESPACE:
            return Progress.MORE
        if character == ")" and not self._key and self._state in ("first_key", "key"):
            return self._end()
        if character == "=" and self._key:
            self._write_key(self._key)
            self._key, self._state, self.started = "", "value", True
            return Progress.MORE
        if character not in NAME_CHARACTERS or len(self._key) >= _KEY_CHARACTERS_MAX:
            return Progress.WRONG
        self._key += character
        return Progress.MORE

    def _end_value(self, character: str) -> Progress:
        try:
            self._written.append(python_to_json("".join(self._value)))
        except (ValueError, RecursionError):
            return Progress.WRONG
        self._value.clear()
        self._state = "key"
        return self._end() if character == ")" else Progress.MORE


_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')|(?P<word>[A-Za-z]++)|(?P<number>[-+0-9.eE_]++)"""
    r"""|(?P<mark>[\[\](){},:]))\s*""",
    re.DOTALL,
)
_WORDS: Final = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_MARKS: Final = {"(": "[", ")": "]"}


def python_to_json(text: str) -> str:
    """Return a literal of Python as JSON: texts, numbers, constants, lists, tuples and dicts with texts as keys.

    Raises:
        ValueError: it is anything else.
    """
    written: list[str] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise ValueError("not a literal")
        position = found.end()
        kind, token = found.lastgroup, found[found.lastgroup or 0]
        if kind == "string":
            written.append(_string(token))
        elif kind == "word":
            if token not in _WORDS:
                raise ValueError("not a constant")
            written.append(_WORDS[token])
        elif kind == "number":
            written.append(_number(token))
        else:
            mark = _MARKS.get(token, token)
            if mark in "]}" and written and written[-1] == ",":
                written.pop()
            written.append(mark)
    value = json.loads("".join(written))
    result = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        result.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can write
        return json.dumps(value)
    return result


def _string(token: str) -> str:
    if token[0] == '"':
        try:
            json.loads(token)
            return token
        except ValueError:
            pass
    # A line end within a literal is an error in Python, but models write it.
    whole = token.replace("\r", "\\r").replace("\n", "\\n").replace("\0", "\\0")
    try:
        return json.dumps(ast.literal_eval(whole))
    except (SyntaxError, MemoryError) as error:
        raise ValueError("not a string") from error


def _number(token: str) -> str:
    try:
        return str(int(token))
    except ValueError:
        return json.dumps(float(token), allow_nan=False)
