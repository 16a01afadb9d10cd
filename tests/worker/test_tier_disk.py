"""The disk tier: a read gives exactly what was written under that name, or nothing, whatever befell the file."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from worker.ranks import RankProcess

from trunkline.kvstore.chunks import NAME_BYTES, ChunkName, SlotId
from trunkline.kvstore.tier import SlotKey, Tier
from trunkline.worker.tiers.disk_tier import PAGE_BYTES, DiskTier, RecordKeeper

KEEPER = RecordKeeper(b"model A, float32", rank=0, tp=1)
SIZES = {"pages": 3 * PAGE_BYTES, "odd": 5000}
"""Of slots: whole pages go straight to the disk, others by way of a buffer."""
SLOT = SIZES["odd"]
Open = Callable[..., DiskTier]


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[Open]:
    made: list[DiskTier] = []

    def open_it(
        slot_bytes: int = SLOT, slots: int = 8, keeper: RecordKeeper = KEEPER, name: str = "slab"
    ) -> DiskTier:
        stride = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        made.append(DiskTier(tmp_path / name, PAGE_BYTES + slots * stride, slot_bytes, keeper))
        return made[-1]

    yield open_it
    for tier in made:
        tier.close()


def key(slot: int, generation: int = 1) -> SlotKey:
    return SlotKey(SlotId(slot), ChunkName(bytes([slot % 256]) * NAME_BYTES), generation)


def content(slot: int, size: int = SLOT) -> bytes:
    return np.random.default_rng(slot).bytes(size)


def fill(tier: Tier, slots: range) -> None:
    for slot in slots:
        tier.write(key(slot), memoryview(content(slot, tier.slot_bytes)))


def found(tier: Tier, wanted: SlotKey) -> bool:
    """Whether the slot gives what was written; anything else but a miss fails."""
    into = memoryview(bytearray(tier.slot_bytes))
    if not tier.read(wanted, into):
        return False
    assert into == content(wanted.slot, tier.slot_bytes)
    return True


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_what_is_written_is_read_also_after_reopening(slab: Open, size: int, tmp_path: Path) -> None:
    tier = slab(size)
    assert tier.capacity_slots == 8
    assert not found(tier, key(3))
    fill(tier, range(0, 8, 2))
    # Sparse: what was never written takes no room.
    assert (tmp_path / "slab").stat().st_mode & 0o777 == 0o600
    for attempt in range(2):
        assert [found(tier, key(slot)) for slot in range(8)] == [slot % 2 == 0 for slot in range(8)], attempt
        tier.close()
        tier = slab(size)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_memory_need_not_be_aligned(slab: Open, size: int) -> None:
    """Direct I/O goes from the host pool's pages; everything else takes the buffer."""
    tier = slab(size)
    memory = bytearray(size + 100)
    for shift in (0, 1, 64):
        data = memoryview(memory)[shift : shift + size]
        data[:] = content(1, size)
        tier.write(key(1, generation=shift), data)
        data[:] = bytes(size)
        assert tier.read(key(1, generation=shift), data)
        assert data == content(1, size)


def test_only_the_key_that_was_written_is_read(slab: Open) -> None:
    tier = slab()
    fill(tier, range(2))
    assert found(tier, key(1))
    assert not found(tier, key(1, generation=2))
    assert not found(tier, key(1)._replace(name=key(0).name))
    tier.write(key(1, generation=2), memoryview(content(1)))
    assert not found(tier, key(1))
    assert found(tier, key(1, generation=2))
    with pytest.raises(OSError, match="slot 8; there are 8"):
        tier.read(key(8), memoryview(bytearray(SLOT)))
    with pytest.raises(OSError, match="3 bytes for a slot of"):
        tier.write(key(1), memoryview(b"abc"))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_any_flipped_bit_is_a_miss(slab: Open, size: int, tmp_path: Path) -> None:
    """In the payload, its name, its generation, its length or its checksum."""
    tier = slab(size)
    fill(tier, range(3))
    stride = (tier.capacity_slots and (-(-size // PAGE_BYTES) + 1)) * PAGE_BYTES
    start = PAGE_BYTES + stride
    record = start + stride - PAGE_BYTES
    rng = np.random.default_rng(5)
    places = [start + int(at) for at in rng.integers(0, size, 10)] + list(range(record, record + 60, 3))
    for place in places:
        with (tmp_path / "slab").open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ (1 << int(rng.integers(8)))]))
        assert not found(tier, key(1)), place
        assert found(tier, key(0))
        assert found(tier, key(2))
        tier.write(key(1), memoryview(content(1, size)))
        assert found(tier, key(1))


