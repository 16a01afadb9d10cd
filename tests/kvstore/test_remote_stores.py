"""Kinds of stores from other packages: found by their entry points, by the launcher and by workers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trunkline.deploy.config.option_values import check_records_url, check_remote_url
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.kvstore.chunk_format import kv_format
from trunkline.kvstore.chunks import NAME_BYTES, ChunkName, SlotId
from trunkline.kvstore.remote_stores import REMOTE_STORES, RemoteStore
from trunkline.kvstore.shards import HeadShard
from trunkline.kvstore.tier import SlotKey
from trunkline.worker.errors import WorkerConfigError
from trunkline.worker.tiers.remote_tier import Part, open_remote_tier

CODE = '''
"""A store in a folder."""
from pathlib import Path

from trunkline.kvstore.remote_stores import RemoteStore


class FolderStore:
    def __init__(self, url):
        self.folder = Path(url.removeprefix("folder://"))

    def write(self, values, kept_s):
        for place, value in values:
            path = self.folder / place.chunk / place.part
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(value)

    def read(self, places, kept_s):
        paths = [self.folder / place.chunk / place.part for place in places]
        return [path.read_bytes() if path.exists() else None for path in paths]

    def count(self, chunks, parts, kept_s):
        for index, chunk in enumerate(chunks):
            if not set(parts) <= set(self.parts(chunk)):
                return index
        return len(chunks)

    def parts(self, chunk):
        folder = self.folder / chunk
        return [path.name for path in folder.iterdir()] if folder.exists() else []

    def delete(self, chunks):
        for chunk in chunks:
            for part in self.parts(chunk):
                (self.folder / chunk / part).unlink()

    def close(self):
        pass


def problem(parts):
    return "write folder:///PATH" if parts.hostname else ""


STORE = RemoteStore("folder:///PATH", "folder_of_kv:FolderStore", problem)
WRONG = "no store"
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package as pip installs it: a module, and the metadata that name its entry points."""
    site = tmp_path / "site"
    metadata = site / "folder_of_kv-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "folder_of_kv.py").write_text(CODE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: folder-of-kv\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[trunkline.tiers]\nfolder = folder_of_kv:STORE\nwrong = folder_of_kv:WRONG\n"
        "absent = folder_of_kv:NOTHING\n"
    )
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    yield tmp_path / "kv"
    sys.modules.pop("folder_of_kv", None)


def test_a_store_of_another_package_serves_kv(package: Path) -> None:
    url = f"folder://{package}"
    ServeSettings(remote_tier=url).validate()
    halves = [HeadShard(4, rank, 2) for rank in range(2)]
    part = kv_format((3, 2, 16, 8), "int8")
    size = part.chunk_bytes
    key = SlotKey(SlotId(-1), ChunkName(b"n" * NAME_BYTES), 0)
    for rank, half in enumerate(halves):
        tier = open_remote_tier(url, Part(b"model", half, part), 60.0)
        assert tier.present([key.name]) == 0
        tier.write(key, memoryview(bytes([rank]) * size))
        assert tier.present([key.name]) == 1
    whole = open_remote_tier(url, Part(b"model", HeadShard(4), part.with_heads(4)), 60.0)
    into = memoryview(bytearray(2 * size))
    assert whole.read(key, into)
    rows = 2 * 16 * 8
    assert into == (bytes(rows) + b"\1" * rows) * 6
    whole.delete([key.name])
    assert not whole.read(key, into)
    assert [path for path in package.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("folder://here/kv", "write folder:///PATH"),
        ("wrong://x", "its entry point folder_of_kv:WRONG is no RemoteStore"),
        ("absent://x", "its entry point folder_of_kv:NOTHING does not load"),
        ("other://x", r"allowed are redis://.*, s3://BUCKET/PREFIX, .*folder://… \(of folder-of-kv\)"),
    ],
)
def test_wrong_urls_of_other_packages_are_told(package: Path, url: str, message: str) -> None:
    part = Part(b"model", HeadShard(4), kv_format((3, 4, 16, 8), "float32"))
    with pytest.raises(UserError, match=message):
        check_remote_url(url)
    with pytest.raises(WorkerConfigError, match=message):
        open_remote_tier(url, part, 60.0)


def test_records_are_on_servers_that_can_keep_them() -> None:
    for url in ("s3://bucket", "folder:///kv"):
        with pytest.raises(UserError, match=r"allowed are redis://HOST:PORT/DB, .*unix:///PATH\?db=DB$"):
            check_records_url(url)
    check_records_url("redis://localhost:6379/0")


def test_a_client_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore(
        "away://X", "nowhere:at_all", lambda parts: "", needs="no_such_client", extra="trunkline[x]"
    )
    monkeypatch.setitem(REMOTE_STORES, "away", store)
    message = r"away://X needs no_such_client, which is not installed here: pip install 'trunkline\[x\]'"
    with pytest.raises(UserError, match=message):
        check_remote_url("away://host")
    with pytest.raises(WorkerConfigError, match=message):
        open_remote_tier("away://host", Part(b"model", HeadShard(4), kv_format((3, 4, 16, 8), "float32")), 60.0)
