"""Faults around a real cluster: a disk that is slow or full, a clock that jumps, a cable that is cut."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any, Final

import pytest

_SOURCE: Final = Path(__file__).with_name("fault_shim.c")
_FIELDS: Final = struct.Struct("<4q")
_ALTERED: Final = Path(__file__).with_name("altered.py")
_NETWORK: Final = 0x40000000
"""`CLONE_NEWNET` of Linux."""
IMPATIENT: Final[dict[str, dict[str, Any]]] = {
    "router": {"config": {}},
    "controller": {"config": {"step_timeout_s": 5.0, "router_silence_seconds_max": 6.0}},
}
"""Changes for `launcher`: what hangs counts as lost sooner than at a user, and yet far later than a slow
machine is late."""


def launcher(folder: Path, changes: Mapping[str, Any]) -> tuple[str, str]:
    """For `Cluster`: `trunkline serve` with changes (`altered.py`)."""
    path = folder / "changes.json"
    path.write_text(json.dumps(changes))
    return str(_ALTERED), str(path)


class Shim:
    """What `fault_shim.c` does to processes that were started with its `environment`."""

    def __init__(self, folder: Path, path_part: str) -> None:
        """
        Args:
            path_part: of the files whose disk fails.
        """
        compiler = shutil.which("cc")
        if compiler is None or not sys.platform.startswith("linux"):
            pytest.skip("faults of disk and clock need Linux and a C compiler (cc)")
        library = folder / "fault_shim.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
        self._control = folder / "faults"
        self._control.write_bytes(bytes(_FIELDS.size))
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAULT_CONTROL": str(self._control),
            "FAULT_PATH": path_part,
        }

    @property
    def hits(self) -> int:
        """Reads, writes and flushes that have met a fault of the disk."""
        return int(_FIELDS.unpack(self._control.read_bytes())[3])

    @contextmanager
    def fault(self, *, delay_ms: int = 0, write_errno: int = 0, clock_s: int = 0) -> Iterator[None]:
        """A fault that lasts as long as the context."""
        self._set(delay_ms, write_errno, clock_s)
        try:
            yield
        finally:
            self._set(0, 0, 0)

    def _set(self, *values: int) -> None:
        with self._control.open("r+b") as file:
            file.write(struct.pack("<3q", *values))


class Network:
    """Network namespaces in a row, each joined to the next one by a cable that can be cut."""

    def __init__(self, count: int) -> None:
        if shutil.which("ip") is None or os.geteuid() != 0:
            pytest.skip("network namespaces need root and the ip command")
        self.names = [f"tl-{secrets.token_hex(3)}-{index}" for index in range(count)]
        self._made: list[str] = []
        try:
            for index, name in enumerate(self.names):
                made = _ip("netns", "add", name, check=False)
                if made.returncode != 0:
                    pytest.skip(f"no network namespaces can be made: {made.stderr.strip()}")
                self._made.append(name)
                _ip("-n", name, "link", "set", "lo", "up")
                if index:
                    self._join(index - 1)
        except BaseException:
            self.close()
            raise

    def prefix(self, index: int) -> list[str]:
        """Words that make a command run in a namespace."""
        return ["ip", "netns", "exec", self.names[index]]

    def connection(self, index: int, port: int, timeout_s: float) -> HTTPConnection:
        """A connection within a namespace, to one of its servers: no process has to be started there to ask."""
        connection = HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        with ExitStack() as opened:
            own = opened.enter_context(Path("/proc/thread-self/ns/net").open())
            other = opened.enter_context(Path("/run/netns", self.names[index]).open())
            _enter(other)
            try:
                connection.connect()
            finally:
                _enter(own)
        return connection

    @staticmethod
    def address(cable: int, end: int) -> str:
        """Of the near (0) or far (1) end of the cable between a namespace and its successor."""
        return f"10.213.{cable}.{end + 1}"

    @contextmanager
    def cut(self, cable: int) -> Iterator[None]:
        """Nothing gets through, and nobody is told."""
        _ip("-n", self.names[cable], "link", "set", f"far{cable}", "down")
        try:
            yield
        finally:
            _ip("-n", self.names[cable], "link", "set", f"far{cable}", "up")

    @contextmanager
    def deaf(self, cable: int) -> Iterator[None]:
        """What the near end sends is lost; what the far end sends arrives."""
        at = (self.address(cable, 1), "dev", f"far{cable}")
        _ip("-n", self.names[cable], "neigh", "replace", *at, "lladdr", "02:00:00:00:00:01", "nud", "permanent")
        try:
            yield
        finally:
            _ip("-n", self.names[cable], "neigh", "del", *at)

    @contextmanager
    def slow(self, cable: int, bits_per_second: int) -> Iterator[None]:
        """What the near end sends takes long."""
        if shutil.which("tc") is None:
            pytest.skip("slow cables need the tc command (Debian: apt install iproute2)")
        at = ("dev", f"far{cable}", "root")
        shape = ("tbf", "rate", f"{bits_per_second}bit", "burst", "20kb", "latency", "400ms")
        subprocess.run(["tc", "-n", self.names[cable], "qdisc", "replace", *at, *shape], check=True)
        try:
            yield
        finally:
            subprocess.run(["tc", "-n", self.names[cable], "qdisc", "del", *at], check=True)

    def close(self) -> None:
        """Remove them; cables go with them."""
        while self._made:
            _ip("netns", "del", self._made.pop(), check=False)

    def _join(self, cable: int) -> None:
        near, far = self.names[cable], self.names[cable + 1]
        _ip(
            *("-n", near, "link", "add", f"far{cable}", "type", "veth"),
            *("peer", "name", f"near{cable}", "netns", far),
        )
        for name, device, end in ((near, f"far{cable}", 0), (far, f"near{cable}", 1)):
            _ip("-n", name, "address", "add", f"{self.address(cable, end)}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")


def _enter(namespace: IO[str]) -> None:
    """Make a network namespace the one of this thread's sockets (`os.setns` is newer than Python 3.11)."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)
