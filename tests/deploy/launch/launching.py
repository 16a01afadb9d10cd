"""What several tests of the launcher need: folders of their own, free ports, units that are no Trunkline."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from trunkline.deploy.launch.folders import KeeperState, UnitFolder, private_folder
from trunkline.deploy.launch.protocol import UnitRecord

SECONDS_MAX = 60.0
_KEEPER = """
import sys
from pathlib import Path
from trunkline.deploy.launch.folders import UnitFolder
from trunkline.deploy.launch.keeper import Keeper
folder = UnitFolder(Path(sys.argv[1]))
sys.exit(Keeper(folder, folder.record(), folder.lock(), (sys.executable, "-c")).run())
"""


def wait_for(condition: Callable[[], bool]) -> None:
    """Return as soon as it holds; fail if it does not for long."""
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.02)


def free_ports(count: int) -> int:
    """The first of so many ports in a row on which nobody listens."""
    for _ in range(100):
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
        if port + count < 65536 and all(is_free(each) for each in range(port, port + count)):
            return port
    raise AssertionError("no free ports in a row")


def is_free(port: int) -> bool:
    with socket.socket() as trial:
        try:
            trial.bind(("", port))
        except OSError:
            return False
    return True


def is_alive(pid: int) -> bool:
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


class Kept:
    """A keeper whose unit is a few lines of Python."""

    def __init__(self, path: Path, code: str) -> None:
        self.folder = UnitFolder(private_folder(path / "host" / "units" / "it"))
        self.folder.write_record(UnitRecord("it", "router", [code, "{state}"], {"GREETING": "hello"}, "d", 1))
        self.process = subprocess.Popen([sys.executable, "-P", "-c", _KEEPER, str(self.folder.path)])

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def state(self) -> KeeperState | None:
        return self.folder.state()

    @property
    def log(self) -> str:
        try:
            return (self.folder.path / "log").read_text()
        except OSError:
            return ""

    def until(self, condition: Callable[[KeeperState], bool]) -> KeeperState:
        """The first state of which it holds."""
        wait_for(lambda: (state := self.state) is not None and condition(state))
        state = self.state
        assert state is not None
        return state

    def terminate(self) -> None:
        os.kill(self.process.pid, signal.SIGTERM)


def encoded(value: object) -> bytes:
    return msgspec.json.encode(value)
