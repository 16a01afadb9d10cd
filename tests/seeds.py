"""Seeds of random tests: others with every commit, the same for everyone who tests that commit.

A failing test has its seed in its name. It fails again, also on later commits, with the base that the head of the
run shows: `TRUNKLINE_TEST_SEED=BASE python -m pytest ...`.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

VARIABLE = "TRUNKLINE_TEST_SEED"


@functools.cache
def base() -> int:
    """Return the first seed: what the variable says, or a number made of the commit's name; 0 without git."""
    if (said := os.environ.get(VARIABLE)) is not None:
        return int(said)
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return int(done.stdout[:8], 16) % 1_000_000 * 1_000 if done.returncode == 0 else 0


def seeds(count: int, *, always: tuple[int, ...] = ()) -> list[int]:
    """Return `count` seeds for `pytest.mark.parametrize("seed", ...)`, behind those that found a fault once.

    Args:
        count: How many seeds rotate; at most 1,000.
        always: Seeds that are met with every commit.
    """
    return [*always, *(base() + number for number in range(count))]
