"""What holds for every test: which ones run, seeds, and that only marked tests start processes or sleep."""

from __future__ import annotations

import atexit
import gc
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import areas
import pytest
import seeds
from spreading import Spreading, in_order, prepare, tell
from watched import watched

import trunkline

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""Torch's threads wait asleep, in processes that tests start as well. Where another test has the core of one, the
others would spin for it: tests of adapters by the reference on two threads took five times as much of the CPUs."""
os.environ |= {"SSL_CERT_FILE": str(Path(__file__).with_name("authority.pem")), "SSL_CERT_DIR": os.devnull}
"""The certificate of one authority, whose key nobody has. Clients of httpx read all that there are when they are
made, which took 21 ms for each, more than most requests of these tests; object stores' clients need one. No test
speaks TLS to a server that an authority vouches for."""
if built := os.environ.get("TRUNKLINE_NAMES_LIBRARY"):
    # Another build of the library of names, as the one with sanitizers: it is looked for in the packages' folders.
    assert Path(built).parts[-3:] == ("trunkline", "kvstore", "_names.so"), built
    assert Path(built).exists(), built
    trunkline.__path__.insert(0, str(Path(built).parents[1]))
SLEEP_S_MAX = 0.02
"""An unmarked test may give way to another thread, not wait for the clock."""
CHOICE = pytest.StashKey[str]()
"""Which areas are tested."""
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this suite."""
    parser.addoption(
        "--areas",
        help="areas to test (tests/areas.py): all, changed, none, names; by default all of the files named",
    )
    parser.addoption(
        "--rewrite", action="store_true", help="write golden transcripts anew, to be looked at in the diff"
    )


def pytest_report_header() -> str:
    """Say how to run the same random tests again."""
    return f"seeds: {seeds.VARIABLE}={seeds.base()}"


def pytest_configure(config: pytest.Config) -> None:
    """Choose the areas; prepare what spreads tests over workers.

    What is collected stays, half a gigabyte: looking for garbage in it meanwhile, or later, finds nothing.
    """
    gc.disable()
    named = any(argument.split("::")[0].endswith(".py") for argument in config.args)
    config.stash[CHOICE] = config.getoption("--areas") or ("all" if named else "none")
    prepare(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Spreading | None:
    """Spread tests over workers as this suite does (tests/spreading.py)."""
    return Spreading(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of areas that were not asked for."""
    in_order(items)
    try:
        wanted = areas.selected(config.stash[CHOICE])
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        marker = item.get_closest_marker("area")
        if marker is not None and marker.args[0] not in areas.AREAS:
            raise pytest.UsageError(f"{item.nodeid}: no such area: {marker.args[0]}")
        (kept if marker is None or marker.args[0] in wanted else left_out).append(item)
    items[:] = kept
    if left_out:
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Say which tests start processes (tests/spreading.py); look for garbage among newer objects from now on."""
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # libraries complain of what is left when the interpreter ends
    items = (item for item in session.items if isinstance(item, pytest.Function))
    tell(item for item in items if item.get_closest_marker("processes") is not None)


def forbid(what: str) -> None:
    """Fail the unmarked test that runs now."""
    raise AssertionError(f"{watched.name} {what}: mark it with pytest.mark.processes")


def watch(event: str, _: tuple[Any, ...]) -> None:
    """Stop what only marked tests may do. An audit hook of the interpreter: it sees the product's code as well."""
    if watched.name and event in STARTS:
        forbid(f"starts a process ({event})")


def sleep(seconds: float) -> None:
    """Sleep as `time.sleep` does, which no audit hook sees before Python 3.13."""
    if watched.name and seconds > SLEEP_S_MAX and threading.current_thread() is threading.main_thread():
        forbid(f"sleeps for {seconds} s")
    sleep_of_time(seconds)


def spawn(path: Any, arguments: Any, file_descriptors: Any) -> int:
    """Start a process of `multiprocessing`, which no audit event tells of."""
    if watched.name:
        forbid("starts a process (multiprocessing)")
    return spawn_of_multiprocessing(path, arguments, file_descriptors)


sys.addaudithook(watch)
sleep_of_time = time.sleep
vars(time)["sleep"] = sleep
spawn_of_multiprocessing = multiprocessing.util.spawnv_passfds
vars(multiprocessing.util)["spawnv_passfds"] = spawn


def watched_phase(item: pytest.Item) -> Iterator[None]:
    """Forbid processes and sleeping meanwhile, unless the test is marked."""
    watched.name = "" if item.get_closest_marker("processes") else item.nodeid
    try:
        return (yield)
    finally:
        watched.name = ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Watch the fixtures that a test starts."""
    return (yield from watched_phase(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Watch the test."""
    return (yield from watched_phase(item))
