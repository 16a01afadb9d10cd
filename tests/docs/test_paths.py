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
FUNCTION_IN: Final = re.compile(r"`([\w./-]+\.py)`(?:: | \()((?:`\w+`(?:, )?)+)")
"""A file in code type, and behind it some of its functions: "`a.py`: `f`, `g`" or "`a.py` (`f`)"."""


def tracked_files() -> list[str]:
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [name for name in found.split() if (ROOT / name).exists()]


def short_names(name: str) -> Iterator[str]:
    """Yield the ways in which a page may name a file: its last parts, with or without `trunkline`."""
    for parts in (name.split("/"), [part for part in name.split("/") if part != "trunkline"]):
        yield from ("/".join(parts[start:]) for start in range(len(parts)))


@pytest.fixture(scope="module")
def files() -> list[str]:
    return tracked_files() or pytest.skip("this is no checkout")


def test_files_and_tests_that_pages_name_exist(files: list[str]) -> None:
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


def paper_name(name: str) -> str:
    """How `docs/papers.md` names a file: without `trunkline/<folder>/` and `tests/`."""
    parts = [part for part in name.split("/") if part not in ("trunkline", "tests")]
    return "/".join(parts[1:] if parts[:1] == parts[1:2] else parts)


def test_the_page_of_the_papers_names_files_by_their_folders(files: list[str]) -> None:
    by_name = {paper_name(name): name for name in files}
    wrong = []
    for line in (ROOT / "docs/papers.md").read_text(encoding="utf-8").splitlines():
        for cell in line.split(" | "):
            folder = ""
            functions = {path: re.findall(r"\w+", names) for path, names in FUNCTION_IN.findall(cell)}
            for path, _ in NAMED.findall(cell):
                name = path if path in by_name else f"{folder}/{path}"
                if name not in by_name:
                    wrong.append(f"{path} in: {cell[:60]}")
                    continue
                folder = name.rsplit("/", 1)[0]
                text = (ROOT / by_name[name]).read_text(encoding="utf-8")
                missing = [each for each in functions.get(path, []) if not re.search(rf"\bdef {each}\b", text)]
                wrong += [f"{path}: {each}" for each in missing]
    assert wrong == []
