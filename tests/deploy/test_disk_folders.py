"""The disk tier's folders: private, bounded and never shared, and other files are not touched."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trunkline.deploy.config.disk_folders import DiskPlan, add_groups, disk_folders, plan_disk
from trunkline.deploy.config.option_values import DiskOption
from trunkline.deploy.errors import UserError

MINE, OTHER, THIRD = "a" * 32, "b" * 32, "c" * 32
MIB = 1 << 20


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free bytes on the disk, as far as the launcher can see; to be changed by tests."""
    free = {"free": 100 << 30, "total": 200 << 30}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), free)())
    return free


def plan(
    base: Path, *, fingerprint: str = MINE, groups: int = 1, size: int = 64 * MIB, named: bool = True
) -> DiskPlan:
    made = plan_disk(DiskOption(size, base if named else None), fingerprint, groups, 2, 4096)
    assert made is not None
    return made


def fill(folder: Path, used_bytes: int, when: float) -> None:
    """A slab of so many bytes, last written at `when`."""
    (folder / "rank-0.slab").write_bytes(b"\1" * (used_bytes))
    for entry in folder.iterdir():
        os.utime(entry, (when, when))


def leave(base: Path, fingerprint: str, used_bytes: int, when: float, groups: int = 1) -> list[Path]:
    """What a server leaves that used these folders."""
    with disk_folders(plan(base, fingerprint=fingerprint, groups=groups, size=1 << 36)) as disk:
        pass
    for folder in disk.groups:
        fill(folder, used_bytes, when)
    return disk.groups


def test_folders_are_private_and_found_again(base: Path) -> None:
    with disk_folders(plan(base, groups=2)) as disk:
        assert disk.groups == [base / MINE / "group-0", base / MINE / "group-1"]
        assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in (base, base / MINE, *disk.groups))
        assert disk.warnings == []
        assert 15 * MIB < disk.rank_bytes <= 16 * MIB  # a quarter of it, less a bit for the index
    with disk_folders(plan(base, groups=2)) as again:
        assert again.groups == disk.groups


def test_further_groups_get_folders_as_large_as_the_first(base: Path, room: dict[str, int]) -> None:
    made = plan(base)
    with disk_folders(made) as disk:
        assert add_groups(made, disk, 3) == ""
        assert [disk.folder_of(group) for group in range(3)] == [base / MINE / f"group-{n}" for n in range(3)]
        with pytest.raises(UserError, match="in use by process"):
            disk_folders(plan(base, groups=3)).__enter__()
        room["free"] = 1 << 30
        assert "No disk tier for group 3: it needs 64.0 MiB" in add_groups(made, disk, 4)
        assert disk.folder_of(3) is None
    room["free"] = 100 << 30
    with disk_folders(plan(base, groups=3)) as again:
        assert again.groups == disk.groups


def test_a_named_folder_is_never_shared(base: Path) -> None:
    with disk_folders(plan(base)):
        with pytest.raises(UserError, match=rf"group-0 is in use by process {os.getpid()}; give each server"):
            disk_folders(plan(base)).__enter__()
        with disk_folders(plan(base, fingerprint=OTHER)) as other:  # another model is no conflict
            assert other.groups
    with disk_folders(plan(base)) as disk:
        assert disk.groups


def test_in_the_cache_folder_servers_step_aside(cache_home: Path) -> None:
    folder = cache_home / "trunkline" / "kv" / MINE
    first = disk_folders(plan(cache_home, named=False))
    with disk_folders(plan(cache_home, named=False, groups=2)) as second:
        assert second.groups == [folder / "group-0", folder / "group-1"]
        with first as disk:
            assert disk.groups == [folder / "group-2"]


