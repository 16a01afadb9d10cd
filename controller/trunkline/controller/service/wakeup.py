"""Wake the controller's loop for reasons other than messages: for signals, and for threads that have news."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from types import FrameType


class WakeUps:
    """A pair of sockets: a signal or thread writes a byte into one to wake the loop, which polls the other."""

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

    def wake(self) -> None:
        """Wake the loop. Any thread may call this."""
        with suppress(OSError):  # it is awake already, or has ended
            self._writer.send(b"\0")

    def read(self) -> bytes:
        """Return the bytes that have arrived: a signal's number each, or zero for a thread."""
        with suppress(BlockingIOError):
            return self._reader.recv(4096)
        return b""

    def close(self) -> None:
        """Close the sockets: signals and threads no longer wake the loop."""
        signal.set_wakeup_fd(-1)
        self._reader.close()
        self._writer.close()


def _arrived(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has written the signal's number to the socket; the loop acts on it between two turns."""
