"""The history's rings against a list of all that was ever put in, and rates of counters."""

from __future__ import annotations

import math
from math import inf, isnan, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.router.messages import State, TierState
from trunkline.router.ui.history import RATE_SECONDS, History, HistorySampler, Measured, Rates

FINE_ROWS, COARSE_ROWS, COARSE_SECONDS = 5, 4, 3.0
names = st.sampled_from("abc")
rows = st.dictionaries(names, st.one_of(st.just(nan), st.integers(-1000, 1000).map(float)))
steps = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 1.25, 7.0]), rows), min_size=1, max_size=40)


def same(one: float, other: float) -> bool:
    return (isnan(one) and isnan(other)) or math.isclose(one, other, abs_tol=1e-3)


@given(steps, st.sampled_from([0.0, 2.0, 4.9, 5.0]), st.one_of(st.none(), st.floats(0, 60)))
def test_the_fine_ring_has_the_last_rows(
    given_rows: list[tuple[float, dict[str, float]]], seconds: float, after: float | None
) -> None:
    history = History((1.0, FINE_ROWS), (COARSE_SECONDS, COARSE_ROWS))
    now, everything = 0.0, []
    for gap, values in given_rows:
        now += gap
        history.add(now, values)
        everything.append((now, values))
    curves = history.read(now, seconds, after)
    limit = -inf if after is None else after
    expected = [(t, v) for t, v in everything[-FINE_ROWS:] if t >= now - seconds and t > limit]
    assert curves.times == [t for t, _ in expected]
    for name in "abc":
        column = [values.get(name, nan) for _, values in expected]
        if all(map(isnan, column)):
            assert name not in curves.series
        else:
            assert all(map(same, curves.series[name], column))
    assert all(len(series) == len(curves.times) for series in curves.series.values())


@given(steps)
def test_the_coarse_ring_has_means(given_rows: list[tuple[float, dict[str, float]]]) -> None:
    history = History((1.0, FINE_ROWS), (COARSE_SECONDS, COARSE_ROWS))
    now, buckets = 0.0, []
    until = None
    for gap, values in given_rows:
        now += gap
        if until is None or now >= until:
            until = now + COARSE_SECONDS
            buckets.append((until - COARSE_SECONDS / 2, [values]))
        else:
            buckets[-1][1].append(values)
        history.add(now, values)
    curves = history.read(now, 1e9)
    complete = buckets[:-1][-COARSE_ROWS:]
    assert curves.times == [t for t, _ in complete]
    for name in "abc":
        means = []
        for _, members in complete:
            known = [v[name] for v in members if not isnan(v.get(name, nan))]
            means.append(sum(known) / len(known) if known else nan)
        if all(map(isnan, means)):
            assert name not in curves.series
        else:
            assert all(map(same, curves.series[name], means))


def test_series_are_bounded_and_old_ones_give_way() -> None:
    history = History((1.0, 4), (2.0, 4), series_max=3)
    for name in "abcd":
        history.add(1.0, {name: 1.0})
    assert sorted(history.read(1.0, 4.0).series) == ["a", "b", "c"], "there is no room for a fourth"
    now = 1.0
    while now < 20.0:
        now += 1.0
        history.add(now, {"b": 2.0, "c": 3.0})
    history.add(20.0, {"d": 4.0})
    curves = history.read(20.0, 4.0)
    assert sorted(curves.series) == ["b", "c", "d"], "the one that was not seen for long is forgotten"
    assert [v for v in curves.series["d"] if not isnan(v)] == [4.0]
    assert all(v != 1.0 for v in history.read(20.0, 100.0).series.get("d", []) if not isnan(v))


def test_rates() -> None:
    rates = Rates(seconds=5.0)
    assert isnan(rates.add(0.0, {"x": 100.0})["x"]), "nothing is known of one moment"
    for second in range(1, 20):
        grown = rates.add(float(second), {"x": 100.0 + 3 * second})["x"]
        assert rates.span_seconds == min(second, 5)
        assert grown == 3 * min(second, 5)
    assert isnan(rates.add(20.0, {"x": 5.0})["x"]), "it was started again"
    assert isnan(rates.add(21.0, {"x": 8.0})["x"])
    for second in range(22, 27):
        grown = rates.add(float(second), {"x": 5.0 + 3 * (second - 20)})["x"]
    assert grown == 15.0


def state(**changed: object) -> State:
    numbers = {
        field.name: 0
        for field in msgspec.structs.fields(State)
        if field.required and field.name not in ("status", "detail")
    }
    return State(**{"status": "ready", "detail": "", **numbers, **changed})  # type: ignore[arg-type]


def test_samples_of_two_groups() -> None:
    sampler = HistorySampler()
    tier = TierState("host", 10, 4, 50, 0, 0, 0, 0)
    for second in range(int(RATE_SECONDS) + 3):
        one = state(
            blocks_total=10,
            blocks_free=2,
            blocks_cached=3,
            running=2,
            prompt_tokens=100 * second,
            cached_tokens=25 * second,
            output_tokens=7 * second,
            tiers=[tier],
        )
        two = state(prompt_tokens=10 * second, cached_tokens=10 * second, tiers=[tier])
        groups = [Measured(one, True, 2), Measured(two, True, 0), Measured(None, False, 0)]
        values = sampler.sample(float(second), groups, 3, 1)
    assert values["requests"] == 3
    assert values["router.waiting"] == 1
    assert values["group.0.kv_used"] == pytest.approx(0.5)
    assert values["group.0.kv_cached"] == pytest.approx(0.3)
    assert isnan(values["group.1.kv_used"]), "it has not said how many blocks it has"
    assert values["group.0.tokens_per_s"] == pytest.approx(7)
    assert values["group.0.hit_rate"] == pytest.approx(0.25)
    assert values["hit_rate"] == pytest.approx(35 / 110)
    assert values["tokens_per_s"] == pytest.approx(7)
    assert (values["tier.host.used"], values["tier.host.slots"]) == (8, 20)
    assert values["tier.host.hit_tokens_per_s"] == 0
    assert (values["group.2.ready"], values["group.1.ready"]) == (0, 1)
    assert "group.2.running" not in values
    assert isnan(values["group.2.tokens_per_s"])
