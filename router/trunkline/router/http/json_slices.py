"""Parses large JSON documents in slices, so that no call of the parser holds Python's lock for long.

A document with too many parts is refused before any part becomes an object.

    body ──scan──► marks: where its brackets, commas and colons are, outside of strings; counted against the limits
      └── pieces between the marks, each of PIECE_BYTES at most ──from_json──► parts ──joined──► the value

One call of the parser takes 60 to 150 ns for each object or key, during which no other thread of the process runs:
16 MiB of `{}` would stop all streams for half a second, and take half a gigabyte. A long string, of which 12 MiB
take 3 to 50 ms in one call, is divided, too, where no character and no escape is cut.

A document within the limits is accepted if and only if `from_json` accepts it whole, with the same value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from trunkline.router.errors import RouterError

PIECE_BYTES: Final = 256 << 10
"""Largest size in bytes of a piece that one call parses. A document of this size or less is one piece, and is not
scanned."""
LIGHT_BYTES: Final = 2 << 20
LIGHT_MARKS: Final = 64 << 10
"""Largest size in bytes, and number of characters that may be marks, of a document that one call parses because it
consists of few long texts: it takes no longer than the heaviest piece."""
PARTS_MAX: Final = 84 << 10
"""Largest number of objects, arrays and strings (keys included) in a document of more than one piece: enough for
16,384 messages."""
VALUES_MAX: Final = 5 << 18
"""Largest number of members of objects and arrays in a document of more than one piece: a million token ids, and
25 % more."""
STRING_BYTES_MAX: Final = 12 << 20
"""Largest size in bytes of a string in a document of more than one piece, with its escapes. No endpoint accepts a
text of more than 8 MiB, but escapes make it longer."""
DEPTH_MAX: Final = 200
"""Deepest nesting of objects and arrays in a document: the parser's own limit."""
_STRING_PIECES: Final = 4
"""Size of the pieces of a long string, in pieces of other values: a string is a single object."""
_STRING_PIECE_BYTES_MIN: Final = 24
"""Smallest size in bytes of a piece of a string: more than two escapes."""
_SLICE_BYTES: Final = 256 << 10
_WHITE: Final = b" \t\n\r"

_OPEN, _CLOSE, _COMMA, _COLON = 1, 2, 3, 4
_KINDS: Final = np.zeros(256, np.uint8)
for _characters, _kind in ((b"[{", _OPEN), (b"]}", _CLOSE), (b",", _COMMA), (b":", _COLON)):
    _KINDS[list(_characters)] = _kind
_STEPS: Final = np.array([0, 1, -1, 0, 0], np.int32)
"""Change of the depth by each kind of mark."""
_PAIRS: Final = {ord("["): ord("]"), ord("{"): ord("}")}


class TooManyPartsError(RouterError):
    """A document exceeds a limit; the text says which."""


class _Marks(NamedTuple):
    """Brackets, commas and colons of a document that are outside of strings, in the order of its bytes."""

    places: npt.NDArray[np.int64]
    """Index of each mark in the document, in bytes."""
    kinds: npt.NDArray[np.uint8]
    depths: npt.NDArray[np.int32]
    """Number of brackets that are open behind each mark."""


def is_light(body: bytes) -> bool:
    """Return whether a document can be parsed in one call: those of conversations are mostly long texts."""
    return len(body) <= LIGHT_BYTES and marks_at_most(body) <= LIGHT_MARKS


def marks_at_most(body: bytes) -> int:
    """Return the number of characters of a document that may be marks: those within strings count, too."""
    return len(body) - len(body.translate(None, b"{[:,"))


def parse_slices(body: bytes, piece_bytes: int = PIECE_BYTES) -> Any:
    """Return the value of a JSON document. NaN and infinity are errors.

    Raises:
        ValueError: the document is not valid JSON; the text says why.
        TooManyPartsError: it has too many parts, or a string that is too long.
    """
    if len(body) <= piece_bytes:
        return from_json(body, allow_inf_nan=False)
    return _Reader(body, _scan(body), piece_bytes).document()


