"""Make, bound and lock the folders of the disk tier.

    PATH/                                0700
      <fingerprint, 32 hex digits>/      one per model, precision, chunk size, …: what is never mixed
        TRUNKLINE-KV                     the mark by which we know that we may delete this folder
        group-0/
          lock                           held by flock while a server uses the folder; says which
          index.sqlite                   of the controller (`trunkline.controller.storage.tier_index`)
          rank-0.slab, rank-1.slab, …    of the workers
        group-1/ …
      records/                           sessions, schemas and kept answers (`record_files.py`): nothing here is
                                         ever deleted

A server takes as many group folders of its fingerprint as it has groups and holds their locks until it ends,
however it ends. In its own cache folder it takes the first ones that are free, so that two servers do not disturb
each other. In a folder that the user named, it is an error if another server uses them.

What KV other configurations left in PATH counts towards SIZE: they keep up to half of it, the last used first, and
the rest is deleted. So the files of unused folders and of this server together never exceed SIZE. Records count,
too, up to half of SIZE, but stay, however many they are: KV can be computed again, they cannot.

Early versions had records in `index.sqlite`. Where that is so, it stays, too, until they are taken over
(`record_files.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from trunkline.deploy.config.machine import cache_folder
from trunkline.deploy.config.option_values import DiskOption, format_bytes
from trunkline.deploy.errors import UserError

INDEX_NAME: Final = "index.sqlite"
_MARK: Final = "TRUNKLINE-KV"
_MARK_TEXT: Final = "Cached KV of one model in one configuration. It may be deleted while no server uses it.\n"
RECORDS_NAME: Final = "records"
_LOCK: Final = "lock"
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{32}")
_GROUP: Final = re.compile(r"group-\d{1,4}")
_OURS: Final = re.compile(
    r"lock|index\.sqlite(\.(old|damaged)(-\d+)?|\.salvaged|\.copy|\.imported)?(-wal|-shm|-journal)?"
    r"|rank-\d{1,4}\.slab"
)
"""Names of the files that may be deleted: those that a server writes into a group's folder."""
_INDEX: Final = re.compile(r"(index\.sqlite(\.(old|damaged)(-\d+)?)?)(-wal|-shm|-journal)?")
"""Names of an index that may hold records of an early version, and of files that belong to such an index. The
first group of the match is the index's name."""

DEFAULT_BYTES_MAX: Final = 10 << 30
DEFAULT_SHARE: Final = 0.1
"""Part of the disk's free space that the disk tier takes by default: enough for hundreds of conversations."""
FREE_BYTES_MIN: Final = 1 << 30
"""Number of bytes that stay free on the disk, or less on a small disk (`_FREE_SHARE`)."""
_FREE_SHARE: Final = 64
"""Divisor of the disk's size: the quotient is what stays free on the disk if it is less than `FREE_BYTES_MIN`."""
_INDEX_SHARE: Final = 64
"""Divisor of the disk tier's size: the quotient is left to the index, which needs half a kilobyte for a chunk, a
hundredth of the chunk's KV."""
_GROUPS_MAX: Final = 64
"""Largest number of group folders, beyond the number that is needed, that are tried if other servers use some of
them."""
_LOOK_S_MAX: Final = 1.0
"""Time in seconds after which a server uses a folder that it has locked: to look at one, or to delete it, takes
less."""
_LOOK_INTERVAL_S: Final = 0.02


@dataclass(frozen=True)
class DiskPlan:
    """The disk tier that is wanted, before any folder is touched."""

    base: Path
    fingerprint: str
    """Fingerprint of the tier, hexadecimal."""
    groups: int
    tp: int
    chunk_bytes: int
    """Bytes of a chunk on one rank."""
    option: DiskOption | None
    """The value of `--disk-tier`; None: the option was not given, so there is a disk tier if that is possible."""

    @property
    def is_named(self) -> bool:
        """Whether the user named the folder."""
        return self.option is not None and self.option.path is not None

    def group_folder(self, number: int) -> Path:
        return self.base / self.fingerprint / f"group-{number}"


@dataclass
class DiskFolders:
    """The folders of the disk tier, locked for this server."""

    groups: list[Path] = field(default_factory=list)
    """The folder of each group; empty: there is no disk tier."""
    rank_bytes: int = 0
    """Bytes that each worker's slab may take."""
    warnings: list[str] = field(default_factory=list)
    """Warnings that are shown to the user, as sentences."""
    locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """The locks of the folders."""
    others: list[DiskFolders] = field(default_factory=list)
    """The folders of further models."""

    def folder_of(self, group: int) -> Path | None:
        """Return the folder of a group; None: the group has no disk tier."""
        return self.groups[group] if group < len(self.groups) else None


