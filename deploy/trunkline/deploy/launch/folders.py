"""The folder of a cluster on one of its hosts, and the identity of processes.

    <state>/<cluster>/<host>/            0700
        wire.key, api-keys.json          0600, as the launcher has copied them
        units/<unit>/
            unit.json                    what it is started from; 0600, its environment may hold secrets
            lock                         held by flock as long as its keeper, or the unit itself, lives
            state.json                   what the keeper says of it
            log, log.1                   what it wrote; the older half in log.1

A unit runs if its lock is held: unlike a process id, a lock is released by the kernel and never reused. Where a
process must be told something, its id counts only together with the time at which it started.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from trunkline.deploy.errors import UserError
from trunkline.deploy.launch.protocol import UnitRecord

STATE: Final = "{state}"
"""The text in a command line that stands for the host's folder of this cluster."""
LOCK: Final = "lock"
LOG: Final = "log"
OLD_LOG: Final = "log.1"
_RECORD: Final = "unit.json"
_STATE: Final = "state.json"
_LOOK_S: Final = 0.001
"""Pause in seconds before a lock is tried again that other processes hold in order to look at it."""
T = TypeVar("T")


class Process(msgspec.Struct, frozen=True):
    """A process by its id and start time, so that it is not mistaken for a later one with the same id."""

    pid: int
    started: int
    """The process's start time, in ticks since the machine's start."""


class KeeperState(msgspec.Struct, frozen=True):
    """The state of a unit, as its keeper writes it."""

    node: str
    """The machine and process namespace of keeper and unit (`process.node_id`)."""
    keeper: Process
    unit: Process | None
    state: str
    """`running`, `waiting`, `stopping`, `stopped` or `failed`."""
    since: float
    """Wall-clock time of the last change of the state, in seconds."""
    restarts: int = 0
    exit_code: int | None = None
    """The exit code of the unit's last end. A negative number is the signal that killed the unit. None: it has not
    ended."""


def state_base(given: str) -> Path:
    """Return the folder for states: `given`, else `$XDG_STATE_HOME/trunkline` or `~/.local/state/trunkline`.

    Raises:
        UserError: There is no home folder.
    """
    try:
        if given:
            return Path(given).expanduser()
        home = os.environ.get("XDG_STATE_HOME", "")
        return (Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state") / "trunkline"
    except RuntimeError as error:
        raise UserError("there is no home folder for states and logs; give the host a `state:` folder") from error


def private_folder(path: Path) -> Path:
    """Make a folder for its owner only, with all folders above it, and return it.

    Raises:
        OSError: It cannot be made, or belongs to another user.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return path


def write_private(path: Path, content: bytes) -> None:
    """Replace a file at once with one that only its owner may read."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        unfinished.unlink()
    descriptor = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        unfinished.rename(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def start_time(pid: int) -> int | None:
    """Return when a process started, in ticks; None if it does not run (any more)."""
    try:
        # The name before it may hold anything, brackets too.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def this_process() -> Process:
    """Return this process."""
    return process_of(os.getpid())


def process_of(pid: int) -> Process:
    """Return the identity of a running process, such as a child, by its id."""
    return Process(pid, start_time(pid) or 0)


def send_signal(process: Process, number: int) -> bool:
    """Send a signal to this very process; return False if it has ended."""
    try:
        # From here on the id cannot pass to another one without this descriptor knowing.
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if start_time(process.pid) != process.started:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


class UnitFolder:
    """A unit's folder; it may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.path.name

    def record(self) -> UnitRecord | None:
        """Return what the unit was last started from."""
        return self._read(_RECORD, UnitRecord)

    def write_record(self, record: UnitRecord) -> None:
        """Write what the unit is to be started from."""
        write_private(self.path / _RECORD, msgspec.json.encode(record))

    def state(self) -> KeeperState | None:
        """Return the state that its keeper wrote last."""
        return self._read(_STATE, KeeperState)

    def write_state(self, state: KeeperState) -> None:
        """Write the unit's state; for its keeper."""
        write_private(self.path / _STATE, msgspec.json.encode(state))

    def lock(self) -> int | None:
        """Take the lock and return its descriptor; None if another process has it.

        Raises:
            OSError: It cannot be found out whether the lock is held.
        """
        descriptor = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self.is_held():
                    os.close(descriptor)
                    return None
                time.sleep(_LOOK_S)  # another process only looks (`is_held`)
            else:
                return descriptor

    def is_held(self) -> bool:
        """Return whether the unit, or its keeper, runs."""
        try:
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            # Shared: several may ask at once, and none of them is taken for the unit.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _read(self, name: str, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=kind)
        except (OSError, msgspec.MsgspecError):
            return None


LOG_BYTES_MAX: Final = 16 << 20
"""Largest size in bytes of one log file: days of warnings. A unit keeps two of them."""
_READ_BYTES_MAX: Final = 4 << 20
"""Number of bytes at a log's end in which its last lines are searched."""


class LogFile:
    """The log of a unit, which its keeper writes. A full disk costs lines, but does not stop the unit."""

    def __init__(self, folder: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._descriptor = -1
        self._size = 0
        with suppress(OSError):
            self._open()

    def write(self, data: bytes) -> None:
        """Append to the log; never raise."""
        with suppress(OSError):
            if self._descriptor < 0:
                self._open()
            if self._size >= self._bytes_max:
                self._rotate()
            os.write(self._descriptor, data)
            self._size += len(data)

    def close(self) -> None:
        """Close the log."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
        self._descriptor = os.open(self._folder / LOG, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def _rotate(self) -> None:
        self.close()
        (self._folder / LOG).rename(self._folder / OLD_LOG)
        self._open()


def last_lines(folder: Path, count: int) -> list[str]:
    """Return the last lines of a log."""
    lines: deque[str] = deque(maxlen=count)
    for name in (OLD_LOG, LOG):
        with suppress(OSError), (folder / name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _READ_BYTES_MAX))
            found = file.read().split(b"\n")
            if size > _READ_BYTES_MAX:
                del found[0]  # the beginning of this line is missing
            lines.extend(line.decode(errors="replace") for line in found if line)
    return list(lines)


class Follower:
    """Reads the new lines of a log, across rotations."""

    def __init__(self, folder: Path) -> None:
        """Follow a log from its present end on."""
        self._path = folder / LOG
        self._descriptor = -1
        self._rest = b""
        self._open()
        if self._descriptor >= 0:
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def read(self) -> Iterator[str]:
        """Yield the complete lines that have come since the last call; never block."""
        if self._descriptor < 0:
            self._open()
        yield from self._lines()
        if self._descriptor >= 0 and self._is_replaced():
            yield from self._lines()  # lines that were written between this reading and the renaming
            os.close(self._descriptor)
            self._open()
            yield from self._lines()

    def close(self) -> None:
        """Close the log."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        self._descriptor = -1
        with suppress(OSError):
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def _is_replaced(self) -> bool:
        try:
            there = os.stat(self._path)
        except OSError:
            return False
        ours = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    def _lines(self) -> Iterator[str]:
        while self._descriptor >= 0 and (data := os.read(self._descriptor, 1 << 16)):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if line:
                    yield line.decode(errors="replace")
