"""When a process that died is started again, and when there is no point in it any more. Pure.

The first time at once: most deaths are accidents, and streams wait. Then after 1, 2, 4 … 30 seconds, so that a
process that cannot live does not keep the machine busy. After more than five deaths within a minute, without its
group having worked in between, it is given up.
"""

from __future__ import annotations

from collections import deque
from typing import Final

DEATHS_MAX: Final = 5
WINDOW_S: Final = 60.0
DELAYS_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


class Record:
    """The deaths of one member since it last worked."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque(maxlen=DEATHS_MAX + 1)
        self._count = 0

    def died(self, now: float) -> float | None:
        """When to start it again, as a time like `now` (seconds); None: never."""
        self._deaths.append(now)
        self._count += 1
        if len(self._deaths) > DEATHS_MAX and now - self._deaths[0] <= WINDOW_S:
            return None
        return now + DELAYS_S[min(self._count, len(DELAYS_S)) - 1]

    def left(self, now: float) -> float:
        """When to start it again after it made room for others, which says nothing against it."""
        self._count += 1
        return now + DELAYS_S[min(self._count, len(DELAYS_S)) - 1]

    def works(self) -> None:
        """It, and all that it needs, works: what was before does not count."""
        self._deaths.clear()
        self._count = 0
