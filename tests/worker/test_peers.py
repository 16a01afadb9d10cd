"""KV travels from rank to rank of other groups: the same bytes, or a miss, and nothing waits for a bad peer."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from seeds import seeds
from worker.peer_driver import FINGERPRINT, HEADS, PeerRank, export_until_killed, name_of
from worker.ranks import RankProcess
from worker.tier_driver import DEADLINE_S, HeldKernels, wait_until

from trunkline.runtime import wire_keys
from trunkline.worker.tiers import exporter, peer_tier, questions
from trunkline.worker.tiers.exchange import CREDIT_BYTES, Ask, Found, Told, checksum
from trunkline.worker.tiers.process_memory import read_memory

DONE, MISS, FAILED = 0, 1, 2
Make = Callable[..., PeerRank]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[PeerRank] = []

    def rank(*arguments: Any, **config: Any) -> PeerRank:
        made.append(PeerRank(*arguments, **config))
        return made[-1]

    yield rank
    for one in made:
        one.close()


@pytest.fixture
def place(tmp_path: Path) -> Callable[[], str]:
    """Makes endpoints on this host."""
    count = iter(range(100))
    return lambda: f"ipc://{tmp_path}/x{next(count)}"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    wire_keys.write(wire_keys.generate().part(wire_keys.PARTS["workers"]), path)
    return str(path)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exporter and puller share a process here: when it stands still for seconds, that is no silence of a peer."""
    monkeypatch.setattr(exporter, "_WAIT_S", DEADLINE_S)
    monkeypatch.setattr(questions, "SILENT_S", DEADLINE_S)
    monkeypatch.setattr(questions, "QUESTION_S", DEADLINE_S)


