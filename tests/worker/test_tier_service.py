"""Tiers behind the messages: moves beside the steps, each answered, and a sequence through all tiers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker.redis_server import RedisServer
from worker.s3_server import S3Server
from worker.tier_driver import DEADLINE_S, HeldKernels, Traveller, moves, wait_until

from trunkline.controller.reports import MoveOutcome, Probed
from trunkline.kvstore.chunks import NAME_BYTES
from trunkline.kvstore.tier import SlotKey, TierKind
from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import PlanError
from trunkline.worker.messages import ForgetChunks, Probe, TierMove, TierMoves
from trunkline.worker.tiers.tier_service import TierService

SAVED = moves((3, 0, 1), (4, 1, 1), (9, 2, 1))
FINGERPRINT = "00ff17"


class Bench:
    """A runner with tiers, and what they report."""

    def __init__(self, folder: Path, slab: Path, **config: Any) -> None:
        settings = {"disk_path": str(slab), "disk_bytes": 1 << 20, "tier_fingerprint": FINGERPRINT, **config}
        self.traveller = Traveller(folder, **settings)
        self._reports: queue.Queue[list[MoveOutcome] | Probed] = queue.Queue()
        self.tiers = TierService(self.traveller.runner._config, self.traveller.copier, self._reports.put)
        self._ended: dict[int, MoveOutcome] = {}
        self._next = 0

    def move(self, *orders: tuple[TierKind, bool, int, int], host_generation: int = 1) -> list[int]:
        """Order moves (tier, whether it is a write, host slot, number of the chunk); returns their ids."""
        made = []
        for kind, is_write, host_slot, chunk in orders:
            self._next += 1
            slot = chunk if kind is TierKind.DISK else -1
            name = bytes([chunk]) * NAME_BYTES
            made.append(TierMove(self._next, kind, is_write, host_slot, host_generation, slot, 5, name))
        self.tiers.move(TierMoves(self.traveller.driver.step, made))
        return [move.id for move in made]

    def outcomes(self, ids: list[int]) -> list[MoveOutcome]:
        """Of these moves, in the order of the ids."""
        while not self._ended.keys() >= set(ids):
            report = self._reports.get(timeout=DEADLINE_S)
            assert isinstance(report, list)
            assert not {outcome.id for outcome in report} & self._ended.keys(), "a move is answered twice"
            self._ended |= {outcome.id: outcome for outcome in report}
        return [self._ended[move] for move in ids]

    def statuses(self, *orders: tuple[TierKind, bool, int, int], **fields: int) -> list[int]:
        return [outcome.status for outcome in self.outcomes(self.move(*orders, **fields))]

    def probe(self, *chunks: int) -> Probed:
        self.tiers.probe(Probe(9, b"".join(bytes([chunk]) * NAME_BYTES for chunk in chunks)))
        report = self._reports.get(timeout=DEADLINE_S)
        assert isinstance(report, Probed)
        return report

    @property
    def is_silent(self) -> bool:
        return self._reports.empty()

    def close(self) -> None:
        self.tiers.close()
        self.traveller.close()


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(deep: Path, tmp_path: Path) -> Iterator[MakeBench]:
    made: list[Bench] = []

    def make(**config: Any) -> Bench:
        made.append(Bench(deep, tmp_path / "slab", **config))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.processes
@pytest.mark.parametrize("kind", [TierKind.DISK, TierKind.REMOTE])
def test_text_is_the_same_through_every_tier(
    bench: MakeBench, redis_server: RedisServer, expected: list[Any], kind: TierKind
) -> None:
    """Device, host, tier, and back into other slots and other blocks: the same numbers, bit by bit."""
    one = bench(remote_url=redis_server.url)
    traveller = one.traveller
    traveller.prefill(late_saves=moves((3, 0, 1), (4, 1, 1)))
    traveller.leave(saves=moves((9, 2, 1)), save_fence=2)
    assert one.statuses(*((kind, True, slot, slot) for slot in range(3))) == [0, 0, 0]
    traveller.wipe()
    for slot in range(3):
        traveller.copier.host.discard(slot)  # type: ignore[arg-type]
    assert one.statuses(*((kind, False, 10 + slot, slot) for slot in range(3)), host_generation=6) == [0, 0, 0]
    loads = moves((10, 10, 6), (11, 11, 6), (12, 12, 6))
    traveller.come_back([10, 11, 12], loads=loads, load_fence=3)
    traveller.decode()
    assert traveller.results == expected[:-1]


@pytest.mark.processes
def test_waiting_moves_to_a_bucket_travel_together(
    bench: MakeBench, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole slot is written, read back and verified; one whose content has changed meanwhile is left out."""
    one = bench(remote_url=s3_server.url, io_threads=1)
    one.traveller.prefill()
    one.traveller.leave(saves=SAVED, save_fence=2)
    remote = one.tiers._shared
    assert remote is not None
    sizes: list[int] = []
    write = remote._store.write

    def note(values: Any, kept_s: Any) -> None:
        sizes.append(len(values))
        write(values, kept_s)

    monkeypatch.setattr(remote._store, "write", note)
    saves = HeldKernels.hold(one.traveller.copier.saves)
    one.traveller.driver.send(saves=moves((3, 5, 1)))
    first = one.move((TierKind.REMOTE, True, 5, 5))  # holds the thread until the copy is let go
    wait_until(lambda: not one.tiers._served[TierKind.REMOTE].queue._writes)
    rest = one.move(*((TierKind.REMOTE, True, slot, slot) for slot in range(3)), (TierKind.REMOTE, True, 9, 9))
    saves.let_all()
    assert [outcome.status for outcome in one.outcomes(first)] == [0]
    assert [outcome.status for outcome in one.outcomes(rest)] == [0, 0, 0, 1]
    assert sizes == [1, 3]
    contents = [bytes(one.traveller.copier.host.view(slot)) for slot in range(3)]
    reads = [(TierKind.REMOTE, False, 10 + slot, slot) for slot in range(4)]
    assert one.statuses(*reads, host_generation=6) == [0, 0, 0, 1]
    assert [bytes(one.traveller.copier.host.view(10 + slot)) for slot in range(3)] == contents
    assert [one.traveller.copier.host.generation(10 + slot) for slot in range(4)] == [6, 6, 6, -1]


