"""Feeds of controllers' events: the pure state over a channel that loses, delays and breaks, then real sockets."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import zmq
from seeds import seeds
from simulation.driver import Simulation
from simulation.told import Mirror, truth

from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.kv_events import KvEventLog
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import EventsCall
from trunkline.controller.service.status import EventPublisher
from trunkline.router.errors import unavailable
from trunkline.router.messages import EventsReply, KvEvents
from trunkline.router.streams.kv_feed import (
    RETRY_SECONDS,
    RETRY_SECONDS_MAX,
    STALE_SECONDS,
    WAITING_BYTES_MAX,
    Ask,
    EventFeeds,
    FeedState,
)
from trunkline.runtime.wire_gate import Gate

CHUNK = 4
STREAM = b"a stream"
SEEDS = seeds(25)


class Index:
    """A `ChunkMap` of mirrors."""

    def __init__(self, controllers: int = 1) -> None:
        self.mirrors = [Mirror() for _ in range(controllers)]
        self.applied = 0

    def apply(self, controller: int, names: bytes, tiers: bytes) -> None:
        self.applied += 1
        self.mirrors[controller].apply(names, tiers)

    def begin_snapshot(self, controller: int) -> None:
        self.mirrors[controller].begin_snapshot()

    def add_snapshot(self, controller: int, names: bytes, tiers: bytes) -> None:
        self.mirrors[controller].add_snapshot(names, tiers)

    def end_snapshot(self, controller: int) -> None:
        self.mirrors[controller].end_snapshot()

    def forget(self, controller: int) -> None:
        self.mirrors[controller].forget()


class Source:
    """A controller's chunks and what it tells of them; it may be started again."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.history: dict[tuple[bytes, int], dict[bytes, int]] = {(b"", 0): {}}
        """What was so at each event of each stream."""
        self.restart()

    def restart(self) -> None:
        self.pool = BlockPool(48)
        self.tree = RadixCache(self.pool, CHUNK)
        self.log = KvEventLog(
            self.rng.randbytes(8), ring_bytes=self.rng.choice([300, 3000, 1 << 20]), page_chunks=6
        )
        self.history[self.log.stream, 0] = {}

    def change(self, now: float) -> list[KvEvents]:
        for _ in range(self.rng.choice([0, 1, 1, 2, 20])):
            if not self.pool.free_count or self.rng.random() < 0.2:
                self.tree.evict(self.rng.randrange(1, 20))
            parent = self.rng.choice([self.tree.root(b""), *self.tree.nodes()])
            key = self.rng.randbytes(4 * CHUNK)
            self.tree.insert(parent, key, self.pool.allocate(), 0, now)
        batches = self.log.follow(self.tree)
        told = self.history[self.log.stream, batches[0].seq - 1] if batches else {}
        for seq, names, tiers in batches:
            mirror = Mirror()
            mirror.tiers = dict(told)
            mirror.apply(names, tiers)
            told = mirror.tiers
            self.history[self.log.stream, seq] = told
        return [KvEvents(self.log.stream, *batch) for batch in batches]

    def heartbeat(self) -> KvEvents:
        return KvEvents(self.log.stream, self.log.seq)


@dataclass
class Wires:
    """What is under way between a controller and a router."""

    events: deque[KvEvents] = field(default_factory=deque)
    calls: list[Ask] = field(default_factory=list)
    replies: list[tuple[int, EventsReply]] = field(default_factory=list)


