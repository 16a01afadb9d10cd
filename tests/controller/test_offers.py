"""The paths that a group offers to others: at a quiet moment all that should be there and in order, in traffic
never anything that cannot be; and how long a group that drains waits until they were handed over."""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from controller.offer_traffic import CHUNK, TIERED, TRAFFIC, listed, traffic_steps
from controller.service_harness import Ranks, group_config, run_controller
from seeds import seeds
from simulation.traffic import Mix, Traffic

from trunkline.controller.cache.radix_tree import PENDING, Node, RadixTree
from trunkline.controller.engine.engine import Engine
from trunkline.controller.messages import Handed, OffersCall, Ping
from trunkline.controller.service import offers
from trunkline.controller.service.handover import BEGIN_SECONDS, HandoverWait
from trunkline.controller.service.offers import HOT, HOT_USES, LIST_SECONDS, LIVE, Offering, OfferList
from trunkline.kvstore.chunks import NAME_BYTES, chunk_name
from trunkline.kvstore.root_keys import CUT_ROOT, TEXT_ROOT
from trunkline.router.messages import OfferedPath, Offers
from trunkline.router.routing.handover import path_names
from trunkline.router.routing.names import KvIdentity

Key = tuple[bytes, bytes]


def nodes_above(node: Node) -> list[Node]:
    found = []
    while node.parent is not None:
        found.append(node)
        node = node.parent
    return [node, *reversed(found)]


def key_of(node: Node) -> Key:
    """Root and tokens of a chunk's path."""
    root, *path = nodes_above(node)
    return root.key, b"".join([chunk.key for chunk in path])


def check_names(tree: RadixTree, offer: OfferedPath, end: Node) -> None:
    """What was moved behind a cut is named, and nothing else; all other names follow."""
    root, *path = nodes_above(end)
    names = [chunk.text_name or chunk.name for chunk in path]
    assert path_names(offer, KvIdentity(*tree._identity, CHUNK)) == names
    if moved := len(offer.names) // NAME_BYTES:
        above = path[moved - 2].name if moved > 1 else root.name
        assert path[moved - 1].name != chunk_name(above, root.name + path[moved - 1].key), "it follows"


def is_offered(node: Node, root: Node) -> bool:
    return node.ready_step != PENDING and (node.token_count == CHUNK or root.key.startswith(TEXT_ROOT))


def check_live(tree: RadixTree, paths: list[OfferedPath]) -> None:
    wanted: dict[Key, list[Node]] = {}
    for node in tree.nodes():
        root, *path = nodes_above(node)
        whole = all(is_offered(each, root) for each in path)
        if whole and not any(is_offered(child, root) for child in node.children.values()):
            key = key_of(node)
            if key[1]:
                wanted.setdefault(key, []).append(node)
    assert sorted((path.root, path.tokens) for path in paths) == sorted(
        key for key, nodes in wanted.items() for _ in nodes
    )
    for offer in paths:  # none is the beginning of another one
        assert not any(
            other is not offer and other.root == offer.root and other.tokens.startswith(offer.tokens)
            for other in paths
            if offer.root[:1] not in (CUT_ROOT, TEXT_ROOT)  # texts may end in chunks that are not full
        )
    for offer in paths:
        check_names(tree, offer, wanted[offer.root, offer.tokens][0])
    ranks = [max((n.active > 0, n.last_use) for n in wanted[offer.root, offer.tokens]) for offer in paths]
    if all(len(nodes) == 1 for nodes in wanted.values()):
        assert ranks == sorted(ranks, reverse=True)


def check_hot(tree: RadixTree, paths: list[OfferedPath]) -> int:
    """Return how many shared paths there are."""
    pinned, shared = set(), set()
    for node in tree.nodes():
        root, *path = nodes_above(node)
        if not all(is_offered(each, root) for each in path):
            continue
        key = key_of(node)
        is_end = not any(is_offered(child, root) for child in node.children.values())
        if node.pins:
            pinned.add((key, node.uses))
        elif node.uses >= HOT_USES and key[1]:
            if root.key.startswith(TEXT_ROOT):
                shared |= {(key, node.uses)} if is_end else set()
            elif len(node.children) > 1:
                shared.add((key, node.uses))
    said = [((path.root, path.tokens), path.uses) for path in paths]
    assert set(said) - shared <= pinned
    assert set(said) >= shared
    uses = [use for key, use in said if (key, use) not in pinned]
    assert uses == sorted(uses, reverse=True)
    return len(shared)


