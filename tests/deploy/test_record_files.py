"""Where records are, and which files of earlier versions are taken over."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from pathlib import Path

import pytest
from xxhash import xxh3_64_digest

from trunkline.deploy.config.disk_folders import disk_folders, plan_disk
from trunkline.deploy.config.option_values import DiskOption
from trunkline.deploy.config.record_files import RecordsPlan, old_files, plan_records, prepare_records
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.kvstore.records import Record, RecordKey, open_records

MINE, OTHER = "a" * 32, "b" * 32
REDIS = "redis://:secret@127.0.0.1:1/0"


class Said(list[tuple[str, str]]):
    """What a person was shown."""

    def __call__(self, text: str, level: str) -> None:
        self.append((text, level))

    def warnings(self) -> list[str]:
        return [text for text, level in self if level == "warning"]


@pytest.fixture
def said() -> Said:
    return Said()


def planned(base: Path) -> RecordsPlan:
    return plan_records(ServeSettings(disk_tier=DiskOption(1 << 30, base)))


def records(plan: RecordsPlan, kind: str) -> list[Record]:
    async def read() -> list[Record]:
        store = open_records(plan.url)
        try:
            return await store.page(kind, "", headers=True)
        finally:
            await store.close()

    return asyncio.run(read())


def test_the_place(tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = DiskOption(1 << 30, tmp_path / "kv")
    beside = f"sqlite:{tmp_path}/kv/records/records.sqlite"
    default = f"sqlite:{cache_home}/trunkline/kv/records/records.sqlite"
    for settings, url in (
        (ServeSettings(), default),
        (ServeSettings(groups=3, tp=4, dtype="bfloat16", chunk_size=8, quantization="int8"), default),
        (ServeSettings(prefix_cache=False, host_tier_bytes=0), default),
        (ServeSettings(disk_tier=DiskOption(1 << 30)), default),
        (ServeSettings(disk_tier=named), beside),
        (ServeSettings(disk_tier=named, remote_tier=REDIS), REDIS),
        (ServeSettings(disk_tier=named, remote_tier=REDIS, records="redis://x/1"), "redis://x/1"),
        (ServeSettings(remote_tier="s3://bucket", records="redis://x/1"), "redis://x/1"),
        (ServeSettings(disk_tier=named, remote_tier="s3://bucket"), beside),
        (ServeSettings(disk_tier=named, remote_tier=REDIS, records="sqlite:/r.sqlite"), "sqlite:/r.sqlite"),
        (ServeSettings(records="sqlite:r.sqlite"), f"sqlite:{Path.cwd()}/r.sqlite"),
        (ServeSettings(records="sqlite::memory:"), "sqlite::memory:"),
        (ServeSettings(disk_tier=DiskOption(0)), "sqlite:/run/x/records.sqlite"),
    ):
        assert plan_records(settings).url_in(Path("/run/x")) == url
    assert not cache_home.exists(), "planning touches nothing"
    assert plan_records(ServeSettings(remote_tier=REDIS)).described == "redis://:***@127.0.0.1:1/0"
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    described = plan_records(ServeSettings()).described
    assert described == "kept only while the server runs; --records sqlite:PATH keeps them"


def test_the_folder_is_private_and_says_what_is_in_it(tmp_path: Path, said: Said) -> None:
    plan = planned(tmp_path / "kv")
    assert prepare_records(plan, [], said) == plan
    folder = tmp_path / "kv" / "records"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "what is deleted here is lost" in (folder / "README").read_text()
    assert said == []


def test_a_named_file_can_be_written_and_holds_nothing_else(tmp_path: Path, said: Said) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("not to be put aside")
    named = plan_records(ServeSettings(records=f"sqlite:{tmp_path}/new.sqlite"))
    assert prepare_records(named, [], said) == named
    assert prepare_records(named, [], said) == named, "an empty file is none of another program"
    assert (tmp_path / "new.sqlite").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match=r"notes.txt holds something else than records"):
        prepare_records(plan_records(ServeSettings(records=f"sqlite:{notes}")), [], said)
    with pytest.raises(UserError, match=r"Is a directory; name another file"):
        prepare_records(plan_records(ServeSettings(records=f"sqlite:{tmp_path}")), [], said)
    (tmp_path / "notes.txt.lock").touch()
    prepare_records(plan_records(ServeSettings(records=f"sqlite:{notes}")), [], said)
    assert plan_records(ServeSettings(records="sqlite::memory:")).described == "kept only while the server runs"


def test_without_a_folder_they_last_as_long_as_the_server(tmp_path: Path, said: Said) -> None:
    (tmp_path / "file").write_text("")
    plan = prepare_records(planned(tmp_path / "file" / "kv"), [], said)
    assert plan.url_in(Path("/run/x")) == "sqlite:/run/x/records.sqlite"
    assert said.warnings() == [
        f"Sessions and schemas are kept only while this server runs: {tmp_path}/file/kv/records cannot be used: "
        "Not a directory."
    ]
    with pytest.raises(UserError, match=r"--records: .*file cannot be used: .*; name another file"):
        prepare_records(plan_records(ServeSettings(records=f"sqlite:{tmp_path}/file/r.sqlite")), [], said)


def leave_records(path: Path, *ids: str) -> Path:
    """A file as controllers wrote them; sessions are `{"n": ID}`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as old:
        old.execute(
            "CREATE TABLE records (kind TEXT NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, value BLOB "
            "NOT NULL, digest BLOB NOT NULL, created REAL NOT NULL, used REAL NOT NULL, ttl REAL NOT NULL, "
            "PRIMARY KEY (kind, id))"
        )
        old.execute("CREATE TABLE meta (key TEXT, value)")
        old.execute(f"PRAGMA application_id = {0x54726B6C}")
        if path.name == "index.sqlite":
            old.execute("CREATE TABLE chunks (name BLOB)")
        for each in ids:
            value, key = b"value of " + each.encode(), f"session\0{each}\0001\0".encode()
            row = ("session", each, 1, value, xxh3_64_digest(key + value), 1.0, 2.0, 0.0)
            old.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        old.commit()
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder that servers of three versions have used."""
    base = tmp_path / "kv"
    for fingerprint in (MINE, OTHER):
        with disk_folders(plan_disk(DiskOption(1 << 30, base), fingerprint, 2, 1, 4096)) as disk:
            assert len(disk.groups) == 2
    leave_records(base / "records" / MINE / "group-0.sqlite", "a", "b")
    leave_records(base / "records" / OTHER / "group-1.sqlite", "c")
    leave_records(base / OTHER / "group-0" / "index.sqlite", "d")
    leave_records(base / MINE / "group-0" / "index.sqlite")
    return base


def test_files_of_earlier_versions_are_taken_over_once(base: Path, said: Said) -> None:
    plan = planned(base)
    with disk_folders(plan_disk(DiskOption(1 << 30, base), MINE, 1, 1, 4096)) as disk:
        prepare_records(plan, disk.groups, said)
    found = {record.key: record.header for record in records(plan, "session")}
    assert found == {RecordKey("session", "", each): b"value of " + each.encode() for each in "abcd"}
    assert [text for text, _ in said] == [
        f"{count} sessions and schemas were taken over from {base}/{path}."
        for count, path in (
            (2, f"records/{MINE}/group-0.sqlite"),
            (1, f"records/{OTHER}/group-1.sqlite"),
            (1, f"{OTHER}/group-0/index.sqlite"),
        )
    ]
    assert (base / OTHER / "group-0" / "index.sqlite").exists(), "the KV in it is of use still"
    assert old_files(base, []) == []
    said.clear()
    prepare_records(plan, [], said)
    assert said == []


def test_of_a_damaged_file_nothing_is_deleted(base: Path, said: Said) -> None:
    plan = planned(base)
    damaged = base / "records" / OTHER / "group-1.sqlite"
    damaged.write_bytes(b"no database" * 100)
    prepare_records(plan, [], said)
    assert any(str(damaged) in text for text, _ in said)
    assert Path(f"{damaged}.imported").read_bytes() == b"no database" * 100
    assert {record.key.id for record in records(plan, "session")} == {"a", "b", "d"}


def test_a_file_in_use_is_named_and_stays(base: Path, said: Said) -> None:
    """Of a controller of an earlier version, which still runs."""
    used = base / "records" / MINE / "group-0.sqlite"
    with contextlib.closing(sqlite3.connect(used, isolation_level=None)) as controller:
        controller.execute("PRAGMA locking_mode = EXCLUSIVE")
        controller.execute("BEGIN EXCLUSIVE")
        prepare_records(planned(base), [], said)
    assert any("not taken over" in text and str(used) in text for text, _ in said)
    assert old_files(base, []) == [used]
    assert {record.key.id for record in records(planned(base), "session")} == {"c", "d"}


def test_if_the_store_is_away_everything_stays(base: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.deploy.config.record_files.PATIENCE_S", 0.0)
    before = old_files(base, [])
    prepare_records(plan_records(ServeSettings(disk_tier=DiskOption(1 << 30, base), records=REDIS)), [], said)
    assert old_files(base, []) == before
    assert [level for _, level in said] == ["warning"]
    assert "redis://:***@127.0.0.1:1/0 does not answer" in said.warnings()[0]
    assert "secret" not in str(said)


def test_what_another_server_uses_stays_its_own(base: Path, said: Said) -> None:
    with disk_folders(plan_disk(DiskOption(1 << 30, base), OTHER, 1, 1, 4096)):
        prepare_records(planned(base), [], said)
        assert old_files(base, []) == []
    assert old_files(base, []) == [base / OTHER / "group-0" / "index.sqlite"]


def test_of_two_servers_each_file_is_taken_over_by_one(base: Path) -> None:
    both = [Said(), Said()]
    threads = [threading.Thread(target=prepare_records, args=(planned(base), [], said)) for said in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # While one looks whether an index is in use, the other passes it over, and it is left to the one who looked.
    assert sum(len(said) for said in both) == 3
    assert [text for said in both for text in said.warnings()] == []
    assert len(records(planned(base), "session")) == 4
