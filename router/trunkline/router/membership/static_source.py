"""The source `static:PATH`: a file that lists the members, for clusters whose launcher knows them.

    {"members": [{"id": "0", "address": "tcp://10.0.0.7:7400", "events": "tcp://10.0.0.7:7401"}]}

The file is read again whenever it has changed. A wrong or missing file is a problem and changes nothing.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Final

import msgspec

from trunkline.router.membership.member import Member, Present, by_id

CHECK_SECONDS: Final = 1.0
"""Time between two checks of whether the file has changed."""
BYTES_MAX: Final = 16 << 20


class _File(msgspec.Struct):
    members: list[Member]


class StaticSource:
    """See `MemberSource`."""

    def __init__(self, path: str | Path, *, check_seconds: float = CHECK_SECONDS) -> None:
        self._path = Path(path)
        self._check_seconds = check_seconds

    async def follow(self) -> AsyncGenerator[Present, None]:
        """See `MemberSource.follow`."""
        present, stamp = Present({}, "the file was not read yet"), ""
        while True:
            found = await asyncio.to_thread(_stamp, self._path)
            if found != stamp:
                stamp = found
                try:
                    now = Present(await asyncio.to_thread(read_members, self._path))
                except (OSError, ValueError) as error:
                    now = Present(present.members, f"{self._path}: {error}")
                if now != present:
                    present = now
                    yield present
            await asyncio.sleep(self._check_seconds)


def read_members(path: Path) -> dict[str, Member]:
    """Return the members that a file lists, by their ids.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is malformed.
    """
    if path.stat().st_size > BYTES_MAX:
        raise ValueError(f"the file is larger than {BYTES_MAX >> 20} MiB")
    return by_id(msgspec.json.decode(path.read_bytes(), type=_File).members)


def encode_members(members: Iterable[Member]) -> bytes:
    """Return the content of a file of members.

    Raises:
        ValueError: two members have the same id, or one is malformed.
    """
    listed = list(by_id(members).values())
    return msgspec.json.format(msgspec.json.encode(_File(listed)), indent=2) + b"\n"


def write_members(path: Path, members: Iterable[Member]) -> None:
    """Write a file of members, for its owner only. A reader sees either the old file or the new one.

    Raises:
        OSError: the file cannot be written.
        ValueError: two members have the same id, or one is malformed.
    """
    text = encode_members(members)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _stamp(path: Path) -> str:
    """Return a string that differs for each version of a file, and for each reason why there is none."""
    try:
        seen = path.stat()
    except OSError as error:
        return str(error)
    return f"{seen.st_dev} {seen.st_ino} {seen.st_size} {seen.st_mtime_ns}"
