"""Wake the controller's loop for signals."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from types import FrameType


class WakeUps:
    """A pair of sockets: a signal writes a byte into one to wake the loop, which polls the other."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def install(self, *, ignore_interrupts: bool) -> None:
        """Have SIGTERM wake the loop, and SIGINT unless it is ignored. Only the main thread may call this."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _arrived)
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignore_interrupts else _arrived)

    def fileno(self) -> int:
        """Return the file descriptor that the loop polls."""
        return self._reader.fileno()

    def read(self) -> bytes:
        """Return the numbers of the signals that have arrived, a byte each."""
        with suppress(BlockingIOError):
            return self._reader.recv(4096)
        return b""

    def close(self) -> None:
        """Close the sockets: signals no longer wake the loop."""
        signal.set_wakeup_fd(-1)
        self._reader.close()
        self._writer.close()


def _arrived(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has written the signal's number to the socket; the loop acts on it between two turns."""
