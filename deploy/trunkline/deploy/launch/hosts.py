"""Talk to the agents (`agent.py`) on all hosts of a cluster at the same time: here, behind a command, or over ssh.

Nothing but a fixed command goes through the shell that `ssh` starts on the other side: what the agent is to do
comes over its standard input.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Final, TypeVar

import msgspec

from trunkline.deploy.errors import DeployError
from trunkline.deploy.launch.fileformat import Host, Ssh
from trunkline.deploy.launch.folders import private_folder, state_base
from trunkline.deploy.launch.protocol import (
    LINE_BYTES_MAX,
    Done,
    Forget,
    Hello,
    HostFacts,
    Look,
    Place,
    Put,
    Refused,
    Reply,
    Request,
    Signal,
    UnitState,
    decode_reply,
    encode_request,
)

_SOCKET_FOLDER_BYTES_MAX: Final = 40
"""Largest number of bytes in the path of the folder for ssh's sockets. ssh adds some sixty bytes, and a socket's
path has 107 at most."""
_CONTROL_NAME: Final = "%C"
"""Name of ssh's sockets: ssh's own digest of user, host and port, which has 40 characters. A socket's path must be
short."""
_SSH_OPTIONS: Final = (
    "BatchMode=yes",  # a question would wait for ever
    "ConnectTimeout=15",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    "ForwardAgent=no",
    "ForwardX11=no",
    "LogLevel=ERROR",
)
"""Options of each ssh command. They follow the options of the file, because ssh takes the first value that it
finds."""


def agent_command(host: Host, sockets: Path | None) -> list[str]:
    """Return the command line that runs the agent of a host.

    Args:
        sockets: Folder for connections that commands share; None if they share none.
    """
    here = [sys.executable, "-P", "-m", "trunkline.deploy.launch.agent"]
    there = [host.trunkline or "trunkline", "launch", "agent"]
    if host.command is not None:
        return [*host.command, *(there if host.trunkline else here)]
    if host.ssh is None:
        return [str(Path(there[0]).expanduser()), *there[1:]] if host.trunkline else here
    ssh = Ssh(host=host.ssh) if isinstance(host.ssh, str) else host.ssh
    return [*_ssh(ssh, sockets), _remote(there)]


def describe(host: Host) -> str:
    """Return how a host is reached, in a few words."""
    if host.ssh is not None:
        ssh = Ssh(host=host.ssh) if isinstance(host.ssh, str) else host.ssh
        return f"ssh {f'{ssh.user}@' if ssh.user else ''}{ssh.host}{f' port {ssh.port}' if ssh.port else ''}"
    return shlex.join(host.command) if host.command else "this machine"


def _ssh(ssh: Ssh, sockets: Path | None) -> list[str]:
    words = ["ssh", "-T"]
    for option in (*ssh.options, *_SSH_OPTIONS):
        words += ["-o", option]
    if sockets is not None and ssh.share_seconds:
        words += ["-o", "ControlMaster=auto", "-o", f"ControlPath={_escaped(sockets)}/{_CONTROL_NAME}"]
        words += ["-o", f"ControlPersist={ssh.share_seconds}"]
    if ssh.port is not None:
        words += ["-p", str(ssh.port)]
    if ssh.user:
        words += ["-l", ssh.user]
    if ssh.identity:
        words += ["-i", str(Path(ssh.identity).expanduser()), "-o", "IdentitiesOnly=yes"]
    return [*words, "--", ssh.host]


def _escaped(path: Path) -> str:
    """Return a path for an option of ssh, in which % must be doubled."""
    return str(path).replace("%", "%%")


def _remote(words: list[str]) -> str:
    """Return a command line for the shell on the host, with all words quoted, but for a leading ~/."""
    first = words[0]
    home = "~/" if first.startswith("~/") else ""
    return f"{home}{shlex.quote(first.removeprefix(home) if home else first)} {shlex.join(words[1:])}"


ANSWER_SECONDS_MAX: Final = 90.0
"""Longest time in seconds to wait for an agent's reply: enough for a host with a slow disk, or with units that do
not answer."""
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
        """Send a request to the agent, and return all replies but the last.

        Raises:
            HostError: The agent refuses, or does not answer.
        """
        return list(self.stream(request, seconds))

    def stream(self, request: Request, seconds: float | None) -> Iterator[Reply]:
        """Send a request to the agent, and yield the replies as they come.

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
        """Let the agent end. The units that it started go on."""
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


