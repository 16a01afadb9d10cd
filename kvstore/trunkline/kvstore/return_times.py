"""How long sessions stay away: learnt from those that came back. Pure.

A turn that has ended is followed by the session's next request, or by none. How soon depends on what the turn
left the client to do: run a tool, read an answer, nothing. `ReturnTimes` learns it for each *kind* of turn, a
tuple of features, the coarsest first: a curve for each beginning of the tuple, so that a kind that was seen seldom
is judged by the coarser ones to which it belongs.

**A curve** counts, by age since the end of the turn, how many turns reached that age and how many came back at it.
Turns that are still away, or will never come back, are counted as far as they got, so they do not distort what is
learnt from the others (Kaplan and Meier). Ages are log-spaced, because they go from seconds to days.

**The wait** of a turn of age a is what the directory sorts by: the seconds for which its KV has to be kept for
each return that this yields, if it is kept for the best time t and then given up,

      wait(a) = min over t of  E[min(T - a, t)] / P(T - a <= t)        T: the age at which the session comes back.

If T is known, this is the time that is left, so the order is that of the furthest next use (Bélády). Where most
sessions come back soon or late or never, it is short while a return is near, and long once that time is past.

**Noise.** Where pauses have no pattern, curves differ by chance only, and an order by chance is worse than one by
last use. So a curve needs many turns to differ from the coarser one if it is finer by a number (a length, a gap).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np

EDGES: Final = (0.0, *(2.0 ** (half / 2) for half in range(35)))
"""Ages in seconds at which the intervals of curves begin; the last interval has no end."""
PRIOR_TURNS: Final = 20.0
"""Weight of the coarser curve, in turns, for a kind whose last feature is a name …"""
PRIOR_TURNS_NUMBER: Final = 200.0
"""… and for one whose last feature is a number: what is seen there is a trend, or chance."""
FIRST_SHARE: Final = 0.02
"""Share of turns that come back in each interval, before anything was learnt."""
MEMORY_TURNS: Final = 4096.0
"""Number of turns of a curve after which all of its counts are halved: what was long ago counts less."""
CURVES_MAX: Final = 2048
"""Largest number of curves; beyond that the one used least recently is forgotten."""

_LENGTHS: Final = np.diff((*EDGES, 2 * EDGES[-1]))
"""Lengths of the intervals, in seconds."""
_MOST: Final = 0.999
"""Largest share of turns that come back in an interval: no curve is sure."""

Kind = tuple[str | int, ...]
"""The features of a turn that say how soon its session comes back, the coarsest first."""


def interval_of(age: float) -> int:
    """Return the number of the interval in which an age in seconds lies."""
    return max(0, bisect_right(EDGES, age) - 1)


class _Curve:
    """Counts of turns by age, and the waits that follow from them."""

    __slots__ = ("came", "hazards", "news", "reached", "waits")

    def __init__(self) -> None:
        self.came = [0.0] * len(EDGES)
        """Number of turns whose session came back in each interval."""
        self.reached = [0.0] * len(EDGES)
        """Number of turns that were away until the beginning of each interval."""
        self.hazards: list[float] = []
        """Share of the turns which reached an interval that come back in it."""
        self.waits: list[float] = []
        self.news = 0
        """Number of changes since the waits were computed."""

    def add(self, counts: list[float], interval: int, more: float) -> None:
        counts[interval] += more
        self.news += 1
        if self.reached[0] > MEMORY_TURNS:
            self.came = [count / 2 for count in self.came]
            self.reached = [count / 2 for count in self.reached]

    @property
    def is_outdated(self) -> bool:
        return not self.waits or self.news > max(16.0, self.reached[0])

    def refresh(self, prior: Sequence[float], turns: float) -> None:
        """Compute the waits anew. `prior`: hazards of the coarser curve, which count as so many turns."""
        self.news = 0
        self.hazards = [
            min(_MOST, max(0.0, came + turns * share) / (max(reached, came) + turns))
            for came, reached, share in zip(self.came, self.reached, prior, strict=True)
        ]
        self.waits = _waits(self.hazards)


def _waits(hazards: Sequence[float]) -> list[float]:
    """Return the wait at the beginning of each interval, in seconds."""
    away = np.concatenate(([1.0], np.cumprod(1.0 - np.asarray(hazards))))
    kept = np.concatenate(([0.0], np.cumsum((away[:-1] + away[1:]) / 2 * _LENGTHS)))
    # From age a to the end of interval j: turns that came back, and seconds for which all were kept.
    came = away[:-1, None] - away[None, 1:]
    seconds = kept[None, 1:] - kept[:-1, None]
    ratios = np.where(came > 0.0, seconds, math.inf) / np.where(came > 0.0, came, 1.0)
    waits: list[float] = ratios.min(axis=1).tolist()
    return waits


class ReturnTimes:
    """The curves of all kinds of turns."""

    def __init__(self) -> None:
        self._curves: OrderedDict[Kind, _Curve] = OrderedDict()

    def __len__(self) -> int:
        return len(self._curves)

    def reached(self, kind: Kind, interval: int, more: float = 1.0) -> None:
        """Note that a turn's session is still away at the beginning of an interval; `more` -1 takes it back."""
        for curve in self._curves_of(kind):
            curve.add(curve.reached, interval, more)

    def came(self, kind: Kind, interval: int) -> None:
        """Note that a turn's session came back in an interval."""
        for curve in self._curves_of(kind):
            curve.add(curve.came, interval, 1.0)

    def wait(self, kind: Kind, interval: int) -> float:
        """Return the wait of a turn of this kind whose age is in this interval, in seconds; infinity: its session
        does not come back."""
        hazards: Sequence[float] = [FIRST_SHARE] * len(EDGES)
        curves = self._curves_of(kind)
        for feature, curve in zip(("", *kind), curves, strict=True):
            if curve.is_outdated:
                curve.refresh(hazards, PRIOR_TURNS if isinstance(feature, str) else PRIOR_TURNS_NUMBER)
            hazards = curve.hazards
        return curves[-1].waits[interval]

    def _curves_of(self, kind: Kind) -> list[_Curve]:
        """Return the curves of a kind and of all coarser ones, the coarsest first."""
        found = []
        for length in range(len(kind) + 1):
            key = kind[:length]
            curve = self._curves.get(key)
            if curve is None:
                curve = self._curves[key] = _Curve()
            self._curves.move_to_end(key)
            found.append(curve)
        while len(self._curves) > CURVES_MAX:
            self._curves.popitem(last=False)
        return found
