"""When a process that died is started again. Pure.

The first time at once: most deaths are accidents, and streams wait. Then after 1, 2, 4 … 30 seconds, for ever: a
process that cannot live for now does not keep the machine busy, and serves again once its trouble has ended.
"""

from __future__ import annotations

from typing import Final

DELAYS_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
LASTING_S: Final = 60.0
"""Where a process cannot be asked whether it works: one that has lived so long has worked."""


class Record:
    """The deaths of one member since it last worked."""

    def __init__(self) -> None:
        self._count = 0

    def died(self, now: float) -> float:
        """Count a death; return when to start the member again, as a time like `now` (seconds)."""
        self._count += 1
        return now + DELAYS_S[min(self._count, len(DELAYS_S)) - 1]

    def works(self) -> None:
        """It, and all that it needs, works: what was before does not count."""
        self._count = 0
