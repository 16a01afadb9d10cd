"""`trunkline launch agent`: do on a host what a launcher asks for over standard input (`protocol.py`).

It lives as long as the launcher's command. What it starts lives on: each unit has a keeper (`keeper.py`) in a
session of its own. All that must be known later is in the host's folder (`folders.py`), so that another launcher,
or this one after a `kill -9`, finds everything again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import http.client
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version as package_version
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from trunkline.deploy.config import machine
from trunkline.deploy.config.machine import available_cores
from trunkline.deploy.errors import UserError
from trunkline.deploy.launch import protocol
from trunkline.deploy.launch.folders import (
    LOG,
    Follower,
    UnitFolder,
    last_lines,
    private_folder,
    send_signal,
    state_base,
    write_private,
)
from trunkline.deploy.launch.keeper import BUSY
from trunkline.deploy.launch.protocol import (
    Begin,
    CheckPorts,
    Done,
    Forget,
    Hello,
    HostFacts,
    LogLine,
    Logs,
    Look,
    Put,
    Refused,
    Reply,
    Request,
    Signal,
    TakenPorts,
    UnitRecord,
    UnitState,
)
from trunkline.deploy.launch.resources import VISIBLE
from trunkline.runtime.process import node_id

KEEPER: Final = (sys.executable, "-P", "-m", "trunkline.deploy.launch.keeper")
_UNITS: Final = "units"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,100}")
_FILE: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,60}")
_FOLLOW_S: Final = 0.25
_KEEPER_S: Final = 20.0
"""Longest time in seconds until a new keeper has taken its unit's lock."""
_PROBES_MAX: Final = 16
_PROBE_S_MAX: Final = 5.0
_PROBE_BYTES_MAX: Final = 2000
_LINES_MAX: Final = 100_000


class RefusedError(Exception):
    """A request that cannot be done; the text is for a person."""


