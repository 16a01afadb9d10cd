"""Over a real ssh server on the loopback address, with keys made for the test."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from deploy.waiting import free_ports, wait_for

from trunkline.deploy.launch.fileformat import Host, Ssh
from trunkline.deploy.launch.hosts import Connection, HostError
from trunkline.deploy.launch.protocol import Begin, Logs, Look, Put, Signal, UnitRecord, UnitState

pytestmark = [pytest.mark.processes, pytest.mark.area("ssh")]
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Server:
    """`sshd`, for one user, who has the key."""

    def __init__(self, folder: Path) -> None:
        assert SSHD is not None
        self.folder = folder
        self.port = free_ports(1)
        for name in ("host", "user", "stranger"):
            self._make_key(folder / name)
        shutil.copy(folder / "user.pub", folder / "authorized")
        self.known = folder / "known"
        public = (folder / "host.pub").read_text().split()
        self.known.write_text(f"[127.0.0.1]:{self.port} {public[0]} {public[1]}\n")
        settings = {
            "HostKey": folder / "host",
            "AuthorizedKeysFile": folder / "authorized",
            "PidFile": folder / "pid",
            "ListenAddress": f"127.0.0.1:{self.port}",
            "StrictModes": "no",  # folders for temporary files belong to everybody
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
        }
        (folder / "settings").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "settings")], stderr=log)
        wait_for(lambda: "listening" in self.log or self.process.poll() is not None)
        if self.process.poll() is not None:
            pytest.skip(f"sshd does not run here: {self.log.strip()}")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text().lower()

    def host(self, key: str = "user", known: Path | None = None, share_seconds: int = 0) -> Host:
        """As a cluster's file would have it."""
        options = [f"UserKnownHostsFile={known or self.known}", "GlobalKnownHostsFile=none"]
        return Host(
            ssh=Ssh(
                host="127.0.0.1",
                user=getpass.getuser(),
                port=self.port,
                identity=str(self.folder / key),
                options=[*options, "StrictHostKeyChecking=yes"],
                share_seconds=share_seconds,
            ),
            trunkline=str(Path(sys.executable).with_name("trunkline")),
            state=str(self.folder / "state of it's"),
        )

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    @staticmethod
    def _make_key(path: Path) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs openssh-server and openssh-client")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # it insists on this place for its own separation
    folder = Path(tempfile.mkdtemp(prefix="tl-ssh-"))
    running = Server(folder)
    yield running
    running.close()
    shutil.rmtree(folder, ignore_errors=True)


def states(connection: Connection) -> dict[str, str]:
    return {reply.name: reply.state for reply in connection.ask(Look()) if isinstance(reply, UnitState)}


def test_a_unit_on_another_machine_goes_on_without_a_connection(server: Server) -> None:
    port = free_ports(2)
    argv = [
        "router",
        "demo",
        "--controllers=127.0.0.1:9",
        "--plain-tcp",
        f"--port={port}",
        f"--health-port={port + 1}",
    ]
    first = Connection("a", server.host(), "demo", None)
    first.ask(Put(name="wire.key", content=bytes(range(256)) * 1000))
    assert (Path(first.facts.folder) / "wire.key").read_bytes() == bytes(range(256)) * 1000
    first.ask(Begin(unit=UnitRecord("it", "router", argv, {"SECRET": "hunter2"}, "d", port + 1)))
    first.close()
    second = Connection("a", server.host(), "demo", None)
    try:
        wait_for(lambda: states(second)["it"] == "unready")
        assert second.ask(Logs(units=["it"], lines=1))
    finally:
        second.ask(Signal(unit="it", kind="term"))
        wait_for(lambda: states(second)["it"] == "stopped")
        second.close()
    assert "hunter2" not in server.log


def test_commands_share_a_connection(server: Server) -> None:
    sockets = server.folder / "c"
    sockets.mkdir(mode=0o700)
    host = server.host(share_seconds=60)
    assert isinstance(host.ssh, Ssh)
    for _ in range(2):
        connection = Connection("a", host, "demo", sockets)
        assert states(connection).keys() <= {"it"}
        connection.close()
    (path,) = sockets.iterdir()
    try:
        check = ["ssh", "-O", "check", "-o", f"ControlPath={path}", "x"]
        assert subprocess.run(check, capture_output=True, check=False).returncode == 0
    finally:
        subprocess.run(["ssh", "-O", "exit", "-o", f"ControlPath={path}", "x"], capture_output=True, check=False)
    assert server.log.count("accepted publickey") >= 1


@pytest.mark.parametrize(
    ("key", "is_known", "words"),
    [("stranger", True, "Permission denied"), ("user", False, "Host key verification failed")],
)
def test_who_is_not_let_in_is_told_and_asked_nothing(server: Server, key: str, is_known: bool, words: str) -> None:
    known = None if is_known else server.folder / "none"
    with pytest.raises(HostError, match=words) as caught:
        Connection("a", server.host(key, known), "demo", None)
    assert "must get in without a question" in str(caught.value)


def test_a_trunkline_that_is_not_there_is_named(server: Server) -> None:
    host = msgspec.structs.replace(server.host(), trunkline="/no/such/trunkline")
    with pytest.raises(HostError, match="/no/such/trunkline cannot be run there"):
        Connection("a", host, "demo", None)
