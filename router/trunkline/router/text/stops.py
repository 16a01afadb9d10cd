"""Find stop strings in text that arrives in pieces, across boundaries of tokens. Pure.

The result does not depend on how the text is cut into pieces. The match with the smallest end position wins; of
several that end there, the longest. Text is held back only while it may be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopText(NamedTuple):
    """The result of `StopMatcher.feed`."""

    text: str
    """Text that may be shown now."""
    stop: str | None
    """The stop string that was found; after that the matcher must not be fed again."""


class StopMatcher:
    """Looks for several stop strings in one text."""

    def __init__(self, stops: Sequence[str] = (), *, include: bool = False) -> None:
        """`include`: whether the text shown includes the stop string.

        Raises:
            ValueError: A stop string is empty; it would match everywhere.
        """
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""

    def feed(self, text: str) -> StopText:
        """Take the next piece of text; return the text that may be shown."""
        if not self._stops:
            return StopText(text, None)
        text = self._held + text
        found = self._find(text)
        if found is not None:
            start, stop = found
            self._held = ""
            return StopText(text[: start + len(stop)] if self._include else text[:start], stop)
        keep = self._held_length(text)
        cut = len(text) - keep
        self._held = text[cut:]
        return StopText(text[:cut], None)

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        best_end = len(text) + 1
        for stop in self._stops:  # longest first, so that a tie in the end goes to the longest
            start = text.find(stop, 0, min(best_end, len(text)))
            if start >= 0 and start + len(stop) < best_end:
                best, best_end = (start, stop), start + len(stop)
        return best

    def _held_length(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            position = len(text) - length
            if text[position] in self._first_characters and any(
                len(stop) > length and text.startswith(stop[:length], position) for stop in self._stops
            ):
                return length
        return 0
