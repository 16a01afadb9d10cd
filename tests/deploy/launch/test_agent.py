"""The agent on a host, as the launcher talks to it: over a process here, behind other words, and over ssh."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deploy.launch.launching import free_ports, is_alive, wait_for

from trunkline.deploy.launch import protocol
from trunkline.deploy.launch.agent import Agent
from trunkline.deploy.launch.connection import Connection, HostError
from trunkline.deploy.launch.fileformat import Host, Ssh
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
from trunkline.deploy.launch.transports import agent_command


def router(port: int, name: str = "it") -> UnitRecord:
    """A unit that runs for ever, and is never ready: there is no group."""
    argv = ["router", "demo", "--controllers=127.0.0.1:9", "--plain-tcp", f"--port={port}"]
    return UnitRecord(name, "router", [*argv, f"--health-port={port + 1}"], {}, "digest", port + 1)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(state=str(tmp_path / "state"))


@pytest.fixture
def connection(host: Host) -> Iterator[Connection]:
    found = Connection("a", host, "demo", None)
    yield found
    found.close()
    last = Connection("a", host, "demo", None)
    for unit in states(last).values():
        last.ask(Signal(unit=unit.name, kind="kill"))
    wait_for(lambda: all(unit.state in ("stopped", "failed", "gone") for unit in states(last).values()))
    last.close()


def states(connection: Connection) -> dict[str, UnitState]:
    return {reply.name: reply for reply in connection.ask(Look()) if isinstance(reply, UnitState)}


def test_a_unit_lives_on_without_its_launcher_and_is_found_again(host: Host, connection: Connection) -> None:
    port = free_ports(2)
    connection.ask(Begin(unit=router(port)))
    wait_for(lambda: states(connection)["it"].state in ("unready", "starting"))
    pid = states(connection)["it"].pid
    assert pid is not None
    with pytest.raises(HostError, match="runs already"):
        connection.ask(Begin(unit=router(port)))
    with pytest.raises(HostError, match="runs; stop it first"):
        connection.ask(Forget(unit="it"))
    connection.close()
    later = Connection("a", host, "demo", None)
    try:
        found = states(later)["it"]
        assert (found.pid, found.digest, found.restarts) == (pid, "digest", 0)
        later.ask(Signal(unit="it", kind="term"))
        wait_for(lambda: states(later)["it"].state == "stopped")
        assert not is_alive(pid)
        assert any(
            "is told to stop" in line.text
            for line in later.ask(Logs(units=["it"], lines=9))
            if isinstance(line, LogLine)
        )
        later.ask(Forget(unit="it"))
        assert states(later) == {}
    finally:
        later.close()


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


def test_a_unit_that_cannot_run_says_why(connection: Connection) -> None:
    bad = UnitRecord("bad", "group", ["group", "demo", "--tp=0"], {}, "d", 1)
    connection.ask(Begin(unit=bad))
    wait_for(lambda: states(connection)["bad"].state == "failed")
    assert states(connection)["bad"].exit_code == 2
    lines = [line.text for line in connection.ask(Logs(units=["bad"], lines=5)) if isinstance(line, LogLine)]
    assert any("--tp is 0" in line for line in lines)


def test_a_killed_keeper_is_told_and_the_unit_can_start_again(connection: Connection, tmp_path: Path) -> None:
    port = free_ports(2)
    connection.ask(Begin(unit=router(port)))
    connection.ask(Signal(unit="it", kind="kill"))
    wait_for(lambda: states(connection)["it"].state == "gone")
    connection.ask(Begin(unit=router(port)))
    assert states(connection)["it"].state == "starting"


def test_files_are_for_their_owner_only_and_not_on_a_command_line(connection: Connection) -> None:
    connection.ask(Put(name="wire.key", content=b"secret"))
    path = Path(connection.facts.folder) / "wire.key"
    assert path.read_bytes() == b"secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    connection.ask(Put(name="wire.key", content=b"other"))
    assert path.read_bytes() == b"other"


def test_ports_in_use_are_found(connection: Connection) -> None:
    port = free_ports(2)
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import socket, sys; s = socket.create_server(('127.0.0.1', {port})); print(); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert connection.ask(CheckPorts(ports=[port, port + 1])) == [TakenPorts(ports=[port])]
        other.communicate(b"")


def test_new_lines_are_followed_until_nobody_listens(connection: Connection, host: Host) -> None:
    connection.ask(Begin(unit=router(free_ports(2))))
    follower = Connection("a", host, "demo", None)
    lines = (
        reply.text
        for reply in follower.stream(Logs(units=["it"], lines=100, follow=True), 60.0)
        if isinstance(reply, LogLine)
    )
    assert "started (process" in next(lines)
    connection.ask(Signal(unit="it", kind="term"))
    assert any("is told to stop" in line for line in lines)
    follower.close()


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".x", "A", "x" * 200])
def test_names_cannot_leave_the_folder(name: str, connection: Connection) -> None:
    for request in (Put(name=name, content=b""), Forget(unit=name), Signal(unit=name, kind="term")):
        with pytest.raises(HostError, match="cannot be a name"):
            connection.ask(request)


def answers(*requests: Request) -> list[Reply]:
    agent = Agent()
    return [reply for request in requests for reply in agent.answer(request)]


def test_an_agent_of_another_version_says_so(tmp_path: Path) -> None:
    hello = Hello(cluster="demo", host="a", protocol=protocol.PROTOCOL + 1, state=str(tmp_path))
    (refused,) = answers(hello)
    assert isinstance(refused, Refused)
    assert "same version" in refused.text


def test_an_agent_that_was_not_greeted_does_nothing() -> None:
    (refused,) = answers(Look())
    assert isinstance(refused, Refused)
    assert not isinstance(refused, Done)


def test_garbage_is_answered_and_survived(host: Host) -> None:
    argv = agent_command(host, None)
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
    assert shlex.join(argv)
