"""Where to put a file aside that cannot be used and must not be lost."""

from __future__ import annotations

from itertools import count
from pathlib import Path


def unused_name(path: Path, ending: str) -> Path:
    """Return the first of `PATH.ENDING`, `PATH.ENDING-2`, `PATH.ENDING-3` … that no file has."""
    names = (Path(f"{path}.{ending}" if number == 1 else f"{path}.{ending}-{number}") for number in count(1))
    return next(name for name in names if not name.exists())
