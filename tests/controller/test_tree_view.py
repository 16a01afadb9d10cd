"""The tree as people see it: at a quiet moment the truth, in traffic never anything that cannot be."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from controller.service_harness import group_config, run_controller
from msgspec.structs import replace
from simulation.traffic import Mix, Traffic

from trunkline.controller.cache.radix_tree import PENDING, Node
from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import DescribeTree, Ping
from trunkline.controller.service.status import ASKED_MAX, Descriptions, state_of
from trunkline.controller.service.tree_view import TreeWalk
from trunkline.kvstore.chunks import NAME_BYTES
from trunkline.kvstore.root_keys import CUT_ROOT, PROMPT_ROOT, TEXT_ROOT
from trunkline.router.messages import NodeFlag, TreeDescription

CHUNK = 4
TINY = EngineConfig(num_blocks=40, chunk_size=CHUNK, max_context=80, token_budget=24, max_rows=8)
TIERED = replace(TINY, host_slots=20, disk_slots=60, remote=True, ranks=2)
TRAFFIC = {
    "samples and beams": (TINY, Mix(preempts=0.01, salts=0.3)),
    "tiers": (TIERED, Mix(ttl=0.2, preempts=0.01)),
    "cuts": (replace(TINY, host_slots=6, disk_slots=30), Mix(cuts=0.5)),
    "modules": (replace(TIERED, session_ttl_s=300.0), Mix(modules=0.7, calls=0.05)),
    "no cache": (replace(TINY, prefix_cache=False), Mix()),
}
ALL = 10_000


class Shown:
    """A description, with numbers instead of bytes."""

    def __init__(self, found: TreeDescription) -> None:
        self.found = found
        self.count = len(found.tiers)
        self.names = [found.names[i * NAME_BYTES : (i + 1) * NAME_BYTES] for i in range(self.count)]
        columns = (found.parents, found.tokens, found.chunks, found.users, found.hidden)
        self.parents, self.tokens, self.chunks, self.users, self.hidden = (
            np.frombuffer(column, "<i4").tolist() for column in columns
        )
        self.ages = np.frombuffer(found.ages, "<f4").tolist()
        assert {len(c) for c in (self.parents, self.tokens, self.chunks, self.users, self.hidden)} == {self.count}
        assert len(self.ages) == len(found.flags) == len(found.head_tokens) == self.count
        assert len(found.heads) == 4 * sum(found.head_tokens)

    def check(self, nodes_max: int) -> None:
        """What holds of any description, whatever went on meanwhile."""
        assert self.count <= nodes_max
        assert all(-1 <= parent < index for index, parent in enumerate(self.parents))
        assert all(0 < tokens <= chunks * CHUNK for tokens, chunks in zip(self.tokens, self.chunks, strict=True))
        assert min([*self.hidden, *self.users, 0]) == 0
        assert min([*self.ages, 0.0]) == 0.0


def describe(engine: Engine, now: float, *, nodes_max: int = ALL, units: int = ALL) -> Shown:
    scheduler = engine.scheduler
    tree, running = scheduler.kv.tree, scheduler.running()
    walk = TreeWalk(tree, running, nodes_max=nodes_max, head_tokens=8, now=now)
    while not walk.advance(units):
        pass
    shown = Shown(walk.description(7))
    shown.check(nodes_max)
    assert (shown.found.ticket, shown.found.total_chunks) == (7, tree.node_count)
    return shown


def users_of(engine: Engine) -> Counter[Node]:
    """By brute force: the chunks of each running sequence's path, with all that they hang from."""
    users: Counter[Node] = Counter()
    for sequence in engine.scheduler.running():
        held = set()
        for end in {*sequence.stem.ends, sequence.anchor}:
            node: Node | None = end
            while node is not None and node.parent is not None:
                held.add(node)
                node = node.parent
        users.update(held)
    return users


