"""The stores that are compared with the model. To add one, add its lab."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from kvstore.records.labs import sqlite_lab
from kvstore.records.records_model import Lab
from kvstore.records.redis_lab import redis_lab

LABS: Final[dict[str, Callable[[Path], AbstractContextManager[Lab]]]] = {
    "sqlite": sqlite_lab,
    "redis": redis_lab,
    "lazy redis": partial(redis_lab, is_lazy=True),
}
"""Context managers that make an empty lab, given a folder."""


@pytest.fixture(
    params=["sqlite", *(pytest.param(name, marks=pytest.mark.processes) for name in ("redis", "lazy redis"))]
)
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    """An empty lab of each kind."""
    with LABS[request.param](tmp_path) as made:
        yield made
