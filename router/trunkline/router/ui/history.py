"""The dashboard's measurements of the last hours: samples of loads and rates, in rings of bounded size. Pure.

    HistorySampler.sample(now, groups) ──► History.add ──► fine ring: one row a second, 15 minutes
                                             └──► mean of each 15 s ──► coarse ring: 6 hours

A row holds one number for each series, NaN where it is not known. Series come and go with the groups and tiers
that are measured. A series that has had no value for as long as a ring lasts loses its column to another one.

Rates are made of counters that grow. Controllers report about once a second, and not in step with the samples, so
a rate is taken over the last few seconds. A counter that fell belongs to a controller that was started again: its
rate is not known for a moment.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from math import inf, isnan, nan
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkline.router.messages import State

SERIES_MAX: Final = 2048
"""Largest number of series that are kept. So many take some 20 MB."""
FINE_SECONDS: Final = 1.0
FINE_ROWS: Final = 900
COARSE_SECONDS: Final = 15.0
COARSE_ROWS: Final = 1440
RATE_SECONDS: Final = 5.0


class Curves(NamedTuple):
    """A part of a history; NaN where a value is not known."""

    times: list[float]
    """Times of the values in seconds, ascending."""
    series: dict[str, list[float]]
    """For each series, by its name, a value for each time. Series without any value are left out."""


class Ring:
    """A buffer of the last rows, in order."""

    def __init__(self, rows: int) -> None:
        self._times = np.full(rows, nan)
        self._values: NDArray[np.float32] = np.full((rows, 16), nan, np.float32)
        self._next = 0
        self.count = 0
        """Number of rows in the ring."""

    def add(self, time: float, columns: Mapping[int, float]) -> None:
        """Add a row with values in some columns."""
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
            coarse: Seconds between two rows of the ring of means, and the number of rows that it keeps.
        """
        self.fine_seconds = fine[0] * fine[1]
        """Number of seconds that the fine ring reaches back."""
        self._coarse_step = coarse[0]
        self._lasts = coarse[0] * coarse[1] + self.fine_seconds
        self._fine, self._coarse = Ring(fine[1]), Ring(coarse[1])
        self._series_max = series_max
        self._columns: dict[str, int] = {}
        self._seen: dict[str, float] = {}
        """Time at which each series last had a value."""
        self._sums: dict[int, tuple[float, int]] = {}
        """Sum and count of the values of the means that are being made, by column."""
        self._until: float | None = None
        """Time at which the means that are being made will be complete."""

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


class Measured(NamedTuple):
    """A group at one moment."""

    state: State | None
    """The controller's last report; None if it is not connected."""
    is_ready: bool
    inflight: int
    """Number of this router's requests that the group has."""


class Rates:
    """Measures how much counters have grown over the last seconds."""

    def __init__(self, seconds: float = RATE_SECONDS) -> None:
        self._seconds = seconds
        self._kept: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, now: float, counters: Mapping[str, float]) -> dict[str, float]:
        """Return how much each counter has grown since the oldest time that is kept; NaN if that is not known.

        The growth of a counter that did not exist at that time is not known yet.
        """
        while len(self._kept) > 1 and self._kept[1][0] <= now - self._seconds:
            self._kept.popleft()
        before_at, before = self._kept[0] if self._kept else (now, {})
        last = self._kept[-1][1] if self._kept else {}
        self._kept.append((now, dict(counters)))
        grown: dict[str, float] = {}
        for name, value in counters.items():
            fell = value < last.get(name, value)
            start = before.get(name)
            grown[name] = nan if start is None or fell or value < start or now <= before_at else value - start
        return grown

    @property
    def span_seconds(self) -> float:
        """Return the seconds over which the last growths were measured."""
        return self._kept[-1][0] - self._kept[0][0] if self._kept else 0.0


class HistorySampler:
    """Makes the values of each series (docs/dashboard.md lists them)."""

    def __init__(self) -> None:
        self._rates = Rates()

    def sample(self, now: float, groups: Sequence[Measured], requests: int, waiting: int) -> dict[str, float]:
        """Return the present value of each series.

        Args:
            groups: All groups, in order.
            requests: Number of this router's generations.
            waiting: Number of this router's generations that no controller has yet.
        """
        values: dict[str, float] = {"requests": requests, "router.waiting": waiting}
        counters: dict[str, float] = {}
        tiers: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for index, group in enumerate(groups):
            values[f"group.{index}.ready"] = group.is_ready
            values[f"group.{index}.inflight"] = group.inflight
            if group.state is not None:
                values |= _loads(f"group.{index}.", group.state)
                counters |= _counters(f"{index}.", group.state)
                for tier in group.state.tiers:
                    tiers[tier.name][0] += tier.used
                    tiers[tier.name][1] += tier.slots
        for name, (used, slots) in tiers.items():
            values |= {f"tier.{name}.used": used, f"tier.{name}.slots": slots}
        return values | self._growths(now, counters, len(groups))

    def _growths(self, now: float, counters: Mapping[str, float], groups: int) -> dict[str, float]:
        grown = self._rates.add(now, counters)
        seconds = self._rates.span_seconds
        if seconds <= 0:
            return {}
        values: dict[str, float] = {}
        whole: defaultdict[str, float] = defaultdict(float)
        for name, growth in grown.items():
            if growth == growth:
                whole[name.partition(".")[2]] += growth
        for index in range(groups):
            prompt, output = grown.get(f"{index}.prompt", nan), grown.get(f"{index}.output", nan)
            values[f"group.{index}.tokens_per_s"] = output / seconds
            values[f"group.{index}.prompt_tokens_per_s"] = prompt / seconds
            values[f"group.{index}.hit_rate"] = grown.get(f"{index}.cached", nan) / prompt if prompt else nan
        if whole:
            values["tokens_per_s"] = whole["output"] / seconds
            values["prompt_tokens_per_s"] = whole["prompt"] / seconds
            values["cached_tokens_per_s"] = whole["cached"] / seconds
            values["hit_rate"] = whole["cached"] / whole["prompt"] if whole["prompt"] else nan
        for name, growth in whole.items():
            kind, _, what = name.partition(":")
            if kind == "tier":
                values[f"tier.{what}_per_s"] = growth / seconds
        return values


def _loads(prefix: str, state: State) -> dict[str, float]:
    total = state.blocks_total or nan
    return {
        f"{prefix}running": state.running,
        f"{prefix}waiting": state.waiting,
        f"{prefix}requests": state.requests,
        f"{prefix}queued_tokens": state.queued_tokens,
        f"{prefix}kv_used": 1.0 - (state.blocks_free + state.blocks_cached) / total,
        f"{prefix}kv_cached": state.blocks_cached / total,
    }


def _counters(prefix: str, state: State) -> dict[str, float]:
    counters: dict[str, float] = {
        f"{prefix}prompt": state.prompt_tokens,
        f"{prefix}cached": state.cached_tokens,
        f"{prefix}output": state.output_tokens,
    }
    for tier in state.tiers:
        counters |= {
            f"{prefix}tier:{tier.name}.hit_tokens": tier.hit_tokens,
            f"{prefix}tier:{tier.name}.evictions": tier.evictions,
            f"{prefix}tier:{tier.name}.reads": tier.reads,
            f"{prefix}tier:{tier.name}.writes": tier.writes,
        }
    return counters
