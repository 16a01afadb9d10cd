"""Talk to the agent on one host (`agent.py`), which a command of `transports.py` runs."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from trunkline.deploy.errors import DeployError
from trunkline.deploy.launch.fileformat import Host
from trunkline.deploy.launch.protocol import (
    LINE_BYTES_MAX,
    Done,
    Hello,
    HostFacts,
    Refused,
    Reply,
    Request,
    decode_reply,
    encode_request,
)
from trunkline.deploy.launch.transports import agent_command, describe

ANSWER_SECONDS_MAX: Final = 90.0
"""Enough for a host with a slow disk, or with units that do not answer."""
_END_SECONDS_MAX: Final = 5.0
_SHOWN_LINES: Final = 8
_SSH_FAILED: Final = 255
_NOT_FOUND: Final = (126, 127)


class HostError(DeployError):
    """A host cannot be reached, or cannot do what was asked for."""

    def __init__(self, label: str, text: str) -> None:
        super().__init__(f"host {label}: {text}")
        self.label = label


class Connection:
    """A connection to an agent. For one thread at a time."""

    def __init__(self, label: str, host: Host, cluster: str, sockets: Path | None) -> None:
        """Start the agent and greet it.

        Raises:
            HostError: The host cannot be reached.
        """
        self.label = label
        self._host = host
        # A file: the ssh process that keeps a connection for later commands keeps its standard error, too, so
        # reading a pipe to its end would wait for that.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._rest = b""
        argv = agent_command(host, sockets)
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the launcher alone
            )
        except OSError as error:
            self._errors.close()
            raise HostError(label, f"{argv[0]} cannot be run: {error.strerror or error}") from error
        try:
            facts = self.ask(Hello(cluster=cluster, host=label, state=host.state))
            found = next((reply for reply in facts if isinstance(reply, HostFacts)), None)
            if found is None:
                raise HostError(label, "the agent there did not say who it is")
        except BaseException:
            self.close()
            raise
        self.facts = found

    def ask(self, request: Request, seconds: float = ANSWER_SECONDS_MAX) -> list[Reply]:
        """Return all replies but the last.

        Raises:
            HostError: The agent refuses, or does not answer.
        """
        return list(self.stream(request, seconds))

    def stream(self, request: Request, seconds: float | None) -> Iterator[Reply]:
        """Yield replies as they come.

        Args:
            seconds: How long each reply may take; None: any time.

        Raises:
            HostError: As `ask`.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode_request(request))
            self._process.stdin.flush()
        except OSError:
            raise self._lost() from None
        while True:
            try:
                reply = decode_reply(self._line(seconds))
            except msgspec.MsgspecError as error:
                raise HostError(self.label, f"the agent there is of another version: {error}") from error
            if isinstance(reply, Done):
                return
            if isinstance(reply, Refused):
                raise HostError(self.label, reply.text)
            if reply is not None:
                yield reply

    def close(self) -> None:
        """Let the agent end; what it started goes on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # what it has not read is lost with it
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # Not before: a thread that waits for an answer sees the end of the agent, and no other file's.
        self._process.stdout.close()
        self._errors.close()

    def _line(self, seconds: float | None) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                raise HostError(self.label, f"no answer within {seconds:g} s ({describe(self._host)})")
            data = os.read(descriptor, 1 << 18)
            if not data:
                raise self._lost()
            self._rest += data
            if len(self._rest) > LINE_BYTES_MAX:
                raise HostError(self.label, "the answer is longer than what an agent says")
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _lost(self) -> HostError:
        """Return why the agent ended."""
        try:
            code = self._process.wait(_END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            code = None
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:]
        way = describe(self._host)
        text = "; ".join(line.strip() for line in said if line.strip())
        if self._host.ssh is not None and code == _SSH_FAILED:
            advice = f"; `ssh` must get in without a question: try `{way.replace(' port ', ' -p ')} true`"
            return HostError(self.label, f"cannot be reached ({way}): {text or 'ssh failed'}{advice}")
        if code in _NOT_FOUND and self._host.command is None:
            command = self._host.trunkline or "trunkline"
            return HostError(
                self.label,
                f"{command} cannot be run there ({text or f'exit code {code}'}); install it, or say where it is: "
                f"hosts.{self.label}.trunkline",
            )
        return HostError(
            self.label, f"the agent there ended ({way}, exit code {code}){': ' if text else ''}{text}"
        )
