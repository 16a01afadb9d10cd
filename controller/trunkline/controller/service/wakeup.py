"""What wakes the controller's loop besides messages: signals, and threads that have done something."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from types import FrameType


class WakeUps:
    """A pair of sockets: whoever wakes the loop writes a byte into one, the loop polls the other."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def install(self, *, ignore_interrupts: bool) -> None:
        """Have SIGTERM wake the loop, and SIGINT unless it is ignored. For the main thread."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _arrived)
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignore_interrupts else _arrived)

    def fileno(self) -> int:
        """What to poll for."""
        return self._reader.fileno()

    def wake(self) -> None:
        """From any thread: there is something to do."""
        with suppress(OSError):  # it is awake already, or has ended
            self._writer.send(b"\0")

    def read(self) -> bytes:
        """Numbers of the signals that have arrived, among zeros."""
        with suppress(BlockingIOError):
            return self._reader.recv(4096)
        return b""

    def close(self) -> None:
        """Signals wake nobody any more."""
        signal.set_wakeup_fd(-1)
        self._reader.close()
        self._writer.close()


def _arrived(number: int, frame: FrameType | None) -> None:
    """Python wrote the signal's number to the socket: the loop acts on it between two turns' work."""
