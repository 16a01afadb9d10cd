"""The supervisor's shell, with stand-ins for the cluster's processes: real processes, signals, pipes, commands."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from deploy.waiting import free_ports, wait_for

from trunkline.deploy.config.machine import open_listener
from trunkline.deploy.supervisor.control import ask
from trunkline.deploy.supervisor.lifecycle import Phase
from trunkline.deploy.supervisor.members import Command, CommandError, Limits, Member, Reply, Role
from trunkline.deploy.supervisor.membership import ChildSpec, Membership
from trunkline.deploy.supervisor.run_folder import CONTROL_SOCKET, STATUS_SOCKET
from trunkline.deploy.supervisor.supervisor import Supervisor

pytestmark = pytest.mark.processes
CHILD = (sys.executable, "-I", "-S", str(Path(__file__).with_name("fake_child.py")))
LIMITS = Limits(
    drain_s=20.0, settle_s=20.0, quick_s=20.0, reap_s=20.0, grace_s=0.05, orphan_s=0.05, pause_s=0.05, leave_s=0.2
)
"""Long where only a fault would take so long, short where a test waits for the end of it."""


class Recorder:
    """A reporter that keeps what it is told, and acts when the cluster serves."""

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

    def has_left_nothing(self) -> bool:
        """Whether no process that was started runs any more."""
        return not any(psutil.pid_exists(pid) for pid in self.pids.values())


def child(name: str, role: Role, *options: str) -> ChildSpec:
    """A stand-in that behaves as the options say (`fake_child.py`)."""
    return ChildSpec(Member(name, role, -1 if role is Role.ROUTER else 0), (*CHILD, f"role={role}", *options))


def cluster(port: int, **options: Sequence[str]) -> list[ChildSpec]:
    """A worker, a controller and a router, with options for each by its role."""
    return [
        child(role.value, role, *options.get(role, ()), *([f"port={port}"] if role is Role.ROUTER else []))
        for role in (Role.WORKER, Role.CONTROLLER, Role.ROUTER)
    ]


def run(
    recorder: Recorder,
    specs: Sequence[ChildSpec] | None = None,
    *,
    restart: bool = True,
    limits: Limits = LIMITS,
    port: int = 0,
    **options: Sequence[str],
) -> int:
    """Run a supervisor to its end; the exit code."""
    port = port or free_ports()
    children = cluster(port, **options) if specs is None else specs
    supervisor = Supervisor(children, recorder, host="127.0.0.1", port=port, limits=limits, restart=restart)
    try:
        return supervisor.run()
    finally:
        assert recorder.has_left_nothing()


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
    [said] = recorder.said
    assert said.startswith(f"Stopping ({number.name}).")
    assert ("a second Ctrl-C stops at once" in said) == (number is signal.SIGINT)
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def ignores_sigterm(pid: int) -> bool:
    """Whether a child is that far: on a busy machine the router may answer before the others have begun."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    def stop_when_all_ignore_it(recorder: Recorder) -> None:
        wait_for(lambda: all(ignores_sigterm(recorder.pids[name]) for name in ("worker", "controller")))
        os.kill(os.getpid(), signal.SIGTERM)

    recorder = Recorder(stop_when_all_ignore_it)
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

    def said(recorder: Recorder) -> str:
        return "".join(line for name, line in recorder.lines if name == "worker")

    def stop_when_all_is_said(recorder: Recorder) -> None:
        """On a busy machine the router may answer before the worker has begun."""
        wait_for(lambda: len(said(recorder)) >= len(text))
        os.kill(os.getpid(), signal.SIGTERM)

    recorder = Recorder(lambda it: threading.Thread(target=stop_when_all_is_said, args=[it], daemon=True).start())
    # The argument list has a limit, so a shell makes the long line.
    shell = ("sh", "-c", f"head -c {len(text)} /dev/zero | tr '\\0' x; echo; exec sleep 60")
    assert run(recorder, [ChildSpec(Member("worker", Role.WORKER), shell), *cluster(port)[1:]], port=port) == 0
    assert said(recorder) == text


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


