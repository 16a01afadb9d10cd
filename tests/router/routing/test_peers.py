"""Who can give a controller the chunks that it lacks: against a search through all groups, and case by case."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from seeds import seeds

from trunkline.controller.messages import WENT_ON_NAMES, Holder, ModuleText, PromptLayout, Submit
from trunkline.router.routing.core import Decision, RouteRequest, RoutingCore, RoutingSettings
from trunkline.router.routing.index import DEVICE, DISK, HOST
from trunkline.router.routing.names import KvIdentity, prompt_names
from trunkline.router.routing.peers import HOLDERS_MAX
from trunkline.router.routing.request import Left
from trunkline.worker.messages import Sampling

CHUNK = 4
IDENTITY = KvIdentity(b"model", "float32", CHUNK)
OTHER = KvIdentity(b"model", "bfloat16", CHUNK)
STEPS = 400
ON_DEVICE, IN_HOST, ON_DISK, NOWHERE = 1 << DEVICE, 1 << HOST, 1 << DISK, 0


def packed(count: int, first: int = 0) -> bytes:
    return np.arange(first, first + count, dtype="<i4").tobytes()


def at(controller: int) -> list[str]:
    return [f"ipc:///run/{controller}.0", f"ipc:///run/{controller}.1"]


def ready(controllers: int, **settings: float) -> RoutingCore:
    """A core whose controllers are all there and exchange chunks."""
    core = RoutingCore(
        map(str, range(controllers)), settings=msgspec.structs.replace(RoutingSettings(floor_tokens=1), **settings)
    )
    for controller in range(controllers):
        core.traits.set_identity(controller, IDENTITY)
        core.traits.set_exports(controller, at(controller))
        core.set_available(controller, True)
    return core


def own_names(request: RouteRequest, identity: KvIdentity = IDENTITY) -> list[bytes]:
    return list(prompt_names(request, identity).chains[-1].names)


def tell(core: RoutingCore, controller: int, names: list[bytes], *tiers: int) -> None:
    """A controller tells where it has the first chunks of a chain."""
    core.index.apply(controller, b"".join(names[: len(tiers)]), bytes(tiers))


def asked(core: RoutingCore, request: RouteRequest, controller: int) -> Decision:
    """The decision, if only one controller could take the request."""
    return core.route(msgspec.structs.replace(request, pinned=controller), 0.0)


def runs(decision: Decision) -> list[tuple[str, int, int]]:
    return [(holder.member, holder.start, holder.stop) for holder in decision.holders]


class Machine:
    """Random changes of what controllers have, export and are; an oracle that remembers all of it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.count = rng.choice((2, 3, 5, 17))
        self.core = ready(self.count)
        self.identity = [IDENTITY] * self.count
        self.exports = [True] * self.count
        self.leaves = [False] * self.count
        self.told: list[dict[bytes, int]] = [{} for _ in range(self.count)]
        self.request = RouteRequest(packed(rng.choice((3, 40, 63))))
        self.names = {identity: own_names(self.request, identity) for identity in (IDENTITY, OTHER)}
        for controller in range(self.count):
            if rng.random() < 0.2:
                self.identity[controller] = OTHER
                self.core.traits.set_identity(controller, OTHER)

    def change(self) -> None:
        rng, core, controller = self.rng, self.core, self.rng.randrange(self.count)
        names = self.names[self.identity[controller]]
        match rng.choice(("tell", "tell", "tell", "long", "snapshot", "export", "forget", "load")):
            case "tell" | "long" as kind:
                start = rng.randrange(len(names) + 1)
                part = names[start:] if kind == "long" else names[start : start + rng.randrange(4)]
                tiers = bytes(rng.choice((0, 1, 2, 2, 3, 4, 6, 7)) for _ in part)
                core.index.apply(controller, b"".join(part), tiers)
                self.told[controller].update(zip(part, tiers, strict=True))
            case "snapshot":
                core.index.begin_snapshot(controller)
                core.index.add_snapshot(controller, b"".join(names), bytes([IN_HOST]) * len(names))
                core.index.end_snapshot(controller)
                self.told[controller] = dict.fromkeys(names, IN_HOST)
            case "export":
                self.exports[controller] = rng.random() < 0.7
                self.leaves[controller] = rng.random() < 0.3
                core.traits.set_exports(
                    controller, at(controller) if self.exports[controller] else [], leaves=self.leaves[controller]
                )
            case "forget":
                core.index.forget(controller)
                self.told[controller] = {}
            case "load":
                core.loads.report(controller, requests=rng.randrange(50), queued_tokens=0, kv_used=0.0, running=0)

    def has(self, controller: int, name: bytes, tiers: int) -> bool:
        return bool(self.told[controller].get(name, 0) & tiers)

    def givers(self, chosen: int, chunk: int) -> list[int]:
        """Those that could give a chunk to a controller."""
        name = self.names[self.identity[chosen]][chunk]
        return [
            other
            for other in range(self.count)
            if other != chosen
            and self.exports[other]
            and self.identity[other] == self.identity[chosen]
            and self.has(other, name, IN_HOST)
        ]

    def first_lack(self, chosen: int) -> int:
        names = self.names[self.identity[chosen]]
        return next((i for i, name in enumerate(names) if not self.has(chosen, name, 7)), len(names))

    def check(self) -> None:
        chosen = self.rng.randrange(self.count)
        names = self.names[self.identity[chosen]]
        decision = asked(self.core, self.request, chosen)
        covered = [chunk for holder in decision.holders for chunk in range(holder.start, holder.stop)]
        if not self.exports[chosen]:
            assert not covered
            assert not decision.pulled_tokens
            return
        assert len(decision.holders) <= HOLDERS_MAX
        assert covered == sorted(set(covered)), "runs overlap"
        for holder in decision.holders:
            giver = int(holder.member)
            assert holder.endpoints == at(giver)
            assert all(giver in self.givers(chosen, chunk) for chunk in range(holder.start, holder.stop))
            best = max(self.length(chosen, other, holder.start) for other in self.givers(chosen, holder.start))
            assert holder.stop - holder.start == best, "a longer run was there"
        lack = self.first_lack(chosen)
        reached = lack
        while reached < len(names) and (reached in covered or self.has(chosen, names[reached], 7)):
            reached += 1
        assert all(chunk < reached for chunk in covered), "there is a gap before a run"
        if len(decision.holders) < HOLDERS_MAX and reached < len(names):
            assert not self.givers(chosen, reached), "somebody could give more"
        counted = lack  # a chunk behind the gap that it has itself in host memory costs no more than a pull
        while counted < len(names) and (self.givers(chosen, counted) or self.has(chosen, names[counted], IN_HOST)):
            counted += 1
        assert decision.pulled_tokens == (counted - lack) * CHUNK
        used = len(decision.holders)
        assert self.reach(chosen, lack, used) == reached
        assert not used or self.reach(chosen, lack, used - 1) < reached, "fewer holders would do"

    def length(self, chosen: int, giver: int, start: int) -> int:
        count = len(self.names[IDENTITY])
        stop = start
        while stop < count and giver in self.givers(chosen, stop):
            stop += 1
        return stop - start

    def reach(self, chosen: int, lack: int, holders: int) -> int:
        """How far any so many holders can bring a controller."""
        names = self.names[self.identity[chosen]]

        def behind_own(chunk: int) -> int:
            while chunk < len(names) and self.has(chosen, names[chunk], 7):
                chunk += 1
            return chunk

        starts = {lack}
        for _ in range(holders):
            starts |= {
                behind_own(stop)
                for start in starts
                for giver in (self.givers(chosen, start) if start < len(names) else [])
                for stop in range(start + 1, start + self.length(chosen, giver, start) + 1)
            }
        return max(starts)


