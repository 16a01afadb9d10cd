"""The folder of one running cluster: its sockets and the configurations of its processes.

    <tmp>/trunkline-XXXXXXXX/     0700: a process that reaches the sockets controls the cluster
        lock                      held by flock while the supervisor lives
        *.json                    one configuration per process, and what commands must know (registry.py)
        g0-plan, g0-report, …     ipc sockets
        control, status           the supervisor's: commands come in, and what children say of themselves

A supervisor removes its folder when it exits. One that was killed cannot, so every start removes folders whose
lock no process holds: unlike a process id, a lock is released by the kernel and never reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trunkline.deploy.errors import UserError

_PREFIX: Final = "trunkline-"
_LOCK: Final = "lock"
_SOCKET_PATH_BYTES_MAX: Final = 107  # sockaddr_un.sun_path without its terminating zero
_SOCKET_NAME_BYTES_MAX: Final = 24
_UNLOCKED_SECONDS_MAX: Final = 60.0
"""A folder without a lock is that of a supervisor between two system calls, or of a dead one."""


def base_folder() -> Path:
    """Return the folder in which run folders are made: the one for temporary files, or `/tmp` if its path is too
    long for sockets."""
    base = Path(tempfile.gettempdir())
    longest = len(os.fsencode(base)) + len(f"/{_PREFIX}12345678/") + _SOCKET_NAME_BYTES_MAX
    return base if longest <= _SOCKET_PATH_BYTES_MAX else Path("/tmp")


def remove_stale(base: Path) -> list[Path]:
    """Remove the run folders below `base` whose supervisors are dead, and return them."""
    removed = []
    for folder in base.glob(f"{_PREFIX}????????"):
        with contextlib.suppress(OSError):  # another user's, or removed by another process meanwhile
            if not is_run_folder(folder) or not is_stale(folder):
                continue
            shutil.rmtree(folder)
            removed.append(folder)
    return removed


@contextlib.contextmanager
def run_folder(base: Path | None = None) -> Iterator[Path]:
    """Make a new, private, locked run folder, and remove it with its contents at the end.

    Raises:
        UserError: It cannot be made.
    """
    try:
        base = base or base_folder()
        remove_stale(base)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    except OSError as error:
        where = base or "the folders for temporary files"
        raise UserError(
            f"no folder for the cluster's sockets can be made in {where}: {error.strerror}; set TMPDIR to a "
            "folder that can be written"
        ) from error
    # Locked before it gets its name, so that a lock file that can be seen is a lock that is held.
    unnamed = folder / f"{_LOCK}.new"
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(folder / _LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def is_run_folder(path: Path) -> bool:
    """Return whether this is a run folder of this user."""
    if len(path.name) != len(_PREFIX) + 8 or not path.name.startswith(_PREFIX) or path.is_symlink():
        return False
    return path.is_dir() and path.stat().st_uid == os.getuid()


def is_stale(folder: Path) -> bool:
    """Return whether the supervisor of a run folder is dead.

    Raises:
        OSError: This cannot be found out, or the folder is gone.
    """
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _UNLOCKED_SECONDS_MAX
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