@pytest.mark.processes
def test_a_move_may_say_how_long_a_chunk_is_kept(bench: MakeBench, redis_server: RedisServer) -> None:
    one = bench(remote_url=redis_server.url, remote_ttl_s=1000.0)
    one.traveller.prefill()
    one.traveller.leave(saves=SAVED, save_fence=2)
    for number, kept_s in ((1, 0.0), (2, 50.0)):
        move = TierMove(number, TierKind.REMOTE, True, 0, 1, -1, 0, bytes([number]) * NAME_BYTES, kept_s=kept_s)
        one.tiers.move(TierMoves(one.traveller.driver.step, [move]))
        assert [outcome.status for outcome in one.outcomes([number])] == [0]
    lives: Any = {place[-1:]: redis_server.client().ttl(place) for place in redis_server.places()}
    assert 990 < lives[b"1"] <= 1000
    assert 40 < lives[b"2"] <= 50


@pytest.mark.processes
def test_deleted_chunks_leave_the_remote_tier(bench: MakeBench, redis_server: RedisServer) -> None:
    one = bench(remote_url=redis_server.url)
    one.traveller.prefill()
    one.traveller.leave(saves=SAVED, save_fence=2)
    assert one.statuses(*((TierKind.REMOTE, True, slot, slot) for slot in range(3))) == [0, 0, 0]
    assert one.probe(0, 1, 2).present == 3
    one.tiers.forget(ForgetChunks(bytes([2]) * NAME_BYTES + bytes([1]) * NAME_BYTES))
    wait_until(lambda: one.probe(0, 1, 2).present == 1)
    redis_server.kill()
    one.tiers.forget(ForgetChunks(bytes([0]) * NAME_BYTES))
    assert one.probe(0).present == -1, "the rank goes on"


def test_moves_wait_for_the_copies_of_their_slots(bench: MakeBench) -> None:
    """A write for the save into its slot, a read for the load out of it; others go ahead."""
    one = bench()
    traveller = one.traveller
    traveller.prefill()
    traveller.driver.send(saves=moves((3, 0, 1), (4, 1, 1)), save_fence=2)
    assert one.statuses((TierKind.DISK, True, 1, 1)) == [0]
    saves = HeldKernels.hold(traveller.copier.saves)
    traveller.driver.send(saves=moves((9, 2, 1)))
    write = one.move((TierKind.DISK, True, 2, 2))
    assert one.statuses((TierKind.DISK, True, 0, 0)) == [0]
    wait_until(lambda: saves.asked == 1)
    assert one.is_silent
    saves.let_all()
    assert [outcome.status for outcome in one.outcomes(write)] == [0]
    loads = HeldKernels.hold(traveller.copier.loads)
    traveller.driver.send(loads=moves((20, 0, 1)))
    read = one.move((TierKind.DISK, False, 0, 2), host_generation=7)
    assert one.statuses((TierKind.DISK, False, 3, 1)) == [0]
    wait_until(lambda: loads.asked == 1)
    assert one.is_silent
    content = bytes(traveller.copier.host.view(0))
    loads.let_all()
    assert [outcome.status for outcome in one.outcomes(read)] == [0]
    assert bytes(traveller.copier.host.view(0)) == bytes(traveller.copier.host.view(2)) != content