def test_a_conversation_leaves_the_peer_that_has_more_than_half_of_its_prompt() -> None:
    core, request = ready(3), RouteRequest(packed(40))
    names = own_names(request)
    tell(core, 1, names, *[IN_HOST] * 4)
    tell(core, 2, names, *[IN_HOST] * 6)
    assert asked(core, request, 2).left is None, "it stays"
    assert asked(core, request, 0).left == Left("2", b"".join(names[:6]), 40)
    assert asked(core, request, 1).left == Left("2", b"".join(names[4:6]), 40)
    tell(core, 2, names, *[IN_HOST] * 5, 0)
    assert asked(core, request, 0).left is None, "half of it may be what all begin with"
    long = RouteRequest(packed(CHUNK * (WENT_ON_NAMES + 9)))
    names = own_names(long)
    tell(core, 2, names, *[IN_HOST] * len(names))
    left = asked(core, long, 0).left
    assert left is not None
    assert left.names == b"".join(names[-WENT_ON_NAMES:])


@pytest.mark.parametrize("seed", seeds(10))
def test_holders_are_what_a_search_through_all_groups_finds(seed: int) -> None:
    machine = Machine(seed)
    for _ in range(STEPS):
        machine.change()
        machine.check()


def test_the_longest_run_comes_first_and_the_next_begins_where_it_ends() -> None:
    core, request = ready(4), RouteRequest(packed(8 * CHUNK))
    names = own_names(request)
    tell(core, 0, names, ON_DEVICE, ON_DISK)
    tell(core, 1, names, *[IN_HOST] * 4)
    tell(core, 2, names, *[IN_HOST] * 6)
    core.index.apply(3, b"".join(names[3:]), bytes([IN_HOST]) * 5)
    decision = asked(core, request, 0)
    assert runs(decision) == [("2", 2, 6), ("3", 6, 8)]
    assert decision.holders[0].endpoints == at(2)
    assert (decision.new_tokens, decision.pulled_tokens) == (6 * CHUNK, 6 * CHUNK)