def check_all(shown: Shown, engine: Engine, now: float) -> None:
    """It is the whole tree, as it is now."""
    tree, users = engine.scheduler.kv.tree, users_of(engine)
    nodes = {node.name: node for node in tree.nodes()}
    by_parent: dict[tuple[bytes, bytes], Node] = {
        (node.parent.name if node.parent else b"", node.name): node for node in tree.nodes()
    }
    assert sum(shown.chunks) == tree.node_count
    assert sum(shown.tokens) == sum(node.token_count for node in tree.nodes())
    assert not any(shown.hidden)
    seen: set[int] = set()
    ends: list[Node] = []
    heads = np.frombuffer(shown.found.heads, "<i4").tolist()
    for index in range(shown.count):
        above = shown.parents[index]
        if above >= 0:
            node = by_parent[ends[above].name, shown.names[index]]
        else:
            candidates = [
                n for n in tree.nodes() if n.name == shown.names[index] and n.parent in set(tree.roots())
            ]
            node = next(n for n in candidates if id(n) not in seen)
        tokens: list[int] = []
        age = float("inf")
        for _ in range(shown.chunks[index]):
            assert id(node) not in seen
            seen.add(id(node))
            assert node.tier_set == shown.found.tiers[index]
            assert users[node] == shown.users[index]
            assert (node.ready_step == PENDING) == bool(shown.found.flags[index] & NodeFlag.COMPUTING)
            tokens += np.frombuffer(node.key, "<i4").tolist()
            age = min(age, now - node.last_use)
            last, node = node, next(iter(node.children.values()), node)
        ends.append(last)
        assert len(tokens) == shown.tokens[index]
        count = shown.found.head_tokens[index]
        assert heads[:count] == tokens[:8]
        del heads[:count]
        assert shown.ages[index] == pytest.approx(max(0.0, age), abs=1e-3)
        check_flags(last, shown.found.flags[index])
    assert len(nodes) <= len(seen) == tree.node_count


def check_flags(node: Node, flags: int) -> None:
    while node.parent is not None:
        node = node.parent
    kinds = {TEXT_ROOT: NodeFlag.MODULE, CUT_ROOT: NodeFlag.CUT, PROMPT_ROOT: NodeFlag.OWN}
    kind = kinds.get(node.key[:1], NodeFlag(0))
    salted = NodeFlag.SALTED if not kind and len(node.key) > 1 else NodeFlag(0)
    assert NodeFlag(flags) & ~NodeFlag.COMPUTING == kind | salted


@pytest.mark.parametrize("name", TRAFFIC)
def test_a_description_is_the_tree(name: str) -> None:
    config, mix = TRAFFIC[name]
    traffic = Traffic(config, mix, seed=3, check=False)
    simulation, rng = traffic.simulation, random.Random(3)
    shared = flagged = runs = 0
    for _ in range(40):
        while traffic.live >= mix.crowd:
            traffic.act()
        traffic.submit()
        for _ in range(6):
            traffic.act()
        engine, now = simulation.engine, simulation.now
        shown = describe(engine, now, units=rng.choice([1, 3, ALL]))
        check_all(shown, engine, now)
        # Blocks that running sequences have for themselves are in no tree.
        on_device = sum(c for c, t in zip(shown.chunks, shown.found.tiers, strict=True) if t & 1)
        idle = sum(n.on_device and not n.active for n in engine.scheduler.kv.tree.nodes())
        assert idle == state_of(engine).blocks_cached <= on_device <= engine.config.num_blocks
        shared += max(shown.users, default=0) > 1
        flagged += any(f & ~NodeFlag.COMPUTING for f in shown.found.flags)
        runs += max(shown.chunks, default=0) > 1
    if config.prefix_cache:
        assert shared > 2
        assert runs > 2
        assert flagged > 5 or name == "tiers"


