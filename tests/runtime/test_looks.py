"""What counts of the time between looks: all of a short one, and of a long one as much as usually lies between."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from seeds import seeds

from trunkline.runtime.looks import Looks


@pytest.mark.parametrize("seed", seeds(3))
def test_a_long_time_counts_as_the_longest_usual_one(seed: int) -> None:
    rng = random.Random(seed)
    within = rng.uniform(0.1, 5.0)
    looks = Looks(within)
    times = [rng.uniform(-100.0, 100.0)]
    for _ in range(2000):
        times.append(times[-1] + rng.choice((0.0, rng.uniform(0.0, within), rng.uniform(within, 1000.0))))
    looks.begin(times[0])
    counted = sum(now - before - looks.late(now) for before, now in pairwise(times))
    expected = sum(min(now - before, within) for before, now in pairwise(times))
    assert counted == pytest.approx(expected)


def test_before_the_first_look_nothing_is_late() -> None:
    looks = Looks(1.0)
    assert looks.late(1e9) == 0.0
    assert looks.late(1e9 + 3.0) == 2.0
    looks.begin(5.0)
    assert looks.late(5.5) == 0.0