_AT_ONCE_MAX: Final = 32
T = TypeVar("T")


def socket_folder() -> Path | None:
    """Return the folder for ssh connections that later commands share; None if its path would be too long."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(runtime) / "trunkline-ssh" if os.path.isabs(runtime) else state_base("") / "ssh"
    if len(os.fsencode(path)) > _SOCKET_FOLDER_BYTES_MAX:
        return None
    try:
        return private_folder(path)
    except OSError:
        return None


class Hosts:
    """Connections to the agents on all hosts. Each is used by one thread at a time."""

    def __init__(self, cluster: str, hosts: Mapping[str, Host]) -> None:
        self._cluster = cluster
        self._hosts = dict(hosts)
        self._connections: dict[str, Connection] = {}
        self._pool = ThreadPoolExecutor(min(_AT_ONCE_MAX, max(1, len(hosts))))

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def connections(self) -> Mapping[str, Connection]:
        """Connections to the hosts that could be reached, by host."""
        return self._connections

    def connect(self) -> dict[str, HostError]:
        """Connect to the hosts that are not connected yet. Return the errors of the hosts where that failed."""
        sockets = socket_folder()
        missing = [label for label in self._hosts if label not in self._connections]

        def reach(label: str) -> Connection | HostError:
            try:
                return Connection(label, self._hosts[label], self._cluster, sockets)
            except HostError as error:
                return error

        failed: dict[str, HostError] = {}
        for label, found in zip(missing, self._pool.map(reach, missing), strict=True):
            if isinstance(found, HostError):
                failed[label] = found
            else:
                self._connections[label] = found
        return failed

    def each(
        self, action: Callable[[Connection], T], labels: Iterable[str] | None = None
    ) -> dict[str, T | HostError]:
        """Return what an action gives on each of the connected hosts, all at the same time."""
        chosen = [
            label for label in (self._connections if labels is None else labels) if label in self._connections
        ]

        def act(label: str) -> T | HostError:
            try:
                return action(self._connections[label])
            except HostError as error:
                return error

        return dict(zip(chosen, self._pool.map(act, chosen), strict=True))

    def states(self, *, probe: bool = True) -> tuple[dict[Place, UnitState], dict[str, HostError]]:
        """Return the states of all units, by host and name, and why some hosts did not answer."""
        states: dict[Place, UnitState] = {}
        failed: dict[str, HostError] = {}
        for label, found in self.each(lambda connection: connection.ask(Look(probe=probe))).items():
            if isinstance(found, HostError):
                failed[label] = found
                self._connections.pop(label).close()
                continue
            states.update({(label, state.name): state for state in found if isinstance(state, UnitState)})
        return states, failed

    def signal(self, places: Iterable[Place], kind: str) -> None:
        """Send a signal to units.

        Raises:
            HostError: A host could not be told.
        """
        for label, unit in places:
            if label in self._connections:
                self._connections[label].ask(Signal(unit=unit, kind=kind))

    def forget(self, place: Place) -> None:
        """Remove the folder of a unit that does not run.

        Raises:
            HostError: It runs.
        """
        self._connections[place[0]].ask(Forget(unit=place[1]))

    def put(self, files: Mapping[str, Mapping[str, bytes]]) -> None:
        """Copy files to hosts.

        Args:
            files: Contents by name, by host.

        Raises:
            HostError: A file could not be written.
        """

        def copy(connection: Connection) -> None:
            for name, content in files.get(connection.label, {}).items():
                connection.ask(Put(name=name, content=content))

        for done in self.each(copy).values():
            if isinstance(done, HostError):
                raise done

    def close(self) -> None:
        """Close all connections, and so end the agents."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