def _scan(body: bytes) -> _Marks:
    """Return the marks at which the document can be cut.

    A backslash outside of a string is treated like one inside: the piece that has it is not JSON in any case.

    Raises:
        ValueError: brackets or quotes do not match.
        TooManyPartsError: there are too many parts.
    """
    found: list[_Marks] = []
    parts = values = depth = 0
    inside = escapes = False
    for start in range(0, len(body), _SLICE_BYTES):
        data = np.frombuffer(body, np.uint8, min(_SLICE_BYTES, len(body) - start), start)
        is_quote, escapes = _quotes(data, escapes)
        within = np.cumsum(is_quote, dtype=np.uint8)  # only the lowest bit counts: inside of a string or not
        within ^= np.uint8(inside)
        kinds = _KINDS[data]
        places = np.flatnonzero((kinds != 0) & (within & 1 == 0))
        kinds = kinds[places]
        depths = depth + np.cumsum(_STEPS[kinds], dtype=np.int32)
        inside = bool(within[-1] & 1)
        counts = np.bincount(kinds, minlength=5)
        # The opening quote of each string; which of a slice's quotes come first does not matter here.
        parts += int(counts[_OPEN]) + (int(np.count_nonzero(is_quote)) + 1) // 2
        values += int(counts[_COMMA])
        _check_counts(parts, values)
        if len(depths):
            _check_depths(int(depths.min()), int(depths.max()))
            depth = int(depths[-1])
        found.append(_Marks(places + start, kinds, depths))
    if inside or depth:
        raise ValueError("it ends within a " + ("string" if inside else "list or an object"))
    return _Marks(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _quotes(data: npt.NDArray[np.uint8], escapes: bool) -> tuple[npt.NDArray[np.bool_], bool]:
    """Return which bytes of a slice begin or end a string, and whether the next slice begins with an escaped
    character. `escapes`: this slice begins with one."""
    is_quote = data == ord('"')
    is_backslash = data == ord("\\")
    if not escapes and not is_backslash.any():
        return is_quote, False
    # An odd number of backslashes in front of a character escapes it; one in front of the slice stands at -1.
    index = np.arange(len(data), dtype=np.int32)
    last_other = np.maximum.accumulate(np.where(is_backslash, np.int32(-2 if escapes else -1), index))
    before = np.concatenate(([np.int32(-2 if escapes else -1)], last_other[:-1]))
    is_escaped = (index - 1 - before) & 1 == 1
    return is_quote & ~is_escaped, bool((len(data) - 1 - int(last_other[-1])) & 1)


def _check_counts(parts: int, values: int) -> None:
    if parts > PARTS_MAX:
        raise TooManyPartsError(f"more than {PARTS_MAX} objects, lists and strings (names of fields included)")
    if values > VALUES_MAX:
        raise TooManyPartsError(f"more than {VALUES_MAX} values")


def _check_depths(lowest: int, highest: int) -> None:
    if lowest < 0:
        raise ValueError("a bracket is closed that was not opened")
    if highest > DEPTH_MAX:
        raise ValueError(f"it is nested more than {DEPTH_MAX} levels deep")


class _Reader:
    """Makes the value of a document out of the values of its pieces."""

    def __init__(self, body: bytes, marks: _Marks, piece_bytes: int) -> None:
        self._body = body
        self._marks = marks
        self._piece_bytes = piece_bytes

    def document(self) -> Any:
        """Return the whole document.

        Raises:
            ValueError: it is not valid JSON.
        """
        return self._value(0, len(self._body))

    def _value(self, start: int, end: int) -> Any:
        """Return the value in a range of bytes, with white space around it."""
        if end - start > self._piece_bytes:
            first = int(np.searchsorted(self._marks.places, start))
            last = int(np.searchsorted(self._marks.places, end)) - 1
            if first < last and self._marks.kinds[first] == _OPEN and self._marks.kinds[last] == _CLOSE:
                return self._container(start, end, first, last)
            if end - start > STRING_BYTES_MAX:
                raise TooManyPartsError(f"a string of more than {STRING_BYTES_MAX} bytes")
        return self._parse(self._body[start:end], start)

    def _container(self, start: int, end: int, first: int, last: int) -> Any:
        """Return the list or object between two marks, with nothing but white space around it."""
        body, marks = self._body, self._marks
        opens, closes = int(marks.places[first]), int(marks.places[last])
        inner = marks.depths[first:last]
        if (
            _PAIRS[body[opens]] != body[closes]
            or body[start:opens].strip(_WHITE)
            or body[closes + 1 : end].strip(_WHITE)
            or int(inner.min()) < int(marks.depths[first])
        ):
            raise ValueError(f"the list or object at byte {opens} is followed by something else, or ends wrongly")
        is_comma = (marks.kinds[first:last] == _COMMA) & (inner == marks.depths[first])
        borders = np.concatenate(([opens], marks.places[first:last][is_comma], [closes]))
        result: Any = {} if body[opens] == ord("{") else []
        for begin, finish in self._groups(borders):
            self._add(result, begin, finish, alone=len(borders) == 2)
        return result

    def _groups(self, borders: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Yield ranges of bytes between `borders`: as many members together as fit a piece, a longer one alone."""
        index = 0
        while index < len(borders) - 1:
            start = int(borders[index]) + 1
            index = max(index + 1, int(np.searchsorted(borders, start + self._piece_bytes, "right")) - 1)
            yield start, int(borders[index])

    def _add(self, result: Any, start: int, end: int, *, alone: bool) -> None:
        """Put the members in a range of bytes into a list or an object. `alone`: there are no others."""
        is_object = isinstance(result, dict)
        if end - start <= self._piece_bytes:
            if not alone and not self._body[start:end].strip(_WHITE):
                raise ValueError(f"a value is missing at byte {start}")
            around = (b"{", b"}") if is_object else (b"[", b"]")
            part = self._parse(around[0] + self._body[start:end] + around[1], start)
            if is_object:
                result.update(part)
            else:
                result += part
        elif is_object:
            key, behind = self._key(start, end)
            result[key] = self._value(behind, end)
        elif not (alone and not self._body[start:end].strip(_WHITE)):
            result.append(self._value(start, end))

    def _key(self, start: int, end: int) -> tuple[str, int]:
        """Return the name of the field in a range of bytes, and where its value begins."""
        index = int(np.searchsorted(self._marks.places, start))
        colon = int(self._marks.places[index]) if index < len(self._marks.places) else end
        if colon >= end or self._marks.kinds[index] != _COLON:
            raise ValueError(f"a field without a value at byte {start}")
        key = self._parse(self._body[start:colon], start)
        if not isinstance(key, str):
            raise ValueError(f"a field whose name is no string at byte {start}")
        return key, colon + 1

    def _parse(self, piece: bytes, start: int) -> Any:
        try:
            if len(piece) > _STRING_PIECES * self._piece_bytes and (text := piece.strip(_WHITE))[:1] == b'"':
                return "".join(self._string_pieces(text))
            return from_json(piece, allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"{error}, counted from byte {start}") from None

    def _string_pieces(self, text: bytes) -> Iterator[str]:
        """Yield the values of the pieces of a JSON string, which has its quotes."""
        if len(text) < 2 or text[-1:] != b'"':
            raise ValueError("it ends within a string")
        size = max(_STRING_PIECES * self._piece_bytes, _STRING_PIECE_BYTES_MIN)
        start, last = 1, len(text) - 1
        while start < last:
            end = last if last - start <= size else _border(text, start, start + size)
            yield from_json(b'"' + text[start:end] + b'"', allow_inf_nan=False)
            start = end


def _border(text: bytes, start: int, end: int) -> int:
    """Return the last place up to `end` at which a string may be cut whose last cut is at `start`.

    Characters and escapes stay whole, also the two escapes of one character: it is at most 11 bytes before `end`.
    """
    border = end
    while border > end - 3 and text[border] & 0xC0 == 0x80:  # within a character
        border -= 1
    if _is_escape(text, start, border - 1):
        return _behind_half(text, start, border - 1)
    for begin in range(border - 5, border - 1):  # within \uXXXX
        if text[begin + 1] == ord("u") and _is_escape(text, start, begin):
            return _behind_half(text, start, begin)
    return _behind_half(text, start, border)


def _behind_half(text: bytes, start: int, border: int) -> int:
    """Return `border`, or the place before the escape in front of it if that is the first of a character's two."""
    half = text[border - 6 : border].lower()
    is_half = half[:3] == b"\\ud" and half[3:4] in (b"8", b"9", b"a", b"b") and _is_escape(text, start, border - 6)
    return border - 6 if is_half else border


def _is_escape(text: bytes, start: int, place: int) -> bool:
    """Return whether an escape begins at `place`: an odd number of backslashes since `start` ends there."""
    before = text[start : place + 1]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1
