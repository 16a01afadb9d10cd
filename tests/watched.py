"""The test that runs now, as long as it may neither start processes nor sleep (conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Watched:
    """The unmarked test that runs now."""

    name = ""
    """Its node id; "" while a marked one or none runs."""


watched = Watched()


@contextmanager
def unwatched() -> Iterator[None]:
    """Allow processes meanwhile: for what is compiled once and kept, whichever test needs it first."""
    name, watched.name = watched.name, ""
    try:
        yield
    finally:
        watched.name = name
