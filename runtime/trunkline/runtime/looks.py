"""How long a process itself stood still between two looks at what others have said. No clock, no I/O.

Who gives up a peer that is silent compares times of a clock. That clock goes on while the process itself stands
still: with a machine that is paused, in a debugger, behind other programs on its processor. What the peer has said
meanwhile waits at another thread or in the kernel, and may arrive after the next look. So of the time between two
looks only as much counts as silence as usually lies between them.
"""

from __future__ import annotations

from math import inf


class Looks:
    """The times of looks, in seconds of any clock."""

    def __init__(self, within_s: float) -> None:
        """
        Args:
            within_s: Longest part of the time between two looks that counts.
        """
        self._within_s = within_s
        self._last = inf

    def begin(self, now: float) -> None:
        """Note a time before which nothing was waited for."""
        self._last = now

    def late(self, now: float) -> float:
        """Note a look; return how many seconds since the one before it do not count."""
        late = max(0.0, now - self._last - self._within_s)
        self._last = now
        return late
