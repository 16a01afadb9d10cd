"""Where records are (sessions, schemas, kept answers), and how files of earlier versions are taken over.

    PATH/records/                        0700; PATH is the disk tier's folder (`disk_folders.py`)
      README
      records.sqlite                     for all servers with this PATH, whatever they serve
      lock                               held by flock while a server takes over old files
      <fingerprint>/group-0.sqlite       of an earlier version: one file per group of a configuration

Records depend on no configuration but the tokenizer's, so all servers of a host share one file: the store lets
several processes use it. A server whose records have no lasting place keeps them in its run folder, so that a
router process that dies loses none.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trunkline.deploy.config.disk_folders import RECORDS_NAME, base_of, indexes_with_records
from trunkline.deploy.config.option_values import SQLITE, redacted
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.kvstore.records import StoreAwayError, open_records, problem_of_records
from trunkline.kvstore.records.old_files import import_old_files

FILE_NAME: Final = "records.sqlite"
IN_MEMORY: Final = f"{SQLITE}:memory:"
_NOTE: Final = "Stored sessions and schemas. They exist nowhere else: what is deleted here is lost.\n"
_LOCK: Final = "lock"
_MAGIC: Final = b"SQLite format 3\0"
"""The first bytes of a SQLite file."""
PATIENCE_S: Final = 10.0
"""Seconds for which the store is waited for at the start, if there are old files to take over."""

Say = Callable[[str, str], None]
"""Shows a sentence to the person who watches; the second argument is a logging level's name."""


@dataclass(frozen=True)
class RecordsPlan:
    """The place of the records, before any folder is touched."""

    url: str
    """URL of the store; "": a file in the run folder, which ends with the server."""
    base: Path | None = None
    """The folder in whose subfolder `records` files are, today's or those of earlier versions; None: there is
    none."""
    is_given: bool = False
    """Whether the user named the store."""

    @property
    def folder(self) -> Path | None:
        """The folder of the records' file; None: they are on a server, or in the run folder."""
        if not self.url.startswith(SQLITE) or self.url == IN_MEMORY:
            return None
        return Path(self.url.removeprefix(SQLITE)).parent

    def url_in(self, run_folder: Path) -> str:
        """Return the URL that routers are told."""
        return self.url or f"{SQLITE}{run_folder / FILE_NAME}"

    @property
    def described(self) -> str:
        """The place in words, without a password."""
        if self.url == "":
            return f"kept only while the server runs; --records {SQLITE}PATH keeps them"
        return "kept only while the server runs" if self.url == IN_MEMORY else redacted(self.url)


def records_beside(remote_tier: str) -> str:
    """Return the URL of a remote tier if its server can keep records, too, as Redis can; else ""."""
    return "" if problem_of_records(remote_tier) else remote_tier


def plan_records(settings: ServeSettings) -> RecordsPlan:
    """Return the place of the records: what `--records` says, else the remote tier's server if that can keep
    records, else a file beside the disk tier.

    Raises:
        UserError: Each of several routers would have records of its own.
    """
    base = base_of(settings.disk_tier)
    if settings.records == IN_MEMORY and settings.routers > 1:
        raise UserError(
            f"--records is {IN_MEMORY}, which each process has for itself, but --routers is {settings.routers}; "
            f"write {SQLITE}PATH, or give one router"
        )
    if settings.records.startswith(SQLITE) and settings.records != IN_MEMORY:
        path = os.path.abspath(os.path.expanduser(settings.records.removeprefix(SQLITE)))
        return RecordsPlan(f"{SQLITE}{path}", base, is_given=True)
    url = settings.records or records_beside(settings.remote_tier)
    if url:
        return RecordsPlan(url, base, is_given=bool(settings.records))
    return RecordsPlan(f"{SQLITE}{base / RECORDS_NAME / FILE_NAME}" if base is not None else "", base)


def _check_file(path: str) -> None:
    """Check that the file that the user named can be one of records; it is made if it does not exist.

    A file that has been one is not looked into: if it is damaged, the store saves what it can.

    Raises:
        OSError: It cannot be written.
        UserError: It is something else, which the store would put aside as damaged.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb") as file:
        start = file.read(len(_MAGIC))
    if start not in (b"", _MAGIC) and not os.path.exists(f"{path}.lock"):
        raise UserError(f"--records: {path} holds something else than records; name another file")


def prepare_records(plan: RecordsPlan, taken: list[Path], say: Say) -> RecordsPlan:
    """Make the folder of the records' file, and take over files of earlier versions.

    Args:
        taken: The group folders of this server, which it has locked.

    Returns:
        The plan, or another one if there is no room where the plan's file should be.

    Raises:
        UserError: The file that the user named cannot be there.
    """
    if plan.folder is not None:
        try:
            plan.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if plan.is_given:
                _check_file(plan.url.removeprefix(SQLITE))
            else:
                (plan.folder / "README").write_text(_NOTE)
        except OSError as error:
            reason = f"{error.filename or plan.folder} cannot be used: {error.strerror or error}"
            if plan.is_given:
                raise UserError(f"--records: {reason}; name another file") from error
            say(f"Sessions and schemas are kept only while this server runs: {reason}.", "warning")
            return replace(plan, url="")
    if plan.url and plan.url != IN_MEMORY and plan.base is not None:
        try:
            take_over(plan.url, plan.base, taken, say)
        except FileNotFoundError:  # there is no folder, so there are no old files
            pass
        except StoreAwayError as error:
            text = f"{redacted(plan.url)} does not answer: {error}"
            say(f"Sessions and schemas of earlier versions stay in {plan.base}; {text}.", "warning")
    return plan


def take_over(url: str, base: Path, taken: list[Path], say: Say) -> None:
    """Put the records of earlier versions into the store. What cannot be put there stays as it is, and is named.

    Args:
        base: The folder of a disk tier.
        taken: The group folders of this server.

    Raises:
        StoreAwayError: The store does not answer.
        FileNotFoundError: There is no such folder.
    """
    if not old_files(base, taken):
        return
    with _locked(base / RECORDS_NAME):
        if paths := old_files(base, taken):  # another server may have had them by now
            asyncio.run(_imported(url, paths, say))


def old_files(base: Path, taken: list[Path]) -> list[Path]:
    """Return the files of earlier versions in which records are.

    Args:
        taken: The group folders of this server. Those of other servers are passed over.
    """
    files = sorted((base / RECORDS_NAME).glob("*/group-*.sqlite"))
    return [*files, *indexes_with_records(base, taken)]


async def _imported(url: str, paths: list[Path], say: Say) -> None:
    store = open_records(url, patience_s=PATIENCE_S)
    try:
        await import_old_files(store, paths, lambda text: say(text, "info"))
    finally:
        await store.close()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other server takes over old files."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
