"""The supervisor's shell with stand-ins for the cluster's processes: real processes, signals and pipes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from trunkline.deploy.supervisor.lifecycle import Phase
from trunkline.deploy.supervisor.members import Limits, Member, Role
from trunkline.deploy.supervisor.supervisor import ChildSpec, Supervisor

CHILD = str(Path(__file__).with_name("fake_child.py"))
LIMITS = Limits(drain_s=1.0, margin_s=0.5, settle_s=1.0, grace_s=0.4, orphan_s=0.2, quick_s=1.0, reap_s=2.0)


class Recorder:
    """A reporter that remembers, and acts when the cluster serves."""

    def __init__(self, when_serving: Callable[[Recorder], None] | None = None) -> None:
        self.pids: dict[str, int] = {}
        self.said: list[str] = []
        self.lines: list[tuple[str, str]] = []
        self.phases: list[Phase] = []
        self.tails: dict[str, list[str]] = {}
        self._when_serving = when_serving

    def spawned(self, name: str, pid: int) -> None:
        self.pids[name] = pid

    def health(self, answer: Mapping[str, Any] | None) -> None:
        pass

    def output(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def say(self, text: str, level: str) -> None:
        self.said.append(text)

    def last_lines(self, name: str, lines: Sequence[str]) -> None:
        self.tails[name] = list(lines)

    def phase(self, phase: Phase) -> None:
        self.phases.append(phase)
        if phase is Phase.SERVING and self._when_serving:
            self._when_serving(self)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def child(name: str, role: Role, *options: str) -> ChildSpec:
    argv = (sys.executable, CHILD, "--role", role.value, *options)
    return ChildSpec(Member(name, role, -1 if role is Role.ROUTER else 0), argv)


def cluster(port: int, **options: Sequence[str]) -> list[ChildSpec]:
    return [
        child("worker", Role.WORKER, *options.get("worker", ())),
        child("controller", Role.CONTROLLER, *options.get("controller", ())),
        child("router", Role.ROUTER, "--port", str(port), *options.get("router", ())),
    ]


def run(recorder: Recorder, *, restart: bool = True, **options: Sequence[str]) -> int:
    port = free_port()
    children = cluster(port, **options)
    code = Supervisor(children, recorder, host="127.0.0.1", port=port, limits=LIMITS, restart=restart).run()
    assert not [pid for pid in recorder.pids.values() if psutil.pid_exists(pid)]
    return code


def signal_self(number: signal.Signals) -> Callable[[Recorder], None]:
    return lambda recorder: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_everything_cleanly(number: signal.Signals) -> None:
    recorder = Recorder(signal_self(number))
    assert run(recorder, router=["--ready-after", "0.3"]) == 0
    assert recorder.phases == [Phase.SERVING, Phase.STOPPING, Phase.STOPPED]
    assert recorder.said == [f"Stopping ({number.name})."]


def test_signal_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    run(Recorder(signal_self(signal.SIGTERM)))
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    recorder = Recorder(signal_self(signal.SIGTERM))
    assert run(recorder, worker=["--ignore-term"]) == 1
    assert "worker did not stop in time; killing." in recorder.said


def test_a_failed_start_shows_the_childs_last_words() -> None:
    recorder = Recorder()
    options = ["--say", "no such weights", "--exit-after", "0.2", "--code", "1"]
    assert run(recorder, worker=options, router=["--ready-after", "60"]) == 1
    assert recorder.said[0] == "worker exited with code 1: no such weights."
    assert recorder.tails["worker"] == ["no such weights"]
    assert ("worker", "no such weights") in recorder.lines
    assert Phase.SERVING not in recorder.phases


@pytest.mark.parametrize("serves_first", [False, True])
def test_a_configuration_that_can_never_work_ends_all_with_its_own_sentence(serves_first: bool) -> None:
    recorder = Recorder()
    sentence = "gpu is 1, but torch sees 1; allowed: 0"
    line = json.dumps({"event": "rank failed", "level": "error", "error": sentence})
    options = ["--say", line, "--exit-after", "2" if serves_first else "0.2", "--code", "2"]
    assert run(recorder, worker=options, router=["--ready-after", "0" if serves_first else "60"]) == 2
    assert recorder.said[0].startswith(f"worker exited with code 2: {sentence}")
    assert (Phase.SERVING in recorder.phases) == serves_first


@pytest.mark.parametrize("left_first", [False, True])
def test_the_rank_with_the_reason_is_named_and_not_the_one_that_left(left_first: bool) -> None:
    recorder = Recorder()
    port = free_port()
    leaves = ["--say", "rank 0 is gone", "--exit-after", "0.2" if left_first else "0.5", "--code", "3"]
    fails = ["--say", "NCCL: Duplicate GPU", "--exit-after", "0.5" if left_first else "0.2", "--code", "2"]
    children = [
        child("worker-1", Role.WORKER, *leaves),
        child("worker-0", Role.WORKER, *fails),
        child("controller", Role.CONTROLLER),
        child("router", Role.ROUTER, "--port", str(port), "--ready-after", "60"),
    ]
    limits = dataclasses.replace(LIMITS, orphan_s=20.0)
    assert Supervisor(children, recorder, host="127.0.0.1", port=port, limits=limits).run() == 2
    assert recorder.said[0] == "worker-0 exited with code 2: NCCL: Duplicate GPU."


@pytest.mark.parametrize("lost", ["worker", "controller"])
def test_without_restarts_a_killed_child_is_noticed_and_the_router_outlives_it(lost: str) -> None:
    killed_at: list[float] = []

    def kill(recorder: Recorder) -> None:
        killed_at.append(time.monotonic())
        os.kill(recorder.pids[lost], signal.SIGKILL)

    recorder = Recorder(kill)
    assert run(recorder, restart=False) == 1
    assert recorder.said[0] == f"{lost} was killed by SIGKILL."
    assert recorder.phases == [Phase.SERVING, Phase.FAILED, Phase.STOPPING, Phase.STOPPED]
    assert time.monotonic() - killed_at[0] >= LIMITS.grace_s


def test_without_restarts_a_killed_router_ends_everything() -> None:
    recorder = Recorder(lambda r: os.kill(r.pids["router"], signal.SIGKILL))
    assert run(recorder, restart=False) == 1
    assert recorder.phases == [Phase.SERVING, Phase.STOPPING, Phase.STOPPED]


def test_a_program_that_cannot_be_spawned_leaves_no_other_behind() -> None:
    recorder = Recorder()
    port = free_port()
    children = [*cluster(port), ChildSpec(Member("ghost", Role.WORKER, 0), ("/nonexistent/program",))]
    with pytest.raises(FileNotFoundError):
        Supervisor(children, recorder, host="127.0.0.1", port=port, limits=LIMITS).run()
    assert len(recorder.pids) == 3
    assert not [pid for pid in recorder.pids.values() if psutil.pid_exists(pid)]


def test_a_chatty_child_neither_blocks_nor_is_cut() -> None:
    text = "x" * 300_000
    recorder = Recorder(signal_self(signal.SIGTERM))
    # The argument list has a limit, so a shell makes the long line.
    shell = ("sh", "-c", f"head -c {len(text)} /dev/zero | tr '\\0' x; echo; exec sleep 60")
    port = free_port()
    children = [ChildSpec(Member("worker", Role.WORKER), shell), *cluster(port)[1:]]
    assert Supervisor(children, recorder, host="127.0.0.1", port=port, limits=LIMITS).run() == 0
    assert "".join(line for name, line in recorder.lines if name == "worker") == text


def test_serving_costs_no_cpu_time() -> None:
    used: list[float] = []

    def measure(recorder: Recorder) -> None:
        def later() -> None:
            before = time.process_time()
            time.sleep(1.0)
            used.append(time.process_time() - before)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=later, daemon=True).start()

    assert run(Recorder(measure)) == 0
    assert used[0] < 0.05


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    """SIGKILL leaves the supervisor no time for anything: the kernel must end its children."""
    program = tmp_path / "parent.py"
    program.write_text(
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, {CHILD!r}, '--parent', str(os.getpid())])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        process = psutil.Process(pid)
        _wait_for(lambda: "trunkline" in " ".join(process.cmdline()))
        parent.kill()
    _wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def _wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
