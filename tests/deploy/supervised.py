"""Supervisors of stand-ins for a cluster's processes: what they are started with, and what they report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from deploy.waiting import free_ports

from trunkline.deploy.supervisor.lifecycle import Phase
from trunkline.deploy.supervisor.members import Limits, Member, Role
from trunkline.deploy.supervisor.supervisor import ChildSpec, Supervisor

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