def test_a_slot_of_another_place_is_a_miss(slab: Open, tmp_path: Path) -> None:
    """Whole and with a right checksum, but not what was asked for."""
    tier = slab()
    fill(tier, range(2))
    data = (tmp_path / "slab").read_bytes()
    stride = 3 * PAGE_BYTES
    with (tmp_path / "slab").open("r+b") as file:
        file.seek(PAGE_BYTES + stride)
        file.write(data[PAGE_BYTES : PAGE_BYTES + stride])
    assert not found(tier, key(1))
    assert found(tier, key(0))


@pytest.mark.parametrize("keep", [0, 1, 50, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 10, PAGE_BYTES + 13_000])
def test_a_truncated_file_has_only_misses(slab: Open, keep: int, tmp_path: Path) -> None:
    slab_file = tmp_path / "slab"
    tier = slab()
    fill(tier, range(4))
    os.truncate(slab_file, keep)
    present = keep >= PAGE_BYTES + 3 * PAGE_BYTES
    assert [found(tier, key(slot)) for slot in range(4)] == [present, False, False, False]
    tier.close()
    with capture_logs() as logs:
        tier = slab()
    assert len(logs) == (0 < keep < PAGE_BYTES)
    assert [found(tier, key(slot)) for slot in range(4)] == [present, False, False, False]
    fill(tier, range(4))
    assert all(found(tier, key(slot)) for slot in range(4))


def test_data_of_another_configuration_is_not_used(slab: Open, tmp_path: Path) -> None:
    """Each begins anew, with a warning; so the way back has nothing either."""

    other_model, other_rank = RecordKeeper(b"model B, float32", 0, 1), RecordKeeper(b"model A, float32", 1, 2)
    changes: dict[str, dict[str, Any]] = {
        "it is of another model or configuration": {"keeper": other_model},
        "it is of rank 0 of 1": {"keeper": other_rank},
        "its slots have 5000 bytes, not 5001": {"slot_bytes": SLOT + 1},
        "its header is damaged": {},
    }
    for reason, change in changes.items():
        tier = slab()
        fill(tier, range(4))
        tier.close()
        if not change:
            with (tmp_path / "slab").open("r+b") as file:
                file.seek(30)
                file.write(b"\xff")
        with capture_logs() as logs:
            tier = slab(**change)
        assert [entry["reason"] for entry in logs] == [reason]
        assert not any(found(tier, key(slot)) for slot in range(4))
        tier.close()
        tier = slab()
        assert not found(tier, key(0))
        tier.close()


def test_foreign_files_are_kept(slab: Open, tmp_path: Path) -> None:
    """Somebody may have named the wrong file, and another one later."""
    theses = {"slab.foreign": b"the only copy of my thesis\n" * 500, "slab.foreign-2": b"and of yours\n" * 500}
    for thesis in theses.values():
        (tmp_path / "slab").write_bytes(thesis)
        with capture_logs() as logs:
            tier = slab()
        assert [entry["reason"] for entry in logs] == ["it is no slab"]
        fill(tier, range(2))
        tier.close()
    assert {name: (tmp_path / name).read_bytes() for name in theses} == theses
    assert found(slab(), key(1))