class Growing(Membership):
    """Starts stand-ins for further groups, up to three together, and keeps what routers would be told."""

    def __init__(self, folder: Path) -> None:
        self.published: list[tuple[int, ...]] = []
        self.has_left = False
        self.problem = ""
        self._status = f"status={folder / STATUS_SOCKET}"

    def grow(self, count: int, missing: Sequence[int]) -> list[ChildSpec]:
        if count > 3:
            raise CommandError(f"there is no room for {count} groups")
        return [
            ChildSpec(Member(f"{role}-{group}", role, group), (*CHILD, f"role={role}", *options))
            for group in missing
            for role, options in ((Role.WORKER, ()), (Role.CONTROLLER, (self._status,)))
        ]

    def publish(self, groups: Sequence[int]) -> None:
        if self.problem:
            raise OSError(self.problem)
        self.published.append(tuple(groups))

    def leave(self) -> None:
        self.has_left = True


class Run:
    """One run: two groups of one worker and two routers; `script` acts in a thread once all serve."""

    def __init__(self, folder: Path, script: Callable[[Run], None], worker: tuple[str, ...] = CHILD) -> None:
        self.folder = folder
        self.recorder = Recorder(lambda _: self._thread.start())
        self.membership = Growing(folder)
        self._thread = threading.Thread(target=self._act, daemon=True)
        self._failure: BaseException | None = None
        self._script = script
        self._worker = worker

    def ask(self, command: str, *units: str) -> list[Reply]:
        return list(ask(self.folder / CONTROL_SOCKET, Command(command, list(units))))

    def scale(self, groups: int) -> Reply:
        return list(ask(self.folder / CONTROL_SOCKET, Command("scale", groups=groups)))[-1]

    def status(self) -> dict[str, Any]:
        [reply] = self.ask("status")
        assert reply.status is not None
        return reply.status

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.status()["processes"]}

    def groups(self) -> list[str]:
        return [group["state"] for group in self.status()["groups"]]

    def all_ready(self) -> bool:
        routers = [row for row in self.rows().values() if row["role"] == "router"]
        return self.groups() == ["ready", "ready"] and {row["state"] for row in routers} == {"ready"}

    def go(self) -> None:
        """Run to the end; fail if the script did, or if the supervisor did not end cleanly."""
        with open_listener("127.0.0.1", 0) as listener:
            descriptor = listener.fileno()
            status = f"status={self.folder / STATUS_SOCKET}"
            specs = []
            for group in range(2):
                worker, controller = (Member(f"{r}-{group}", r, group) for r in (Role.WORKER, Role.CONTROLLER))
                specs.append(ChildSpec(worker, (*self._worker, "role=worker")))
                specs.append(ChildSpec(controller, (*CHILD, "role=controller", status)))
            for number in range(2):
                argv = (*CHILD, "role=router", f"fd={descriptor}", status)
                specs.append(
                    ChildSpec(Member(f"router-{number}", Role.ROUTER, -1), argv, descriptors=(descriptor,))
                )
            supervisor = Supervisor(
                specs,
                self.recorder,
                host="127.0.0.1",
                port=listener.getsockname()[1],
                limits=LIMITS,
                folder=self.folder,
                listener=listener,
            )
            supervisor.membership = self.membership
            previous = signal.signal(signal.SIGTERM, lambda *_: None)  # should the script end later than the run
            try:
                code = supervisor.run()
                self._thread.join(20)
            finally:
                signal.signal(signal.SIGTERM, previous)
        if self._failure is not None:
            raise self._failure
        assert code == 0
        assert self.recorder.has_left_nothing()
        assert self.recorder.phases == [Phase.SERVING, Phase.STOPPING, Phase.STOPPED]
        assert self.membership.has_left

    def _act(self) -> None:
        try:
            wait_for(self.all_ready)
            self._script(self)
        except BaseException as error:  # noqa: BLE001 (shown by the test's own thread)
            self._failure = error
        finally:
            os.kill(os.getpid(), signal.SIGTERM)