@pytest.fixture
def living(base: Path) -> Iterator[Path]:
    """A folder that another process uses."""
    code = (
        "import sys; from pathlib import Path; from trunkline.deploy.config.disk_folders import *; "
        "from trunkline.deploy.config.option_values import DiskOption\n"
        f"with disk_folders(plan_disk(DiskOption(1 << 30, Path({str(base)!r})), {OTHER!r}, 1, 2, 4096)) as disk:\n"
        "    print(disk.groups[0], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        yield Path(other.stdout.readline().decode().strip())
        other.kill()


@pytest.mark.processes
def test_a_lock_ends_with_its_process_however_that_ends(base: Path, living: Path) -> None:
    with pytest.raises(UserError, match="in use by process"):
        disk_folders(plan(base, fingerprint=OTHER)).__enter__()
    fill(living, 20 * MIB, when=1000.0)
    with disk_folders(plan(base, size=8 * MIB)) as disk:
        assert disk.rank_bytes > 0
        assert (living / "rank-0.slab").stat().st_size == 20 * MIB, "what another server uses is left alone"
    holder = int(living.joinpath("lock").read_text().split(":")[1].strip(" }"))
    os.kill(holder, 9)
    os.waitpid(holder, 0)
    with disk_folders(plan(base, fingerprint=OTHER)) as disk:
        assert disk.groups == [living]


def test_a_server_that_only_looks_keeps_no_other_from_its_folder(base: Path) -> None:
    """One with another configuration, which starts at the same time and looks what it may delete."""
    (folder,) = leave(base, MINE, MIB, when=1000.0)
    looks = os.open(folder / "lock", os.O_RDWR)
    fcntl.flock(looks, fcntl.LOCK_EX)
    ending = threading.Timer(0.1, os.close, [looks])
    ending.start()
    with disk_folders(plan(base)) as disk:
        assert disk.groups == [folder]
    ending.join()


def test_unused_folders_keep_half_of_the_size_the_last_used_first(base: Path) -> None:
    (oldest,) = leave(base, OTHER, 20 * MIB, when=1000.0)
    (newest,) = leave(base, THIRD, 20 * MIB, when=2000.0)
    with disk_folders(plan(base, size=64 * MIB)) as disk:
        assert not oldest.parent.exists()
        assert newest.exists()
        total = disk.rank_bytes * 2
        assert 42 * MIB < total <= 44 * MIB  # with what was left, never more than was allowed
    with disk_folders(plan(base, size=30 * MIB)):
        assert not newest.parent.exists()


def put_records(base: Path, used_bytes: int) -> Path:
    """A file of records of this size on the disk."""
    path = base / "records" / "records.sqlite"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\1" * used_bytes)
    return path


def test_no_record_is_ever_deleted(base: Path) -> None:
    """Neither those beside the folders nor those that early versions had inside of the index."""
    groups = leave(base, OTHER, 20 * MIB, when=1000.0, groups=2)
    files = [put_records(base, 8), base / "records" / OTHER / "group-0.sqlite"]
    files[1].parent.mkdir()
    files[1].write_bytes(b"sessions")
    for group, rows in zip(groups, (1, 0), strict=True):
        with contextlib.closing(sqlite3.connect(group / "index.sqlite")) as old:
            old.execute("PRAGMA journal_mode = WAL")
            old.execute("CREATE TABLE records (kind, id)")
            old.executemany("INSERT INTO records VALUES ('session', ?)", [["a"]] * rows)
            old.commit()
            shutil.copy(group / "index.sqlite", group / "copy")
            shutil.copy(group / "index.sqlite-wal", group / "copy-wal")
        for end in ("", "-wal"):  # as a kill leaves them
            (group / f"copy{end}").rename(group / f"index.sqlite{end}")
    (damaged,) = leave(base, THIRD, 20 * MIB, when=1000.0)
    (damaged / "index.sqlite").write_bytes(b"who knows what was in it" * 1000)
    with disk_folders(plan(base, size=8 * MIB)) as mine:
        said = "\n".join(mine.warnings)
    assert [path.read_bytes() for path in files] == [b"\1" * 8, b"sessions"]
    with contextlib.closing(sqlite3.connect(groups[0] / "index.sqlite")) as old:
        assert old.execute("SELECT id FROM records").fetchall() == [("a",)]
    assert not (groups[0] / "rank-0.slab").exists()
    assert not groups[1].exists()
    assert (damaged / "index.sqlite").exists()
    for folder in (*groups, damaged):
        assert f"another configuration's KV were deleted: {folder}." in said
    assert f"Sessions and schemas of an early version are still in {groups[0]}." in said
    assert f"still in {groups[1]}" not in said


def test_an_index_whose_schema_is_no_text_is_kept(base: Path) -> None:
    """SQLite's message quotes what is damaged, which Python may not be able to read."""
    (folder,) = leave(base, OTHER, 20 * MIB, when=1000.0)
    index = folder / "index.sqlite"
    index.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(index)) as old:
        old.execute("CREATE TABLE records (kind, id)")
    index.write_bytes(index.read_bytes().replace(b"CREATE TABLE records", b"CREATE TAB\xff\xfe records"))
    with disk_folders(plan(base, size=8 * MIB)):
        assert not (folder / "rank-0.slab").exists()
    assert index.exists()


