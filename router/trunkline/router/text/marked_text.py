"""Find parts of messages in the text that a chat template makes of them. Pure.

A part is put between marks before the template runs, and the marks are taken out of its text again:

    "\\nresult\\n" ─► "\\n⟨7⟨result⟩\\n" ─► template ─► "…tool⟨7⟨result⟩…" ─► the text that it writes without
                                                                          marks, and the places of part 7

Marks are noncharacters of Unicode that no message contains. White space at the ends of a part stays outside, so
that a template that trims its messages writes the same text with marks as without. Where a template does more to
its messages than to show them or leave them out (turns them round, cuts them, escapes all that is not ASCII), the
marks come back damaged, and nothing is known about places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from trunkline.router.text.borders import agreed_length

_NONCHARACTERS: Final = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class PartPlace(NamedTuple):
    """A place at which a text shows a part."""

    part: int
    """The part's number."""
    start: int
    """Index of the first character."""
    stop: int
    """Index behind the last character."""


class PlacedText(NamedTuple):
    """A text without marks."""

    text: str
    places: list[PartPlace]
    """Where the parts stand, ascending and disjoint. A part that is not shown has no place."""


class Marks(NamedTuple):
    """Two characters, for the beginning and the end of parts."""

    opening: str
    closing: str

    @classmethod
    def unused(cls, texts: Iterable[str]) -> Marks | None:
        """Return marks that none of the texts contains; None if there are no such marks."""
        free = _NONCHARACTERS
        for text in texts:
            if not text.isascii():
                free = [mark for mark in free if mark not in text]
        return cls(free[0], free[1]) if len(free) > 1 else None

    def around(self, part: int, text: str) -> str:
        """Return a text with marks around it, but for white space at its ends; an empty text gets none."""
        core = text.strip()
        if not core:
            return text
        start = len(text) - len(text.lstrip())
        marked = f"{self.opening}{part}{self.opening}{core}{self.closing}"
        return text[:start] + marked + text[start + len(core) :]

    def read(self, text: str, known: tuple[str, PlacedText] | None = None) -> PlacedText | None:
        """Take the marks out of a text; None if some are damaged. `known`: a text with these marks that may begin
        like it, and what was read of it."""
        opening, closing = self
        pattern = re.compile(f"{opening}([0-9]+){opening}([^{opening}{closing}]*){closing}")
        places, end = ([], 0) if known is None else _shared_places(*known, text)
        length = places[-1].stop if places else 0
        pieces: list[str] = []
        begun = known[1].text[:length] if known is not None else ""
        for match in pattern.finditer(text, end):
            pieces += [text[end : match.start()], match[2]]
            start = length + match.start() - end
            length = start + len(match[2])
            places.append(PartPlace(int(match[1]), start, length))
            end = match.end()
        plain = "".join([*pieces, text[end:]])
        damaged = (opening, closing, _escaped(opening), _escaped(closing))
        return None if any(mark in plain for mark in damaged) else PlacedText(begun + plain, places)


def _shared_places(marked: str, known: PlacedText, text: str) -> tuple[list[PartPlace], int]:
    """Return the first places that a text with marks has in common with a known one, and where in it the last of
    them ends, marks included."""
    agreed, count = agreed_length(marked, text), len(known.places)
    behind = len(marked) - len(known.text)  # characters of marks up to the last place that is looked at
    while count and known.places[count - 1].stop + behind > agreed:
        count -= 1
        behind -= 3 + len(str(known.places[count].part))
    return known.places[:count], known.places[count - 1].stop + behind if count else 0


def _escaped(mark: str) -> str:
    """Return a mark as JSON in ASCII has it."""
    return f"\\u{ord(mark):04x}"


class LeftOut(NamedTuple):
    """One piece of a text without which another text is left. Where the pieces at both of its ends are alike, it
    may begin at several places, and each leaves the same text."""

    first: int
    """First place at which it may begin."""
    last: int
    """Last place at which it may begin."""
    length: int
    """Number of characters."""


def left_out(text: str, rest: str) -> LeftOut | None:
    """Return the piece of `text` without which `rest` is left; None if `rest` is no such text."""
    length = len(text) - len(rest)
    if length < 0:
        return None
    last = agreed_length(text, rest)
    behind = agreed_length(text[::-1], rest[::-1])
    first = max(0, len(rest) - behind)
    return LeftOut(first, last, length) if first <= last else None