def base_of(option: DiskOption | None) -> Path | None:
    """Return the folder for what outlives the server: the one that `--disk-tier` names, else one in the user's
    cache folder. None: there is to be none, or there is no cache folder."""
    if option is not None and not option.size_bytes:
        return None
    if option is not None and option.path is not None:
        return option.path
    cache = cache_folder()
    return None if cache is None else cache / "kv"


def plan_disk(
    option: DiskOption | None, fingerprint: str, groups: int, tp: int, chunk_bytes: int
) -> DiskPlan | None:
    """Return the disk tier that there should be, or None.

    Raises:
        UserError: A size was given, but there is no cache folder, or the size does not hold two chunks.
    """
    if option is not None and not option.size_bytes:
        return None
    base = base_of(option)
    if base is None:
        if option is None:
            return None
        raise UserError("--disk-tier names no folder, and there is no home folder; write PATH:SIZE")
    plan = DiskPlan(base, fingerprint, groups, tp, chunk_bytes, option)
    if option is not None and option.size_bytes < (least := _least_bytes(plan)):
        workers = f"{groups * tp} worker{'s' if groups * tp > 1 else ''}"
        raise UserError(
            f"--disk-tier is {format_bytes(option.size_bytes)}; {workers} with two chunks of "
            f"{format_bytes(chunk_bytes)} each need {-(-least // 1024)} KiB at least"
        )
    return plan


@contextlib.contextmanager
def disk_folders(plan: DiskPlan | None, others: Sequence[DiskPlan | None] = ()) -> Iterator[DiskFolders]:
    """Make, bound and lock the folders; unlock them at the end, without deleting them.

    Args:
        others: The disk tiers of further models. All are locked before the first is bounded, so that none of them
            deletes what another one has kept.

    Raises:
        UserError: The disk tier was asked for and is not possible.
    """
    found = DiskFolders(others=[DiskFolders() for _ in others])
    pairs = [
        (each, folders)
        for each, folders in zip((plan, *others), (found, *found.others), strict=True)
        if each is not None
    ]
    with contextlib.ExitStack() as locks:
        for folders in (found, *found.others):
            locks.enter_context(folders.locks)
        for step in (_lock, _bound):
            for each, folders in pairs:
                _try(step, each, folders)
        yield found


