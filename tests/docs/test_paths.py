"""Files and tests that the documentation names exist."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.processes

ROOT: Final = Path(__file__).resolve().parents[2]
NAMED: Final = re.compile(r"`([\w./-]+\.(?:py|h|cc|cu|cuh|lua|js))(?:::(\w+))?`")
"""A file in code type, perhaps with one of its tests or classes."""


def tracked_files() -> list[str]:
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [name for name in found.split() if (ROOT / name).exists()]


def short_names(name: str) -> Iterator[str]:
    """Yield the ways in which a page may name a file: its last parts, with or without `trunkline`."""
    for parts in (name.split("/"), [part for part in name.split("/") if part != "trunkline"]):
        yield from ("/".join(parts[start:]) for start in range(len(parts)))


def test_files_and_tests_that_pages_name_exist() -> None:
    files = tracked_files()
    if not files:
        pytest.skip("this is no checkout")
    by_short_name: dict[str, list[str]] = {}
    for name in files:
        for short in short_names(name):
            by_short_name.setdefault(short, []).append(name)
    missing = []
    for page in (name for name in files if name.startswith("docs/") and name.endswith(".md")):
        for path, inner in NAMED.findall((ROOT / page).read_text(encoding="utf-8")):
            named = by_short_name.get(path, [])
            if not named:
                missing.append(f"{page}: {path}")
            elif inner and not any(
                re.search(rf"\b(?:def|class) {inner}\b", (ROOT / name).read_text(encoding="utf-8"))
                for name in named
            ):
                missing.append(f"{page}: {path}::{inner}")
    assert missing == []
