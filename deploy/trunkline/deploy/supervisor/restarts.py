"""When to start a process again that died. Pure.

The first time at once: most deaths are accidents, and streams wait. Then after 1, 2, 4 … 30 seconds, for ever: so
a process that keeps dying does not load the machine, and serves again once its trouble has ended.
"""

from __future__ import annotations

from typing import Final

DELAYS_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
LASTING_S: Final = 60.0
"""A process that cannot be asked whether it works counts as working after this time."""


class Record:
    """The deaths of one member since it last worked."""

    def __init__(self) -> None:
        self._count = 0

    def died(self, now: float) -> float:
        """Count a death; return when to start the member again, as a time like `now` (seconds)."""
        self._count += 1
        return now + DELAYS_S[min(self._count, len(DELAYS_S)) - 1]

    def works(self) -> None:
        """Note that the member works, and all that it needs: earlier deaths no longer count."""
        self._count = 0