def add_groups(plan: DiskPlan, found: DiskFolders, groups: int) -> str:
    """Make and lock the folders of further groups, each as large as the others' folders.

    Args:
        plan: The plan that the folders were made by.
        groups: The number of groups that there are to be.

    Returns:
        Why some of these groups have no disk tier, as a sentence; "": all have one, or none was to have one.
    """
    if not found.groups:
        return ""
    try:
        for number in range(len(found.groups), plan.groups + groups + _GROUPS_MAX):
            if len(found.groups) >= groups:
                break
            folder = plan.group_folder(number)
            lock = None if folder in found.groups else _try_lock(folder)
            if lock is None:
                continue
            disk = shutil.disk_usage(plan.base)
            left_alone = min(FREE_BYTES_MIN, disk.total // _FREE_SHARE)
            wanted = found.rank_bytes * plan.tp * (_INDEX_SHARE + 1) // _INDEX_SHARE
            if wanted > (room := disk.free + _used_bytes(folder) - left_alone):
                os.close(lock)
                return (
                    f"No disk tier for group {len(found.groups)}: it needs {format_bytes(wanted)} in {plan.base}, "
                    f"where there is room for {format_bytes(max(0, room))}."
                )
            found.locks.callback(os.close, lock)
            found.groups.append(folder)
    except OSError as error:
        return f"No disk tier for group {len(found.groups)}: {plan.base}: {error.strerror or error}."
    return ""


def _lock(plan: DiskPlan, found: DiskFolders) -> None:
    _make_private(plan.base)
    _make_private(plan.base / plan.fingerprint)
    (plan.base / plan.fingerprint / _MARK).write_text(_MARK_TEXT)
    found.groups = _take_groups(plan, found.locks)


def _try(step: Callable[[DiskPlan, DiskFolders], None], plan: DiskPlan, found: DiskFolders) -> None:
    """Take a step towards a disk tier, unless an earlier one has failed."""
    if found.warnings and not found.groups:
        return
    try:
        step(plan, found)
    except OSError as error:
        reason = f"{plan.base} cannot be used for KV: {error.strerror or error}"
        if plan.option is not None:
            raise UserError(f"--disk-tier: {reason}; name another folder, or give 0 for none") from error
        found.warnings.append(f"No disk tier: {reason}.")
        found.groups = []


def _take_groups(plan: DiskPlan, locks: contextlib.ExitStack) -> list[Path]:
    """Lock and return the first group folders that no other server uses."""
    taken: list[Path] = []
    for number in range(plan.groups + _GROUPS_MAX):
        folder = plan.group_folder(number)
        lock = _try_lock(folder)
        deadline = time.monotonic() + _LOOK_S_MAX
        while lock is None and plan.is_named and time.monotonic() < deadline:
            time.sleep(_LOOK_INTERVAL_S)
            lock = _try_lock(folder)
        if lock is not None:
            locks.callback(os.close, lock)
            taken.append(folder)
            if len(taken) == plan.groups:
                return taken
        elif plan.is_named:
            raise UserError(
                f"--disk-tier: {folder} is in use by {_holder(folder)}; give each server a folder of its own, or "
                "stop the other one"
            )
    raise OSError(None, f"all of its first {plan.groups + _GROUPS_MAX} folders are in use")


class _Unused(NamedTuple):
    """A group folder that no server uses."""

    last_use: float
    folder: Path
    used: int
    """Size in bytes of the folder's files on the disk."""


@dataclass(frozen=True)
class _Division:
    """The division of the disk between this server and unused folders."""

    wanted: int
    """Bytes that this server's workers should have together."""
    available: int
    """Bytes that this server's workers can have together, once the superfluous folders are deleted."""
    superfluous: list[_Unused]


def _divide(
    size: int, free: int, left_alone: int, ours: int, unused: list[_Unused], records: int, least: int
) -> _Division:
    """Return how the disk is divided between this server and unused folders.

    Args:
        size: The size in `--disk-tier`; 0 if it was not given.
        free: Free bytes on the disk.
        left_alone: Bytes that stay free.
        ours: Bytes of KV in the folders of this server.
        records: Bytes of all records. The more there are, the less KV there may be, so that a size that fitted
            once still does. They take half of it at most.
        least: Bytes of KV without which a disk tier is of no use to this server.
    """
    present = ours + records + sum(folder.used for folder in unused)
    # The KV that is on disk already counts as free: else the default would shrink with every start.
    size = size or min(DEFAULT_BYTES_MAX, int((free + present) * DEFAULT_SHARE))
    size = max(size - records, size // 2, min(size, least))
    kept, superfluous = 0, []
    for folder in sorted(unused, reverse=True):  # the last used first
        if kept + folder.used <= min(size // 2, size - least):
            kept += folder.used
        else:
            superfluous.append(folder)
    available = free + ours + sum(folder.used for folder in superfluous) - left_alone
    return _Division(size - kept, available, superfluous)


def _bound(plan: DiskPlan, found: DiskFolders) -> None:
    """Decide how much the workers may use, and delete the KV that there is no room for.

    Raises:
        UserError: There is less room than was asked for.
    """
    ours = sum(_used_bytes(folder) for folder in found.groups)
    unused = _unused_groups(plan.base, found.groups)
    disk = shutil.disk_usage(plan.base)
    left_alone = min(FREE_BYTES_MIN, disk.total // _FREE_SHARE)
    size = plan.option.size_bytes if plan.option is not None else 0
    records = sum(_used_bytes(Path(folder)) for folder, _, _ in os.walk(plan.base / RECORDS_NAME))
    division = _divide(size, disk.free, left_alone, ours, unused, records, _least_bytes(plan))
    if size and division.available < division.wanted:
        share = (
            f", of which this server gets {format_bytes(division.wanted)}"
            if size - division.wanted >= size // 100
            else ""
        )
        raise UserError(
            f"--disk-tier asks for {format_bytes(size)} in {plan.base}{share}, but there is room for "
            f"{format_bytes(max(0, division.available))}: {format_bytes(disk.free)} are free, its own KV has "
            f"{format_bytes(ours)} of the rest, and {format_bytes(left_alone)} are left alone; give a "
            "smaller SIZE or another PATH, or make room"
        )
    total, least = min(division.wanted, division.available), _least_bytes(plan)
    if total < least:
        found.groups = []
        found.warnings.append(
            f"No disk tier: it needs {format_bytes(least)}, and may have {format_bytes(max(0, total))} of the "
            f"{format_bytes(disk.free)} that are free in {plan.base}."
        )
        return
    for folder in division.superfluous:
        found.warnings.extend(_deleted(folder))
        total -= _used_bytes(folder.folder) if folder.folder.exists() else 0
    found.rank_bytes = _rank_bytes(plan, max(0, total))


def _deleted(unused: _Unused) -> list[str]:
    """Delete the KV in a folder, and return sentences for the user about it."""
    if not _remove_group(unused.folder):
        return []  # in use by now
    said = [
        f"To make room, {format_bytes(unused.used)} of another configuration's KV were deleted: {unused.folder}."
    ]
    if unused.folder.exists() and any(_INDEX.fullmatch(name) for name in os.listdir(unused.folder)):
        said.append(f"Sessions and schemas of an early version are still in {unused.folder}.")
    return said


def _rank_bytes(plan: DiskPlan, total: int) -> int:
    return (total - total // _INDEX_SHARE) // (plan.groups * plan.tp)


def _least_bytes(plan: DiskPlan) -> int:
    """Return the bytes of two chunks with their headers, the header of the file, and the index's part."""
    page = 4096
    slab = 2 * (plan.chunk_bytes + 2 * page) + 2 * page
    return slab * plan.groups * plan.tp * (_INDEX_SHARE + 1) // _INDEX_SHARE


def _unused_groups(base: Path, taken: list[Path]) -> list[_Unused]:
    """Return the group folders below the base that no server uses."""
    unused = []
    for parent in base.iterdir():
        if not _FINGERPRINT.fullmatch(parent.name) or parent.is_symlink() or not (parent / _MARK).is_file():
            continue
        with contextlib.suppress(FileNotFoundError):  # another server deletes, too
            for folder in sorted(parent.iterdir()):
                if folder in taken or folder.is_symlink() or not _GROUP.fullmatch(folder.name):
                    continue
                lock = _try_lock(folder, claims=False)
                if lock is not None:
                    unused.append(_Unused(_last_use(folder), folder, _used_bytes(folder)))
                    os.close(lock)
    return unused


def _remove_group(folder: Path) -> bool:
    """Delete the files of servers in a group folder, except an index with records; then delete the folders that
    are empty.

    Returns:
        False if a server uses the folder by now.
    """
    lock = _try_lock(folder, claims=False)
    if lock is None:
        return False
    try:
        names = [name for name in os.listdir(folder) if _OURS.fullmatch(name) and not _has_records(folder, name)]
        for name in sorted(names, key=lambda name: name == _LOCK):  # the lock last
            (folder / name).unlink(
                missing_ok=True
            )  # SQLite may have removed a log when `_has_records` opened the database
        with contextlib.suppress(OSError):  # the user has other files in it
            folder.rmdir()
            if os.listdir(folder.parent) == [_MARK]:
                (folder.parent / _MARK).unlink()
                folder.parent.rmdir()
    finally:
        os.close(lock)
    return True


def indexes_with_records(base: Path, taken: list[Path]) -> list[Path]:
    """Return the indexes below the base that hold records, as those of early versions did.

    Args:
        taken: The group folders of this server. Those of other servers are passed over.
    """
    folders = [*taken, *(unused.folder for unused in _unused_groups(base, taken))]
    indexes = [folder / INDEX_NAME for folder in folders]
    return [index for index in indexes if index.is_file() and _holds_records(index)]


def _has_records(folder: Path, name: str) -> bool:
    """Return whether a file is, or belongs to, an index that holds records, or may hold some."""
    index = _INDEX.fullmatch(name)
    return index is not None and (folder / index[1]).is_file() and _holds_records(folder / index[1]) is not False


def _holds_records(index: Path) -> bool | None:
    """Return whether an index holds records; None: that cannot be found out."""
    try:
        with contextlib.closing(sqlite3.connect(index)) as connection:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            tables = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'records'").fetchone()
            return bool(tables and connection.execute("SELECT 1 FROM records LIMIT 1").fetchone())
    except (sqlite3.Error, UnicodeDecodeError):  # the second: a message that quotes bytes which are no text
        return None


def _try_lock(folder: Path, *, claims: bool = True) -> int | None:
    """Return the descriptor of a folder's lock, for the caller to close; None if another process holds the lock.

    Args:
        folder: A group's folder.
        claims: Whether to make the folder, and to write into the lock which process uses it.
    """
    while True:
        if claims:
            _make_private(folder)
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(folder / _LOCK)):
                break
        os.close(lock)  # another server deleted the file between the two calls, so this lock protects nothing
    if claims:
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps({"process": os.getpid()}).encode(), 0)
    return lock


def _holder(folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return f"process {int(json.loads((folder / _LOCK).read_bytes())['process'])}"
    return "another process"


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _last_use(folder: Path) -> float:
    return max((entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(folder)), default=0.0)


def _used_bytes(folder: Path) -> int:
    """Return the bytes that a folder's files take on the disk: less than their length for slabs with holes."""
    used = 0
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            used += entry.stat(follow_symlinks=False).st_blocks * 512
    return used
