"""A supervisor that starts again what dies and takes commands, with stand-ins for the cluster's processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from deploy.test_supervisor import CHILD, LIMITS, Recorder, _wait_for

from trunkline.deploy.config.listening import open_listener
from trunkline.deploy.supervisor.control_client import ask
from trunkline.deploy.supervisor.control_commands import Command, Reply
from trunkline.deploy.supervisor.lifecycle import Phase
from trunkline.deploy.supervisor.members import Member, Role
from trunkline.deploy.supervisor.registry import control_path
from trunkline.deploy.supervisor.statuses import SOCKET_NAME
from trunkline.deploy.supervisor.supervisor import ChildSpec, Supervisor, Surroundings


class Run:
    """One run: two groups of one worker and two routers; `script` acts in a thread once all serve."""

    def __init__(self, folder: Path, script: Callable[[Run], None]) -> None:
        self.folder = folder
        self.recorder = Recorder(lambda _: self._thread.start())
        self._thread = threading.Thread(target=self._act, daemon=True)
        self.failure: BaseException | None = None
        self._script = script

    def ask(self, command: str, *units: str) -> list[Reply]:
        """All replies."""
        return list(ask(control_path(self.folder), Command(command, list(units))))

    def rows(self) -> dict[str, dict[str, Any]]:
        """The status of each process, by name."""
        [reply] = self.ask("status")
        assert reply.status is not None
        return {row["name"]: row for row in reply.status["processes"]}

    def groups(self) -> list[str]:
        """The status of each group."""
        [reply] = self.ask("status")
        assert reply.status is not None
        return [group["state"] for group in reply.status["groups"]]

    def all_ready(self) -> bool:
        """Groups and routers."""
        routers = [row for row in self.rows().values() if row["role"] == "router"]
        return self.groups() == ["ready", "ready"] and {row["state"] for row in routers} == {"ready"}

    def go(self) -> int:
        """The supervisor's exit code; fails if the script did."""
        with open_listener("127.0.0.1", 0) as listener:
            descriptor, port = listener.fileno(), listener.getsockname()[1]
            status = ("--status", str(self.folder / SOCKET_NAME))
            specs = []
            for role, group in [(Role.WORKER, 0), (Role.WORKER, 1), (Role.CONTROLLER, 0), (Role.CONTROLLER, 1)]:
                said = status if role is Role.CONTROLLER else ()
                argv = (sys.executable, CHILD, "--role", role.value, *said)
                specs.append(ChildSpec(Member(f"{role}-{group}", role, group), argv))
            for number in range(2):
                argv = (sys.executable, CHILD, "--role", "router", "--listen-fd", str(descriptor), *status)
                specs.append(
                    ChildSpec(Member(f"router-{number}", Role.ROUTER, -1), argv, descriptors=(descriptor,))
                )
            supervisor = Supervisor(
                specs,
                self.recorder,
                host="127.0.0.1",
                port=port,
                limits=LIMITS,
                surroundings=Surroundings(self.folder, listener),
            )
            # The script's last signal may come when the supervisor has gone already.
            previous = signal.signal(signal.SIGTERM, lambda *_: None)
            try:
                code = supervisor.run()
                self._thread.join(20)
            finally:
                signal.signal(signal.SIGTERM, previous)
        if self.failure is not None:
            raise self.failure
        assert not [pid for pid in self.recorder.pids.values() if psutil.pid_exists(pid)]
        return code

    def _act(self) -> None:
        try:
            self._script(self)
        except BaseException as error:  # noqa: BLE001 (shown by the test's own thread)
            self.failure = error
        finally:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("victim", ["worker-0", "controller-1", "router-1"])
def test_what_is_killed_is_started_again(tmp_path: Path, victim: str) -> None:
    def script(run: Run) -> None:
        _wait_for(run.all_ready)
        old = run.rows()[victim]["pid"]
        os.kill(old, signal.SIGKILL)
        _wait_for(lambda: run.rows()[victim]["pid"] not in (None, old))
        row = run.rows()[victim]
        assert row["restarts"] == 1
        assert psutil.pid_exists(row["pid"])

    run = Run(tmp_path, script)
    assert run.go() == 0
    assert run.recorder.said[0] == f"{victim} was killed by SIGKILL; it is started again."
    assert run.recorder.phases == [Phase.SERVING, Phase.STOPPING, Phase.STOPPED]


def test_drain_undrain_and_restart(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        _wait_for(run.all_ready)
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

    run = Run(tmp_path, script)
    assert run.go() == 0
    assert "router-0/3" in run.recorder.pids


def test_a_stop_answers_those_who_wait(tmp_path: Path) -> None:
    replies: list[Reply] = []

    def script(run: Run) -> None:
        _wait_for(run.all_ready)
        waiting = ask(control_path(run.folder), Command("restart"))
        replies.append(next(waiting))
        os.kill(os.getpid(), signal.SIGTERM)
        replies.extend(waiting)

    run = Run(tmp_path, script)
    run.go()
    assert replies[-1].done
    assert not replies[-1].ok
    assert "stop" in replies[-1].text


def test_a_program_that_is_gone_for_a_while_is_tried_again_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More often than any limit would have allowed; here it is the only group."""
    monkeypatch.setattr("trunkline.deploy.supervisor.restarts.DELAYS_S", (0.0, 0.1))
    program = tmp_path / "worker"
    hidden = tmp_path / "hidden"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {CHILD} "$@"\n')
    program.chmod(0o700)
    listener = open_listener("127.0.0.1", 0)
    descriptor, port = listener.fileno(), listener.getsockname()[1]

    def hide_for_a_while(recorder: Recorder) -> None:
        first = recorder.pids["worker"]
        program.rename(hidden)
        os.kill(first, signal.SIGKILL)
        _wait_for(lambda: sum("cannot be started" in text for text in recorder.said) >= 12)
        hidden.rename(program)
        _wait_for(lambda: recorder.pids["worker"] != first)
        os.kill(os.getpid(), signal.SIGTERM)

    recorder = Recorder(lambda recorder: threading.Thread(target=hide_for_a_while, args=(recorder,)).start())
    router = (sys.executable, CHILD, "--role", "router", "--listen-fd", str(descriptor))
    specs = [
        ChildSpec(Member("worker", Role.WORKER, 0), (str(program),)),
        ChildSpec(Member("controller", Role.CONTROLLER, 0), (sys.executable, CHILD)),
        ChildSpec(Member("router", Role.ROUTER, -1), router, descriptors=(descriptor,)),
    ]
    with listener:
        supervisor = Supervisor(
            specs, recorder, host="127.0.0.1", port=port, limits=LIMITS, surroundings=Surroundings(None, listener)
        )
        assert supervisor.run() == 0
    assert recorder.phases == [Phase.SERVING, Phase.STOPPING, Phase.STOPPED]
