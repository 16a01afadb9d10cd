"""A control socket in a thread, as a supervisor's loop serves it."""

from __future__ import annotations

import selectors
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trunkline.deploy.supervisor.control import ControlServer
from trunkline.deploy.supervisor.members import Command


@contextmanager
def control_server(folder: Path, on_command: Callable[[Command, int], None]) -> Iterator[ControlServer]:
    """Serve the control socket in this folder until the end of the block."""
    ended = threading.Event()

    def turn() -> None:
        while not ended.is_set():
            for key, events in selector.select(0.01):
                if selector.get_map().get(key.fd) is key:
                    key.data(events)

    with selectors.DefaultSelector() as selector:
        server = ControlServer(selector, folder, on_command)
        thread = threading.Thread(target=turn, daemon=True)
        thread.start()
        yield server
        ended.set()
        thread.join()
        server.close()
        assert len(selector.get_map()) == 0
