"""The test that runs now, as long as it may neither start processes nor sleep (conftest.py)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Watched:
    """The unmarked test that runs now."""

    name = ""
    """Its node id; "" while a marked one or none runs."""


watched = Watched()


@contextmanager
def unwatched() -> Iterator[None]:
    """Allow processes meanwhile, and any time: for what is compiled once and kept, whichever test needs it first.

    A timeout of that test (pytest-timeout's alarm) would throw away what was compiled so far, and the next test
    would begin anew and fail as well.
    """
    name, watched.name = watched.name, ""
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        watched.name = name
        signal.setitimer(signal.ITIMER_REAL, left_s)