def test_what_is_not_there_is_a_miss(bench: MakeBench) -> None:
    """And leaves the slot empty, so that no load can take it for what was asked for."""
    one = bench()
    traveller = one.traveller
    traveller.prefill()
    traveller.leave(saves=SAVED, save_fence=2)
    (wrong,) = one.outcomes(one.move((TierKind.DISK, True, 0, 0), host_generation=4))
    assert (wrong.status, wrong.detail) == (1, "host slot 0 holds generation 1, not 4")
    assert one.statuses((TierKind.DISK, True, 0, 0)) == [0]
    assert one.statuses((TierKind.DISK, False, 1, 3), host_generation=2) == [1]
    with pytest.raises(PlanError, match="it holds nothing"):
        traveller.driver.send(loads=moves((20, 1, 2)))


def test_failures_are_answered(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a tier does, the rank goes on."""
    one = bench()
    traveller = one.traveller
    traveller.prefill()
    traveller.leave(saves=SAVED, save_fence=2)
    (absent,) = one.outcomes(one.move((TierKind.REMOTE, True, 0, 0)))
    assert (absent.status, absent.detail) == (2, "this rank has no such tier")
    (beyond,) = one.outcomes(one.move((TierKind.DISK, True, 0, 200)))
    assert beyond.status == 2
    assert "slot 200; there are" in beyond.detail
    probed = one.probe(1)
    assert (probed.present, probed.detail) == (-1, "this rank has no remote tier")

    def explode(*_: object) -> None:
        raise ValueError("surprise")

    monkeypatch.setattr("trunkline.worker.tiers.disk_tier.DiskTier.write", explode)
    (failed,) = one.outcomes(one.move((TierKind.DISK, True, 0, 0)))
    assert (failed.status, failed.detail) == (2, "ValueError: surprise")
    monkeypatch.undo()
    assert one.statuses((TierKind.DISK, True, 0, 0)) == [0]
    with pytest.raises(PlanError, match="host slot 9999"):
        one.move((TierKind.DISK, True, 9999, 0))


def test_closing_leaves_a_tier_open_that_is_still_written(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread would write to a file descriptor that may be another file's by now."""
    one = bench()
    one.traveller.prefill()
    one.traveller.leave(saves=SAVED, save_fence=2)
    disk = one.tiers._served[TierKind.DISK].tier
    begun, go_on, write = threading.Event(), threading.Event(), disk.write

    def wait_and_write(key: SlotKey, data: memoryview) -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        write(key, data)

    monkeypatch.setattr(disk, "write", wait_and_write)
    monkeypatch.setattr("trunkline.worker.tiers.tier_service._CLOSE_WITHIN_S", 0.01)
    moved = one.move((TierKind.DISK, True, 0, 0))
    assert begun.wait(DEADLINE_S)
    one.tiers.close()
    go_on.set()
    assert [(outcome.status, outcome.detail) for outcome in one.outcomes(moved)] == [(0, "")]


def test_probes_are_answered_whatever_a_store_does(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench(remote_url="redis://127.0.0.1:1/0")

    def explode(*_: object) -> None:
        raise ValueError("surprise")

    monkeypatch.setattr("trunkline.worker.tiers.redis_store.RedisStore.count", explode)
    probed = one.probe(1)
    assert (probed.present, probed.detail) == (-1, "ValueError: surprise")


@pytest.mark.processes
def test_probes_count_the_first_chunks(bench: MakeBench, redis_server: RedisServer) -> None:
    one = bench(remote_url=redis_server.url)
    assert (one.tiers.has_remote, one.tiers.problem) == (True, "")
    one.traveller.prefill()
    one.traveller.leave(saves=SAVED, save_fence=2)
    assert one.statuses((TierKind.REMOTE, True, 0, 1), (TierKind.REMOTE, True, 1, 2)) == [0, 0]
    assert one.probe(1, 2, 3).present == 2
    assert one.probe(3, 1).present == 0
    redis_server.kill()
    probed = one.probe(1)
    assert probed.present == -1
    assert "remote tier at 127.0.0.1" in probed.detail
    assert one.statuses((TierKind.REMOTE, True, 0, 1), (TierKind.REMOTE, False, 5, 1)) == [2, 2]


def test_a_disk_that_cannot_be_used_is_a_problem_not_an_end(bench: MakeBench, tmp_path: Path) -> None:
    one = bench(disk_path=str(tmp_path))
    assert one.tiers.disk_slots == 0
    assert one.tiers.problem.startswith("no disk tier: ")
    one.traveller.prefill()
    one.traveller.leave(saves=SAVED, save_fence=2)
    assert one.statuses((TierKind.DISK, True, 0, 0)) == [2]


def test_slots_fit_into_the_given_size(bench: MakeBench) -> None:
    one = bench()
    block = one.traveller.runner.block_bytes
    assert block == 4096
    assert one.tiers.disk_slots == ((1 << 20) - 4096) // (block + 4096)


def test_without_a_host_pool_there_are_no_tiers() -> None:
    tiers = TierService(WorkerConfig(model="", plan_endpoint="", report_endpoint=""), None, lambda _: None)
    assert (tiers.disk_slots, tiers.has_remote, tiers.problem) == (0, False, "")
    with pytest.raises(PlanError, match="no host pool"):
        tiers.move(TierMoves(1, []))
