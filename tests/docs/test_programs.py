"""The programs of the documentation's pages, run as a reader would run them, say what the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from cluster.harness import Cluster

ROOT: Final = Path(__file__).parents[2]
pytestmark = [pytest.mark.area("site"), pytest.mark.processes]
URL: Final = "http://127.0.0.1:8000"
PROGRAM_SECONDS_MAX: Final = 150.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """As a reader has it who typed `make serve`, but smaller."""
    with Cluster("--tp", "1", "--threads", "1") as served:
        yield served
        assert served.stop() == 0


@pytest.fixture(scope="module")
def two_groups() -> Iterator[Cluster]:
    with Cluster("--groups", "2", "--tp", "1", "--routers", "2", "--threads", "1") as served:
        yield served
        assert served.stop() == 0


def run(*arguments: str | Path) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS_MAX,
        env={**os.environ, "PYTHONWARNINGS": "default"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def blocks(page: str) -> str:
    """The Python of a page, as one program."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def ran(page: str, cluster: Cluster, folder: Path) -> str:
    program = folder / "page.py"
    program.write_text(blocks(page).replace(URL, cluster.url), encoding="utf-8")
    return run(program)


def test_the_quickstart_says_what_happens(cluster: Cluster, tmp_path: Path) -> None:
    assert "12 of 13 prompt tokens were cached" in ran("quickstart", cluster, tmp_path)


def test_the_tutorial_of_many_controllers_says_what_happens(two_groups: Cluster, tmp_path: Path) -> None:
    said = ran("tutorials/many-controllers", two_groups, tmp_path)
    found = re.search(r"one by one: \[(.*)\]", said)
    assert found is not None, said
    assert all(int(cached) >= 384 for cached in found[1].split(", ")), said


def test_the_sessions_tutorial_says_what_happens(cluster: Cluster, tmp_path: Path) -> None:
    said = ran("tutorials/sessions", cluster, tmp_path)
    chats = [tuple(map(int, found)) for found in re.findall(r"(\d+) prompt tokens, (\d+) of them cached", said)]
    assert len(chats) == 3
    for (before, _), (_, cached) in pairwise(chats):
        assert cached >= before, chats  # all that the turn before had sent, and its answer
    turns = [tuple(map(int, found)) for found in re.findall(r"(\d+) tokens of history, (\d+) cached", said)]
    assert len(turns) == 5
    assert all(cached >= history * 0.9 for history, cached in turns[1:4]), turns


def test_the_modules_tutorial_says_what_happens(cluster: Cluster, tmp_path: Path) -> None:
    said = ran("tutorials/modules", cluster, tmp_path)
    found = [tuple(map(int, counts)) for counts in re.findall(r": (\d+) of (\d+) cached", said)]
    assert len(found) == 3
    assert all(cached > total / 2 for cached, total in found), found
    assert "notes: " in said
