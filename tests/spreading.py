"""Which of pytest-xdist's workers runs which tests, with `--dist loadfile`: files whole, and no idle cores.

Tests that start processes wait much of their time, and mind how many others run. So two workers take them, file by
file, for the tests of a file share clusters; those of `tests/cluster`, the longest, first. Files that share one
with other files (`tests/cluster/conftest.py`) go to the first worker while there are others for the second: each
worker that takes one starts that cluster. The third worker only computes, with less of the processor than they
have. What it leaves of the tests that compute, the others end with.

Every worker collects all tests. On a clean checkout most of that is to compile them, with what pytest writes into
their assertions, and all workers would compile the same file at the same time: so each begins elsewhere.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

if TYPE_CHECKING:
    import pytest

WORKER: Final = os.environ.get("PYTEST_XDIST_WORKER", "")
"""This process's name among the workers; "" in the process that spreads the tests, or with no workers."""
FIRST: Final = "gw0"
COMPUTES_ONLY: Final = "gw2"
"""The third worker."""
NICENESS: Final = 5
"""How much it stands back behind the processes of the others' tests, as `os.nice` counts."""
TOLD: Final = "TRUNKLINE_TESTS_OF_PROCESSES"
"""The environment variable with the path of a file: workers collect the tests, the process above them does not."""
CLUSTER: Final = "tests/cluster/"
SHARED: Final = {"cluster", "plain"}
"""The fixtures there that files share."""
SIGN: Final = " with processes"
SHARES: Final = " and clusters of others"
"""How the line of a test ends, in that file, that needs one of these."""


def prepare(config: pytest.Config) -> None:
    """Make the file before the workers start; or choose where this one begins to collect."""
    if WORKER:
        config.args[:] = turned(config.args, int(WORKER[2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    else:
        file, path = tempfile.mkstemp(prefix="trunkline-tests-")
        os.close(file)
        os.environ[TOLD] = path
        config.add_cleanup(lambda: os.unlink(path))


def turned(folders: list[str], number: int, workers: int) -> list[str]:
    """Return the files of tests in `folders`, a worker's part of them first; or `folders`, if one is no folder."""
    if not all(Path(folder).is_dir() for folder in folders):
        return folders
    files = sorted(str(path) for folder in folders for path in Path(folder).rglob("test_*.py"))
    first = len(files) * number // workers
    return files[first:] + files[:first]


def in_order(items: list[pytest.Item]) -> None:
    """Bring what a worker has collected into the order of all workers."""
    if WORKER:
        items.sort(key=lambda item: item.path)


def tell(items: Iterable[pytest.Function]) -> None:
    """Say in a worker which tests start processes.

    The worker that computes stands back from now on, not before: the others wait until all have collected.
    """
    if WORKER == COMPUTES_ONLY:
        os.nice(NICENESS)
    if WORKER == FIRST and TOLD in os.environ:
        lines = (item.nodeid + (SHARES if SHARED & set(item.fixturenames) else "") for item in items)
        Path(os.environ[TOLD]).write_text("\n".join(lines), encoding="utf-8")


def turn(unit: str) -> int:
    """Return when the tests of a file are given away: small numbers first."""
    if not unit.endswith(SIGN):
        return 2
    return int(not unit.startswith(CLUSTER))


class Spreading(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each worker the next file that it may have. Of equal turns, the first worker gets one that shares a
    cluster with others, and the second one that does not; of these, the one with the most tests."""

    @functools.cached_property
    def _told(self) -> list[str]:
        """The lines about tests that start processes, once a worker has collected all."""
        return Path(os.environ[TOLD]).read_text(encoding="utf-8").split("\n")

    @functools.cached_property
    def _processes(self) -> frozenset[str]:
        """The tests that start processes."""
        return frozenset(line.removesuffix(SHARES) for line in self._told)

    @functools.cached_property
    def _sharing(self) -> frozenset[str]:
        """The files of which a test shares a cluster with other files."""
        files = (line.split("::", 1)[0] + SIGN for line in self._told if line.endswith(SHARES))
        return frozenset(file for file in files if file.startswith(CLUSTER))

    def _split_scope(self, nodeid: str) -> str:
        """Return what a worker gets as a whole: those tests of a file that start processes, or the others."""
        return nodeid.split("::", 1)[0] + (SIGN if nodeid in self._processes else "")

    def _assign_work_unit(self, node: Any) -> None:
        """Give a worker its next file, or let it end where nothing is left for it."""
        own = [unit for unit in self.workqueue if node.gateway.id != COMPUTES_ONLY or not unit.endswith(SIGN)]
        if not own:
            node.shutdown()
            return
        is_first = node.gateway.id == FIRST
        best = min(own, key=lambda unit: (turn(unit), (unit in self._sharing) != is_first))
        self.workqueue.move_to_end(best, last=False)
        super()._assign_work_unit(node)
