"""Read the dashboard's files from the package and keep them in memory with their digests. Read no others."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = Path(__file__).parent / "static"
PAGE: Final = "index.html"
FILES_MAX: Final = 256
"""Largest number of files kept in memory. The dashboard has far fewer."""
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".md": "text/plain; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
"""Media types by suffix. Files with another suffix are not served."""
_TEXT: Final = ("text/", "application/", "image/svg")
_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_VERSIONED: Final = re.compile(r"[.-](?:v?\d+\.\d+\.\d+|[0-9a-f]{8,64})[.-]")
_COMPRESSED_BYTES_MIN: Final = 512


class Asset(NamedTuple):
    """A file as it is sent."""

    content: bytes
    compressed: bytes | None
    """The content compressed with gzip; None if that is not worth it."""
    media_type: str
    etag: str
    cache_control: str
    stamp: tuple[int, int]
    """Time of change in nanoseconds, and size in bytes, of the file when it was read."""


class Assets:
    """The files of a folder, found by their paths below it (with slashes)."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._read: dict[str, Asset] = {}

    def find(self, name: str) -> Asset | None:
        """Return a file, read again if it has changed; None if there is none, or browsers need no such file."""
        parts = name.split("/")
        media_type = _TYPES.get(Path(name).suffix)
        if media_type is None or len(parts) > 4 or not all(_PART.fullmatch(part) for part in parts):
            return None
        path = self._folder.joinpath(*parts)
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            known = self._read.get(name)
            if known is not None and known.stamp == stamp:
                return known
            content = path.read_bytes()
        except OSError:
            return None
        if len(self._read) >= FILES_MAX:
            self._read.clear()
        asset = self._read[name] = _asset(name, content, media_type, stamp)
        return asset


def _asset(name: str, content: bytes, media_type: str, stamp: tuple[int, int]) -> Asset:
    compressed = None
    if len(content) >= _COMPRESSED_BYTES_MIN and media_type.startswith(_TEXT):
        compressed = gzip.compress(content, mtime=0)
    # A file whose name changes with its content may be kept for ever. For others the browser asks again each time,
    # and is mostly told that the file has not changed.
    is_versioned = _VERSIONED.search(name) is not None
    return Asset(
        content,
        compressed,
        media_type,
        f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"',
        "public, max-age=31536000, immutable" if is_versioned else "no-cache",
        stamp,
    )


def is_current(asset: Asset, if_none_match: str) -> bool:
    """Return whether a browser that sends this `If-None-Match` header has the present file."""
    tags = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return asset.etag in tags or "*" in tags
