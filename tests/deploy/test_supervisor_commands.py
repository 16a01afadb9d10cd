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
from deploy.supervised import CHILD, LIMITS, Recorder
from deploy.waiting import wait_for

from trunkline.deploy.config.machine import open_listener
from trunkline.deploy.supervisor.control import ask
from trunkline.deploy.supervisor.lifecycle import Phase
from trunkline.deploy.supervisor.members import Command, Member, Reply, Role
from trunkline.deploy.supervisor.run_folder import CONTROL_SOCKET, STATUS_SOCKET
from trunkline.deploy.supervisor.supervisor import ChildSpec, Supervisor, Surroundings

pytestmark = pytest.mark.processes


class Run:
    """One run: two groups of one worker and two routers; `script` acts in a thread once all serve."""

    def __init__(self, folder: Path, script: Callable[[Run], None], worker: tuple[str, ...] = CHILD) -> None:
        self.folder = folder
        self.recorder = Recorder(lambda _: self._thread.start())
        self._thread = threading.Thread(target=self._act, daemon=True)
        self._failure: BaseException | None = None
        self._script = script
        self._worker = worker

    def ask(self, command: str, *units: str) -> list[Reply]:
        return list(ask(self.folder / CONTROL_SOCKET, Command(command, list(units))))

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
                surroundings=Surroundings(self.folder, listener),
            )
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