@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.parametrize("seed", seeds(2))
def test_all_paths_are_offered_in_order(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, mix = TRAFFIC[name]
    traffic = Traffic(config, mix, seed=seed, check=False)
    rng = random.Random(seed)
    live = shared = 0
    for _ in range(40):
        traffic_steps(traffic, mix, 6)
        tree, now = traffic.simulation.engine.scheduler.kv.tree, traffic.simulation.now
        monkeypatch.setattr(offers, "PAGE_BYTES", rng.choice([1, 40, 1 << 20]))
        paths = listed(tree, LIVE, now, units=rng.choice([1, 3, 1000]))
        check_live(tree, paths)
        assert all(0 <= path.age <= now for path in paths)
        live += len(paths)
        shared += check_hot(tree, listed(tree, HOT, now))
        assert listed(tree, "?", now) == []
    assert live > 40
    assert shared > 0


@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.parametrize("seed", seeds(2, always=(788944000,)))
def test_in_traffic_nothing_impossible_is_offered(name: str, seed: int) -> None:
    """A path has chunks that were in the tree, whatever has come and gone between its pages."""
    config, mix = TRAFFIC[name]
    traffic = Traffic(config, dataclasses.replace(mix, losses=0.002, aborts=0.1), seed=seed, check=False)
    offering, known, now = Offering(), set[Key](), 0.0
    answers = 0
    for turn in range(120):
        traffic_steps(traffic, mix, 2)
        engine, now = traffic.simulation.engine, traffic.simulation.now
        known |= {key_of(node) for node in engine.scheduler.kv.tree.nodes()}
        if not offering.is_busy:
            offering.ask(turn % 2, OffersCall(turn, (LIVE, HOT)[turn % 3 == 2], page=turn % 5 == 4))
        for router, answer in offering.turn(engine, now):
            answers += 1
            assert router == answer.ticket % 2
            assert {(path.root, path.tokens) for path in answer.paths} <= known
    assert answers > 20


def test_of_many_paths_the_first_ones_are_kept() -> None:
    traffic = Traffic(TIERED, Mix(), seed=5, check=False)
    for _ in range(40):
        traffic_steps(traffic, Mix(), 6)
    tree = traffic.simulation.engine.scheduler.kv.tree
    whole = listed(tree, LIVE, 1e9)
    part = OfferList(tree, LIVE, 1e9, paths_max=3)
    assert part.advance(100_000)
    assert len(whole) > 3
    assert part.page(0, 9).paths == whole[:3]


def test_lists_are_forgotten_when_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "PAGE_PATHS_MAX", 1)
    traffic = Traffic(TIERED, Mix(), seed=1, check=False)
    for _ in range(10):
        traffic_steps(traffic, Mix(), 4)
    engine, offering = traffic.simulation.engine, Offering()

    def ask(page: int, now: float, router: int = 1, of: Engine | None = engine) -> Offers:
        offering.ask(router, OffersCall(7, LIVE, page))
        for _ in range(1000):
            for asker, answer in offering.turn(of, now):
                assert asker == router
                return answer
        raise AssertionError("no answer")

    first = ask(0, 5.0)
    assert first.paths
    assert ask(0, 5.0) == first
    assert ask(0, 5.0, of=None).paths == []
    now, page = 5.0, 0
    answer = ask(page, now)
    while answer.more and page < 4:  # to fetch what a page offers may take long
        now, page = now + 0.9 * LIST_SECONDS, page + 1
        answer = ask(page, now)
        assert answer.paths
    assert page == 4
    assert ask(page, now + LIST_SECONDS + 1).paths == []
    assert not offering.is_busy
    for router in range(100):
        ask(0, 5.0, router)
    assert len(offering._lists) <= offers.LISTS_MAX


@pytest.mark.parametrize("seed", seeds(20))
def test_a_drain_waits_for_routers_that_hand_over(seed: int) -> None:
    """Against a plain account of who is at it."""
    rng = random.Random(seed)
    wait, now = HandoverWait(), 0.0
    wait.asked(1)  # before the drain: it only looks
    assert wait.is_over(now)
    routers = rng.randrange(3)
    wait.begin(routers, now)
    at_it: set[int] = set()
    until = BEGIN_SECONDS if routers else 0.0
    for _ in range(200):
        router, deadline = rng.randrange(4), wait.deadline
        match rng.randrange(5):
            case 0:
                wait.asked(router)
                at_it.add(router)
            case 1 if rng.random() < 0.5:
                wait.handed(router)
                at_it.discard(router)
                until = 0.0
            case 2:
                others = rng.randrange(3)
                wait.gone(router, others, now)
                if router in at_it and others:
                    until = max(until, now + BEGIN_SECONDS)
                until = until if others else 0.0
                at_it.discard(router)
            case _:
                was_over = wait.is_over(now)
                now += rng.random()
                assert not was_over or wait.is_over(now)
                if wait.is_over(now) and not was_over:
                    assert deadline <= now
        assert wait.is_over(now) == (not at_it and now >= until)


def test_a_controller_that_stands_still_takes_no_time_from_the_routers() -> None:
    wait = HandoverWait()
    wait.begin(1, 0.0)
    assert not wait.is_over(30.0)
    wait.asked(1)
    assert not wait.is_over(90.0)
    wait.handed(1)
    assert wait.is_over(90.0)
    assert wait.is_over(150.0)
    wait.begin(2, 200.0)
    wait.asked(1)
    wait.gone(1, 1, 230.0)
    assert not wait.is_over(230.0)
    assert wait.deadline == 230.0 + BEGIN_SECONDS, "for the other one the time begins behind the pause"


@pytest.mark.processes
def test_a_group_that_drains_waits_until_its_chunks_are_handed_over(tmp_path: Path) -> None:
    config = group_config(tmp_path)
    with run_controller(config, tmp_path) as (process, router):
        ranks = Ranks(config)
        for rank in range(config.tp):
            ranks.say_hello(rank)
        ranks.start()
        router.wait_state("ready")
        router.submit(1, list(range(1, 12)), 4)
        router.wait_finished(1)
        process.send_signal(signal.SIGTERM)
        while router.state is None or router.state.status != "draining":
            router.receive()
        answer = router.call(OffersCall(3, LIVE))
        tokens = [np.frombuffer(path.tokens, "<i4").tolist() for path in answer.paths]
        assert [path[:11] for path in tokens] == [list(range(1, 12))]
        assert not len(tokens[0]) % CHUNK
        until = time.monotonic() + BEGIN_SECONDS + 0.5
        while time.monotonic() < until:  # longer than it waits for a router to begin
            router.send(Ping(0))
            router.receive()
            time.sleep(0.05)
        assert process.poll() is None
        router.send(Handed())
        assert process.wait(timeout=60) == 0
        ranks.end()
