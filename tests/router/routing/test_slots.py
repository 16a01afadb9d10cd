"""Controllers that come, go and come back, under random requests: the routing core against a simple model."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from seeds import seeds

from trunkline.router.routing.core import Decision, NoControllerError, RouteRequest, RoutingCore, RoutingSettings
from trunkline.router.routing.names import KvIdentity
from trunkline.router.routing.slots import AWAY_SECONDS, Slots

CHUNK = 4
IDENTITY = KvIdentity(b"model", "float32", CHUNK)


def packed(start: int, count: int) -> bytes:
    return np.full(count, start, "<i4").tobytes()


@dataclass
class Group:
    """What the model knows of a controller, by its name."""

    slot: int
    is_here: bool = True
    gone_at: float = float("inf")
    is_known: bool = False
    """Whether it has told its identity in its present life."""
    has: dict[int, int] = field(default_factory=dict)
    """By the token of which a prompt is made: how many chunks of it the controller has told of."""


class Machine:
    """Random lives of controllers and requests."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core = RoutingCore(settings=RoutingSettings(chunk_tokens=32), replica_seed=seed)
        self.groups: dict[str, Group] = {}
        self.live: dict[int, tuple[str, Decision, bool]] = {}
        """By ticket: the controller's name, the decision, and whether it has started."""
        self.now = 0.0
        self.ticket = 0
        self.joined = 0

    def turn(self) -> None:
        self.now += self.rng.choice((0.0, 0.1, 0.1, 1.0, 7.0))
        self.groups = {name: each for name, each in self.groups.items() if self.now < each.gone_at}
        draw = self.rng.random()
        if draw < 0.08:
            self.join()
        elif draw < 0.16:
            self.leave()
        elif draw < 0.55:
            self.route()
        elif draw < 0.65:
            self.tell()
        else:
            self.live_on()

    def join(self) -> None:
        away = [name for name, each in self.groups.items() if not each.is_here]
        back = self.rng.choice(away) if away and self.rng.random() < 0.5 else ""
        name = back or f"group {self.joined}"
        self.joined += not back
        slot = self.core.add(name)
        assert self.core.names[slot] == name
        assert not self.core.is_available(slot, self.now)
        if back:
            group = self.groups[name]
            assert slot == group.slot, "it has its slot again"
            group.is_here, group.gone_at, group.is_known = True, float("inf"), False
        else:
            assert slot not in {each.slot for each in self.groups.values()}
            assert not self.core.inflight(slot), "a slot is free only without requests of its last controller"
            group = self.groups[name] = Group(slot)
        with pytest.raises(ValueError, match="already"):
            self.core.add(name)
        if self.rng.random() < 0.8:
            self.core.traits.set_identity(slot, IDENTITY)
            group.is_known = True
        self.core.set_available(slot, True)
        assert self.core.is_available(slot, self.now), "its failures are forgotten"

    def leave(self) -> None:
        here = [name for name, each in self.groups.items() if each.is_here]
        if not here:
            return
        group = self.groups[self.rng.choice(here)]
        self.core.remove(group.slot, self.now)
        group.is_here, group.gone_at = False, self.now + AWAY_SECONDS
        self.core.set_available(group.slot, True)
        assert not self.core.is_available(group.slot, self.now), "a late report changes nothing"
        with pytest.raises(ValueError, match="no controller"):
            self.core.remove(group.slot, self.now)

    def route(self) -> None:
        start = self.rng.randrange(4)
        length = CHUNK * self.rng.randint(1, 9)
        request = RouteRequest(packed(start, length), session=self.rng.choice(("", "a", "b")))
        usable = {
            name: each
            for name, each in self.groups.items()
            if each.is_here and self.core.is_available(each.slot, self.now)
        }
        if not usable:
            with pytest.raises(NoControllerError):
                self.core.route(request, self.now)
            return
        decision = self.core.route(request, self.now)
        group = usable[decision.name]
        assert group.slot == decision.controller
        told = sum(decision.tier_tokens[:3])
        assert told == (CHUNK * min(group.has.get(start, 0), length // CHUNK) if group.is_known else 0)
        assert decision.weighed is not None
        assert decision.weighed.names[decision.controller] == decision.name
        self.core.sent(self.ticket, decision, request, self.now)
        self.live[self.ticket] = decision.name, decision, False
        self.ticket += 1

    def tell(self) -> None:
        """Tell that a controller has the beginning of a prompt; it may be away or gone by now."""
        if not self.core.names:
            return
        slot, start, count = (
            self.rng.randrange(len(self.core.names)),
            self.rng.randrange(4),
            self.rng.randint(1, 9),
        )
        self.core.index.apply(slot, b"".join(all_names(start, count)), b"\1" * count)
        group = next((each for each in self.groups.values() if each.slot == slot), None)
        if group is not None:
            group.has[start] = max(count, group.has.get(start, 0))

    def live_on(self) -> None:
        if not self.live:
            return
        ticket = self.rng.choice([*self.live])
        name, decision, _ = self.live[ticket]
        if self.rng.random() < 0.4:
            self.core.started(ticket, self.now)
            self.live[ticket] = name, decision, True
            return
        self.core.ended(ticket, self.now, failed=self.rng.random() < 0.2)
        del self.live[ticket]

    def check(self) -> None:
        inflight = np.zeros(len(self.core.names)).tolist()
        queued = list(inflight)
        for _, decision, started in self.live.values():
            inflight[decision.controller] += 1
            queued[decision.controller] += 0 if started else decision.new_tokens
        loads = self.core.loads
        assert loads.own_inflight[: len(inflight)].tolist() == inflight
        assert loads.own_queued[: len(inflight)].tolist() == queued
        assert not loads.own_inflight[len(inflight) :].any()


@functools.cache
def all_names(start: int, count: int) -> list[bytes]:
    core = RoutingCore("0")
    core.traits.set_identity(0, IDENTITY)
    core.set_available(0, True)
    return core.route(RouteRequest(packed(start, CHUNK * count)), 0.0).names


@pytest.mark.parametrize("seed", seeds(3))
def test_controllers_come_and_go_while_requests_run(seed: int) -> None:
    machine = Machine(seed)
    for _ in range(2000):
        machine.turn()
        machine.check()
    assert machine.joined > 50
    assert machine.ticket > 300
    for ticket in [*machine.live]:
        machine.core.ended(ticket, machine.now)
    machine.live.clear()
    machine.check()
    assert len(machine.core.names) < machine.joined, "slots are used again"


def test_a_slot_waits_for_the_requests_of_its_last_controller() -> None:
    core = RoutingCore("ab")
    for slot in range(2):
        core.set_available(slot, True)
    request = RouteRequest(packed(1, 8), pinned=1)
    core.sent(0, core.route(request, 0.0), request, 0.0)
    core.remove(1, 1.0)
    assert core.route(RouteRequest(packed(1, 8)), 2.0).reason == "only"
    later = 1.0 + AWAY_SECONDS
    assert core.route(RouteRequest(packed(1, 8)), later).name == "a"
    assert core.names == ("a", "")
    assert core.add("c") == 2, "the slot of b has a request"
    core.ended(0, later, failed=True)
    assert core.add("d") == 1
    core.set_available(1, True)
    assert core.is_available(1, later)


def test_failures_of_requests_of_an_earlier_life_do_not_count() -> None:
    core = RoutingCore("a")
    core.set_available(0, True)
    request = RouteRequest(packed(1, 8))
    for ticket in range(5):
        core.sent(ticket, core.route(request, 0.1 * ticket), request, 0.1 * ticket)
    core.remove(0, 1.0)
    assert core.add("a") == 0
    core.set_available(0, True)
    for ticket in range(5):
        core.ended(ticket, 1.0 + ticket, failed=True)
        assert core.is_available(0, 1.0 + ticket)
    assert core.inflight(0) == 0


def test_sessions_find_a_controller_that_comes_back_by_its_name() -> None:
    core = RoutingCore("abc")
    for slot in range(3):
        core.set_available(slot, True)
    request = RouteRequest(packed(1, 8), session="s")
    first = core.route(request, 0.0)
    core.sent(0, first, request, 0.0)
    core.ended(0, 0.1)
    core.remove(first.controller, 1.0)
    assert core.route(request, 2.0).name != first.name
    core.add("d")
    late = 3.0 + 2 * AWAY_SECONDS
    core.route(request, late)
    assert first.name not in core.names
    slot = core.add(first.name)
    core.set_available(slot, True)
    again = core.route(request, late)
    assert (again.name, again.reason) == (first.name, "session")


def test_thousand_groups_come_and_go() -> None:
    """Ten groups are there at any time, and each stays for a while. The core stays as small as ten groups are."""
    core = RoutingCore()
    chains = [all_names(start, 8) for start in range(4)]
    here: list[int] = []
    for number in range(1000):
        now = float(number)
        slot = core.add(f"group {number}")
        core.traits.set_identity(slot, IDENTITY)
        core.set_available(slot, True)
        here.append(slot)
        for start, chain in enumerate(chains):
            core.index.apply(slot, b"".join(chain), b"\1" * 8)
            request = RouteRequest(packed(start, 32))
            decision = core.route(request, now)
            assert decision.cached_tokens == 32
            core.sent(4 * number + start, decision, request, now)
            core.ended(4 * number + start, now)
        if len(here) > 10:
            core.remove(here.pop(0), now)
    assert len(core.names) <= 10 + AWAY_SECONDS + 2
    assert len(core.loads.own_inflight) <= 128
    for slot in here:
        core.remove(slot, 1000.0)
    with pytest.raises(NoControllerError):
        core.route(RouteRequest(packed(1, 4)), 1000.0 + AWAY_SECONDS)
    for _ in range(600):
        core.index.match(chains[0], 2000.0)
    assert core.index.size == 0, "no name of a group that is gone is left"
    assert not any(core.names)


@pytest.mark.parametrize("seed", seeds(1))
def test_a_thousand_groups_are_there_at_once(seed: int) -> None:
    """All join, most leave, and others come; each request finds what some group has. Nothing of those that left
    stays, and nothing is counted for them."""
    rng = random.Random(seed)
    core = RoutingCore()
    chains = [all_names(start, 8) for start in range(40)]
    slots: dict[str, int] = {}
    has: dict[str, int] = {}

    def join(name: str, now: float) -> None:
        slots[name] = slot = core.add(name)
        core.traits.set_identity(slot, IDENTITY)
        core.set_available(slot, True)
        has[name] = rng.randrange(len(chains))
        core.index.apply(slot, b"".join(chains[has[name]]), b"\1" * 8)

    def leave(name: str, now: float) -> None:
        core.remove(slots.pop(name), now)
        del has[name]

    def ask(now: float) -> None:
        for start in rng.sample(range(len(chains)), 5):
            request = RouteRequest(packed(start, 32))
            decision = core.route(request, now)
            assert decision.cached_tokens == (32 if start in has.values() else 0)
            core.sent(start, decision, request, now)
            core.ended(start, now)

    for number in range(1000):
        join(f"group {number}", 0.0)
    assert sorted(slots.values()) == list(range(1000))
    ask(0.0)
    for number in rng.sample(range(1000), 900):
        leave(f"group {number}", 1.0)
    ask(1.0)
    for number in range(900):
        join(f"new {number}", 2.0 + AWAY_SECONDS)
    ask(3.0 + AWAY_SECONDS)
    assert len(slots) == len(set(slots.values())) == 1000
    assert len(core.names) <= 1900, "slots of those that left are used again"
    for name in list(slots):
        leave(name, 10.0 + AWAY_SECONDS)
    with pytest.raises(NoControllerError):
        core.route(RouteRequest(packed(1, 4)), 20.0 + 2 * AWAY_SECONDS)
    for _ in range(4000):
        core.index.match(chains[0], 20.0 + 2 * AWAY_SECONDS)
    assert core.index.size == 0, "no name of a group that is gone is left"
    assert not any(core.names)


def test_slots_are_used_again_the_lowest_first() -> None:
    slots = Slots(away_seconds=5.0)
    assert [slots.add(name) for name in "abc"] == [0, 1, 2]
    with pytest.raises(ValueError, match="there is a controller 'b' already"):
        slots.add("b")
    with pytest.raises(ValueError, match="needs a name"):
        slots.add("")
    slots.remove(2, 0.0)
    slots.remove(0, 1.0)
    assert slots.present() == [1]
    assert slots.next_gone(4.9) == -1
    assert slots.find("c") == 2
    assert slots.next_gone(7.0) == 2
    assert slots.next_gone(7.0) == 0
    assert slots.next_gone(7.0) == -1
    assert (slots.find("c"), slots.names) == (-1, ("", "b", ""))
    assert slots.add("d") == 3, "both are not free yet"
    slots.free(2)
    slots.free(0)
    assert [slots.add(name) for name in "efg"] == [0, 2, 4]
    assert slots.names == ("e", "b", "f", "d", "g")