def test_fewer_and_more_slots_keep_what_fits(slab: Open, tmp_path: Path) -> None:
    tier = slab(slots=8)
    fill(tier, range(8))
    tier.close()
    tier = slab(slots=5)
    assert (tmp_path / "slab").stat().st_size == PAGE_BYTES + 5 * 3 * PAGE_BYTES
    assert all(found(tier, key(slot)) for slot in range(5))
    tier.close()
    tier = slab(slots=9)
    assert [found(tier, key(slot)) for slot in range(9)] == [True] * 5 + [False] * 4


@pytest.mark.processes
def test_one_process_at_a_time(slab: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.worker.tiers.disk_tier._LOCK_WITHIN_S", 0.1)
    tier = slab()
    fill(tier, range(1))
    with pytest.raises(OSError, match="in use by another process"):
        slab()
    assert found(tier, key(0))


def test_places_where_no_slab_can_be(slab: Open, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="have no room for a slot"):
        slab(slots=0)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        slab(name="folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        slab(name="pipe")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        slab(name="file/slab")
    assert found(slab(name="made/on/the/way"), key(0)) is False


def test_a_full_disk_refuses_and_keeps_the_rest(slab: Open, tmp_path: Path) -> None:
    """A limit of the file's size stands for the disk's; the write that meets it ends in the middle of a slot."""
    tier = slab(slots=64)
    fill(tier, range(2))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES + 2 * 3 * PAGE_BYTES + 2 * PAGE_BYTES, before[1]))
    try:
        for slot in (2, 3):
            with pytest.raises(OSError, match=r"only \d+ of 12288 bytes|File too large"):
                tier.write(key(slot), memoryview(content(slot)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [found(tier, key(slot)) for slot in range(4)] == [True, True, False, False]
    fill(tier, range(2, 4))
    assert all(found(tier, key(slot)) for slot in range(4))


def test_without_direct_io(slab: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems that do not have it; the files are the same."""
    monkeypatch.setattr(DiskTier, "_try_direct", lambda _: False)
    tier = slab(SIZES["pages"])
    fill(tier, range(4))
    assert all(found(tier, key(slot)) for slot in range(4))
    tier.close()
    monkeypatch.undo()
    tier = slab(SIZES["pages"])
    assert all(found(tier, key(slot)) for slot in range(4))


def test_many_threads(slab: Open) -> None:
    tier = slab(SIZES["pages"], slots=40)

    def write_and_read(slot: int) -> bool:
        for generation in range(1, 6):
            tier.write(key(slot, generation), memoryview(content(slot, tier.slot_bytes)))
            if not found(tier, key(slot, generation)):
                return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(write_and_read, range(40)))
    assert all(found(tier, key(slot, 5)) for slot in range(40))


CRASH_SLOT = 64 * PAGE_BYTES


def write_for_ever(path: Path, reports: Connection) -> None:
    tier = DiskTier(path, 1 << 28, CRASH_SLOT, KEEPER)
    for generation in range(1, 1000):
        for slot in range(48):
            tier.write(key(slot, generation), memoryview(content(slot, CRASH_SLOT)))
            reports.send((slot, generation))


@pytest.mark.processes
@pytest.mark.parametrize("reports", [150, 401])
def test_killed_in_the_middle_of_writes(tmp_path: Path, reports: int) -> None:
    """What was reported as written is there, but for the one that was being written: never other bytes."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = RankProcess(write_for_ever, tmp_path / "slab", theirs)
    theirs.close()
    written: dict[int, int] = {}
    with suppress(EOFError):
        for number in itertools.count():
            slot, generation = ours.recv()
            written[slot] = generation
            if number == reports:
                process.kill()
    process.wait()
    tier = DiskTier(tmp_path / "slab", 1 << 28, CRASH_SLOT, KEEPER)
    there = sum(found(tier, key(slot, generation)) for slot, generation in written.items())
    assert len(written) == 48
    assert there >= len(written) - 1
    tier.close()
