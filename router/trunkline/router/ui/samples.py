"""Compute the values that the history gets each second: loads as they are, rates from counters that grow. Pure.

Controllers report about once a second, and not in step with the clock here, so a rate is taken over the last few
seconds. A counter that fell belongs to a controller that was started again: its rate is not known for a moment.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from math import nan
from typing import Final, NamedTuple

from trunkline.router.messages import State

RATE_SECONDS: Final = 5.0


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


class Sampler:
    """Makes the values of each series (docs/dashboard.md lists them)."""

    def __init__(self) -> None:
        self._rates = Rates()

    def sample(self, now: float, groups: Sequence[Measured], requests: int, waiting: int) -> dict[str, float]:
        """
        Args:
            groups: All groups, in order.
            requests: Number of this router's generations.
            waiting: Number of those that no controller has yet.
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
