"""Open the port that a cluster serves on, or say why that is not possible."""

from __future__ import annotations

import errno
import socket
from typing import Final

from trunkline.deploy.errors import UserError

DEFAULT_URL: Final = "http://127.0.0.1:8000"
"""Where a server is unless its options say otherwise."""
_BACKLOG: Final = 2048
"""Connections that wait while all routers are busy, or being started again."""


def open_listener(host: str, port: int, option: str = "--port") -> socket.socket:
    """Open a listening socket, which routers inherit.

    Args:
        host: An address of this machine or its name.
        port: The port; 0 for any free one.
        option: The option that gave the port, for messages; the one for the host is named after it.

    Raises:
        UserError: The port is in use, needs privileges, or the host is not an address of this machine.
    """
    listener: socket.socket | None = None
    try:
        family, *_, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        raise UserError(_explain(error, host, port, option)) from error


def free_port(host: str, port: int) -> int:
    """Return `port` if a server can listen there now; for 0 a free one.

    Raises:
        UserError: As `open_listener`.
    """
    with open_listener(host, port) as listener:
        return int(listener.getsockname()[1])


def _explain(error: OSError, host: str, port: int, option: str) -> str:
    if isinstance(error, PermissionError):
        return f"port {port} needs privileges; choose one above 1023 with {option}"
    advice = (
        f"choose another {option}, or stop the process that has it"
        if error.errno == errno.EADDRINUSE
        else f"{option.replace('port', 'host')} must be an address of this machine, such as 127.0.0.1 or 0.0.0.0"
    )
    return f"cannot listen on {host}:{port}: {error.strerror}; {advice}"
