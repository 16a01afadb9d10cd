"""The agent on a host: what it starts, finds again, tells and refuses; and the ways in which it is reached."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deploy.launch.launching import KEEPER
from deploy.waiting import free_ports, is_alive, wait_for

from trunkline.deploy.launch import agent as host_agent
from trunkline.deploy.launch import protocol
from trunkline.deploy.launch.agent import Agent
from trunkline.deploy.launch.fileformat import Host, Ssh
from trunkline.deploy.launch.hosts import Connection, HostError, agent_command
from trunkline.deploy.launch.protocol import (
    Begin,
    CheckPorts,
    Done,
    Forget,
    Hello,
    HostFacts,
    LogLine,
    Logs,
    Look,
    Put,
    Refused,
    Reply,
    Request,
    Signal,
    TakenPorts,
    UnitRecord,
    UnitState,
)

pytestmark = pytest.mark.processes
SLEEPS = UnitRecord("it", "router", ["import time; time.sleep(1000)"], {}, "digest", 1)
"""A unit that runs for ever and is never ready."""


class Here:
    """An agent in this process, whose units are lines of Python."""

    def __init__(self, state: Path) -> None:
        self._agent = Agent()
        [self.facts] = self.ask(Hello(cluster="demo", host="a", state=str(state)))

    def ask(self, request: Request) -> list[Reply]:
        """Return all replies but the last; fail with its text if it is a refusal."""
        *replies, last = self._agent.answer(request)
        if isinstance(last, Refused):
            raise HostError("a", last.text)
        assert last == Done()
        return replies

    def reap(self) -> None:
        for keeper in self._agent._keepers:
            keeper.wait()

    def units(self) -> dict[str, UnitState]:
        return {reply.name: reply for reply in self.ask(Look()) if isinstance(reply, UnitState)}

    def log(self, unit: str) -> str:
        return "\n".join(r.text for r in self.ask(Logs(units=[unit], lines=9)) if isinstance(r, LogLine))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def here(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.setattr(host_agent, "KEEPER", KEEPER)
    made = Here(state)
    yield made
    last = Here(state)
    for unit in last.units():
        last.ask(Signal(unit=unit, kind="kill"))
    wait_for(lambda: all(unit.state in ("stopped", "failed", "gone") for unit in last.units().values()))
    made.reap()


def test_a_unit_is_found_again_by_the_next_launcher(here: Here, state: Path) -> None:
    here.ask(Begin(unit=SLEEPS))
    wait_for(lambda: here.units()["it"].pid is not None)
    pid = here.units()["it"].pid
    assert pid is not None
    with pytest.raises(HostError, match="runs already"):
        here.ask(Begin(unit=SLEEPS))
    with pytest.raises(HostError, match="runs; stop it first"):
        here.ask(Forget(unit="it"))
    later = Here(state)
    found = later.units()["it"]
    assert (found.pid, found.digest, found.restarts) == (pid, "digest", 0)
    later.ask(Signal(unit="it", kind="term"))
    wait_for(lambda: later.units()["it"].state == "stopped")
    assert not is_alive(pid)
    assert "is told to stop" in later.log("it")
    later.ask(Forget(unit="it"))
    assert later.units() == {}


def test_a_unit_that_cannot_run_says_why(state: Path) -> None:
    """By way of the real agent, keeper and command."""
    connection = Connection("a", Host(state=str(state)), "demo", None)
    connection.ask(Begin(unit=UnitRecord("bad", "group", ["group", "demo", "--tp=0"], {}, "d", 1)))
    connection.close()
    here = Here(state)
    wait_for(lambda: here.units()["bad"].state == "failed")
    assert here.units()["bad"].exit_code == 2
    assert "--tp is 0" in here.log("bad")


def test_a_killed_keeper_is_told_and_the_unit_can_start_again(here: Here) -> None:
    here.ask(Begin(unit=SLEEPS))
    here.ask(Signal(unit="it", kind="kill"))
    wait_for(lambda: here.units()["it"].state == "gone")
    here.ask(Begin(unit=SLEEPS))
    assert here.units()["it"].state == "starting"


def test_new_lines_are_followed_until_nobody_listens(here: Here, state: Path) -> None:
    here.ask(Begin(unit=SLEEPS))
    follower = Connection("a", Host(state=str(state)), "demo", None)
    replies = follower.stream(Logs(units=["it"], lines=100, follow=True), 60.0)
    lines = (reply.text for reply in replies if isinstance(reply, LogLine))
    assert "started (process" in next(lines)
    here.ask(Signal(unit="it", kind="term"))
    assert any("is told to stop" in line for line in lines)
    follower.close()


@pytest.mark.parametrize(
    ("count", "visible", "names"),
    [
        (0, None, []),
        (2, None, ["0", "1"]),
        (8, None, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        (2, "6, GPU-8f1c", ["6", "GPU-8f1c"]),
        (1, "3,99", ["3"]),
    ],
)
def test_a_host_says_which_gpus_its_processes_can_use(
    count: int,
    visible: str | None,
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    show_gpus: Callable[[int], None],
) -> None:
    show_gpus(count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    facts, _ = Agent().answer(Hello(cluster="demo", host="a", state=str(tmp_path)))
    assert isinstance(facts, HostFacts)
    assert facts.gpus == names


def test_files_are_for_their_owner_only_and_not_on_a_command_line(here: Here) -> None:
    here.ask(Put(name="wire.key", content=b"secret"))
    assert isinstance(here.facts, HostFacts)
    path = Path(here.facts.folder) / "wire.key"
    assert path.read_bytes() == b"secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    here.ask(Put(name="wire.key", content=b"other"))
    assert path.read_bytes() == b"other"


def test_ports_in_use_are_found(here: Here) -> None:
    port = free_ports(2)
    with socket.create_server(("127.0.0.1", port)):
        assert here.ask(CheckPorts(ports=[port, port + 1])) == [TakenPorts(ports=[port])]


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".x", "A", "x" * 200])
def test_names_cannot_leave_the_folder(name: str, here: Here) -> None:
    for request in (Put(name=name, content=b""), Forget(unit=name), Signal(unit=name, kind="term")):
        with pytest.raises(HostError, match="cannot be a name"):
            here.ask(request)


def test_an_agent_of_another_version_and_one_that_was_not_greeted_do_nothing(tmp_path: Path) -> None:
    hello = Hello(cluster="demo", host="a", protocol=protocol.PROTOCOL + 1, state=str(tmp_path))
    for request, text in ((hello, "same version"), (Look(), "first request")):
        [refused] = Agent().answer(request)
        assert isinstance(refused, Refused)
        assert text in refused.text


def test_garbage_is_answered_and_survived(state: Path) -> None:
    argv = agent_command(Host(state=str(state)), None)
    lines = b"\n".join([b"{", b"[]", b'{"type":"Look","x":1}', b"[" * 100_000, b"\xff", b'{"type":"Look"}', b""])
    done = subprocess.run(argv, input=lines, capture_output=True, check=True)
    replies = [protocol.decode_reply(line) for line in done.stdout.splitlines()]
    assert len(replies) == 6
    assert all(isinstance(reply, Refused) for reply in replies)


def test_login_scripts_may_talk(tmp_path: Path) -> None:
    script = 'echo Welcome; echo "trunkline is great"; exec "$@"'
    found = Connection("a", Host(command=["sh", "-c", script, "sh"], state=str(tmp_path)), "demo", None)
    assert found.facts.cores >= 1
    found.close()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (Host(command=["/no/such/program"]), "/no/such/program cannot be run"),
        (Host(command=["sh", "-c", "echo broken >&2; exit 7"]), "exit code 7"),
        (Host(trunkline="/no/such/trunkline"), "cannot be run"),
        (Host(command=["cat"]), "is of another version|ended|did not say"),
    ],
)
def test_a_host_that_does_not_work_is_named_with_the_reason(host: Host, words: str) -> None:
    with pytest.raises(HostError, match=words) as caught:
        Connection("alpha", host, "demo", None)
    assert str(caught.value).startswith("host alpha: ")


def test_nothing_is_left_to_the_shell_on_the_other_side(tmp_path: Path) -> None:
    program = tmp_path / "a b;$(touch pwned)'\"" / "trunkline"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o700)
    argv = agent_command(Host(ssh="h", trunkline=str(program)), None)
    done = subprocess.run(["sh", "-c", argv[-1]], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "launch agent\n"
    assert not (tmp_path / "pwned").exists()


def test_a_tilde_is_the_home_there(tmp_path: Path) -> None:
    argv = agent_command(Host(ssh="h", trunkline="~/my bin/trunkline"), None)
    assert argv[-1] == "~/'my bin/trunkline' launch agent"


def test_what_the_file_says_of_ssh_comes_first_and_is_no_option_of_ours(tmp_path: Path) -> None:
    ssh = Ssh(host="h", user="u", port=22, identity="~/.ssh/k", options=["ConnectTimeout=3"])
    argv = agent_command(Host(ssh=ssh), tmp_path)
    assert argv[0] == "ssh"
    assert argv.index("ConnectTimeout=3") < argv.index("ConnectTimeout=15")
    assert "BatchMode=yes" in argv
    assert f"ControlPath={tmp_path}/%C" in argv
    assert argv[-3:] == ["--", "h", "trunkline launch agent"]
    assert os.path.expanduser("~/.ssh/k") in argv
