"""A server of another program, in a process of its own on a free port, that tests start, freeze and kill."""

from __future__ import annotations

import signal
import subprocess

from deploy.waiting import free_ports


class ChildServer:
    """Subclasses start the process."""

    def __init__(self) -> None:
        self.port = free_ports()
        self._process: subprocess.Popen[bytes] | None = None

    def pause(self) -> None:
        """Make it answer nothing until `resume`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