class Play:
    """One feed, one controller, and everything that may go wrong between them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.source = Source(self.rng)
        self.index = Index()
        self.now = 0.0
        self.feed = FeedState(0, self.index, self.now)
        self.wires = Wires()
        self.losses = self.rng.choice([0.0, 0.05, 0.4])
        self.counts = dict.fromkeys(["snapshot", "replay", "failed", "restart", "kept"], 0)

    def make(self, ask: Ask | None) -> None:
        if ask is not None:
            self.wires.calls.append(ask)

    def tell(self) -> None:
        events = self.source.change(self.now) or [self.source.heartbeat()]
        self.wires.events += [message for message in events if self.rng.random() >= self.losses]

    def hear(self) -> None:
        if self.wires.events:
            self.make(self.feed.heard(self.wires.events.popleft(), self.now))
            self.counts["kept"] += len(self.feed._waiting)

    def answer(self) -> None:
        if self.wires.calls:
            ask = self.wires.calls.pop(self.rng.randrange(len(self.wires.calls)))
            reply = self.source.log.answer(ask.call(3), 1, self.now)
            self.wires.replies.append((ask.number, reply))

    def be_answered(self) -> None:
        if self.wires.replies:
            number, reply = self.wires.replies.pop(self.rng.randrange(len(self.wires.replies)))
            self.counts["snapshot" if reply.snapshot else "replay"] += 1
            self.make(self.feed.answered(number, reply, self.now))

    def fail(self) -> None:
        if self.wires.calls:
            ask = self.wires.calls.pop()
            self.counts["failed"] += 1
            self.feed.failed(ask.number, self.now)

    def restart(self) -> None:
        self.counts["restart"] += 1
        self.source.restart()

    def act(self) -> None:
        self.now += self.rng.choice([0.01, 0.2, 1.0])
        acts = [self.tell, self.hear, self.answer, self.be_answered, self.fail, self.restart]
        self.rng.choices(acts, [30, 30, 20, 20, 2, 1])[0]()
        self.make(self.feed.tick(self.now))
        self.check()

    def check(self) -> None:
        """What the index has of it is what was so at the event up to which it has come."""
        expected = self.source.history[self.feed.stream, self.feed.seq]
        assert self.index.mirrors[0].tiers == expected

    def settle(self) -> None:
        """Nothing goes wrong any more."""
        self.losses = 0.0
        for _ in range(200):
            self.now += 1.0
            while self.wires.events or self.wires.calls or self.wires.replies:
                self.hear()
                self.answer()
                self.be_answered()
                self.check()
            self.make(self.feed.tick(self.now))
            self.wires.events.append(self.source.heartbeat())
        self.hear()
        assert self.feed.status(self.now) == "current"
        assert self.index.mirrors[0].tiers == truth(self.source.tree)


def test_the_index_is_never_wrong_and_at_last_current() -> None:
    counts: dict[str, int] = {}
    for seed in SEEDS:
        play = Play(seed)
        try:
            for _ in range(400):
                play.act()
            play.settle()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        for name, count in play.counts.items():
            counts[name] = counts.get(name, 0) + count
        counts["whole"] = counts.get("whole", 0) + play.index.mirrors[0].snapshots
    assert all(count > 5 for count in counts.values()), counts


# One thing at a time


def told(seq: int, tiers: int = 1, stream: bytes = STREAM) -> KvEvents:
    return KvEvents(stream, seq, bytes([seq]) * 16, bytes([tiers]))


def replay(upto: int, names: bytes = b"", *, more: bool = False, snapshot: bool = False) -> EventsReply:
    return EventsReply(1, 2, STREAM, upto, snapshot, names, b"\1" * (len(names) // 16), more)


def test_who_is_there_from_the_first_event_asks_for_nothing() -> None:
    for first in (KvEvents(STREAM, 0), told(1)):
        index = Index()
        feed = FeedState(0, index, 0.0)
        assert feed.status(0.0) == "catching up"
        assert feed.tick(0.0) is None, "it is not known whom to ask"
        for events in (first, told(1), told(1), told(2)):
            assert feed.heard(events, 1.0) is None
        assert index.mirrors[0].tiers == {b"\1" * 16: 1, b"\2" * 16: 1}
        assert (index.applied, feed.seq, feed.status(1.0)) == (2, 2, "current")


def test_a_controller_that_comes_back_keeps_only_what_it_still_has() -> None:
    for first in (KvEvents(STREAM, 0), told(1)):
        index = Index()
        index.apply(0, b"x" * 16, b"\1")
        feed = FeedState(0, index, 0.0)
        assert feed.heard(first, 1.0) is None
        assert b"x" * 16 not in index.mirrors[0].tiers, "it was started again"
    index = Index()
    index.apply(0, b"x" * 16 + b"y" * 16, b"\1\1")
    feed = FeedState(0, index, 0.0)
    ask = feed.heard(told(7), 1.0)
    assert ask is not None
    assert b"x" * 16 in index.mirrors[0].tiers, "it may have gone on all the time"
    feed.answered(ask.number, replay(7, b"y" * 16, snapshot=True), 1.0)
    assert index.mirrors[0].tiers == {b"y" * 16: 1}


@pytest.mark.parametrize("ahead", [told(5), KvEvents(STREAM, 5)])
def test_a_gap_is_asked_for_once(ahead: KvEvents) -> None:
    index = Index()
    feed = FeedState(0, index, 0.0)
    feed.heard(told(1), 0.0)
    ask = feed.heard(ahead, 1.0)
    assert ask == Ask(1, STREAM, 1, 0, 0)
    assert feed.heard(told(6), 1.0) is None
    assert feed.status(1.0) == "catching up"
    part = feed.answered(1, replay(3, b"\2" * 16 + b"\3" * 16, more=True), 2.0)
    assert part == Ask(2, STREAM, 3, 0, 0)
    assert feed.answered(1, replay(9), 2.0) is None, "an answer comes twice"
    assert feed.answered(2, replay(5, b"\4" * 16 + b"\5" * 16), 2.0) is None
    assert (feed.seq, feed.status(2.0)) == (6, "current")
    assert len(index.mirrors[0].tiers) == 6


def test_calls_that_fail_are_repeated_ever_more_slowly() -> None:
    feed = FeedState(0, Index(), 0.0)
    ask, now, pauses = feed.heard(told(7), 0.0), 0.0, []
    for _ in range(8):
        assert ask is not None
        feed.failed(ask.number + 1, now)
        assert feed.tick(now) is None, "the call is still under way"
        feed.failed(ask.number, now)
        began, ask = now, None
        while ask is None:
            now += 0.05
            ask = feed.tick(now)
        pauses.append(now - began)
    expected = [min(RETRY_SECONDS * 2**i, RETRY_SECONDS_MAX) for i in range(8)]
    assert pauses == pytest.approx(expected, abs=0.06)


def test_silence_makes_stale_but_forgets_nothing() -> None:
    index = Index()
    feed = FeedState(0, index, 0.0)
    feed.heard(told(1), 0.0)
    assert feed.status(STALE_SECONDS) == "current"
    assert feed.status(STALE_SECONDS + 0.1) == "stale"
    assert index.mirrors[0].tiers
    feed.heard(KvEvents(STREAM, 1), 60.0)
    assert feed.status(60.0) == "current"


def test_events_that_wait_are_bounded() -> None:
    feed = FeedState(0, Index(), 0.0)
    size = 1 << 16
    ask = feed.heard(told(9), 0.0)
    assert ask is not None
    for seq in range(10, 40):
        feed.heard(KvEvents(STREAM, seq, b"n" * 16 * size, b"\1" * size), 0.0)
        assert feed._waiting_bytes <= WAITING_BYTES_MAX
    again = feed.answered(ask.number, replay(8, b"\1" * 16, snapshot=True), 1.0)
    assert again is None, "what waited follows without a gap, as far as it goes"
    gap = feed.heard(KvEvents(STREAM, 39), 1.0)
    assert gap is not None
    assert 9 < gap.after < 39


def test_malformed_messages_are_refused_and_change_nothing() -> None:
    index = Index()
    feed = FeedState(0, index, 0.0)
    feed.heard(told(1), 0.0)
    with pytest.raises(ValueError, match="17 bytes of names"):
        feed.heard(KvEvents(STREAM, 2, b"n" * 17, b"\1"), 1.0)
    assert feed.seq == 1
    ask = feed.heard(told(3), 1.0)
    assert ask is not None
    wrong = [
        EventsReply(1, 2, STREAM, 3, False, b"n", b"\1", False),
        replay(0),
        replay(1, more=True),
        EventsReply(1, 2, b"restart!", 3, False, b"", b"", False),
    ]
    for reply in wrong:
        with pytest.raises(ValueError, match=r"names|replays"):
            feed.answered(ask.number, reply, 1.0)
    feed.failed(ask.number, 1.0)
    assert (feed.seq, len(index.mirrors[0].tiers)) == (1, 1)


# Sockets


class Controller:
    """An engine and its publisher, and the link over which it is asked: all in one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.simulation = Simulation(EngineConfig(num_blocks=64, chunk_size=CHUNK, max_context=96), check=False)
        self.publisher = EventPublisher(Gate(context), endpoint)
        self.calls: list[EventsCall] = []
        self.refuses = 0
        """Calls that fail."""

    @property
    def truth(self) -> dict[bytes, int]:
        return truth(self.simulation.engine.scheduler.kv.tree)

    def turn(self) -> None:
        self.publisher.turn(self.simulation.engine, asyncio.get_running_loop().time())

    def compute(self, prompt: list[int]) -> None:
        self.simulation.submit(prompt, 3)
        while not self.simulation.engine.is_idle:
            self.simulation.step()
            self.turn()

    async def call(self, make: Callable[[int], EventsCall], timeout_seconds: float | None) -> object:
        self.calls.append(make(77))
        await asyncio.sleep(0)
        if self.refuses:
            self.refuses -= 1
            raise unavailable("not now")
        return self.publisher.log.answer(self.calls[-1], 1, asyncio.get_running_loop().time())