def test_what_is_killed_is_started_again(tmp_path: Path) -> None:
    victims = ("worker-0", "controller-1", "router-1")

    def script(run: Run) -> None:
        for victim in victims:
            kill(run, victim)

    def kill(run: Run, victim: str) -> None:
        old = run.rows()[victim]["pid"]
        os.kill(old, signal.SIGKILL)
        wait_for(lambda: run.rows()[victim]["pid"] not in (None, old))
        row = run.rows()[victim]
        assert row["restarts"] == 1
        assert psutil.pid_exists(row["pid"])

    run = Run(tmp_path, script)
    run.go()
    assert all(f"{name} was killed by SIGKILL; it is started again." in run.recorder.said for name in victims)


def test_drain_undrain_restart_and_a_stop_meanwhile(tmp_path: Path) -> None:
    replies: list[Reply] = []

    def script(run: Run) -> None:
        before = run.rows()
        assert run.ask("drain", "0")[-1] == Reply("group 0 is down", done=True)
        rows = run.rows()
        assert [rows[name]["state"] for name in ("worker-0", "controller-0")] == ["down", "down"]
        assert rows["worker-0"]["pid"] is None
        assert run.groups() == ["down", "ready"]
        assert "group 0 is drained" in run.ask("restart", "0")[-1].text
        assert run.ask("undrain", "controller-0")[-1] == Reply("group 0 is ready", done=True)
        assert run.ask("restart")[-1] == Reply("restarted", done=True)
        after = run.rows()
        assert sorted(after) == sorted(before)
        assert not {row["pid"] for row in before.values()} & {row["pid"] for row in after.values()}
        assert run.ask("restart", "routers")[-1].ok
        waiting = ask(run.folder / CONTROL_SOCKET, Command("restart"))
        replies.append(next(waiting))
        os.kill(os.getpid(), signal.SIGTERM)
        replies.extend(waiting)

    run = Run(tmp_path, script)
    run.go()
    assert "router-0/3" in run.recorder.pids
    assert (replies[-1].done, replies[-1].ok) == (True, False)
    assert "stop" in replies[-1].text


def test_groups_come_and_go_beside_the_others(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        before = {name: row["pid"] for name, row in run.rows().items()}
        assert run.scale(3) == Reply("the cluster has 3 groups now", done=True)
        assert run.membership.published == [(0, 1), (0, 1, 2)]
        after = {name: row["pid"] for name, row in run.rows().items()}
        assert after.keys() - before.keys() == {"worker-2", "controller-2"}
        assert before.items() < after.items()
        assert run.scale(4) == Reply("there is no room for 4 groups", done=True, ok=False)

        run.membership.problem = "no space left on device"
        assert run.scale(1).ok
        assert len(run.membership.published) == 2
        assert any("no space left on device; `trunkline scale` tries again" in said for said in run.recorder.said)
        run.membership.problem = ""
        assert run.scale(1) == Reply("the cluster has 1 group now", done=True)
        assert run.membership.published[2:] == [(0,)]
        assert run.groups() == ["ready"]
        assert run.scale(3).ok, "the same groups again"
        assert {name for name, pid in before.items() if run.rows()[name]["pid"] == pid} == {
            *("worker-0", "controller-0", "router-0", "router-1")
        }

    Run(tmp_path, script).go()


def test_a_program_that_is_gone_for_a_while_is_tried_again_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline.deploy.supervisor.members.DELAYS_S", (0.0, 0.02))
    program, hidden = tmp_path / "worker", tmp_path / "hidden"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {" ".join(CHILD[1:])} "$@"\n')
    program.chmod(0o700)

    def hide_for_a_while(run: Run) -> None:
        first = run.recorder.pids["worker-0"]
        program.rename(hidden)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: sum("cannot be started" in text for text in run.recorder.said) >= 12)
        hidden.rename(program)
        wait_for(lambda: run.recorder.pids["worker-0"] != first)

    Run(tmp_path, hide_for_a_while, worker=(str(program),)).go()
