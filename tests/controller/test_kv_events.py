"""What routers are told: that it is the truth in all kinds of traffic, and what is answered to who missed some."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from msgspec.structs import replace
from seeds import seeds
from simulation.driver import Simulation
from simulation.engines import ENGINES, MIXES, TINY
from simulation.module_prompts import Schemas
from simulation.told import Mirror, truth
from simulation.traffic import Mix, Traffic

from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.kv_events import SNAPSHOT_SECONDS, SNAPSHOTS_MAX, Announced, KvEventLog
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.engine.integrity import IntegrityError, check_integrity
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import EventsCall
from trunkline.controller.service.status import load_of, state_of
from trunkline.kvstore.chunks import NO_BLOCK, ChunkName, pack_int32
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import EventsReply
from trunkline.router.routing.names import KvIdentity, prompt_names
from trunkline.router.routing.request import RouteRequest

CHUNK = 4


def known_of(simulation: Simulation) -> dict[bytes, int]:
    """What a router knows of it."""
    assert simulation.listener is not None
    return simulation.listener.tiers


@pytest.mark.parametrize(
    "name", ["tiny, both", "tiers", "little host memory, cuts", "modules, tiers", "modules that cannot shift"]
)
@pytest.mark.parametrize("seed", seeds(1))
def test_routers_know_where_chunks_are(name: str, seed: int) -> None:
    """The simulation compares what was told with the tree after every step."""
    mix = dataclasses.replace(MIXES.get(name, Mix()), losses=0.003)
    traffic = Traffic(ENGINES[name], mix, seed)
    traffic.run(90)
    listener = traffic.simulation.listener
    assert listener is not None
    assert listener.log.seq > 50
    assert listener.told >= ({0, 1, 2, 3, 4, 6} if ENGINES[name].disk_slots else {0, 1})


def test_a_change_that_nobody_noted_is_found() -> None:
    simulation = Simulation(TINY)
    simulation.submit(list(range(12)), 2)
    simulation.run()
    tree = simulation.tree
    next(tree.nodes()).announced = 0
    with pytest.raises(IntegrityError, match="was not noted"):
        check_integrity(simulation.scheduler)


ROOMY = EngineConfig(num_blocks=900, chunk_size=CHUNK, max_context=400, token_budget=64, max_rows=8)
IDENTITY = KvIdentity(b"", "float32", CHUNK)


def test_a_router_finds_what_requests_with_modules_leave() -> None:
    """But for ends of texts that a longer text took the place of."""
    rng = random.Random(3)
    schemas, simulation = Schemas(rng, CHUNK, count=6, span=80), Simulation(ROOMY)
    found = absent = 0
    for number in range(40):
        own, layout = schemas.prompt()
        salt = rng.choice([b"", b"tenant"])
        simulation.submit(own, 1, layout=layout, salt=salt, seed=number)
        simulation.run()
        chains = prompt_names(RouteRequest(pack_int32(own), salt=salt, layout=layout), IDENTITY).chains
        for i, names in enumerate(text.names for text in chains):
            there = [name in known_of(simulation) for name in names]
            assert all(there[:-1])
            assert i < len(chains) - 1 or all(there), "own tokens that are full chunks"
            found += sum(there)
            absent += len(there) - sum(there)
    assert absent < 0.1 * found


def test_a_router_finds_what_is_kept_behind_a_cut() -> None:
    rng, simulation = random.Random(4), Simulation(ROOMY)
    for _ in range(30):
        history = [rng.randrange(50) for _ in range(rng.randrange(30, 90))]
        simulation.submit(history, 1)
        simulation.run()
        start = rng.randrange(10)
        drops = ((start, start + rng.randrange(1, 15)),)
        first, *_ = prompt_names(RouteRequest(pack_int32(history), drops=drops), IDENTITY).chains
        assert set(first.names) <= known_of(simulation).keys()
        simulation.submit(history, 1, drops=drops)
        simulation.run()
        assert set(first.names) <= known_of(simulation).keys(), "it hangs elsewhere, under the same names"


@pytest.mark.parametrize("seed", seeds(2))
def test_chunks_of_one_name_count_together(seed: int) -> None:
    rng, announced = random.Random(seed), Announced()
    names = [ChunkName(bytes([i % 4])) for i in range(9)]
    present = [0] * len(names)
    for _ in range(2000):
        chunk = rng.randrange(len(names))
        before = present[chunk]
        present[chunk] = rng.choice([tiers for tiers in range(8) if tiers != before])
        announced.move(names[chunk], before, present[chunk])
        expected: Counter[ChunkName] = Counter()
        for name, tiers in zip(names, present, strict=True):
            expected[name] |= tiers
        assert announced.tiers == {name: tiers for name, tiers in expected.items() if tiers}


# Answers


class Chunks:
    """A tree on the device only, of random chunks."""

    def __init__(self, seed: int, blocks: int = 64) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(blocks)
        self.tree = RadixCache(self.pool, CHUNK)
        self.now = 0.0

    def change(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 1.0
            if not self.pool.free_count or self.rng.random() < 0.1:
                self.tree.evict(self.rng.randrange(1, 8))
            parents = [self.tree.root(b""), *self.tree.nodes()]
            key = self.rng.randbytes(4 * CHUNK)
            self.tree.insert(self.rng.choice(parents), key, self.pool.allocate(), 0, self.now)


def ask(log: KvEventLog, **fields: int | bytes) -> EventsReply:
    return log.answer(EventsCall(ticket=5, **fields), 9, 0.0)  # type: ignore[arg-type]


def pages(log: KvEventLog, **first: int | bytes) -> list[EventsReply]:
    """All pages of a snapshot, or all parts of a replay."""
    replies = [ask(log, **first)]
    while replies[-1].more:
        last = replies[-1]
        if last.snapshot:
            replies.append(ask(log, stream=last.stream, page=len(replies), upto=last.upto))
        else:
            replies.append(ask(log, stream=last.stream, after=last.upto))
    return replies


def restored(replies: list[EventsReply]) -> dict[bytes, int]:
    mirror = Mirror()
    mirror.begin_snapshot()
    for reply in replies:
        mirror.add_snapshot(reply.names, reply.tiers)
    mirror.end_snapshot()
    return mirror.tiers


def test_a_snapshot_comes_in_pages_and_stays_as_it_was() -> None:
    chunks, log = Chunks(1), KvEventLog(b"12345678", page_chunks=7)
    chunks.change(40)
    log.follow(chunks.tree)
    before = truth(chunks.tree)
    first = ask(log)
    assert (first.seq, first.ticket, first.stream, first.snapshot, first.more) == (9, 5, b"12345678", True, True)
    replies = [first]
    while replies[-1].more:
        chunks.change(5)
        log.follow(chunks.tree)
        replies.append(ask(log, stream=log.stream, page=len(replies), upto=first.upto))
    assert all(reply.upto == first.upto < log.seq for reply in replies)
    assert len(replies) == -(-len(before) // 7)
    assert restored(replies) == before
    # What has happened since can be replayed.
    mirror = Mirror()
    mirror.tiers = before
    for reply in pages(log, stream=log.stream, after=first.upto):
        assert not reply.snapshot
        mirror.apply(reply.names, reply.tiers)
    assert mirror.tiers == truth(chunks.tree)


def test_a_forgotten_snapshot_begins_anew() -> None:
    chunks, log = Chunks(2), KvEventLog(b"12345678", page_chunks=7)
    chunks.change(30)
    log.follow(chunks.tree)
    first = ask(log)
    log.forget_old(SNAPSHOT_SECONDS + 1)
    # Nothing has changed: one that is taken now is the same.
    same = ask(log, stream=log.stream, page=1, upto=first.upto)
    assert (same.upto, same.names[:16] in first.names) == (first.upto, False)
    chunks.change(3)
    log.follow(chunks.tree)
    log.forget_old(2 * SNAPSHOT_SECONDS)
    again = ask(log, stream=log.stream, page=2, upto=first.upto)
    assert again.upto == log.seq > first.upto
    assert restored([again]).items() <= truth(chunks.tree).items()
    wrong: list[dict[str, int | bytes]] = [
        {"stream": b"another!", "page": 1, "upto": log.seq},
        {"page": -3},
        {"page": 99, "upto": log.seq},
    ]
    for fields in wrong:
        reply = ask(log, **fields)
        assert (reply.snapshot, reply.upto, reply.names) == (True, log.seq, again.names)


def test_few_snapshots_are_kept() -> None:
    chunks, log = Chunks(3), KvEventLog(b"12345678", page_chunks=7)
    for _ in range(3 * SNAPSHOTS_MAX):
        chunks.change(2)
        log.follow(chunks.tree)
        ask(log)
        ask(log)
    assert len(log._snapshots) == SNAPSHOTS_MAX


@pytest.mark.parametrize("after", [-1, 0, 1, 50, 99, 100, 101, 1 << 70])
def test_a_ring_that_is_too_short_is_no_help(after: int) -> None:
    chunks, log = Chunks(4), KvEventLog(b"12345678", ring_bytes=8000)
    for _ in range(100):
        chunks.change()
        log.follow(chunks.tree)
    kept = len(log._ring)
    assert 10 < kept < 60
    reply = ask(log, stream=log.stream, after=after)
    assert reply.snapshot == (not 100 - kept <= after <= 100)
    assert reply.upto == 100
    if after == 100:
        assert not reply.names
    assert ask(log, stream=b"another!", after=after).snapshot


def test_another_tree_takes_the_place_of_the_first() -> None:
    """What both have is not told again."""
    first, second, log, mirror = Chunks(5), Chunks(5), KvEventLog(b"12345678"), Mirror()
    first.change(20)
    second.change(30)
    [batch] = log.follow(first.tree)
    mirror.apply(batch.names, batch.tiers)
    common = set(mirror.tiers) & truth(second.tree).keys()
    assert common
    [batch] = log.follow(second.tree)
    mirror.apply(batch.names, batch.tiers)
    assert mirror.tiers == truth(second.tree)
    assert not common & {batch.names[at : at + 16] for at in range(0, len(batch.names), 16)}
    assert not log.follow(second.tree)


def test_chunks_that_were_lost_unnoticed_are_found_by_looking() -> None:
    chunks, log = Chunks(6), KvEventLog(b"12345678")
    chunks.change(10)
    log.follow(chunks.tree)
    for node in chunks.tree.nodes():
        node.block = NO_BLOCK
    assert not log.follow(chunks.tree)
    [batch] = log.follow(chunks.tree, look_again=True)
    assert set(batch.tiers) == {0}
    assert not log.announced.tiers


# Load


def test_queued_tokens_are_those_that_are_not_computed() -> None:
    config = replace(TINY, num_blocks=40, max_rows=2)
    simulation = Simulation(config)
    engine = simulation.engine
    assert load_of(engine) == (0, 0)
    shared = list(range(20))
    simulation.submit(shared, 4)
    simulation.submit(list(range(40, 70)), 4)
    assert load_of(engine) == (2, 50)
    simulation.plan()  # two steps of 24 tokens, one of which is output
    assert load_of(engine) == (2, 50 - 24 - 23)
    simulation.submit(shared, 4)
    assert load_of(engine) == (3, 3 + 1), "all of it is found, and the last token is computed all the same"
    simulation.run()
    assert load_of(engine) == (0, 0)


def test_a_state_says_what_a_router_needs_to_name_chunks() -> None:
    simulation = Simulation(replace(ENGINES["tiers"], model_fingerprint=b"weights", swap_us_per_block=80.0))
    state = state_of(simulation.engine)
    assert (state.fingerprint, state.dtype, state.chunk_size) == (b"weights", "float32", CHUNK)
    device, host, disk, remote, peer = state.load_us
    assert (device, host, peer) == (0.0, 10.0, 0.0)
    assert host < disk < remote
    assert state.prefill_us == 0.0, "not known before the first prompt"
    simulation.submit(list(range(20)), 4)
    simulation.run()
    assert state_of(simulation.engine).prefill_us > 0
    assert state_of(Simulation(TINY).engine).load_us == [0.0] * len(TierKind)