def test_what_fitted_once_still_fits_when_records_have_grown(base: Path, room: dict[str, int]) -> None:
    room["free"] = room["total"] = 64 * MIB
    with disk_folders(plan(base, size=62 * MIB)) as disk:
        before = disk.rank_bytes
    put_records(base, 20 * MIB)
    room["free"] -= 20 * MIB
    with disk_folders(plan(base, size=62 * MIB)) as disk:
        assert 19 * MIB < 2 * (before - disk.rank_bytes) < 21 * MIB
    put_records(base, 40 * MIB)
    room["free"] -= 20 * MIB
    with pytest.raises(UserError, match="of which this server gets 31 MiB, but there is room for"):
        disk_folders(plan(base, size=62 * MIB)).__enter__()
    put_records(base, MIB // 8)  # not worth a word
    with pytest.raises(UserError, match=f"asks for 62 MiB in {base}, but there is room for"):
        disk_folders(plan(base, size=62 * MIB)).__enter__()


def test_the_least_size_that_is_taken_is_had(base: Path) -> None:
    """Whatever others left, and however many records there are."""
    with pytest.raises(UserError, match="need 65 KiB at least"):
        plan(base, size=64 << 10)
    (other,) = leave(base, OTHER, 24 << 10, when=1000.0)
    with disk_folders(plan(base, size=MIB)):
        put_records(base, MIB)
    with disk_folders(plan(base, size=65 << 10)) as disk:
        assert disk.rank_bytes >= 4096 + 2 * (4096 + 4096)  # the slab's header, two chunks with their records
    assert not other.exists()


def test_folders_of_former_groups_count_too(base: Path) -> None:
    groups = leave(base, MINE, 20 * MIB, when=1000.0, groups=3)
    with disk_folders(plan(base, size=64 * MIB)) as disk:
        assert disk.groups == groups[:1]
        kept = [folder for folder in groups if folder.exists()]
        assert len(kept) == 2
        assert disk.rank_bytes * 2 <= 44 * MIB


def test_only_our_own_files_are_deleted(base: Path) -> None:
    (group,) = leave(base, OTHER, 20 * MIB, when=1000.0)
    (group / "thesis.tex").write_text("years of work")
    unmarked = base / THIRD / "group-0"
    unmarked.mkdir(parents=True)
    (unmarked / "rank-0.slab").write_bytes(bytes(20 * MIB))
    (base / "photos").mkdir()
    elsewhere = base.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rank-0.slab").write_bytes(bytes(20 * MIB))
    (base / OTHER / "group-7").symlink_to(elsewhere)
    with disk_folders(plan(base, size=8 * MIB)):
        assert (group / "thesis.tex").exists()
        assert not (group / "rank-0.slab").exists()
        assert (unmarked / "rank-0.slab").exists()
        assert (base / "photos").exists()
        assert (elsewhere / "rank-0.slab").exists()


def test_a_disk_that_is_nearly_full(base: Path, room: dict[str, int]) -> None:
    (other,) = leave(base, OTHER, 20 * MIB, when=1000.0)
    room["free"] = (1 << 30) - 10 * MIB
    with pytest.raises(UserError) as caught:
        disk_folders(plan(base, size=16 * MIB)).__enter__()
    assert str(caught.value) == (
        f"--disk-tier asks for 16 MiB in {base}, but there is room for 10.0 MiB: 1014 MiB are free, its own "
        "KV has 4 KiB of the rest, and 1 GiB are left alone; give a smaller SIZE or another PATH, or make room"
    )
    assert (other / "rank-0.slab").exists()  # nothing is deleted for what is refused
    with disk_folders(plan(base, size=9 * MIB)) as disk:
        assert disk.groups
    room["free"] += 20 * MIB
    fill(disk.groups[0], 8 * MIB, when=1000.0)
    room["free"] -= 8 * MIB
    with disk_folders(plan(base, size=9 * MIB)) as disk:  # what it holds already is its own
        assert disk.rank_bytes * 2 > 8 * MIB
    room["free"] = 0
    with pytest.raises(UserError, match=r"room for 0 B: 0 B are free, its own KV has 8.0 MiB of the rest"):
        disk_folders(plan(base, size=64 * MIB)).__enter__()


def test_a_small_disk_need_not_leave_a_gibibyte_alone(base: Path, room: dict[str, int]) -> None:
    room["free"] = room["total"] = 64 * MIB
    with disk_folders(plan(base, size=63 * MIB)) as disk:
        assert disk.rank_bytes * 2 > 61 * MIB
    with pytest.raises(UserError, match=r"room for 63.0 MiB: 64 MiB are free, .* and 1 MiB are left alone"):
        disk_folders(plan(base, size=64 * MIB)).__enter__()


def test_without_room_there_is_no_tier_by_default(cache_home: Path, room: dict[str, int]) -> None:
    room["free"] = 1 << 20
    with disk_folders(plan_disk(None, MINE, 1, 2, 4096)) as disk:
        folder = cache_home / "trunkline" / "kv"
        assert disk.groups == []
        what = f"it needs 65 KiB, and may have 0 B of the 1 MiB that are free in {folder}."
        assert disk.warnings == [f"No disk tier: {what}"]


def test_the_default_is_a_share_of_the_free_space(cache_home: Path, room: dict[str, int]) -> None:
    sizes = []
    for free in (1 << 40, 40 << 30):
        room["free"] = free
        default = plan_disk(None, MINE, 1, 1, 4096)
        with disk_folders(default) as disk:
            sizes.append(disk.rank_bytes)
    assert sizes == pytest.approx([(10 << 30) * 63 / 64, (4 << 30) * 63 / 64], abs=4096)
    fill(cache_home / "trunkline" / "kv" / MINE / "group-0", 32 * MIB, when=1000.0)
    room["free"] -= (cache_home / "trunkline" / "kv" / MINE / "group-0" / "rank-0.slab").stat().st_blocks * 512
    with disk_folders(default) as disk:
        assert abs(disk.rank_bytes - sizes[1]) < MIB  # it does not shrink by what it has written


def test_no_place_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match=r"cannot be used for KV: Not a directory; name another folder"):
        disk_folders(plan(blocked / "kv")).__enter__()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with disk_folders(plan_disk(None, MINE, 1, 2, 4096)) as disk:  # nobody asked for it
        assert disk.groups == []
        assert "No disk tier: " in disk.warnings[0]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    assert plan_disk(None, MINE, 1, 2, 4096) is None
    with pytest.raises(UserError, match="no home folder"):
        plan_disk(DiskOption(1 << 30), MINE, 1, 2, 4096)


def test_a_size_that_holds_nothing_is_refused(base: Path) -> None:
    with pytest.raises(UserError, match=r"--disk-tier is 1 MiB; 4 workers with two chunks of 1 MiB each need"):
        plan_disk(DiskOption(MIB, base), MINE, 2, 2, MIB)
    assert plan_disk(DiskOption(0), MINE, 2, 2, MIB) is None


def test_a_lock_that_was_deleted_under_us_is_none(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server removes the folder between our opening of the lock and our locking it."""
    folder = base / MINE / "group-0"
    folder.mkdir(parents=True)
    real = fcntl.flock
    calls: list[int] = []

    def flock(lock: int, how: int) -> None:
        if not calls:
            shutil.rmtree(folder)
        calls.append(how)
        real(lock, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with disk_folders(plan(base)) as disk:
        assert (disk.groups[0] / "lock").exists()
        assert len(calls) >= 2
