"""Groups that pull from each other, under traffic of every kind, with peers that are not to be trusted.

Routers say who has what, mostly from what is true and sometimes from what was true a while ago or never. Groups
lose chunks, answer nothing, fail, leave, and come back at other endpoints. Whatever happens, every output is the
oracle's (`simulation.traffic`), what is pulled is what was saved under that name (`simulation.peers`), nothing is
leaked, and all invariants of engines and directories hold after each step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from msgspec.structs import replace
from seeds import seeds
from simulation.peers import Network
from simulation.traffic import Mix, Traffic

from trunkline.controller.allocation.modules import name_texts
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.engine.events import ExpectRequest
from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.engine.validation import problem_of_prefetch, problem_of_submit, request_of_prefetch
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Holder, KeptChunks, ModuleText, Prefetch, Submit
from trunkline.controller.sequences.module_prompt import CachedText
from trunkline.controller.service.offers import HOT, LIVE, OfferList
from trunkline.kvstore import peers
from trunkline.kvstore.chunks import NAME_BYTES, ChunkName, unpack_int32
from trunkline.kvstore.cuts import ContextCut, cut_name, pack_drops
from trunkline.kvstore.module_names import RelocationRule
from trunkline.kvstore.root_keys import TEXT_ROOT
from trunkline.kvstore.tier import TierKind
from trunkline.router.routing.handover import path_names
from trunkline.router.routing.names import KvIdentity

BASE = EngineConfig(num_blocks=24, chunk_size=4, max_context=80, token_budget=24, max_rows=8, peers=True)
GROUPS = {
    "host memory only": (replace(BASE, host_slots=14), Mix(cuts=0.1, ttl=0.2)),
    "cuts": (replace(BASE, num_blocks=40, host_slots=40), Mix(cuts=0.6, beams=0.0, scored=0.0)),
    "disks": (replace(BASE, host_slots=12, disk_slots=30, ranks=2, preemption="swap"), Mix(cuts=0.2)),
    "all tiers, modules": (
        replace(BASE, host_slots=20, disk_slots=40, remote=True, ranks=2, session_ttl_s=300.0),
        Mix(modules=0.4, calls=0.02, schemas=3, cuts=0.3),
    ),
}


@dataclass
class Group:
    """One of the groups, and where it exports at present."""

    name: str
    traffic: Traffic
    endpoints: list[str] = field(default_factory=list)
    told: list[tuple[str, list[str]]] = field(default_factory=list)
    """All that routers ever knew of it."""


class Cluster:
    """Groups in one network; what happens next is drawn from a seed."""

    def __init__(self, config: EngineConfig, mix: Mix, seed: int) -> None:
        self.rng = random.Random(seed)
        self.network = Network()
        self.groups: list[Group] = []
        self.moved = 0
        """Paths handed over of which chunks were moved behind a cut."""
        self.kept_told = 0
        """Requests with a cut behind which another group had kept chunks."""
        for number in range(3):
            traffic = Traffic(config, mix, seed, check=True)  # alike prompts in all groups
            traffic._rng.seed(seed + 7 * number)
            simulation = traffic.simulation
            simulation.pace_s = self.rng.choice([1e-4, 1e-2])
            simulation.tiers.network = self.network
            if self.groups:
                simulation.tiers.remote = self.groups[0].traffic.simulation.tiers.remote  # all share one store
            group = Group(f"group-{number}", traffic)
            simulation.holders_of = lambda submit, group=group: self.holders(group, submit)
            simulation.kept_of = partial(self.kept, group)
            simulation.texts_of = partial(self.texts, group)
            self.groups.append(group)
            self.join(group)
        for group in self.groups:
            group.traffic._bases = self.groups[0].traffic._bases

    def join(self, group: Group) -> None:
        simulation = group.traffic.simulation
        group.endpoints = self.network.export(simulation.workers.pool, group.name, simulation.engine.config.ranks)
        group.told.append((group.name, group.endpoints))

    def holders(self, asking: Group, submit: Submit) -> list[Holder]:
        """What a router says: where the prompt's chunks are in host memory, or what it wrongly believes."""
        found = self.believed(asking, lambda group: self.held(group, submit))
        checked = replace(submit, holders=found)
        assert not problem_of_submit(checked, 0)
        return found

    def kept(self, asking: Group, submit: Submit) -> KeptChunks | None:
        """What a router says of chunks that a group has kept behind a prompt's cut."""
        rng, source = self.rng, self.rng.choice(self.groups)
        names = self.kept_names(source, submit) if submit.drops and rng.random() < 0.8 else []
        if not names or source is asking:
            return None
        if rng.random() < 0.1:
            names[rng.randrange(len(names))] = ChunkName(rng.randbytes(NAME_BYTES))
        member, endpoints = source.told[-1] if rng.random() < 0.9 else rng.choice(source.told)
        self.kept_told += 1
        found = KeptChunks(b"".join(names), [Holder(member, endpoints, 0, len(names))])
        assert not problem_of_submit(replace(submit, kept=found), 0)
        return found

    @staticmethod
    def kept_names(group: Group, submit: Submit) -> list[ChunkName]:
        """The names of the chunks of a prompt's block table that a group has in host memory."""
        tree = group.traffic.simulation.tree
        history, drops = unpack_int32(submit.tokens), unpack_int32(submit.drops, columns=2).tolist()
        cut = ContextCut(tuple((start, stop) for start, stop in drops), tree.chunk_size)
        names, chain = list[ChunkName](), cut.chain(tree.root_name(submit.salt), history)
        for segment in cut.segments:
            after = chain[segment.start - 1] if segment.start else tree.root_name(submit.salt)
            cut_root = tree.find_cut(cut_name(after, pack_drops(cut.drops[: segment.drops])))
            node: Node | None = cut_root if segment.drops else tree.find_root(submit.salt)
            stop = segment.stop if segment.stop >= 0 else len(history) // tree.chunk_size
            for at in range(segment.start, stop):
                key = submit.tokens[at * tree.chunk_bytes : (at + 1) * tree.chunk_bytes]
                node = node.children.get(key) if node is not None else None
                if node is None or not node.host_ready:
                    return names
                names.append(node.name)
        return names

    def texts(self, asking: Group, texts: list[ModuleText], salt: bytes, relocate: bool) -> list[ModuleText]:
        """The same of texts: under their names, whatever the position at which a group has computed them."""
        named: list[CachedText] = []
        tree = asking.traffic.simulation.tree
        name_texts(tree, salt, texts, RelocationRule.of(BASE.positions_shift, relocate), named)
        told = []
        for text, names in zip(texts, named, strict=True):
            found = self.believed(asking, partial(self.held_text, text=names))
            told.append(replace(text, holders=found))
        return told

    def believed(self, asking: Group, count_of: Callable[[Group], int]) -> list[Holder]:
        """What routers say of a chain of which groups have so many chunks."""
        rng, found = self.rng, list[Holder]()
        for group in rng.sample(self.groups, len(self.groups)):
            if group is asking and rng.random() < 0.9:
                continue
            count = count_of(group)
            start = rng.choice([0, 0, rng.randrange(count + 1)])
            stop = count if rng.random() < 0.7 else start + rng.randrange(1, 6)
            member, endpoints = group.told[-1] if rng.random() < 0.9 else rng.choice(group.told)
            if stop > start:
                found.append(Holder(member, endpoints, start, stop))
        return found

    def held_text(self, group: Group, text: CachedText) -> int:
        """How many of a text's first chunks a group has in host memory."""
        tree = group.traffic.simulation.tree
        nodes = []
        if (root := tree.find_text_root(text.place)) is not None:
            node: Node | None = root
            for at in range(0, len(text.tokens), tree.chunk_bytes):
                node = node.children.get(text.tokens[at : at + tree.chunk_bytes]) if node is not None else None
                if node is not None and node.host_ready:
                    nodes.append(node)
        return len(nodes)

    def held(self, group: Group, submit: Submit) -> int:
        """How many of a plain prompt's first chunks a group has in host memory."""
        tree, size = group.traffic.simulation.tree, group.traffic.simulation.tree.chunk_bytes
        node: Node | None = tree.find_root(submit.salt)
        count = 0
        while node is not None and len(key := submit.tokens[count * size : (count + 1) * size]) == size:
            node = node.children.get(key)
            if node is None or not node.host_ready:
                break
            count += 1
        return count

    # What happens

    def step(self) -> None:
        """One random event in one group, or to one."""
        rng = self.rng
        group = rng.choice(self.groups)
        traffic = group.traffic
        event = rng.random()
        if event < 0.02:
            self.trouble(group)
        elif event < 0.05:
            self.prefetch(group)
        elif event < 0.3 and traffic.live < traffic.mix.crowd:
            traffic.submit()
        elif event < 0.8 and not traffic.simulation.engine.is_away:
            traffic.simulation.step()
            traffic.settle()
        else:
            traffic.act()
        self.check(group)

    def trouble(self, group: Group) -> None:
        rng, simulation = self.rng, group.traffic.simulation
        kind = rng.choice(["leave", "back", "silent", "answers", "faults", "sound", "loses", "workers"])
        if kind == "leave":
            self.network.leave(group.endpoints)
        elif kind == "back":
            self.network.leave(group.endpoints)
            self.join(group)
        elif kind == "silent":
            self.network.silent.update(group.endpoints)
        elif kind == "answers":
            self.network.silent.difference_update(group.endpoints)
        elif kind == "faults":
            simulation.tiers.faults.fail, simulation.tiers.faults.lose = rng.choice(
                [(0.3, 0.0), (0.0, 0.3), (0.1, 0.1)]
            )
        elif kind == "sound":
            simulation.tiers.faults.fail = simulation.tiers.faults.lose = 0.0
        elif kind == "loses":  # what routers were told is not true any more
            simulation.flush_cache()
            group.traffic.settle()
        elif not simulation.engine.is_away:
            group.traffic._lose_workers()
            self.network.leave(group.endpoints)
            simulation.replace_workers()
            self.join(group)
            group.traffic.settle()

    def prefetch(self, group: Group) -> None:
        """Hand a path of another group over, as a router does when that one drains."""
        source = self.rng.choice(self.groups)
        tree, now = source.traffic.simulation.tree, source.traffic.simulation.now
        listed = OfferList(tree, self.rng.choice([LIVE, HOT]), now)
        while not listed.advance(100):
            pass
        paths = listed.page(0, 0).paths
        if not paths:
            return
        special = [path for path in paths if path.names or path.root.startswith(TEXT_ROOT)]
        path = self.rng.choice(special if special and self.rng.random() < 0.7 else paths)
        member, endpoints = source.told[-1]
        names = path_names(path, KvIdentity(*tree._identity, BASE.chunk_size))
        assert set(names) <= {node.text_name or node.name for node in tree.nodes()}, "a path has other names"
        self.moved += bool(path.names)
        message = Prefetch(
            1, path.tokens, holders=[Holder(member, endpoints, 0, len(names))], root=path.root, names=path.names
        )
        assert not problem_of_prefetch(message, 0)
        if not group.traffic.simulation.engine.is_away:
            expected = ExpectRequest((0, 1), request_of_prefetch(message), message.root, message.names)
            group.traffic.simulation.receive(expected)

    def check(self, group: Group) -> None:
        simulation = group.traffic.simulation
        if simulation.engine.is_away:
            return
        tree, tiers = simulation.tree, simulation.tiers
        book = tree.tiers.peers
        assert {peer.number for peer in book} >= set(tiers.peers), "ranks know of a peer that is forgotten"
        for peer in book:
            known = tiers.peers.get(peer.number)
            assert known is None or known == list(peer.endpoints), "ranks look for a peer in the wrong place"
            assert peer.health.reading <= tree.tiers.config.pulls_in_flight

    def end(self) -> None:
        """All requests end, everything that is under way ends, and nothing is left."""
        for group in self.groups:
            group.traffic.simulation.tiers.faults.fail = group.traffic.simulation.tiers.faults.lose = 0.0
        for group in self.groups:
            traffic, simulation = group.traffic, group.traffic.simulation
            steps = 0
            while not simulation.engine.is_idle:
                assert simulation.step() or simulation.grammars or simulation.wanted.wake_at < float("inf")
                for message in list(simulation.grammars.values()):
                    simulation.compiled(message.grammar, "it is bad" if message.text == "(" else "")
                traffic.settle()
                steps += 1
                assert steps < 100_000, "requests wait for ever"
            traffic._callers.end()
            for _ in range(2):
                simulation.now += 1000.0  # announcements and peers are forgotten; paused tiers work again
                while simulation.plan() or simulation.move_chunks() or simulation.answer():
                    pass
            tiers = simulation.tree.tiers
            assert not simulation.engine.traffic.in_flight, "a move is never answered"
            assert not tiers.copies.at_peers, "what peers have is remembered for ever"
            assert not len(tiers.peers), "peers are remembered for ever"
            check_integrity(simulation.scheduler)
            traffic.check_empty()

    def pulled(self) -> int:
        return sum(g.traffic.simulation.engine.counters.tiers[TierKind.PEER].reads for g in self.groups)


def live(name: str, seed: int, steps: int) -> Cluster:
    config, mix = GROUPS[name]
    cluster = Cluster(config, mix, seed)
    for _ in range(steps):
        cluster.step()
    cluster.end()
    return cluster


@pytest.fixture(autouse=True)
def pulls_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated steps are so fast that pulls at the usual assumption would not be tried."""
    monkeypatch.setattr(peers, "PEER_READ_US", 1.0)


@pytest.mark.parametrize("seed", seeds(1, always=(1,)))
@pytest.mark.parametrize("name", GROUPS)
def test_groups_pull_from_each_other(name: str, seed: int) -> None:
    cluster = live(name, seed, 400)
    assert cluster.pulled() or seed != 1, "nothing was ever pulled"
    assert cluster.kept_told or seed != 1 or name != "cuts", "nothing was ever kept elsewhere"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("name", GROUPS)
def test_groups_pull_from_each_other_for_long(name: str, seed: int) -> None:
    live(name, seed, 10_000)
