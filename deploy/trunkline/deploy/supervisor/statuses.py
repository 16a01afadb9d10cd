"""Receive the status reports of child processes (sent by `runtime/process.py`)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

SOCKET_NAME: Final = "status"
"""In the run folder."""
STATUSES: Final = ("starting", "ready", "draining", "failed")
_BYTES_MAX: Final = 8 << 10
_REPORTS_MAX: Final = 256
"""At one wake-up; the rest at the next."""


class Report(msgspec.Struct, frozen=True):
    """A status report: one datagram."""

    pid: int
    status: str
    detail: str = ""
    epoch: int = 0


def parse_report(data: bytes) -> Report | None:
    """Return the report in a datagram; None if it holds something else."""
    try:
        report = msgspec.json.decode(data, type=Report)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return report if report.status in STATUSES else None


class StatusSocket:
    """The socket that receives reports. The permissions of its folder keep other users out."""

    def __init__(self, folder: Path) -> None:
        path = folder / SOCKET_NAME
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(os.fspath(path))
        os.chmod(path, 0o600)

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    def receive(self) -> Iterator[Report]:
        """Yield the reports that have arrived; never block."""
        for _ in range(_REPORTS_MAX):
            try:
                data = self._socket.recv(_BYTES_MAX)
            except (BlockingIOError, InterruptedError):
                return
            report = parse_report(data)
            if report is not None:
                yield report

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
