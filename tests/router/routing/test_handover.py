"""The plan of a handover in thousands of random steps, and the names of paths as controllers publish them."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from controller.offer_traffic import TRAFFIC, listed, traffic_steps
from seeds import seeds
from simulation.traffic import Traffic

from trunkline.controller.service.offers import HOT, LIVE
from trunkline.kvstore.chunks import pack_int32
from trunkline.kvstore.root_keys import SALT_ROOT, TEXT_ROOT
from trunkline.router.messages import OfferedPath
from trunkline.router.routing.handover import (
    ASLEEP_SECONDS,
    STALL_SECONDS,
    Handing,
    HandoverPlan,
    path_names,
)
from trunkline.router.routing.names import KvIdentity

CHUNK = 4


def paths_of(rng: random.Random, first: int, count: int) -> list[OfferedPath]:
    return [OfferedPath(b"s", pack_int32([first + i] * CHUNK * rng.randint(1, 6))) for i in range(count)]


def chunks_of(handing: Handing) -> int:
    return len(handing.path.tokens) // (4 * CHUNK)


class World:
    """Groups that fetch what they are asked to, or not, or half of it, or are gone."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.room = {name: rng.choice([0, 5, 40, 1000]) for name in "abc"}
        self.plan = HandoverPlan(self.room, per_target_max=rng.randint(1, 3))
        self.per_target = self.plan._per_target_max
        self.offered: list[bytes] = []
        self.begun: list[bytes] = []
        self.asked: Counter[str] = Counter()
        self.gone: set[str] = set()
        self.works = rng.random()

    def offer(self) -> None:
        paths = paths_of(self.rng, len(self.offered), self.rng.randint(0, 5))
        again = [OfferedPath(b"s", tokens) for tokens in self.rng.sample(self.offered, min(2, len(self.offered)))]
        self.plan.offer([*again, *paths], "giver")
        self.offered += [path.tokens for path in paths]

    def send(self) -> None:
        handing = self.plan.next()
        if handing is None:
            return
        self.begun.append(handing.path.tokens)
        count, targets = chunks_of(handing), self.plan.open_targets
        assert targets
        assert self.gone.isdisjoint(targets)
        if self.rng.random() < 0.1:
            self.plan.give_up(handing)
            return
        if self.rng.random() < 0.2:
            assert self.plan.asleep(handing, self.now)
            assert not self.plan.asleep(handing, self.now + ASLEEP_SECONDS)
            self.now += self.rng.random()
        target = self.plan.choose({name: 1.0 + self.rng.random() for name in targets})
        has = self.rng.randrange(count)
        assert self.room[target] > self.asked[target], "it has got more than there is room for"
        self.asked[target] += count - has
        self.plan.sent(handing, target, has, count, self.now)
        if self.rng.random() < 0.3:
            self.plan.answered(handing, self.rng.random() < 0.5, self.now)

    def look(self) -> None:
        for handing in self.plan.flying:
            if handing.target:
                come = handing.has + (self.rng.random() < self.works)
                self.plan.seen(handing, min(come, chunks_of(handing)), chunks_of(handing), self.now)

    def step(self) -> None:
        match self.rng.randrange(8):
            case 0:
                self.offer()
            case 1 | 2 | 3:
                self.send()
            case 4 if self.rng.random() < 0.03:
                name = self.rng.choice("abc")
                self.plan.left(name)
                self.gone.add(name)
                self.begun = [b"again"]  # what was on its way there comes again
            case _:
                self.look()
                self.now += self.rng.random()
        busy = Counter(handing.target for handing in self.plan.flying)
        assert all(count <= self.per_target for name, count in busy.items() if name)
        assert self.gone.isdisjoint(busy)


@pytest.mark.parametrize("seed", seeds(20))
def test_each_path_is_over_once(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    for _ in range(400):
        world.step()
    plan = world.plan
    waits = len(plan._queue) + len(plan.flying)
    assert plan.handed.paths + plan.handed.given_up + waits == len(world.offered)
    if not world.gone:
        order = [tokens for tokens in world.offered if tokens in set(world.begun)]
        assert world.begun == order, "a path overtook another one"
    for _ in range(10_000):  # it ends by itself, whatever the groups do
        if plan.is_idle:
            break
        world.send()
        world.look()
        world.now += STALL_SECONDS / 2
    assert plan.is_idle
    assert plan.next() is None
    assert plan.handed.paths + plan.handed.given_up == len(world.offered)
    assert plan.handed.chunks <= sum(world.asked.values())


def test_what_is_not_done_in_time_is_given_up() -> None:
    plan = HandoverPlan({"a": 100}, per_target_max=2)
    plan.offer(paths_of(random.Random(0), 0, 5), "giver")
    one, two = plan.next(), plan.next()
    assert one is not None
    assert two is not None
    plan.sent(one, "a", 0, chunks_of(one), 0.0)
    plan.sent(two, "a", 0, chunks_of(two), 0.0)
    assert plan.next() is None
    plan.seen(one, chunks_of(one), chunks_of(one), 1.0)
    plan.stop()
    assert plan.is_idle
    assert (plan.handed.paths, plan.handed.given_up, plan.handed.chunks) == (1, 4, chunks_of(one))


def test_equal_groups_share_and_a_much_cheaper_one_gets_more() -> None:
    plan = HandoverPlan({"a": 10_000, "b": 10_000})
    given: Counter[str] = Counter()
    for path in paths_of(random.Random(1), 0, 40):
        plan.offer([path], "giver")
        handing = plan.next()
        assert handing is not None
        target = plan.choose({"a": 1.0, "b": 1.0 if sum(given.values()) < 20 else 3.0})
        given[target] += 1
        plan.sent(handing, target, 0, 1, 0.0)
        plan.seen(handing, 1, 1, 0.0)
        if sum(given.values()) == 20:
            assert given == {"a": 10, "b": 10}
    assert given["a"] > given["b"]


@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.parametrize("seed", seeds(1))
def test_names_are_those_that_controllers_publish(name: str, seed: int) -> None:
    """Paths of all kinds of roots: of the chunks that they name, the tree has those very ones."""
    config, mix = TRAFFIC[name]
    traffic = Traffic(config, mix, seed=seed, check=False)
    kinds: Counter[bytes] = Counter()
    for _ in range(40):
        traffic_steps(traffic, mix, 6)
        engine = traffic.simulation.engine
        tree, of = engine.scheduler.kv.tree, engine.config
        identity = KvIdentity(of.model_fingerprint, of.dtype, of.chunk_size)
        published = {node.text_name or node.name for node in tree.nodes()}
        for path in [*listed(tree, LIVE, 0.0), *listed(tree, HOT, 0.0)]:
            names = path_names(path, identity)
            assert len(names) == -(-len(path.tokens) // (4 * CHUNK))
            assert published.issuperset(names)
            kinds[path.root[:1]] += 1
    assert kinds[SALT_ROOT] > 20
    assert kinds[TEXT_ROOT] > 20 or name != "modules"


def test_malformed_roots_have_no_names() -> None:
    identity = KvIdentity(b"f", "float32", CHUNK)
    tokens = pack_int32([1] * CHUNK)
    for root in (b"", b"m", b"c123", b"x" * 40):
        assert path_names(OfferedPath(root, tokens), identity) == []
    assert path_names(OfferedPath(b"m" + bytes(24), tokens[:-1]), identity) == []
    assert path_names(OfferedPath(b"c" + bytes(16), tokens, names=bytes(17)), identity) == []
