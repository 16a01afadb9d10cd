"""What children say of themselves (`notify.py`), as the supervisor hears it."""

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
    """A datagram."""

    pid: int
    status: str
    detail: str = ""
    epoch: int = 0


def parse_report(data: bytes) -> Report | None:
    """None: it is something else, which is not worth dying for."""
    try:
        report = msgspec.json.decode(data, type=Report)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return report if report.status in STATUSES else None


class StatusSocket:
    """Where reports come in. The folder keeps others out."""

    def __init__(self, folder: Path) -> None:
        path = folder / SOCKET_NAME
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(os.fspath(path))
        os.chmod(path, 0o600)

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def receive(self) -> Iterator[Report]:
        """What has come; never blocks."""
        for _ in range(_REPORTS_MAX):
            try:
                data = self._socket.recv(_BYTES_MAX)
            except (BlockingIOError, InterruptedError):
                return
            report = parse_report(data)
            if report is not None:
                yield report

    def close(self) -> None:
        """No more reports."""
        self._socket.close()