async def until(condition: Callable[[], bool], *controllers: Controller) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        for controller in controllers:
            controller.turn()
        await asyncio.sleep(0.01)


async def follow_two_controllers(place: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoints = [f"ipc://{place}/0", "", f"ipc://{place}/2"]
    first, third = Controller(context, endpoints[0]), Controller(context, endpoints[2])
    first.compute(list(range(30)))  # nobody hears that
    first.refuses = 1
    index, loads = Index(3), dict[int, tuple[int, int]]()
    feeds = EventFeeds(context, index, lambda c, *load: loads.update({c: load}))
    feeds.open()
    for number, controller in ((0, first), (2, third)):
        feeds.add(number, endpoints[number], controller)
    assert [feeds.status(i) for i in range(3)] == ["catching up", "off", "catching up"]
    await until(lambda: feeds.status(0) == feeds.status(2) == "current", first, third)
    assert len(first.calls) == 2, "one call that failed, and one that did not"
    assert not third.calls, "nothing has happened there"
    assert index.mirrors[0].tiers == first.truth
    for start in range(100, 500, 50):
        first.compute(list(range(start, start + 40)))
        third.compute(list(range(start, start + 20)))
    await until(lambda: index.mirrors[0].tiers == first.truth and index.mirrors[2].tiers == third.truth)
    first.simulation.submit(list(range(9)), 3)
    await until(lambda: loads.get(0) == (1, 9) and loads.get(2) == (0, 0), first, third)
    # It is started again, and its successor has computed something else before anybody hears of it.
    first.publisher.close()
    again = Controller(context, endpoints[0])
    again.compute(list(range(700, 720)))
    first.publisher = again.publisher
    await until(lambda: index.mirrors[0].tiers == again.truth, again)
    assert feeds.status(0) == "current"
    socket = context.socket(zmq.PUB)
    again.publisher.close()
    while True:
        try:
            socket.bind(endpoints[0])
            break
        except zmq.ZMQError:  # the other one is still being closed
            await asyncio.sleep(0.01)
    beat = msgspec.msgpack.encode(KvEvents(again.publisher.log.stream, again.publisher.log.seq, requests=5))

    def is_heard() -> bool:
        for frame in (b"", b"\xc1", msgspec.msgpack.encode(KvEvents(STREAM, 1, b"n", b"")), beat):
            socket.send(frame)
        return loads[0] == (5, 0)

    await until(is_heard)  # what cannot be read does no harm
    assert index.mirrors[0].tiers == again.truth
    feeds.close()
    socket.close(linger=0)
    third.publisher.close()
    context.term()


def test_feeds_follow_controllers_over_sockets(tmp_path_factory: pytest.TempPathFactory) -> None:
    asyncio.run(follow_two_controllers(tmp_path_factory.mktemp("e")))


async def check_again_after_an_error() -> None:
    ticks: list[float] = []

    class Failing:
        def tick(self) -> None:
            ticks.append(asyncio.get_running_loop().time())
            raise ValueError("surprise")

        def close(self) -> None:
            pass

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    feeds = EventFeeds(zmq.Context.instance(), Index(), lambda *_: None)
    feeds._feeds[0] = Failing()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="surprise"):
        feeds.open()
    await until(lambda: len(ticks) >= 2)
    feeds.close()


def test_an_error_does_not_end_the_checks_for_good() -> None:
    asyncio.run(check_again_after_an_error())