@pytest.mark.parametrize(("leaving", "expected"), [(None, "2"), (1, "1")])
def test_of_equal_runs_the_one_that_leaves_then_the_less_loaded(leaving: int | None, expected: str) -> None:
    core, request = ready(4), RouteRequest(packed(4 * CHUNK))
    for controller in (1, 2, 3):
        tell(core, controller, own_names(request), *[IN_HOST] * 4)
        core.loads.report(controller, requests=9 - controller % 3, queued_tokens=0, kv_used=0.0, running=0)
        core.traits.set_exports(controller, at(controller), leaves=controller == leaving)
    assert runs(asked(core, request, 0)) == [(expected, 0, 4)]


def test_a_group_that_drains_or_was_removed_still_gives() -> None:
    core, request = ready(3), RouteRequest(packed(4 * CHUNK))
    tell(core, 1, own_names(request), *[IN_HOST] * 4)
    core.set_available(1, False)
    core.remove(1, 0.0)
    assert runs(asked(core, request, 0)) == [("1", 0, 4)]
    core.traits.set_exports(1, [])  # its connection is closed
    assert not runs(asked(core, request, 0))
    core.traits.set_exports(1, at(1))
    core.route(request, 100.0)  # it did not come back, and its slot may be another's
    assert not runs(asked(core, request, 0))


def test_chunks_that_are_only_expected_are_asked_for() -> None:
    core, request = ready(2), RouteRequest(packed(4 * CHUNK))
    tell(core, 1, own_names(request), *[IN_HOST] * 4)
    first = asked(core, request, 0)
    core.sent(1, first, request, 0.0)
    second = asked(core, request, 0)
    assert second.tier_tokens == [0, 0, 0, 4 * CHUNK]
    assert runs(second) == runs(first) == [("1", 0, 4)]
    assert second.pulled_tokens == 0, "the first request pulls them"


def test_pulled_tokens_do_not_queue_at_the_controller() -> None:
    core, request = ready(2), RouteRequest(packed(4 * CHUNK + 3))
    tell(core, 1, own_names(request), *[IN_HOST] * 4)
    core.sent(1, asked(core, request, 0), request, 0.0)
    assert core.loads.own_queued[0] == 3


@pytest.mark.parametrize(
    ("load_us", "worth"),
    [
        ([0.0, 0.0, 0.0, 0.0], 0.5),
        ([0.0, 0.0, 0.0, 0.0, 0.0], 0.5),
        ([0.0, 0.0, 0.0, 0.0, 10.0], 0.9),
        ([0.0, 0.0, 0.0, 0.0, 500.0], 0.0),
    ],
)
def test_pulling_costs_what_was_measured_and_never_more_than_computing(load_us: list[float], worth: float) -> None:
    core, request = ready(2), RouteRequest(packed(8 * CHUNK))
    tell(core, 1, own_names(request), *[IN_HOST] * 8)
    for controller in (0, 1):
        core.traits.set_costs(controller, 100.0, load_us)
    assert asked(core, request, 0).cost == pytest.approx(8 * CHUNK * (1 - worth) + 1)
    core.traits.set_exports(0, [])
    assert asked(core, request, 0).cost == 8 * CHUNK + 1


def test_a_busy_home_loses_its_session_sooner_where_pulling_is_cheap() -> None:
    core, request = ready(2), RouteRequest(packed(64 * CHUNK), session="s")
    tell(core, 0, own_names(request), *[IN_HOST] * 64)
    core.loads.report(0, requests=30, queued_tokens=0, kv_used=0.0, running=30)
    for controller in (0, 1):
        core.traits.set_costs(controller, 100.0, [0.0, 1.0, 0.0, 0.0, 100.0])
    assert core.route(request, 0.0).controller == 0
    for controller in (0, 1):
        core.traits.set_costs(controller, 100.0, [0.0, 1.0, 0.0, 0.0, 1.0])
    decision = core.route(request, 0.0)
    assert (decision.controller, runs(decision)) == (1, [("0", 0, 64)])


