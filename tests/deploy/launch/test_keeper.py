"""A unit's keeper: it starts the unit again, ends with it, and is never mistaken for another process."""

from __future__ import annotations

import fcntl
import os
import selectors
import shutil
import signal
import stat
import threading
from pathlib import Path

import pytest
from deploy.launch.launching import Kept
from deploy.waiting import is_alive, wait_for

from trunkline.deploy.launch.folders import (
    LOCK,
    Follower,
    LogFile,
    Process,
    UnitFolder,
    last_lines,
    private_folder,
    process_of,
    send_signal,
    this_process,
)
from trunkline.deploy.launch.keeper import Keeper
from trunkline.deploy.launch.protocol import UnitRecord

pytestmark = pytest.mark.processes
SLEEPS = "import sys, time; print('here', flush=True); time.sleep(1000)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('here', flush=True); time.sleep(1000)"


def test_it_passes_on_what_the_unit_needs_and_keeps_what_it_says(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['GREETING'], sys.argv[1], os.getcwd())"
    old = os.umask(0)
    with Kept(tmp_path, code) as kept:
        state = kept.until(lambda state: state.state == "stopped")
        assert kept.process.wait() == 0
        assert state.exit_code == 0
        assert f"hello {tmp_path}/host {kept.folder.path}" in kept.log
        assert "exited with code 0" in kept.log
        assert not kept.folder.is_held()
    os.umask(old)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in files} == {0}, "others could read secrets"
    assert stat.S_IMODE(kept.folder.path.stat().st_mode) == 0o700


def test_a_unit_that_dies_is_started_again(tmp_path: Path) -> None:
    with Kept(tmp_path, "import sys; open('times', 'a').write('x'); sys.exit(1)") as kept:
        kept.until(lambda state: state.restarts >= 2)
        assert "it is started again in 0 s" in kept.log
        assert "it is started again in 1 s" in kept.log
        kept.terminate()
        # A slow test may find it started once more by then.
        assert kept.until(lambda state: state.state == "stopped").exit_code in (1, -signal.SIGTERM)
        kept.process.wait()
        assert len((kept.folder.path / "times").read_text()) >= 2


def test_it_survives_that_a_signal_without_a_name_kills_the_unit(tmp_path: Path) -> None:
    """Real-time signals but the first and last have none."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)"
    with Kept(tmp_path, code) as kept:
        kept.until(lambda state: state.restarts >= 1)
        assert f"was killed by signal {signal.SIGRTMIN + 3}; it is started again" in kept.log
        kept.terminate()
        kept.until(lambda state: state.state == "stopped")


def test_what_is_impossible_is_not_tried_again(tmp_path: Path) -> None:
    with Kept(tmp_path, "import sys; open('times', 'a').write('x'); sys.exit(2)") as kept:
        assert kept.process.wait() == 1
        state = kept.state
        assert state is not None
        assert (state.state, state.exit_code, state.restarts) == ("failed", 2, 0)
        assert (kept.folder.path / "times").read_text() == "x"


def test_starts_that_fail_wait_longer_and_longer(tmp_path: Path) -> None:
    """Also behind a unit that ran for long, or a keeper would start processes as fast as they fail."""
    kept = UnitFolder(private_folder(tmp_path / "host" / "units" / "it"))
    lock = kept.lock()
    assert lock is not None
    keeper = Keeper(kept, UnitRecord("it", "router", [], {}, "d", 1), lock, (f"{tmp_path}/missing",))
    with selectors.DefaultSelector() as selector:
        for _ in range(4):
            keeper._start(selector)
    said = (kept.path / "log").read_text()
    assert [f"again in {seconds} s" in said for seconds in (0, 1, 2, 4)] == [True] * 4, said
    os.close(lock)


def test_a_unit_whose_folder_is_gone_is_not_started_again(tmp_path: Path) -> None:
    with Kept(tmp_path, SLEEPS) as kept:
        unit = kept.until(lambda state: state.unit is not None).unit
        assert unit is not None
        wait_for(lambda: "here" in kept.log)
        shutil.rmtree(kept.folder.path)
        os.kill(unit.pid, signal.SIGKILL)
        assert kept.process.wait(30) == 1


def test_who_looks_at_a_unit_keeps_no_keeper_from_it(tmp_path: Path) -> None:
    """A look takes a shared lock, and on a busy machine it may last."""
    folder = UnitFolder(private_folder(tmp_path / "it"))
    looks = os.open(folder.path / LOCK, os.O_CREAT | os.O_RDWR)
    fcntl.flock(looks, fcntl.LOCK_SH)
    ending = threading.Timer(0.1, os.close, [looks])
    ending.start()
    assert not folder.is_held()
    lock = folder.lock()
    ending.join()
    assert lock is not None
    assert folder.is_held()
    os.close(lock)


def test_it_stops_the_unit_when_it_is_told_to(tmp_path: Path) -> None:
    with Kept(tmp_path, SLEEPS) as kept:
        unit = kept.until(lambda state: state.unit is not None).unit
        assert unit is not None
        assert kept.folder.is_held()
        assert kept.folder.lock() is None, "no second keeper gets the unit"
        wait_for(lambda: "here" in kept.log)
        kept.terminate()
        assert kept.process.wait() == 0
        assert not is_alive(unit.pid)
        state = kept.state
        assert state is not None
        assert (state.state, state.exit_code) == ("stopped", -signal.SIGTERM)


def test_the_unit_ends_with_a_keeper_that_is_killed(tmp_path: Path) -> None:
    with Kept(tmp_path, STUBBORN) as kept:
        unit = kept.until(lambda state: state.unit is not None).unit
        assert unit is not None
        wait_for(lambda: "here" in kept.log)
        kept.process.kill()
        kept.process.wait()
        wait_for(lambda: not is_alive(unit.pid))
        wait_for(lambda: not kept.folder.is_held())


def test_a_process_with_the_same_id_is_not_the_same_process() -> None:
    ours = this_process()
    assert ours == process_of(os.getpid())
    assert not send_signal(Process(ours.pid, ours.started - 1), signal.SIGKILL)
    assert send_signal(ours, 0)
    assert not send_signal(Process(2**22 - 1, 5), signal.SIGKILL)


def test_a_folder_that_is_empty_runs_nothing(tmp_path: Path) -> None:
    folder = UnitFolder(private_folder(tmp_path / "x"))
    assert folder.record() is None
    assert folder.state() is None
    assert not folder.is_held()


def test_a_log_stays_bounded_and_can_be_followed_across_its_turns(tmp_path: Path) -> None:
    log, follower, seen = LogFile(tmp_path, bytes_max=200), Follower(tmp_path), list[str]()
    for number in range(100):
        log.write(f"line {number}\n".encode())
        seen += follower.read()
    assert seen == [f"line {number}" for number in range(100)]
    assert sum(path.stat().st_size for path in tmp_path.glob("log*")) < 600
    assert last_lines(tmp_path, 3) == ["line 97", "line 98", "line 99"]
    assert len(last_lines(tmp_path, 1000)) < 100
    follower.close()
    log.close()


def test_a_disk_that_is_full_costs_lines_only(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "missing")
    log.write(b"lost\n")
    (tmp_path / "missing").mkdir()
    log.write(b"kept\n")
    log.close()
    assert last_lines(tmp_path / "missing", 5) == ["kept"]
