"""Keep the measurements of the last hours in rings of bounded size: the last minutes finer than the rest. Pure.

    add(now, values) ──► fine ring: one row a second, 15 minutes
                    └──► mean of each 15 s ──► coarse ring: 6 hours

A row holds one number for each series, NaN where it is not known. Series come and go with the groups and tiers
that are measured. A series that has had no value for as long as a ring lasts loses its column to another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isnan, nan
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

SERIES_MAX: Final = 2048
"""Most series that are kept; they take some 20 MB."""
FINE_SECONDS: Final = 1.0
FINE_ROWS: Final = 900
COARSE_SECONDS: Final = 15.0
COARSE_ROWS: Final = 1440


class Curves(NamedTuple):
    """A part of a history; NaN where a value is not known."""

    times: list[float]
    """Seconds, ascending."""
    series: dict[str, list[float]]
    """By a series' name, a value for each time. Series without any value are left out."""


class Ring:
    """A buffer of the last rows, in order."""

    def __init__(self, rows: int) -> None:
        self._times = np.full(rows, nan)
        self._values: NDArray[np.float32] = np.full((rows, 16), nan, np.float32)
        self._next = 0
        self.count = 0
        """Number of rows in the ring."""

    def add(self, time: float, columns: Mapping[int, float]) -> None:
        """A row with values in some columns."""
        widest = max(columns, default=0)
        if widest >= self._values.shape[1]:
            wider = np.full((len(self._times), max(widest + 1, 2 * self._values.shape[1])), nan, np.float32)
            wider[:, : self._values.shape[1]] = self._values
            self._values = wider
        row = self._values[self._next]
        row[:] = nan
        row[list(columns)] = list(columns.values())
        self._times[self._next] = time
        self._next = (self._next + 1) % len(self._times)
        self.count = min(self.count + 1, len(self._times))

    def clear_column(self, column: int) -> None:
        """Forget a column's values, because another series will use it."""
        if column < self._values.shape[1]:
            self._values[:, column] = nan

    def since(self, time: float, after: float = -inf) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """Return times and values (by column) of the rows from a time on and later than `after`, oldest first."""
        order = (self._next - self.count + np.arange(self.count)) % len(self._times)
        times = self._times[order]
        order = order[(times >= time) & (times > after)]
        return self._times[order], self._values[order]


class History:
    """The fine and the coarse ring. Times are seconds of a clock that does not go back."""

    def __init__(
        self,
        fine: tuple[float, int] = (FINE_SECONDS, FINE_ROWS),
        coarse: tuple[float, int] = (COARSE_SECONDS, COARSE_ROWS),
        series_max: int = SERIES_MAX,
    ) -> None:
        """
        Args:
            fine: Seconds between two rows of the fine ring (about), and the number of rows that it keeps.
            coarse: The same for the ring of means.
        """
        self.fine_seconds = fine[0] * fine[1]
        """How many seconds back the fine ring goes."""
        self._coarse_step = coarse[0]
        self._lasts = coarse[0] * coarse[1] + self.fine_seconds
        self._fine, self._coarse = Ring(fine[1]), Ring(coarse[1])
        self._series_max = series_max
        self._columns: dict[str, int] = {}
        self._seen: dict[str, float] = {}
        """When each series last had a value."""
        self._sums: dict[int, tuple[float, int]] = {}
        """Sum and count of the values of the means that are being made, by column."""
        self._until: float | None = None
        """When these means are complete."""

    def add(self, now: float, values: Mapping[str, float]) -> None:
        """Add the values that are measured now, by series; NaN counts as no value."""
        columns: dict[int, float] = {}
        for name, value in values.items():
            if isnan(value):
                continue
            column = self._column(name, now)
            if column >= 0:
                columns[column] = value
                self._seen[name] = now
        if self._until is not None and now >= self._until:
            means = {column: total / count for column, (total, count) in self._sums.items()}
            self._coarse.add(self._until - self._coarse_step / 2, means)
            self._sums, self._until = {}, None
        if self._until is None:
            self._until = now + self._coarse_step
        for column, value in columns.items():
            total, count = self._sums.get(column, (0.0, 0))
            self._sums[column] = total + value, count + 1
        self._fine.add(now, columns)

    def read(self, now: float, seconds: float, after: float | None = None) -> Curves:
        """Return the last `seconds`: rows of the fine ring if it goes back so far, else means.

        Args:
            after: Return only rows that are younger than this; None for all.
        """
        ring = self._fine if seconds <= self.fine_seconds else self._coarse
        times, values = ring.since(now - seconds, -inf if after is None else after)
        known = set(np.flatnonzero(np.logical_not(np.isnan(values)).any(axis=0)).tolist())
        by_name = {
            name: values[:, column].astype(np.float64).round(4).tolist()
            for name, column in sorted(self._columns.items())
            if column in known
        }
        return Curves(times.tolist(), by_name)

    def _column(self, name: str, now: float) -> int:
        """Return the column in which a series is kept; -1 if there is no room for it."""
        column = self._columns.get(name)
        if column is not None:
            return column
        if len(self._columns) < self._series_max:
            column = len(self._columns)
        else:
            oldest = min(self._seen, key=lambda each: self._seen[each])
            if now - self._seen[oldest] <= self._lasts:
                return -1
            column = self._columns.pop(oldest)
            del self._seen[oldest]
            self._sums.pop(column, None)
            self._fine.clear_column(column)
            self._coarse.clear_column(column)
        self._columns[name] = column
        return column
