"""The supervisor's shell, with stand-ins for the cluster's processes: real processes, signals and pipes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from deploy.supervised import LIMITS, Recorder, child, cluster, run
from deploy.waiting import free_ports, wait_for

from trunkline.deploy.supervisor.lifecycle import Phase
from trunkline.deploy.supervisor.members import Member, Role
from trunkline.deploy.supervisor.supervisor import ChildSpec

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.deploy.supervisor.supervisor._HEALTH_INTERVAL_S", 0.02)


def signal_self(number: signal.Signals) -> Callable[[Recorder], None]:
    return lambda recorder: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_everything_cleanly(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    recorder = Recorder(signal_self(number))
    assert run(recorder) == 0
    assert recorder.phases == [Phase.SERVING, Phase.STOPPING, Phase.STOPPED]
    assert recorder.said == [f"Stopping ({number.name})."]
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    recorder = Recorder(signal_self(signal.SIGTERM))
    limits = dataclasses.replace(LIMITS, settle_s=0.2)
    assert run(recorder, limits=limits, worker=["stubborn"], controller=["stubborn"]) == 1
    assert "worker did not stop in time; killing." in recorder.said


SENTENCE = "gpu is 1, but torch sees 1; allowed: 0"
RECORD = json.dumps({"event": "rank failed", "level": "error", "error": SENTENCE})


@pytest.mark.parametrize(
    ("line", "code", "serves_first", "reason"),
    [("no such weights", 1, False, "no such weights."), (RECORD, 2, False, SENTENCE), (RECORD, 2, True, SENTENCE)],
    ids=["while it starts", "impossible while it starts", "impossible while it serves"],
)
def test_a_failure_ends_all_with_the_childs_own_sentence(
    tmp_path: Path, line: str, code: int, serves_first: bool, reason: str
) -> None:
    """Before the cluster serves; afterwards only where the configuration can never work."""
    recorder = Recorder(lambda _: (tmp_path / "now").touch())
    options = [f"say={line}", f"code={code}", *([f"file={tmp_path}/now"] if serves_first else [])]
    assert run(recorder, worker=options, router=[] if serves_first else ["healthy=no"]) == code
    assert recorder.said[0].startswith(f"worker exited with code {code}: {reason}")
    assert recorder.tails["worker"] == [line]
    assert ("worker", line) in recorder.lines
    assert (Phase.SERVING in recorder.phases) == serves_first


def test_the_rank_with_the_reason_is_named_and_not_the_one_that_left(tmp_path: Path) -> None:
    class Watcher(Recorder):
        def output(self, name: str, line: str) -> None:
            (tmp_path / "now").touch()
            super().output(name, line)

    recorder, port = Watcher(), free_ports()
    children = [
        child("worker-1", Role.WORKER, "say=rank 0 is gone", "code=3"),
        child("worker-0", Role.WORKER, "say=NCCL: Duplicate GPU", "code=2", f"file={tmp_path}/now"),
        *cluster(port, router=["healthy=no"])[1:],
    ]
    assert run(recorder, children, limits=dataclasses.replace(LIMITS, orphan_s=20.0), port=port) == 2
    assert recorder.said[0] == "worker-0 exited with code 2: NCCL: Duplicate GPU."


@pytest.mark.parametrize(("lost", "phases"), [("worker", [Phase.FAILED]), ("router", [])])
def test_without_restarts_a_killed_child_ends_everything(lost: str, phases: Sequence[Phase]) -> None:
    recorder = Recorder(lambda found: os.kill(found.pids[lost], signal.SIGKILL))
    assert run(recorder, restart=False) == 1
    assert recorder.said[0] == f"{lost} was killed by SIGKILL."
    assert recorder.phases == [Phase.SERVING, *phases, Phase.STOPPING, Phase.STOPPED]


def test_a_program_that_cannot_be_spawned_leaves_no_other_behind() -> None:
    recorder, port = Recorder(), free_ports()
    ghost = ChildSpec(Member("ghost", Role.WORKER, 0), ("/nonexistent/program",))
    with pytest.raises(FileNotFoundError):
        run(recorder, [*cluster(port), ghost], port=port)
    assert len(recorder.pids) == 3


def test_a_chatty_child_neither_blocks_nor_is_cut() -> None:
    text, port = "x" * 300_000, free_ports()
    recorder = Recorder(signal_self(signal.SIGTERM))
    # The argument list has a limit, so a shell makes the long line.
    shell = ("sh", "-c", f"head -c {len(text)} /dev/zero | tr '\\0' x; echo; exec sleep 60")
    assert run(recorder, [ChildSpec(Member("worker", Role.WORKER), shell), *cluster(port)[1:]], port=port) == 0
    assert "".join(line for name, line in recorder.lines if name == "worker") == text


def test_children_die_with_a_killed_supervisor() -> None:
    """SIGKILL leaves the supervisor no time for anything: the kernel must end its children."""
    child = "from trunkline.runtime.process import enter_role; import sys, time; "
    child += "enter_role('worker', parent_pid=int(sys.argv[1])); print(flush=True); time.sleep(60)"
    parent = (
        "import os, subprocess as s, sys; child = s.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())], "
        "stdout=s.PIPE); child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent, child], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        process = psutil.Process(int(running.stdout.readline()))
        title = process.cmdline()[0]
        running.kill()
    assert title == "trunkline: worker"
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
