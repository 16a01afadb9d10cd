"""Name the host of a process, and find whether a process id on it is a worker's.

A leaf (it imports nothing of Trunkline), as `trunkline.runtime.process` is.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE: Final = "/proc/self/ns/pid"


def node_id() -> str:
    """Return a name for the running kernel and the namespace of process ids; "" if it cannot be found out.

    Among processes with the same name, a process id means the same process.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()}:{os.stat(_PID_NAMESPACE).st_ino}"
    except OSError:
        return ""


def is_worker(pid: int) -> bool:
    """Return whether this is the id of a worker, by its title or, before it has one, its command line."""
    with suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return line.startswith(b"trunkline: worker ") or b"trunkline.worker" in line.split(b"\0")
    return False