@pytest.fixture(params=["memory", "socket"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How bytes come: read in the exporter's memory, or by the socket as between hosts."""
    if request.param == "socket":
        monkeypatch.setattr(peer_tier, "node_id", lambda: "")
    return str(request.param)


@pytest.mark.usefixtures("patient")
def test_a_peer_on_another_host_sends_more_than_one_question_may_ask_for(
    make: Make, place: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = make(export=place())
    peer.save(range(90), range(90))
    monkeypatch.setattr(peer_tier, "node_id", lambda: "elsewhere")
    own = make()
    own.meet(1, peer.tiers.exports)
    assert 90 * own.copier.host.slot_bytes > 2 * CREDIT_BYTES
    assert own.statuses(1, {chunk: chunk for chunk in range(90)}) == [DONE] * 90


@pytest.mark.usefixtures("patient")
def test_parts_of_an_answer_without_room_wait_for_it(
    make: Make, place: Callable[[], str], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "_WAITING_MAX", 1)
    monkeypatch.setattr(exporter, "_PART_BYTES", 1)
    peer, own = make(export=place()), make()
    peer.save(range(90), range(90))
    own.meet(1, peer.tiers.exports)
    assert own.statuses(1, {chunk: chunk for chunk in range(90)}) == [DONE] * 90
    assert all(own.holds(chunk, chunk) for chunk in range(90))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("tp", "peer_tp"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (1, 8), (8, 2), (8, 8)])
def test_chunks_arrive_whole_for_any_number_of_ranks(
    make: Make, place: Callable[[], str], way: str, tp: int, peer_tp: int
) -> None:
    exports = []
    for rank in range(peer_tp):
        peer = make(rank, peer_tp, export=place())
        peer.save(range(20), range(20))
        exports.append(peer.tiers.exports)
    for rank in range(tp):
        own = make(rank, tp)
        own.meet(7, *exports)
        assert own.statuses(7, {30 + chunk: chunk for chunk in range(20)}) == [DONE] * 20
        assert all(own.holds(30 + chunk, chunk) for chunk in range(20))
        assert own.statuses(7, {1: 99, 2: 3}) == [MISS, DONE]
        assert own.copier.host.generation(1) < 0


@pytest.mark.usefixtures("patient")
def test_parts_are_as_long_as_keys_make_them(make: Make, keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encrypted frames are longer than their contents, and a reader limits what it takes."""
    monkeypatch.setattr(peer_tier, "node_id", lambda: "")
    peer, own = make(export="tcp://127.0.0.1:*", wire_keys=keys), make(wire_keys=keys)
    assert peer.copier.host.slot_bytes > 65536
    peer.save([5], [0])
    own.meet(1, peer.tiers.exports)
    assert own.statuses(1, {0: 5}) == [DONE]
    assert own.holds(0, 5)


@pytest.mark.usefixtures("patient")
def test_what_was_pulled_is_exported_again(make: Make, place: Callable[[], str]) -> None:
    first, second, third = make(export=place()), make(export=place()), make()
    first.save([5], [0])
    second.meet(1, first.tiers.exports)
    third.meet(1, second.tiers.exports)
    assert third.statuses(1, {0: 5}) == [MISS]
    assert second.statuses(1, {4: 5}) == [DONE]
    assert third.statuses(1, {0: 5}) == [DONE]
    assert third.holds(0, 5)


@pytest.mark.usefixtures("patient")
def test_an_exporter_takes_the_first_free_port_of_a_range(make: Make, keys: str) -> None:
    """Firewalls know the range. If all ports are taken, the rank does its work without giving KV to peers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        first = taken.getsockname()[1]
        ports = f"tcp://127.0.0.1:{first}-{first + 3}"
        taken.listen()
        peers = [make(export=ports, wire_keys=keys) for _ in range(4)]
        found = [urlsplit(peer.tiers.exports).port or 0 for peer in peers if peer.tiers.exports]
        assert found == sorted(set(found))
        assert set(found) <= set(range(first + 1, first + 4))
        assert not peers[-1].tiers.exports
        assert "Address already in use" in peers[-1].tiers.problem
        own = make(wire_keys=keys)
        peers[0].save([5], [0])
        own.meet(1, peers[0].tiers.exports)
        assert own.statuses(1, {0: 5}) == [DONE]


@pytest.mark.processes
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("is_near", [True, False])
def test_another_process_exports_over_tcp_with_keys(
    make: Make, tmp_path: Path, keys: str, monkeypatch: pytest.MonkeyPatch, is_near: bool
) -> None:
    if not is_near:
        monkeypatch.setattr(peer_tier, "node_id", lambda: "")
    settings = {"export": "tcp://127.0.0.1:*", "wire_keys": keys, "parent_pid": os.getpid()}
    process, endpoint = start(tmp_path, settings)
    try:
        own = make(wire_keys=keys)
        own.meet(1, endpoint)
        assert own.statuses(1, {30 + chunk: chunk for chunk in range(60)}) == [DONE] * 60
        assert all(own.holds(30 + chunk, chunk) for chunk in range(60))
        stranger = make()
        stranger.meet(1, endpoint)
        assert stranger.statuses(1, {0: 0}) == [FAILED]
    finally:
        process.kill()


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_freezes_fails_and_delays_no_other(
    make: Make, place: Callable[[], str], tmp_path: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "SILENT_S", 4.0)  # the good one may get its turns late, too
    process, endpoint = start(tmp_path, {"export": place()})
    try:
        good, own = make(export=place()), make()
        good.save(range(20), range(20))
        own.meet(1, endpoint)
        own.meet(2, good.tiers.exports)
        assert own.statuses(1, {0: 0}) == [DONE]
        process.send_signal(how)
        if how is signal.SIGKILL:
            process.wait()
        else:
            stopped = psutil.STATUS_STOPPED  # until then its threads may still answer
            wait_until(lambda: psutil.Process(process.pid).status() == stopped, 60)
        bad = own.pull(1, {slot: slot for slot in range(10)})
        assert own.statuses(2, {40 + chunk: chunk for chunk in range(20)}) == [DONE] * 20
        assert [outcome.status for outcome in own.outcomes(bad)] == [FAILED] * 10
        assert all(own.copier.host.generation(slot) < 0 for slot in range(10))
        assert own.statuses(1, {0: 0}) == [FAILED], "at once, not after another silence"
    finally:
        process.kill()
    process, endpoint = start(tmp_path, {"export": endpoint})
    try:
        wait_until(lambda: own.statuses(1, {0: 0}) == [DONE])
        assert own.holds(0, 0)
    finally:
        process.kill()


def start(folder: Path, settings: dict[str, Any]) -> tuple[RankProcess, str]:
    told = folder / "endpoint"
    told.unlink(missing_ok=True)
    process = RankProcess(export_until_killed, str(told), 60, settings)
    wait_until(told.exists, 60)
    return process, told.read_text()


@pytest.mark.usefixtures("patient")
def test_copies_that_are_under_way_are_waited_for(make: Make, place: Callable[[], str], way: str) -> None:
    peer, own = make(export=place()), make()
    own.meet(1, peer.tiers.exports)
    peer.save([1], [1])
    assert own.statuses(1, {1: 1}) == [DONE]
    held = HeldKernels.hold(peer.copier.saves)
    peer.save_late(chunk=2, slot=2)
    moves = own.pull(1, {3: 1, 2: 2})
    assert own.outcomes(moves[:1])[0].status == DONE, "others are not kept waiting"
    held.let_all()
    assert own.outcomes(moves[1:])[0].status == DONE
    assert own.holds(2, 2)
    loads = HeldKernels.hold(own.copier.loads)
    own.load(slot=2)
    again = own.pull(1, {2: 1})
    wait_until(lambda: loads.asked == 1)
    assert own.holds(2, 2), "a slot that is being loaded from is not overwritten"
    loads.let_all()
    assert own.outcomes(again)[0].status == DONE
    assert own.holds(2, 1)


@pytest.mark.usefixtures("patient")
def test_bytes_that_changed_are_a_miss(make: Make, place: Callable[[], str], way: str) -> None:
    """The exporter remembers the checksum of an unchanged slot; here a bit of it flips."""
    peer, own = make(export=place()), make()
    peer.save(range(4), range(4))
    own.meet(1, peer.tiers.exports)
    assert own.statuses(1, {0: 1}) == [DONE]
    peer.copier.host.view(1)[1000] ^= 1
    moves = own.pull(1, {0: 1, 1: 2})
    assert [(one.status, one.detail) for one in own.outcomes(moves)] == [
        (MISS, "the checksum does not fit"),
        (DONE, ""),
    ]
    assert own.copier.host.generation(0) < 0


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("seed", seeds(3))
def test_slots_that_are_overwritten_never_give_wrong_bytes(
    make: Make, place: Callable[[], str], way: str, seed: int
) -> None:
    """Saves go into the exporter's slots all the time while chunks are pulled: each comes whole or not at all."""
    chance = random.Random(seed)
    peer, own = make(export=place()), make()
    own.meet(1, peer.tiers.exports)
    generation, found = 0, 0
    for _ in range(40):
        wanted = {slot: chance.randrange(12) for slot in chance.sample(range(60), 20)}
        moves = own.pull(1, wanted)
        for _ in range(chance.randrange(4)):
            generation += 1
            count = chance.randrange(1, 8)
            peer.save(chance.sample(range(12), count), chance.sample(range(10), count), generation)
        for (slot, chunk), outcome in zip(wanted.items(), own.outcomes(moves), strict=True):
            assert outcome.status in (DONE, MISS)
            assert outcome.status == MISS or own.holds(slot, chunk)
            found += outcome.status == DONE
    assert found


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("seed", seeds(8))
def test_a_name_is_found_where_its_chunk_is(make: Make, seed: int) -> None:
    """Random plans and moves against a plain dictionary."""
    chance = random.Random(seed)
    rank = make()
    held: dict[int, int] = {}
    """The chunk in each slot, the one that was saved last at the end."""
    names = rank.copier.host.names
    for generation in range(1, 60):
        count = chance.randrange(1, 8)
        slots, chunks = chance.sample(range(20), count), chance.sample(range(30), count)
        if chance.random() < 0.2:
            rank.copier.host.discard(slots[0])  # type: ignore[arg-type]
            held.pop(slots[0], None)
        else:
            rank.save(chunks, slots, generation)
            held = {slot: chunk for slot, chunk in held.items() if slot not in slots}
            held |= dict(zip(slots, chunks, strict=True))
        for chunk in range(30):
            use = names.find(name_of(chunk))
            assert (use.slot if use else None) == next((s for s in reversed(held) if held[s] == chunk), None)
        assert len(names) == len(set(held.values()))


@pytest.mark.usefixtures("patient")
def test_another_fingerprint_is_refused(make: Make, place: Callable[[], str]) -> None:
    peer, own = make(export=place(), exchange_fingerprint="ab" * 16), make()
    peer.save([1], [1])
    own.meet(1, peer.tiers.exports)
    outcome = own.outcomes(own.pull(1, {0: 1}))[0]
    assert outcome.status == FAILED
    assert "another model" in outcome.detail


@pytest.mark.parametrize("endpoints", [["tcp://127.0.0.1:1"] * 3, ["what://x"], ["tcp://"], [""]])
def test_peers_that_cannot_be_fail(make: Make, endpoints: list[str]) -> None:
    own = make()
    own.meet(1, *endpoints)
    assert own.statuses(1, {0: 1}) == [FAILED]
    own.meet(1)
    assert own.statuses(1, {0: 1}) == [FAILED]


class Liar:
    """A peer that answers what a test says."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(endpoint)

    def ask(self) -> tuple[bytes, Ask]:
        assert self.socket.poll(10_000)
        peer, payload = self.socket.recv_multipart()
        return peer, msgspec.msgpack.decode(payload, type=Ask)

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


@pytest.mark.usefixtures("patient")
def test_lies_are_never_believed(make: Make, place: Callable[[], str]) -> None:
    endpoint = place()
    liar, own = Liar(endpoint), make()
    good = checksum(FINGERPRINT, name_of(1), 0, np.zeros((6, HEADS, 8192), dtype="u1"))
    answers: list[Callable[[Ask], list[bytes]]] = [
        lambda ask: [b"\xff\xff"],
        lambda ask: [encoded(Told(ask.id, [Found(0, good)]))],  # no bytes
        lambda ask: [encoded(Told(ask.id, [Found(0, good)])), b"short"],
        lambda ask: [encoded(Told(ask.id, [Found(0, good)])), b"\1" * 6 * HEADS * 8192],
        lambda ask: [encoded(Told(ask.id, [Found(0, good, 4096)], pid=os.getpid()))],
        lambda ask: [encoded(Told(ask.id, [Found(0, good, -5)], pid=-1))],
        lambda ask: [encoded(Told(ask.id, [Found(0, good, 1 << 40)], pid=1 << 30))],
        lambda ask: [encoded(Told(ask.id, [Found(0)]))],
    ]
    for answer in answers:
        own.meet(1, endpoint)
        moves = own.pull(1, {0: 1})
        peer, ask = liar.ask()
        liar.socket.send_multipart([peer, encoded(Told(ask.id + 9, [Found(0, good)]))])
        liar.socket.send_multipart([peer, encoded(Told(ask.id, [Found(77, good)]))])
        liar.socket.send_multipart([peer, *answer(ask)])
        assert own.outcomes(moves)[0].status in (MISS, FAILED)
        assert own.copier.host.generation(0) < 0
    liar.close()


@pytest.mark.usefixtures("patient")
def test_a_time_in_which_the_puller_stood_still_is_no_silence(
    make: Make, place: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the answers may reach its socket later than its first look."""
    stood = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stood)
    monkeypatch.setattr(peer_tier, "time", clock)
    endpoint = place()
    liar, own = Liar(endpoint), make()
    own.meet(1, endpoint)
    moves = own.pull(1, {0: 1})
    questions = [liar.ask()]
    stood = 10 * DEADLINE_S
    moves += own.pull(1, {1: 2})
    questions.append(liar.ask())  # by now it has looked
    for peer, ask in questions:
        liar.socket.send_multipart([peer, encoded(Told(ask.id, [Found(0)]))])
    assert [outcome.status for outcome in own.outcomes(moves)] == [MISS, MISS]
    liar.close()


def encoded(told: Told) -> bytes:
    return msgspec.msgpack.encode(told)


@pytest.mark.usefixtures("patient")
def test_questions_that_make_no_sense_harm_none(make: Make, place: Callable[[], str]) -> None:
    peer, own = make(1, 2, export=place()), make(1, 2)
    peer.save([1], [1])
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(peer.tiers.exports)
    right = Ask(1, FINGERPRINT, 2, 4, name_of(1), "")
    socket.send(msgspec.msgpack.encode(right))
    assert answer_of(socket).found[0].checksum
    chance = random.Random(1)
    for _ in range(300):
        socket.send(chance.randbytes(chance.randrange(200)))
    for change in (
        {"first": 0},
        {"first": 3, "stop": 3},
        {"stop": 5},
        {"first": -1},
        {"names": b""},
        {"names": b"x" * 17},
        {"names": name_of(1) * 65},
        {"fingerprint": b""},
    ):
        socket.send(msgspec.msgpack.encode(msgspec.structs.replace(right, **change)))
        told = answer_of(socket)
        assert told.refusal
        assert not told.found
    own.meet(1, place(), peer.tiers.exports)
    assert own.statuses(1, {1: 1}) == [DONE]
    socket.close(linger=0)
    context.term()


def answer_of(socket: Any) -> Told:
    assert socket.poll(10_000)
    return msgspec.msgpack.decode(socket.recv_multipart()[0], type=Told)


@pytest.mark.usefixtures("patient")
def test_memory_that_may_not_be_read_comes_by_socket(
    make: Make, place: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def forbid(*arguments: Any) -> None:
        refused.append(arguments)
        raise PermissionError(1, "not allowed")

    monkeypatch.setattr(peer_tier, "read_memory", forbid)
    peer, own = make(export=place()), make()
    peer.save(range(20), range(20))
    own.meet(1, peer.tiers.exports)
    assert own.statuses(1, {40 + chunk: chunk for chunk in range(20)}) == [DONE] * 20
    assert all(own.holds(40 + chunk, chunk) for chunk in range(20))
    assert refused


def test_memory_of_a_process_that_is_gone_cannot_be_read() -> None:
    into = np.zeros(8, dtype=np.uint8)
    ours = np.array([[into.ctypes.data, 8]], dtype=np.uint64)
    with pytest.raises(OSError, match="cannot be read"):
        read_memory(2**22 + 1, ours, ours)
    with pytest.raises(OSError, match="cannot be read"):
        read_memory(os.getpid(), np.array([[4096, 8]], dtype=np.uint64), ours)
