"""Report the status of a process to its supervisor: one datagram for each change, on a socket in the run folder.

A leaf (it imports nothing of Trunkline), as `trunkline.runtime.process` is.
"""

from __future__ import annotations

import json
import os
import socket

_TIMEOUT_S = 1.0
"""A slow supervisor holds few datagrams, and one that hangs must not block its children."""


def report_status(path: str, status: str, detail: str = "", *, epoch: int = 0) -> bool:
    """Report a status to the supervisor; never raise.

    Args:
        path: The path of its socket, `status_path` of the configuration; "" if the process has no supervisor.
        status: "starting", "ready", "draining" or "failed".
        detail: The reason, for people.
        epoch: The epoch of a worker's group.

    Returns:
        Whether the report was sent. Callers need not act on it: children end with their supervisor.
    """
    if not path:
        return False
    report = {"pid": os.getpid(), "status": status, "detail": detail[:500], "epoch": epoch}
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(_TIMEOUT_S)
            sender.sendto(json.dumps(report).encode(), path)
    except OSError:
        return False
    return True
