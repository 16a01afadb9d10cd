"""The routing core under random calls, against loads computed from scratch, and its rules one by one."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from seeds import seeds

from trunkline.router.routing.core import Decision, NoControllerError, RouteRequest, RoutingCore, RoutingSettings
from trunkline.router.routing.names import KvIdentity
from trunkline.router.routing.policies import rendezvous

CHUNK = 4
IDENTITY = KvIdentity(b"model", "float32", CHUNK)
OTHER = KvIdentity(b"model", "float32", 2 * CHUNK)


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def ready(controllers: int, **options: Any) -> RoutingCore:
    """A core whose controllers are all there: a cost is (new tokens + 1) · (1 + requests + queued tokens / 2048)
    unless a test says otherwise."""
    settings = RoutingSettings(chunk_tokens=2048, request_tokens=2048, floor_tokens=1)
    core = RoutingCore(map(str, range(controllers)), settings=settings, **options)
    for controller in range(controllers):
        core.traits.set_identity(controller, IDENTITY)
        core.set_available(controller, True)
    return core


def tell(core: RoutingCore, controller: int, decision: Decision, tier: int = 1) -> None:
    """The controller tells of all that was decided to be computed there."""
    core.index.apply(controller, b"".join(decision.names), bytes([tier]) * len(decision.names))


class Machine:
    """Random requests, reports, losses and lives."""

    def __init__(self, seed: int, policy: str) -> None:
        self.rng = random.Random(seed)
        self.count = self.rng.choice((1, 2, 5, 9))
        self.core = RoutingCore(
            map(str, range(self.count)), policy, settings=RoutingSettings(chunk_tokens=32), replica_seed=seed
        )
        self.available: set[int] = set()
        self.now = 0.0
        self.next_ticket = 0
        self.live: dict[int, tuple[Decision, bool]] = {}
        self.others = dict.fromkeys(range(self.count), (0.0, 0.0))
        for controller in range(self.count):
            self.core.traits.set_identity(controller, self.rng.choice((IDENTITY, IDENTITY, OTHER)))

    def request(self) -> RouteRequest:
        length = self.rng.randint(1, 60)
        start = self.rng.randrange(6)
        own = [self.rng.randrange(9) for _ in range(self.rng.choice((0, 0, 7)))]
        exclude = frozenset(self.rng.sample(range(self.count), self.rng.choice((0, 0, 1, self.count))))
        session = self.rng.choice(("", "a", "b", "c"))
        home = self.rng.choice((-1, self.rng.randrange(self.count)))
        drops = ((2, 11),) if length > 12 and self.rng.random() < 0.2 else ()
        return RouteRequest(
            packed([start] * length + own), session=session, home=home, drops=drops, exclude=exclude
        )

    def route(self) -> None:
        request = self.request()
        usable = {c for c in range(self.count) if self.core.is_available(c, self.now)}
        assert usable <= self.available
        if not usable:
            with pytest.raises(NoControllerError) as refused:
                self.core.route(request, self.now)
            assert refused.value.wait_seconds > 0
            return
        decision = self.core.route(request, self.now)
        assert decision.controller in (usable - request.exclude or usable)
        assert decision.cached_tokens == sum(decision.tier_tokens)
        seen = len(request.tokens) // 4 - sum(stop - start for start, stop in request.drops)
        assert decision.new_tokens + decision.cached_tokens == seen
        assert decision.new_tokens >= 0
        assert min(decision.tier_tokens) >= 0
        assert decision.best_cost <= decision.cost
        assert decision.cost >= 1
        self.core.sent(self.next_ticket, decision, request, self.now)
        self.live[self.next_ticket] = decision, False
        self.next_ticket += 1

    def turn(self) -> None:
        draw, core = self.rng.random(), self.core
        controller = self.rng.randrange(self.count)
        self.now += self.rng.choice((0.0, 0.01, 0.3, 3.0))
        if draw < 0.5:
            self.route()
        elif draw < 0.6:
            requests, queued = self.rng.randrange(30), self.rng.randrange(500)
            own = [live for live in self.live.values() if live[0].controller == controller]
            waiting = sum(decision.new_tokens for decision, started in own if not started)
            self.others[controller] = max(0, requests - len(own)), max(0, queued - waiting)
            core.loads.report(controller, requests=requests, queued_tokens=queued, kv_used=0.5, running=3)
        elif draw < 0.66:
            is_there = self.rng.random() < 0.8
            core.set_available(controller, is_there)
            if not is_there:
                self.available.discard(controller)
                self.others[controller] = (0, 0)
                core.index.forget(controller)
            else:
                self.available.add(controller)
        else:
            self.live_on()

    def live_on(self) -> None:
        ticket = self.rng.choice([*self.live, 123_456, self.next_ticket - 1])
        decision, _ = self.live.get(ticket, (None, False))
        if self.rng.random() < 0.4:
            self.core.started(ticket, self.now)
            if decision is not None:
                self.live[ticket] = decision, True
                tell(self.core, decision.controller, decision, self.rng.choice((1, 3, 2, 4)))
            return
        for _ in range(self.rng.randint(1, 2)):
            self.core.ended(ticket, self.now, failed=self.rng.random() < 0.2)
        self.live.pop(ticket, None)

    def check(self) -> None:
        inflight, queued, blocks = np.zeros((3, self.count)).tolist()
        for decision, started in self.live.values():
            inflight[decision.controller] += 1
            blocks[decision.controller] += decision.blocks
            queued[decision.controller] += 0 if started else decision.new_tokens
        loads = self.core.loads
        assert loads.own_inflight.tolist() == inflight
        assert loads.own_queued.tolist() == queued
        assert loads.own_blocks.tolist() == blocks
        assert [self.core.inflight(c) for c in range(self.count)] == inflight
        others = [self.others[c] for c in range(self.count)]
        assert list(zip(loads.other_inflight.tolist(), loads.other_queued.tolist(), strict=True)) == others
        assert self.core.index.expecting <= self.next_ticket


@pytest.mark.parametrize(
    ("policy", "seed"), [(policy, seed) for seed in seeds(2) for policy in ("prefix", "least-loaded")]
)
def test_loads_are_the_live_tickets_whatever_happens(policy: str, seed: int) -> None:
    machine = Machine(seed, policy)
    for _ in range(600):
        machine.turn()
        machine.check()
    for ticket in [*machine.live]:
        machine.core.ended(ticket, machine.now)
    machine.live.clear()
    machine.check()
    machine.core.index.match([], machine.now + 10)
    assert machine.core.index.expecting == 0, "nothing is expected of requests that have ended"
    assert machine.next_ticket > 50


def test_the_prefix_goes_where_it_is() -> None:
    core = ready(4)
    request = RouteRequest(packed(list(range(400))))
    first = core.route(request, 0.0)
    assert (first.reason, first.new_tokens, first.cached_tokens) == ("load", 400, 0)
    core.sent(1, first, request, 0.0)
    second = core.route(request, 0.1)
    assert second.controller == first.controller, "what is expected counts at once"
    assert (second.reason, second.tier_tokens) == ("prefix", [0, 0, 0, 400])
    core.started(1, 0.2)
    tell(core, first.controller, first)
    core.ended(1, 3.0)
    later = core.route(RouteRequest(packed([*range(395), 9, 9, 9])), 10.0)
    assert later.controller == first.controller
    assert (later.tier_tokens, later.new_tokens) == ([392, 0, 0, 0], 6), "whole chunks only"


def test_what_failed_before_it_started_is_not_expected() -> None:
    core = ready(2)
    request = RouteRequest(packed([1] * 400))
    decision = core.route(request, 0.0)
    core.sent(1, decision, request, 0.0)
    core.sent(2, core.route(request, 0.0), request, 0.0)
    core.ended(1, 0.1, failed=True)
    assert core.route(request, 0.1).tier_tokens[3] == 400, "the second one will compute it"
    core.ended(2, 0.2)
    assert core.route(request, 0.2).cached_tokens == 0


def test_ties_go_round_and_routers_begin_elsewhere() -> None:
    request = RouteRequest(packed([1, 2, 3]))
    for policy in (
        "prefix",
        "round-robin",
        "least-loaded",
        "dynamo",
        "lmetric",
        "llm-d",
        "sglang",
        "session-hash",
    ):
        core = ready(5, policy=policy)
        chosen = [core.route(request, 0.0).controller for _ in range(50)]
        assert Counter(chosen) == dict.fromkeys(range(5), 10), policy
    firsts = {ready(5, replica_seed=seed).route(request, 0.0).controller for seed in range(10)}
    assert len(firsts) > 2


def test_a_session_stays_unless_that_is_much_dearer() -> None:
    core = ready(3)
    first = RouteRequest(packed([1] * 200), session="s")
    place = core.route(first, 0.0)
    core.sent(0, place, first, 0.0)
    core.ended(0, 0.1)
    other = next(c for c in range(3) if c != place.controller)
    again = RouteRequest(packed([2] * 200), session="s")
    core.loads.report(place.controller, requests=1, queued_tokens=900, kv_used=0.0, running=1)
    core.loads.report(other, requests=1, queued_tokens=0, kv_used=0.0, running=1)
    core.loads.report(3 - place.controller - other, requests=1, queued_tokens=0, kv_used=0.0, running=1)
    stays = core.route(again, 0.3)
    assert (stays.controller, stays.reason) == (place.controller, "session"), "2.44 is not 1.5 times 2"
    assert stays.best_cost < stays.cost <= 1.5 * stays.best_cost
    core.loads.report(place.controller, requests=2, queued_tokens=900, kv_used=0.0, running=1)
    moves = core.route(again, 0.5)
    assert (moves.controller != place.controller, moves.reason) == (True, "load"), "3.44 is"


def test_a_session_is_at_home_until_it_was_sent() -> None:
    core = ready(4)
    request = RouteRequest(packed([1] * 50), session="s", home=2)
    decision = core.route(request, 0.0)
    assert (decision.controller, decision.reason) == (2, "home")
    core.sent(0, core.route(RouteRequest(packed([1] * 50), session="s", pinned=3), 0.0), request, 0.0)
    core.ended(0, 0.1)
    decision = core.route(request, 0.2)
    assert (decision.controller, decision.reason) == (3, "session")
    core.set_available(3, False)
    assert core.route(request, 0.4).controller in (0, 1, 2)


def test_routers_agree_on_new_sessions() -> None:
    cores = [ready(8, replica_seed=seed) for seed in range(3)]
    for core in cores:
        core.set_available(5, False)
    for number in range(50):
        request = RouteRequest(packed([number] * 100), session=f"session {number}")
        wanted = int(rendezvous(request.session, [str(c) for c in range(8) if c != 5]))
        assert {core.route(request, 1.0).controller for core in cores} == {wanted}
    for core in cores[:1]:
        core.loads.report(wanted, requests=9, queued_tokens=0, kv_used=0.0, running=9)
        assert core.route(request, 1.0).controller != wanted, "but not to one that is busy"


def test_slower_tiers_are_worth_less() -> None:
    core = ready(3)
    request = RouteRequest(packed(list(range(800))))
    names = core.route(request, 0.0).names
    assert len(names) == 200
    core.index.apply(0, b"".join(names), b"\4" * 200)
    core.index.apply(1, b"".join(names), b"\2" * 200)
    host = core.route(request, 0.0)
    assert (host.controller, host.tier_tokens) == (1, [0, 800, 0, 0])
    assert host.cost == pytest.approx(81), "a tenth of computing it"
    core.traits.set_costs(1, 10.0, [0.0, 9.0, 0.0, 0.0])
    disk = core.route(request, 0.0)
    assert (disk.controller, disk.tier_tokens) == (0, [0, 0, 800, 0])
    assert disk.cost == pytest.approx(401), "half of it, as long as nobody has measured"
    core.traits.set_costs(0, 10.0, [0.0, 0.0, 50.0])
    assert core.route(request, 0.0).controller == 1
    core.traits.set_costs(1, 10.0, [0.0, 0.0])
    assert core.route(request, 0.0).cost == pytest.approx(81)


def test_controllers_of_two_identities_have_names_of_their_own() -> None:
    core = ready(2)
    core.traits.set_identity(1, OTHER)
    request = RouteRequest(packed(list(range(84))))
    for controller, count in ((0, 21), (1, 10)):
        names = core.route(RouteRequest(request.tokens, pinned=controller), 0.0).names
        assert len(names) == count
        core.index.apply(controller, b"".join(names), b"\1" * count)
        assert core.route(RouteRequest(request.tokens, pinned=controller), 0.0).new_tokens == (0, 4)[controller]


def test_failures_pause_a_controller_and_one_request_tries_it() -> None:
    core = ready(2)
    request = RouteRequest(packed([1]))
    pinned = RouteRequest(packed([1]), pinned=0)
    ticket, now = 0, 0.0
    while core.is_available(0, now):
        core.sent(ticket, core.route(pinned, now), pinned, now)
        core.ended(ticket, now + 0.1, failed=True)
        ticket, now = ticket + 1, now + 0.1
        assert ticket < 10
    assert {core.route(request, now).controller for _ in range(10)} == {1}
    with pytest.raises(NoControllerError, match="controller 0, which the request needs") as refused:
        core.route(pinned, now)
    assert 0 < refused.value.wait_seconds <= 1
    core.set_available(1, False)
    with pytest.raises(NoControllerError, match="no controller is available"):
        core.route(request, now)
    now += 1
    core.sent(99, core.route(request, now), request, now)
    with pytest.raises(NoControllerError) as refused:
        core.route(request, now)
    assert refused.value.wait_seconds == float("inf")
    core.started(99, now + 0.5)
    assert core.route(request, now + 0.5).reason == "only"


def test_excluded_controllers_are_the_last_resort() -> None:
    core = ready(3)
    assert core.route(RouteRequest(b"", exclude=frozenset({0, 1})), 0.0).controller == 2
    assert core.route(RouteRequest(b"", exclude=frozenset({0, 1, 2})), 0.0).controller in (0, 1, 2)
    core.set_available(2, False)
    assert core.route(RouteRequest(b"", exclude=frozenset({0, 1})), 0.0).controller in (0, 1)


def test_names_may_be_given() -> None:
    core = ready(2)
    names = [bytes([i]) * 16 for i in range(5)]
    core.index.apply(1, b"".join(names[:3]), b"\1\1\1")
    decision = core.route(RouteRequest(b"", names=names, token_count=22), 0.0)
    assert (decision.controller, decision.cached_tokens, decision.new_tokens) == (1, 12, 10)
    assert list(decision.names) == names[3:]


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="policy is 'best'; it must be one of prefix, "):
        RoutingCore("0", "best")
    with pytest.raises(ValueError, match="floor_tokens is 0; it must be at least 1"):
        RoutingCore("0", settings=RoutingSettings(floor_tokens=0))
    with pytest.raises(ValueError, match=r"stay_ratio is 0.5; it must be at least 1"):
        RoutingCore("0", settings=RoutingSettings(stay_ratio=0.5))
    with pytest.raises(ValueError, match="disk_worth is 2; it must be from 0 to 1"):
        RoutingCore("0", settings=RoutingSettings(disk_worth=2))
    core = ready(1)
    request = RouteRequest(packed([1]))
    decision = core.route(request, 0.0)
    core.sent(5, decision, request, 0.0)
    with pytest.raises(ValueError, match="ticket 5 is in use"):
        core.sent(5, decision, request, 0.0)
    with pytest.raises(ValueError, match="a prompt of 3 bytes"):
        core.route(RouteRequest(b"abc"), 0.0)
    with pytest.raises(NoControllerError):
        RoutingCore("01").route(request, 0.0)


@pytest.mark.parametrize("seed", seeds(4))
def test_what_is_decided_behind_the_message(seed: int) -> None:
    """It is what would have been decided before, and nothing that the message needs."""
    rng = random.Random(seed)
    count = rng.choice((1, 1, 2, 3))
    before, behind = ready(count), ready(count)
    exports = [[f"tcp://{controller}"] * rng.randrange(2) for controller in range(count)]
    for controller, endpoints in enumerate(exports):
        for core in (before, behind):
            core.traits.set_exports(controller, endpoints)
    live: list[int] = []
    for ticket in range(400):
        now = 0.1 * ticket
        away, is_there = rng.randrange(count), rng.random() < 0.8
        drops = ((1, 3),) if rng.random() < 0.1 else ()
        session = rng.choice(("", "a", "b"))
        request = RouteRequest(packed([rng.randrange(2)] * rng.randrange(4, 60)), session=session, drops=drops)
        for core in (before, behind):
            core.set_available(away, is_there or count == 1)
        usable = sum(before.is_available(controller, now) for controller in range(count))
        if not usable:
            continue
        whole, asked = before.route(request, now), behind.route(request, now, in_full=False)
        may_pull = bool(exports[whole.controller]) and sum(map(bool, exports)) > 1
        assert (asked.weighed is None) == (usable == 1 and not may_pull and not drops)
        assert (asked.controller, asked.goes_on) == (whole.controller, whole.goes_on)
        assert (asked.holders, asked.sleeping, asked.kept) == (whole.holders, whole.sleeping, whole.kept)
        before.sent(ticket, whole, request, now)
        decided = behind.sent(ticket, asked, request, now)
        assert repr(decided) == repr(whole)  # arrays have no single answer to ==
        tier = rng.choice((1, 2, 4))
        live.append(ticket)
        over = live.pop(rng.randrange(len(live))) if rng.random() < 0.7 else -1
        for core in (before, behind):
            tell(core, whole.controller, whole, tier)
            core.started(ticket, now)
            core.ended(over, now)
