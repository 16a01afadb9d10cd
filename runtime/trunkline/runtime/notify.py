"""How a process tells its supervisor where it stands: one datagram per change on a socket in the run folder.

A leaf (it imports nothing of Trunkline), as `trunkline.runtime.process` is.
"""

from __future__ import annotations

import json
import os
import socket

_TIMEOUT_S = 1.0
"""A supervisor that is slow keeps few datagrams; one that hangs must not hang us."""


def report_status(path: str, status: str, detail: str = "", *, epoch: int = 0) -> bool:
    """Tell the supervisor; never raises.

    Args:
        path: of its socket, `status_path` of the configuration; "": nobody supervises this process.
        status: "starting", "ready", "draining" or "failed".
        detail: why, for people.
        epoch: of a worker group.

    Returns:
        Whether it was told. Nobody needs to act on it: a supervisor that is gone takes its children along.
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
