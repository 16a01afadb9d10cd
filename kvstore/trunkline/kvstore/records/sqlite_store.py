"""The record store of one host: an SQLite file that all its routers use at the same time."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from trunkline.kvstore.records.sqlite_file import MEMORY, OpenFile
from trunkline.kvstore.records.sqlite_tables import Clocks, RecordTables
from trunkline.kvstore.records.sqlite_thread import SqliteThread
from trunkline.kvstore.records.store import Change, Reading, Record, RecordKey, Tended, Usage

FREE_BYTES_MIN: Final = 256 << 20
"""With less free space than this, the disk is said to be nearly full."""
_NETWORK: Final = frozenset("nfs nfs4 cifs smb3 smbfs 9p ceph lustre gpfs fuse.sshfs fuse.glusterfs".split())


def steady_time() -> float:
    """Return the seconds since the machine started, time asleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_name() -> str:
    """Return the name of the machine's present start; "" if the kernel does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class SqliteRecords:
    """See `RecordStore`. Several stores, in one or several processes of a host, may use the same file."""

    def __init__(
        self,
        path: str,
        *,
        bytes_max: int = 0,
        patience_s: float = 10.0,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady_time,
        boot: str | None = None,
    ) -> None:
        """
        Args:
            path: The file; ":memory:" for a store in memory that ends with this object.
            bytes_max: See `open_records`.
            patience_s: See `open_records`.
            clock: Returns Unix time in seconds.
            steady: Returns seconds on a clock that does not jump and is the same for all processes of the host.
            boot: Names the start of the machine from which `steady` counts; None: as the kernel says.
        """
        self._path = path
        clocks = Clocks(clock, steady, boot_name() if boot is None else boot)

        def opened() -> tuple[OpenFile, RecordTables]:
            file = OpenFile(path)
            return file, RecordTables(file.connection, clocks, bytes_max)

        self._thread = SqliteThread(opened, path, patience_s)

    async def create(self, key: RecordKey, change: Change, *, owner_bytes_max: int = 0) -> Record:
        """See `RecordStore.create`."""
        return await self._thread.carry_out(lambda to: to.create(key, change, owner_bytes_max), writes=True)

    async def get(self, key: RecordKey, known: Sequence[bytes] = (), *, use: bool = True) -> Reading:
        """See `RecordStore.get`."""
        return await self._thread.carry_out(lambda to: to.get(key, known, use=use), writes=False)

    async def acquire(self, key: RecordKey, token: str, seconds: float, known: Sequence[bytes] = ()) -> Reading:
        """See `RecordStore.acquire`."""
        return await self._thread.carry_out(lambda to: to.acquire(key, token, seconds, known), writes=True)

    async def renew(self, key: RecordKey, token: str, seconds: float) -> bool:
        """See `RecordStore.renew`."""
        return await self._thread.carry_out(lambda to: to.renew(key, token, seconds), writes=True)

    async def release(self, key: RecordKey, token: str) -> None:
        """See `RecordStore.release`."""
        await self._thread.carry_out(lambda to: to.release(key, token), writes=True)

    async def put(
        self, key: RecordKey, version: int, change: Change, *, lease: str = "", release: bool = False
    ) -> Record:
        """See `RecordStore.put`."""
        return await self._thread.carry_out(
            lambda to: to.put(key, version, change, lease, release=release), writes=True
        )

    async def delete(self, key: RecordKey, *, lease: str = "") -> None:
        """See `RecordStore.delete`."""
        await self._thread.carry_out(lambda to: to.delete(key, lease), writes=True)

    async def page(
        self, kind: str, owner: str, after: str = "", limit: int = 100, *, prefix: str = "", headers: bool = False
    ) -> list[Record]:
        """See `RecordStore.page`."""
        return await self._thread.carry_out(
            lambda to: to.page(kind, owner, after, limit, prefix, headers=headers), writes=False
        )

    async def kinds(self, owner: str) -> list[str]:
        """See `RecordStore.kinds`."""
        return await self._thread.carry_out(lambda to: to.kinds(owner), writes=False)

    async def usage(self, owner: str | None = None) -> Usage:
        """See `RecordStore.usage`."""
        return await self._thread.carry_out(lambda to: to.usage(owner), writes=False)

    async def tend(self) -> Tended:
        """See `RecordStore.tend`."""
        return await self._thread.carry_out(lambda to: to.tend(), writes=False)

    async def check(self) -> str:
        """See `RecordStore.check`."""
        if self._path == MEMORY:
            return "Records are kept in the memory of one process and end with it; give a file or a Redis server."
        await self.usage()
        folder = Path(self._path).absolute().parent
        if (kind := _file_system(folder)) in _NETWORK:
            return f"{self._path} is on a network file system ({kind}), which SQLite cannot use safely."
        if (free := shutil.disk_usage(folder).free) < FREE_BYTES_MIN:
            return f"The disk of {self._path} is nearly full: {free >> 20} MiB are free."
        return ""

    async def close(self) -> None:
        """See `RecordStore.close`."""
        await self._thread.close()


def _file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is on; "" if the kernel does not say."""
    found, longest = "", -1
    path = os.path.realpath(folder)
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split(" ")
            is_below = path == mount or path.startswith(mount.rstrip("/") + "/")
            if is_below and len(mount) >= longest:
                found, longest = kind, len(mount)
    return found
