"""How fast a tier is and whether it works, learnt from its moves. Pure: time is an argument.

A tier that fails several times in a row is left alone for a while, then tried with one move at a time; each
relapse doubles the pause. Meanwhile what it holds counts as out of reach, never as an error.
"""

from __future__ import annotations

from typing import Final

FAILURES_IN_A_ROW: Final = 3
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
SURPRISE_MAX: Final = 4.0
"""A read counts as so many times what was expected at most."""
DOUBT: Final = 0.8
SMOOTHING: Final = 0.1
"""Weight of the newest sample of a move's cost."""


class TierHealth:
    """One tier below host memory."""

    def __init__(self, read_us: float, reads_in_flight: int, writes_in_flight: int) -> None:
        """
        Args:
            read_us: what one read of many is taken to cost before any was measured.
        """
        self.reads = 0
        """Moves done since the start …"""
        self.writes = 0
        self.failures = 0
        self.reading = 0
        """Moves in flight …"""
        self.writing = 0
        self.problem = ""
        """Why it is paused or on trial."""
        self.read_us = read_us
        """Time one read of many takes, with as many at once as are let."""
        self.latency_us = 0.0
        """Time from a read's start to its end."""
        self._limits = reads_in_flight, writes_in_flight
        self._last_read = 0.0
        self._streak = 0
        self._pause_s = FIRST_PAUSE_S
        self._paused_until = 0.0
        self.is_paused = False
        self._on_trial = False

    def look(self, now: float) -> bool:
        """Whether moves may be ordered at this time."""
        if self.is_paused and now >= self._paused_until:
            self.is_paused = False
            self._on_trial = True
        return not self.is_paused

    def may_read(self) -> bool:
        return not self.is_paused and self.reading < self._limits[0] and not self._trial_runs()

    def may_write(self) -> bool:
        return not self.is_paused and self.writing < self._limits[1] and not self._trial_runs()

    def _trial_runs(self) -> bool:
        return self._on_trial and self.reading + self.writing > 0

    def ordered(self, is_write: bool) -> None:
        """A move has been ordered."""
        if is_write:
            self.writing += 1
        else:
            self.reading += 1

    def withdrawn(self, is_write: bool) -> None:
        """A move will not be answered."""
        if is_write:
            self.writing -= 1
        else:
            self.reading -= 1

    def succeeded(self, is_write: bool, ordered: float, now: float, elapsed_us: float) -> None:
        """A move ended, with or without what was wanted: the tier works."""
        self.withdrawn(is_write)
        if is_write:
            self.writes += 1
        else:
            self.reads += 1
            # With several under way the time between two ends is what one costs.
            sample = max(0.0, now - max(ordered, self._last_read)) * 1e6
            sample = min(sample, SURPRISE_MAX * self.read_us)  # a stall, or a busy machine: not the way it is
            if elapsed_us:
                sample = min(sample, elapsed_us)  # the rest is the messages' delay, not the tier's
            self._last_read = now
            self.read_us += SMOOTHING * (sample - self.read_us)
            self.latency_us += SMOOTHING * (elapsed_us - self.latency_us)
        self._streak = 0
        self._on_trial = False
        self._pause_s = FIRST_PAUSE_S
        if not self.is_paused:
            self.problem = ""

    def predicted_us(self, reads: int) -> float:
        """Time until so many reads more than those in flight are done."""
        return max(self.latency_us, (self.reading + reads) * self.read_us)

    def doubt(self, prior_us: float) -> None:
        """What reads cost may be less by now: lower the estimate by a fifth, not below `prior_us`."""
        self.read_us = max(prior_us, DOUBT * self.read_us)
        self.latency_us *= DOUBT

    def failed(self, is_write: bool, now: float, detail: str) -> None:
        """A move could not be carried out."""
        self.withdrawn(is_write)
        self.failures += 1
        self._streak += 1
        if self.is_paused or (self._streak < FAILURES_IN_A_ROW and not self._on_trial):
            return
        self.problem = detail or "its moves fail"
        self.is_paused, self._on_trial = True, False
        self._paused_until = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
