"""What tests need that look at processes and ports: wait for a condition, find free ports."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

SECONDS_MAX = 60.0


def wait_for(condition: Callable[[], object], seconds: float = SECONDS_MAX) -> None:
    """Return as soon as the condition holds; fail if it does not for so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition still does not hold"
        time.sleep(0.01)


def free_ports(count: int = 1) -> int:
    """Return the first of so many ports in a row that are free on every address.

    None of those that systems give to connections: these could be taken until a server listens, seconds later.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(10_000, 32_000)
        if all(is_free(each) for each in range(port, port + count)):
            return port
    raise AssertionError("no free ports in a row")


def is_free(port: int) -> bool:
    """Return whether a server could listen on this port."""
    with socket.socket() as trial:
        try:
            trial.bind(("", port))
        except OSError:
            return False
    return True


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not waited for does not."""
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
