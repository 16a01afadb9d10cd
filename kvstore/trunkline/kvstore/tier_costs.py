"""How fast a tier is and whether it works, as learnt from its moves. Pure: time is an argument.

A tier that fails several times in a row is paused, then tried with one move at a time; each relapse doubles the
pause. Meanwhile its copies count as out of reach, and no request fails.
"""

from __future__ import annotations

from typing import Final

FAILURES_IN_A_ROW: Final = 3
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
SURPRISE_MAX: Final = 4.0
"""A sample of a read's cost counts as at most this many times the estimate."""
DOUBT: Final = 0.8
"""Factor by which `doubt` lowers an estimate."""
SMOOTHING: Final = 0.1
"""Weight of the newest sample of a read's cost."""


class TierHealth:
    """The speed and the state of one tier below host memory."""

    def __init__(self, read_us: float, reads_in_flight: int, writes_in_flight: int) -> None:
        """
        Args:
            read_us: The assumed cost of one read of many before any was measured.
        """
        self.reads = 0
        """Reads done since the start; likewise writes."""
        self.writes = 0
        self.failures = 0
        self.reading = 0
        """Reads in flight; likewise writes."""
        self.writing = 0
        self.problem = ""
        """Why the tier is paused or on trial."""
        self.read_us = read_us
        """Time per read while as many run at once as may."""
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
        """End a pause that is over; return whether moves may be ordered at this time."""
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
        """Count a move that was ordered."""
        if is_write:
            self.writing += 1
        else:
            self.reading += 1

    def withdrawn(self, is_write: bool) -> None:
        """Take back a move that will not be answered."""
        if is_write:
            self.writing -= 1
        else:
            self.reading -= 1

    def succeeded(self, is_write: bool, ordered: float, now: float, elapsed_us: float) -> None:
        """Note that the tier carried out a move, even if a read found nothing: the tier works."""
        self.withdrawn(is_write)
        if is_write:
            self.writes += 1
        else:
            self.reads += 1
            # With several reads in flight the time between two ends is the cost of one.
            sample = max(0.0, now - max(ordered, self._last_read)) * 1e6
            sample = min(sample, SURPRISE_MAX * self.read_us)  # a stall or a busy machine, not the usual cost
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
        """Return the time until the reads in flight and `reads` more are done."""
        return max(self.latency_us, (self.reading + reads) * self.read_us)

    def doubt(self, prior_us: float) -> None:
        """Lower the estimated cost of reads by a fifth, not below `prior_us`: it may be less by now."""
        self.read_us = max(prior_us, DOUBT * self.read_us)
        self.latency_us *= DOUBT

    def failed(self, is_write: bool, now: float, detail: str) -> None:
        """Note that the tier could not carry out a move."""
        self.withdrawn(is_write)
        self.failures += 1
        self._streak += 1
        if self.is_paused or (self._streak < FAILURES_IN_A_ROW and not self._on_trial):
            return
        self.problem = detail or "its moves fail"
        self.is_paused, self._on_trial = True, False
        self._paused_until = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