def test_what_is_cut_short_is_what_is_used_least() -> None:
    traffic = Traffic(TIERED, Mix(), seed=5, check=False)
    simulation, cuts = traffic.simulation, 0
    for _ in range(40):
        while traffic.live >= 12:
            traffic.act()
        traffic.submit()
        for _ in range(6):
            traffic.act()
        whole = describe(simulation.engine, simulation.now)
        part = describe(simulation.engine, simulation.now, nodes_max=6)
        assert part.count == min(6, whole.count)
        where = {
            (name, parent): i for i, (name, parent) in enumerate(zip(whole.names, whole.parents, strict=True))
        }
        # The same nodes in the same order: the whole one only goes on.
        places = [where[name, parent] for name, parent in zip(part.names, part.parents, strict=True)]
        assert places == list(range(part.count))
        for index in range(part.count):
            below = [i for i, parent in enumerate(whole.parents) if parent == index]
            assert part.hidden[index] == sum(i >= part.count for i in below)
        shown = [u for u in part.users if u]
        assert len(shown) == min(6, sum(u > 0 for u in whole.users))
        cuts += whole.count > 6
    assert cuts > 2


@pytest.mark.parametrize("name", TRAFFIC)
def test_a_walk_in_traffic_shows_nothing_impossible(name: str) -> None:
    config, mix = TRAFFIC[name]
    traffic = Traffic(config, dataclasses.replace(mix, losses=0.002, aborts=0.1), seed=11, check=False)
    simulation = traffic.simulation
    walk: TreeWalk | None = None
    done = 0
    for _ in range(80):
        while traffic.live >= mix.crowd:
            traffic.act()
        traffic.submit()
        for _ in range(4):
            traffic.act()
            scheduler = simulation.engine.scheduler
            tree = scheduler.kv.tree
            if walk is None or walk.tree is not tree:
                walk = TreeWalk(tree, scheduler.running(), nodes_max=50, head_tokens=2, now=simulation.now)
            if walk.advance(5):
                Shown(walk.description(1)).check(50)
                walk, done = None, done + 1
    assert done > 2


def test_descriptions_are_shared_by_who_asks_at_once() -> None:
    traffic = Traffic(TIERED, Mix(), seed=1, check=False)
    for _ in range(10):
        traffic.submit()
        traffic.act()
    engine, now = traffic.simulation.engine, traffic.simulation.now
    said: list[tuple[int, TreeDescription]] = []
    descriptions = Descriptions()
    assert descriptions.turn(engine, now) == []
    for router in (1, 2):
        descriptions.ask(router, DescribeTree(router + 10, nodes_max=router))
    turns = 0
    while descriptions.is_busy:
        said += descriptions.turn(engine, now)
        turns += 1
        assert turns < 1000
    assert [(router, found.ticket, len(found.tiers)) for router, found in said] == [(1, 11, 2), (2, 12, 2)]
    descriptions.ask(3, DescribeTree(1))
    assert descriptions.turn(None, now) == [(3, TreeDescription(seq=0, ticket=1))]
    assert not descriptions.is_busy


def test_who_floods_gets_the_last_answers_only() -> None:
    descriptions = Descriptions()
    for ticket in range(ASKED_MAX + 20):
        descriptions.ask(1, DescribeTree(ticket))
    said = descriptions.turn(None, 0.0)
    assert [description.ticket for _, description in said] == list(range(20, ASKED_MAX + 20))


@pytest.mark.processes
def test_a_controller_without_workers_describes_nothing(tmp_path: Path) -> None:
    with run_controller(group_config(tmp_path), tmp_path) as (_, router):
        assert router.call(DescribeTree(4)).tiers == b""
        router.send(Ping(1))  # it goes on
        assert router.socket.poll(20_000)


def test_wild_numbers_are_brought_into_bounds() -> None:
    traffic = Traffic(TINY, Mix(), seed=2, check=False)
    traffic.submit()
    traffic.simulation.run()
    engine = traffic.simulation.engine
    for nodes_max, heads in ((0, 0), (-5, -1), (1 << 40, 1 << 40)):
        tree = engine.scheduler.kv.tree
        walk = TreeWalk(tree, [], nodes_max=nodes_max, head_tokens=heads, now=0.0)
        assert walk.advance(ALL)
        found = walk.description(1)
        assert 1 <= len(found.tiers) <= tree.node_count
        assert (len(found.heads) > 0) == (heads > 0)
