"""New prompts go where they displace least, as long as a group has room."""

from __future__ import annotations

import random
from collections import Counter
from math import inf

import msgspec
import numpy as np
import pytest
from seeds import seeds

from trunkline.router.messages import State, TierState
from trunkline.router.routing.core import RouteRequest, RoutingCore, RoutingSettings
from trunkline.router.routing.names import KvIdentity
from trunkline.router.streams.courier import room_of


def report(core: RoutingCore, controller: int, room: float, *, queued: int = 0) -> None:
    core.loads.report(controller, requests=0, queued_tokens=queued, kv_used=0.0, running=0, room=room)


def ready(controllers: int) -> RoutingCore:
    core = RoutingCore(map(str, range(controllers)), settings=RoutingSettings(floor_tokens=1))
    for controller in range(controllers):
        core.traits.set_identity(controller, KvIdentity(b"model", "float32", 4))
        core.set_available(controller, True)
    return core


def prompt(tokens: int, first: int = 0) -> RouteRequest:
    return RouteRequest(np.arange(first, first + tokens, dtype="<i4").tobytes())


def test_a_new_prompt_goes_where_there_is_room() -> None:
    core = ready(3)
    for controller, room in enumerate((0.0, 399.0, 400.0)):
        report(core, controller, room)
    assert {core.route(prompt(400), 0.0).controller for _ in range(9)} == {2}
    report(core, 2, 400.0, queued=1024)  # the prompts before it take the room; the request waits for them, too
    assert {core.route(prompt(400), 0.0).controller for _ in range(9)} == {1}


def test_an_answer_of_known_length_needs_room_too() -> None:
    core = ready(3)
    for controller, room in enumerate((0.0, 400.0, 600.0)):
        report(core, controller, room)
    for answer, fitting in ((0, {1, 2}), (100, {2}), (200, {2})):
        request = msgspec.structs.replace(prompt(400), output_tokens=answer)
        assert {core.route(request, 0.0).controller for _ in range(9)} == fitting
    report(core, 1, 900.0)
    assert {core.route(request, 0.0).controller for _ in range(9)} == {1, 2}


def test_where_all_are_full_or_none_is_known_all_are_equal() -> None:
    for rooms in ((0.0, 0.0, 0.0), (inf, inf, inf), (4000.0, inf, 500.0)):
        core = ready(3)
        for controller, room in enumerate(rooms):
            report(core, controller, room)
        chosen = Counter(core.route(prompt(400), 0.0).controller for _ in range(30))
        assert chosen == {0: 10, 1: 10, 2: 10}, rooms


def test_a_conversation_stays_at_its_full_group() -> None:
    core = ready(3)
    for controller, room in enumerate((inf, 0.0, inf)):
        report(core, controller, room)
    decision = core.route(prompt(400), 0.0)
    core.index.apply(1, b"".join(decision.names), bytes([1]) * len(decision.names))
    assert core.route(prompt(440), 0.0).controller == 1, "40 tokens and their room are less than 400 tokens"


@pytest.mark.parametrize("seed", seeds(3))
def test_room_is_what_was_told_last_by_whom_is_there(seed: int) -> None:
    rng, core = random.Random(seed), ready(5)
    rooms = dict.fromkeys(range(5), inf)
    for turn in range(600):
        controller, draw = rng.randrange(5), rng.random()
        if draw < 0.5:
            rooms[controller] = rng.choice((0.0, float(rng.randrange(2000)), inf))
            report(core, controller, rooms[controller], queued=rng.choice((0, 300)))
        elif draw < 0.6:
            core.set_available(controller, False)
            core.set_available(controller, True)
            core.loads.started(turn)  # unknown tickets change nothing
            rooms[controller] = inf
        elif draw < 0.62:
            core.loads.grow(len(core.loads.room) + rng.randrange(3))
        assert core.loads.room.tolist() == [rooms.get(at, inf) for at in range(len(core.loads.room))]
        lacking = np.array([rng.randrange(3000) for _ in core.loads.room])
        for at, gone in enumerate(core.loads.displaced(lacking, core.loads.queued).tolist()):
            left = max(0.0, rooms.get(at, inf) - core.loads.queued[at])
            assert gone == max(0.0, lacking[at] - left)


def test_the_room_of_a_group_is_that_of_its_largest_tier() -> None:
    state = msgspec.structs.replace(
        State(0, "ready", "", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), blocks_free=3, chunk_size=64
    )
    assert room_of(state) == 3 * 64

    def tier(name: str, slots: int, used: int, problem: str = "") -> TierState:
        return TierState(name, slots, used, 0, 0, 0, 0, 0, problem)

    host, disk, remote = tier("host", 10, 5), tier("disk", 100, 91), tier("remote", 0, 7)
    assert room_of(msgspec.structs.replace(state, tiers=[host])) == 5 * 64
    assert room_of(msgspec.structs.replace(state, tiers=[host, disk])) == 9 * 64
    assert room_of(msgspec.structs.replace(state, tiers=[host, disk, remote])) == inf
    broken = [host, tier("disk", 100, 91, "no space"), tier("remote", 0, 7, "it does not answer")]
    assert room_of(msgspec.structs.replace(state, tiers=broken)) == 5 * 64


def test_the_weight_of_what_is_displaced_is_checked() -> None:
    with pytest.raises(ValueError, match="displaced_weight is -1; it must be at least 0"):
        RoutingSettings(displaced_weight=-1).validate()