class Agent:
    """Carries out a launcher's requests on one host."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._keepers: list[subprocess.Popen[bytes]] = []

    def answer(self, request: Request) -> Iterator[Reply]:
        """Yield the replies to a request, the last of them `Done` or `Refused`."""
        for keeper in self._keepers:
            keeper.poll()  # no other process can reap these children
        try:
            yield from self._answer(request)
            yield Done()
        except (RefusedError, UserError) as error:
            yield Refused(text=str(error))
        except OSError as error:
            yield Refused(text=f"{error.filename or 'the system'}: {error.strerror or error}")

    def _answer(self, request: Request) -> Iterator[Reply]:
        match request:
            case Hello():
                yield self._hello(request)
            case Put():
                self._put(request)
            case CheckPorts():
                yield TakenPorts(ports=[port for port in request.ports if _is_taken(port)])
            case Begin():
                self._begin(request.unit)
            case Signal():
                self._signal(request)
            case Look():
                yield from self._look(request.probe)
            case Logs():
                yield from self._logs(request)
            case Forget():
                self._forget(self._unit(request.unit))

    def _hello(self, request: Hello) -> HostFacts:
        if request.protocol != protocol.PROTOCOL:
            raise RefusedError(
                f"the launcher speaks version {request.protocol} of its protocol, this host {protocol.PROTOCOL}; "
                "install the same version of trunkline on both"
            )
        for name in (request.cluster, request.host):
            _check(name, _NAME)
        self._folder = private_folder(state_base(request.state) / request.cluster / request.host)
        return HostFacts(
            version=package_version("trunkline"),
            protocol=protocol.PROTOCOL,
            hostname=socket.gethostname(),
            cores=available_cores(),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            gpus=_gpu_names(machine.find_gpus().count, os.environ.get(VISIBLE)),
            folder=str(self._folder),
        )

    @property
    def _home(self) -> Path:
        if self._folder is None:
            raise RefusedError("the first request says of which cluster")
        return self._folder

    def _unit(self, name: str) -> UnitFolder:
        return UnitFolder(self._home / _UNITS / _check(name, _NAME))

    def _put(self, request: Put) -> None:
        write_private(self._home / _check(request.name, _FILE), request.content)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other agents from changing units here meanwhile."""
        descriptor = os.open(self._home / "agent.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _begin(self, record: UnitRecord) -> None:
        unit = self._unit(record.name)
        with self._alone():
            private_folder(unit.path)
            if unit.is_held():
                raise RefusedError(f"{record.name} runs already; stop it first")
            unit.write_record(msgspec.structs.replace(record, version=package_version("trunkline")))
            log = os.open(unit.path / LOG, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                keeper = subprocess.Popen(
                    [*KEEPER, str(unit.path)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    start_new_session=True,
                )
            finally:
                os.close(log)
            self._keepers.append(keeper)
            self._wait_for(unit, keeper)

    def _wait_for(self, unit: UnitFolder, keeper: subprocess.Popen[bytes]) -> None:
        """Wait until the keeper has written that it keeps the unit."""
        deadline = time.monotonic() + _KEEPER_S
        while time.monotonic() < deadline:
            state = unit.state()
            if state is not None and state.keeper.pid == keeper.pid:
                return
            code = keeper.poll()
            if code == BUSY:
                raise RefusedError(f"{unit.name} runs already; stop it first")
            if code is not None:
                raise RefusedError(
                    f"{unit.name} cannot be started: its keeper ended with exit code {code}; see its log"
                )
            time.sleep(0.02)
        keeper.kill()
        raise RefusedError(f"{unit.name} cannot be started: its keeper has not begun within {_KEEPER_S:g} s")

    def _signal(self, request: Signal) -> None:
        unit = self._unit(request.unit)
        state = unit.state()
        if state is None or not unit.is_held():
            return
        if state.node != node_id():
            raise RefusedError(
                f"{unit.name} runs on another machine, or in another container, which shares this folder; give "
                "each its own `state:` folder"
            )
        number = signal.SIGKILL if request.kind == "kill" else signal.SIGTERM
        reached = send_signal(state.keeper, number)
        # Without its keeper it dies anyway, but perhaps the keeper is what was killed before.
        if (not reached or number == signal.SIGKILL) and state.unit is not None:
            send_signal(state.unit, number)

    def _look(self, with_probe: bool) -> Iterator[UnitState]:
        folders = [UnitFolder(path) for path in sorted((self._home / _UNITS).glob("*")) if path.is_dir()]
        with ThreadPoolExecutor(_PROBES_MAX) as pool:
            for state in pool.map(lambda unit: _look_at(unit, with_probe), folders):
                if state is not None:
                    yield state

    def _logs(self, request: Logs) -> Iterator[LogLine]:
        units = [self._unit(name) for name in request.units]
        followers = [Follower(unit.path) for unit in units] if request.follow else []
        for unit in units:
            for line in last_lines(unit.path, min(request.lines, _LINES_MAX)):
                yield LogLine(unit=unit.name, text=line)
        try:
            # The launcher asks for no more lines by sending anything, or by closing this standard input.
            while followers and not select.select([sys.stdin], [], [], _FOLLOW_S)[0]:
                for unit, follower in zip(units, followers, strict=True):
                    for line in follower.read():
                        yield LogLine(unit=unit.name, text=line)
        finally:
            for follower in followers:
                follower.close()

    def _forget(self, unit: UnitFolder) -> None:
        with self._alone():
            if unit.is_held():
                raise RefusedError(f"{unit.name} runs; stop it first")
            shutil.rmtree(unit.path, ignore_errors=True)


def _look_at(unit: UnitFolder, with_probe: bool) -> UnitState | None:
    record, said, held = unit.record(), unit.state(), unit.is_held()
    if record is None:
        return None  # made by a start that was cut off
    if said is None or (not held and said.state in ("running", "waiting", "stopping")):
        # Its keeper was killed, or the machine has been started anew; or it is about to begin.
        state, detail = ("starting", "its keeper begins") if held else ("gone", "it was killed, with its keeper")
        said_unit, since, restarts, code = None, None, said.restarts if said else 0, None
    else:
        state, detail, said_unit = said.state, "", said.unit
        since, restarts, code = said.since, said.restarts, said.exit_code
    if held and state in ("stopped", "failed"):
        state, detail = "stopping", "its keeper ends"  # as long as the lock is held, it cannot be started again
    elif state == "running":
        state, detail = _probe(record.health_port) if with_probe else ("starting", "")
    elif state == "waiting":
        detail = "it died, and is started again soon"
    alive = held and said_unit is not None
    return UnitState(
        name=record.name,
        kind=record.kind,
        state=state,
        detail=detail,
        pid=said_unit.pid if alive and said_unit else None,
        restarts=restarts,
        up_s=max(0.0, time.time() - since) if alive and since is not None else None,
        exit_code=code,
        digest=record.digest,
        version=record.version,
        argv=record.argv,
    )


def _probe(port: int) -> tuple[str, str]:
    """Return `ready`, `unready` or `starting`, and why, by what a unit's health port answers."""
    status, reason = _get(port, "/readyz")
    if status == 200:
        return "ready", ""
    if status == 0:
        return "starting", reason
    started, _ = _get(port, "/startupz")
    return ("unready" if started == 200 else "starting"), reason


def _get(port: int, path: str) -> tuple[int, str]:
    """Return the HTTP status of the answer and the answer's first line. The status is 0 if there is no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PROBE_S_MAX)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read(_PROBE_BYTES_MAX).decode(errors="replace").strip()
        return answer.status, text.partition("\n")[0]
    except ConnectionRefusedError:
        return 0, "its health port does not answer yet"
    except (OSError, http.client.HTTPException) as error:
        return 0, f"its health port does not answer: {error or type(error).__name__}"
    finally:
        connection.close()


def _gpu_names(count: int, visible: str | None) -> list[str]:
    """Return the names of this host's GPUs, or only of those that `CUDA_VISIBLE_DEVICES` shows."""
    if visible is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in visible.split(",")][:count]


def _is_taken(port: int) -> bool:
    """Return whether a process listens on this port, on any address: better one port too many than one too few."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                trial.bind((address, port))
                trial.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
    return False


def _check(name: str, rule: re.Pattern[str]) -> str:
    """Return a name that is safe as the name of a file."""
    if not rule.fullmatch(name):
        raise RefusedError(f"{name!r} cannot be a name here")
    return name


def serve(source: RawIOBase, target: BinaryIO) -> int:
    """Answer requests until there are no more; return the exit code."""
    agent = Agent()
    for line in iter(lambda: source.readline(protocol.LINE_BYTES_MAX), b""):
        try:
            replies = agent.answer(protocol.decode_request(line))
        except (msgspec.MsgspecError, RecursionError) as error:
            replies = iter([Refused(text=f"the launcher is of another version: {error}")])
        try:
            for reply in replies:
                target.write(protocol.encode_reply(reply))
                target.flush()
        except BrokenPipeError:
            return 0
    return 0


def main() -> int:
    """Run the process."""
    os.umask(0o077)
    # Ctrl-C is for the launcher: it decides what becomes of the units.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Nothing is read ahead: `Logs` looks at what comes.
    with open(0, "rb", buffering=0, closefd=False) as source:
        return serve(source, sys.stdout.buffer)


if __name__ == "__main__":
    sys.exit(main())
