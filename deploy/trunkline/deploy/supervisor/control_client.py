"""Send commands to a running cluster, over its control socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from trunkline.deploy.errors import DeployError
from trunkline.deploy.supervisor.control_commands import Command, Reply


class ControlError(DeployError):
    """The supervisor does not answer."""


def ask(path: Path, command: Command, timeout_s: float | None = None) -> Iterator[Reply]:
    """Send a command, and yield its replies as they come; the last one is `done`.

    Args:
        timeout_s: How long each reply may take; None: any time.

    Raises:
        ControlError: The supervisor does not answer, or not in its protocol.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(os.fspath(path))
            with suppress(BrokenPipeError):  # a server that refuses the connection has said why before
                connection.sendall(msgspec.json.encode(command) + b"\n")
            with connection.makefile("rb") as lines:
                for line in lines:
                    reply = msgspec.json.decode(line, type=Reply)
                    yield reply
                    if reply.done:
                        return
        except OSError as error:
            raise ControlError(f"the supervisor does not answer ({error.strerror or error})") from error
        except msgspec.MsgspecError as error:
            raise ControlError(f"the supervisor's answer makes no sense: {error}") from error
    raise ControlError("the supervisor ended before it had answered")
