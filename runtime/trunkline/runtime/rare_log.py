"""Limit warnings that a peer can cause: at most one of each kind in an interval, with the number of those left
out.

A leaf (it imports nothing of Trunkline), as `trunkline.runtime.process` is. Time is an argument, in seconds.
"""

from __future__ import annotations

from typing import Any, Final

import structlog

INTERVAL_SECONDS: Final = 10.0
_KINDS_MAX: Final = 64
"""Kinds of warnings that are counted apart, at most."""


class RareLog:
    """Writes the first warning of a kind at once, and then one in each interval for all that came meanwhile."""

    def __init__(self, name: str, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self.counts: dict[str, int] = {}
        """How often each kind of warning came, written or not."""
        self._log = structlog.get_logger(name)
        self._interval_seconds = interval_seconds
        self._last: dict[str, tuple[float, int]] = {}
        """When each kind was last written, and its count then."""

    def warning(self, event: str, now: float, **fields: Any) -> None:
        """Warn; `event` is the kind of warning, so it must not contain text that a peer sent."""
        if event not in self.counts and len(self.counts) >= _KINDS_MAX:
            event = "other"
        count = self.counts[event] = self.counts.get(event, 0) + 1
        written_at, written = self._last.get(event, (float("-inf"), 0))
        if now - written_at < self._interval_seconds:
            return
        self._last[event] = (now, count)
        unwritten = {"not_logged": count - written - 1} if count - written > 1 else {}
        self._log.warning(event, **fields, **unwritten)
