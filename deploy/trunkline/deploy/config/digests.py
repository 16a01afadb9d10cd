"""Digests of files of any size, remembered as long as the files stay as they are.

KV that outlives its server is found again by what it was computed with, so every byte of a checkpoint counts: a
fine-tuned copy may differ in a few of them. Reading 16 GB takes as long as the disk does, once: the digests stand
in `digests.json` in the user's cache folder, each with its file's size, inode and times. A note that is missing,
damaged or cannot be written costs that time again, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from xxhash import xxh3_128

from trunkline.deploy.config.cache_folder import cache_folder

PIECE_BYTES: Final = 16 << 20
"""Bytes that one thread reads and digests; a file's digest is made of those of its pieces."""
_READ_BYTES: Final = 1 << 20
_THREADS_MAX: Final = 8
_NOTES: Final = "digests.json"
_NOTES_MAX: Final = 4096
_VERSION: Final = 1
_SETTLED_NS: Final = 2_000_000_000
"""A file that changed less than this time ago might change again without its times showing it."""


def digest_files(paths: Sequence[Path], tell: Callable[[int], None] = lambda count: None) -> list[bytes]:
    """Return a digest of each file's content, 16 bytes. It is not cryptographic: it only tells files apart.

    Args:
        paths: Paths of readable files.
        tell: Called with the number of bytes before they are read.

    Raises:
        OSError: A file cannot be read.
    """
    notes = _read_notes()
    known = {path: _noted(notes, path) for path in paths}
    missing = [path for path, digest in known.items() if digest is None]
    if missing:
        tell(sum(path.stat().st_size for path in missing))
        for path in missing:
            stat = _identity(path)
            known[path] = fresh = _digest(path)
            if stat == _identity(path) and time.time_ns() - max(stat[2], stat[3]) > _SETTLED_NS:
                notes.pop(_key(path), None)
                notes[_key(path)] = [*stat, fresh.hex()]
        _write_notes(notes)
    return [digest for path in paths if (digest := known[path]) is not None]


def _digest(path: Path) -> bytes:
    size = path.stat().st_size
    whole = blake2b(size.to_bytes(8, "little"), digest_size=16)
    with path.open("rb") as file, ThreadPoolExecutor(min(_THREADS_MAX, os.cpu_count() or 1)) as pool:
        number = file.fileno()
        for piece in pool.map(lambda start: _digest_piece(number, start), range(0, size, PIECE_BYTES)):
            whole.update(piece)
    return whole.digest()


def _digest_piece(file: int, start: int) -> bytes:
    digest = xxh3_128()
    offset, stop = start, start + PIECE_BYTES
    while offset < stop and (data := os.pread(file, min(_READ_BYTES, stop - offset), offset)):
        digest.update(data)
        offset += len(data)
    return digest.digest()


def _identity(path: Path) -> tuple[int, int, int, int]:
    """Return a file's size, inode and times, which change with its content; the last one even if its date is set
    back."""
    stat = path.stat()
    return stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


def _key(path: Path) -> str:
    return str(path.resolve())


def _noted(notes: dict[str, list[Any]], path: Path) -> bytes | None:
    note = notes.get(_key(path))
    if not isinstance(note, list) or note[:-1] != list(_identity(path)):
        return None
    with contextlib.suppress(ValueError, TypeError):
        digest = bytes.fromhex(note[-1])
        return digest if len(digest) == 16 else None
    return None


def _read_notes() -> dict[str, list[Any]]:
    folder = cache_folder()
    if folder is None:
        return {}
    try:
        content = json.loads((folder / _NOTES).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    files = content.get("files") if isinstance(content, dict) and content.get("version") == _VERSION else None
    return files if isinstance(files, dict) else {}


def _write_notes(notes: dict[str, list[Any]]) -> None:
    """Write the latest `_NOTES_MAX` notes, whole or not at all."""
    folder = cache_folder()
    if folder is None:
        return
    latest = dict(list(notes.items())[-_NOTES_MAX:])
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(prefix=_NOTES, dir=folder)
        try:
            with open(file, "w") as stream:
                json.dump({"version": _VERSION, "files": latest}, stream)
            os.replace(name, folder / _NOTES)
        except BaseException:
            os.unlink(name)
            raise