def test_the_part_of_an_open_tail_is_not_counted_twice() -> None:
    core, turn = ready(2), RouteRequest(packed(2 * CHUNK + 3))
    decision = asked(core, turn, 0)
    core.sent(1, decision, turn, 0.0)
    core.started(1, 0.0)
    tell(core, 0, own_names(turn), IN_HOST, IN_HOST)
    core.ended(1, 0.0)
    following = RouteRequest(packed(4 * CHUNK))
    tell(core, 1, own_names(following), *[IN_HOST] * 4)
    decision = core.route(msgspec.structs.replace(following, pinned=0), 10.0)
    assert decision.cached_tokens == 2 * CHUNK + 3
    assert decision.pulled_tokens == 2 * CHUNK - 3
    assert runs(decision) == [("1", 2, 4)]
    core.index.apply(1, own_names(following)[2], bytes([ON_DEVICE]))  # the chunk behind the tail is not exported
    decision = core.route(msgspec.structs.replace(following, pinned=0), 10.0)
    assert (decision.holders, decision.pulled_tokens) == ([], 0)


def layout() -> PromptLayout:
    text = ModuleText(packed(6, 100), 0, -1, np.array([[0, 6]], "<i4").tobytes())
    return PromptLayout([text], np.array([[6, 3 * CHUNK]], "<i4").tobytes())


def test_of_a_prompt_with_modules_its_own_chunks_are_counted() -> None:
    core, request = ready(2), RouteRequest(packed(3 * CHUNK), layout=layout())
    tell(core, 1, own_names(request), *[IN_HOST] * 3)
    decision = asked(core, request, 0)
    assert runs(decision) == [("1", 0, 3)]
    assert (decision.new_tokens, decision.pulled_tokens) == (6 + 3 * CHUNK, 3 * CHUNK)


def test_behind_a_cut_what_is_left_is_pulled_unless_the_kv_was_kept() -> None:
    core = ready(2)
    request = RouteRequest(packed(8 * CHUNK), drops=((CHUNK, 3 * CHUNK),))
    kept, plain = prompt_names(request, IDENTITY).chains
    tell(core, 1, list(plain.names), *[IN_HOST] * 6)
    assert runs(asked(core, request, 0)) == [("1", 0, 6)]
    tell(core, 0, list(kept.names), *[IN_HOST] * 6)
    decision = asked(core, request, 0)
    assert (decision.holders, decision.pulled_tokens) == ([], 0)


def test_what_a_peer_has_on_disk_only_is_told() -> None:
    core, request = ready(3), RouteRequest(packed(8 * CHUNK))
    names = own_names(request)
    tell(core, 0, names, ON_DEVICE)
    tell(core, 1, names, NOWHERE, IN_HOST, IN_HOST, ON_DISK, ON_DISK | IN_HOST, ON_DISK)
    tell(core, 2, names, NOWHERE, NOWHERE, NOWHERE, ON_DISK)
    decision = asked(core, request, 0)
    assert runs(decision) == [("1", 1, 3)]
    assert decision.sleeping == (1, names[3], 3 * CHUNK)
    core.traits.set_exports(1, [])
    tell(core, 2, names, NOWHERE, NOWHERE, NOWHERE, ON_DISK | ON_DEVICE)
    assert asked(core, request, 0).sleeping is None


def test_without_exports_nothing_is_looked_for() -> None:
    core, request = ready(2), RouteRequest(packed(4 * CHUNK))
    tell(core, 1, own_names(request), *[IN_HOST] * 4)
    core.traits.set_exports(1, [])
    decision = asked(core, request, 0)
    assert (decision.holders, decision.pulled_tokens, decision.sleeping) == ([], 0, None)


def versions() -> Iterator[type[msgspec.Struct]]:
    yield Submit
    fields = msgspec.structs.fields(Submit)
    before = [field.name for field in fields].index("holders")
    required = [(field.name, field.type) for field in fields[:5]]
    others = [(field.name, field.type, field.default) for field in fields[5:before]]
    yield msgspec.defstruct("Submit", [*required, *others], array_like=True, tag="submit")


@pytest.mark.parametrize("version", list(versions()))
def test_a_controller_that_knows_no_holders_ignores_them(version: type[msgspec.Struct]) -> None:
    submit = Submit(1, packed(4), 4, 8, Sampling(), holders=[Holder("1", at(1), 0, 1)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=version)
