"""Log files of bounded size: lines go to `log`, which becomes `log.1` when it is large."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from trunkline.deploy.launch.folders import LOG, OLD_LOG

LOG_BYTES_MAX: Final = 16 << 20
"""Days of warnings; a unit keeps twice that at most."""
_READ_BYTES_MAX: Final = 4 << 20
"""Bytes of a log that are read for its last lines."""


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
                del found[0]  # its beginning is missing
            lines.extend(line.decode(errors="replace") for line in found if line)
    return list(lines)


class Follower:
    """New lines of a log, across rotations."""

    def __init__(self, folder: Path) -> None:
        """From now on."""
        self._path = folder / LOG
        self._descriptor = -1
        self._rest = b""
        self._open()
        if self._descriptor >= 0:
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def read(self) -> Iterator[str]:
        """Complete lines that have come; never blocks."""
        if self._descriptor < 0:
            self._open()
        yield from self._lines()
        if self._descriptor >= 0 and self._is_replaced():
            yield from self._lines()  # what came between the reading and the renaming
            os.close(self._descriptor)
            self._open()
            yield from self._lines()

    def close(self) -> None:
        """No more."""
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
