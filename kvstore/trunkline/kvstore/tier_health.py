"""How fast and how reliable a place of chunks is: a tier below host memory, or a peer. Part of the directory.

A tier's health is learnt from its moves. A tier that fails several times in a row is paused, then tried with one
move at a time; each relapse doubles the pause. Meanwhile its copies count as out of reach, and no request fails.
What a read costs is learnt from reads only, and a place that seems slow gets none. So a high estimate is doubted,
by those who did without it and as time goes by, until a read is tried again.
Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from trunkline.kvstore.tier import TierTotals

FAILURES_IN_A_ROW: Final = 3
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
SURPRISE_MAX: Final = 4.0
"""Largest factor by which one measured read may exceed the estimate of a read's cost; a slower read counts as this
many times the estimate."""
DOUBT: Final = 0.8
"""Factor by which `TierHealth.doubt` lowers the estimate of a read's cost."""
DOUBT_AGAIN_S: Final = 60.0
"""Time in seconds without a read after which the estimate is doubted, and doubted again."""
SMOOTHING: Final = 0.1
"""Weight of the newest sample of a read's cost."""


@dataclass(slots=True)
class _Batch:
    """Reads whose ends became known at the same time."""

    now: float
    since: float
    """Time from which on they used the tier: the ends before them, or the first one's order."""
    before_us: float
    """The estimate before these reads."""
    is_first: bool
    """Whether no read was measured before these."""
    trusted: float
    """Time from which on the estimate ages: of these reads, or of the last doubt since; infinite: it does not."""
    reads: int = 0
    elapsed_us: float = 0.0
    """Time that these reads took together."""
    kept: float = 1.0
    """Weight of the estimate before them beside what they show."""


class TierHealth:
    """The speed and the state of one tier below host memory, or of one peer."""

    def __init__(
        self,
        read_us: float,
        reads_in_flight: int,
        writes_in_flight: int,
        totals: TierTotals,
        *,
        is_guess: bool = False,
    ) -> None:
        """
        Args:
            read_us: The assumed cost of one read of many before any was measured.
            is_guess: Whether the first measured read replaces `read_us`.
        """
        self.totals = totals
        self.reading = 0
        """Number of reads in flight."""
        self.writing = 0
        self.problem = ""
        """Why the tier is paused, or gets only one move at a time after a pause; "": it works."""
        self.read_us = read_us
        """Microseconds per read while the tier has as many reads in flight as it may."""
        self._least_us = read_us
        """The lowest estimate so far: what a read may cost again."""
        self.latency_us = 0.0
        """Microseconds from a read's start to its end."""
        self._limits = reads_in_flight, writes_in_flight
        self._batch = _Batch(-inf, -inf, read_us, is_first=is_guess, trusted=inf)
        self._samples = 0.0 if is_guess else inf
        """Number of measured reads; infinite if the assumed cost counts like many of them."""
        self._streak = 0
        self._pause_s = FIRST_PAUSE_S
        self._paused_until = 0.0
        self.is_paused = False
        self._on_trial = False

    @property
    def is_measured(self) -> bool:
        """Whether `read_us` is more than a guess."""
        return self._samples > 0

    def look(self, now: float) -> bool:
        """End a pause that is over, and doubt an old estimate; return whether moves may be ordered now."""
        if now - self._batch.trusted >= DOUBT_AGAIN_S:
            self._batch.trusted = now
            self.doubt()
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

    def _ended(self, is_write: bool) -> None:
        if is_write:
            self.writing -= 1
        else:
            self.reading -= 1

    def succeeded(self, is_write: bool, ordered: float, now: float, elapsed_us: float) -> None:
        """Note that the tier carried out a move, even if a read found nothing: the tier works."""
        if is_write:
            self.totals.writes += 1
        else:
            self.totals.reads += 1
            self._learn(ordered, now, elapsed_us)
        self.answered(is_write)

    def _learn(self, ordered: float, now: float, elapsed_us: float) -> None:
        """Learn what a read costs from one that has ended.

        With several reads in flight the time between two ends is the cost of one. Ends that become known at the
        same time, as after a long step, share the time since the ends before them.
        """
        batch = self._batch
        if now != batch.now:
            is_first = self._samples == 0
            batch = self._batch = _Batch(now, max(ordered, batch.now), self.read_us, is_first, now)
        batch.reads += 1
        batch.elapsed_us += elapsed_us
        sample = max(0.0, now - batch.since) * 1e6 / batch.reads
        if not batch.is_first:
            sample = min(sample, SURPRISE_MAX * batch.before_us)  # a stall or a busy machine, not the usual cost
        if batch.elapsed_us:
            sample = min(sample, batch.elapsed_us / batch.reads)  # the rest is the messages' delay, not the tier's
        self._samples += 1.0
        weight = max(SMOOTHING, 1.0 / self._samples)
        batch.kept *= 1.0 - weight
        self.read_us = batch.kept * batch.before_us + (1.0 - batch.kept) * sample
        self.latency_us += weight * (elapsed_us - self.latency_us)
        self._least_us = min(self._least_us, self.read_us)

    def answered(self, is_write: bool) -> None:
        """Note that a move ended and that the tier works, without learning what the move cost."""
        self._ended(is_write)
        self._streak = 0
        self._on_trial = False
        self._pause_s = FIRST_PAUSE_S
        if not self.is_paused:
            self.problem = ""

    def predicted_us(self, reads: int) -> float:
        """Return the microseconds until the reads in flight and `reads` more are done."""
        return max(self.latency_us, (self.reading + reads) * self.read_us)

    def doubt(self) -> None:
        """Lower the estimated cost of reads by a fifth, but not below the lowest that was assumed or measured: the
        true cost may have fallen since it was measured."""
        self.read_us = max(min(self._least_us, self.read_us), DOUBT * self.read_us)
        self.latency_us *= DOUBT

    def failed(self, is_write: bool, now: float, detail: str) -> None:
        """Note that the tier could not carry out a move."""
        self._ended(is_write)
        self.totals.failures += 1
        self._streak += 1
        if self.is_paused or (self._streak < FAILURES_IN_A_ROW and not self._on_trial):
            return
        self.problem = detail or "its moves fail"
        self.is_paused, self._on_trial = True, False
        self._paused_until = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
