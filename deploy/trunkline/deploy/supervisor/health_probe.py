"""Ask a router for its health while the cluster starts."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Mapping
from typing import Any, Final

NEWS: Final = 0
"""The byte on the wake-up pipe that announces an answer; no signal has this number."""
_INTERVAL_S: Final = 0.5
_TIMEOUT_S: Final = 10.0


class HealthProbe(threading.Thread):
    """Ask a router for its health until it is healthy.

    This is a thread because an answer may take seconds (the router generates a token for it), and Ctrl-C must not
    wait for that.
    """

    def __init__(self, host: str, port: int, wake_write: int) -> None:
        super().__init__(name="health", daemon=True)
        self.healthy = False
        self.answer: Mapping[str, Any] | None = None
        self._address = (host, port)
        self._wake_write = wake_write
        self._stop_asked = threading.Event()
        self._write_lock = threading.Lock()

    def run(self) -> None:
        """Ask, report and wait, until the router is healthy or `stop` was called."""
        while not self.healthy and not self._stop_asked.is_set():
            self.answer, self.healthy = self._ask()
            with self._write_lock:
                if not self._stop_asked.is_set():  # after `stop` the descriptor may be another file's
                    os.write(self._wake_write, bytes([NEWS]))
            self._stop_asked.wait(_INTERVAL_S)

    def stop(self) -> None:
        """Never write to the pipe again. Do not wait for an answer on its way."""
        with self._write_lock:
            self._stop_asked.set()

    def _ask(self) -> tuple[Mapping[str, Any] | None, bool]:
        connection = http.client.HTTPConnection(*self._address, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            body = json.loads(response.read() or b"{}")
            return (body if isinstance(body, dict) else {}), response.status == 200
        except (OSError, ValueError, http.client.HTTPException):
            return None, False
        finally:
            connection.close()
