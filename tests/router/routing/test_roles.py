"""Which group computes a long prompt, and which requests groups get because of their roles."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from seeds import seeds

from trunkline.router.routing.core import NoControllerError, RouteRequest, RoutingCore, RoutingSettings
from trunkline.router.routing.index import HOST
from trunkline.router.routing.names import KvIdentity, prompt_names
from trunkline.router.routing.policies import POLICIES
from trunkline.router.routing.roles import Prospect, StreamGroup, prefill_group

CHUNK = 16
IDENTITY = KvIdentity(b"model", "float32", CHUNK)
OTHER = KvIdentity(b"model", "bfloat16", CHUNK)
ROLES = ("both", "prefill", "decode")
STEPS = 300


def packed(count: int, first: int = 0) -> bytes:
    return np.arange(first, first + count, dtype="<i4").tobytes()


def ready(*roles: str, policy: str = "prefix", **settings: float) -> RoutingCore:
    core = RoutingCore(
        map(str, range(len(roles))), policy, settings=msgspec.structs.replace(RoutingSettings(), **settings)
    )
    for controller, role in enumerate(roles):
        core.traits.set_role(controller, role)
        core.traits.set_identity(controller, IDENTITY)
        core.traits.set_exports(controller, [f"ipc:///{controller}"])
        core.set_available(controller, True)
    return core


def busy(core: RoutingCore, controller: int, requests: int, queued: int = 0) -> None:
    core.loads.report(controller, requests=requests, queued_tokens=queued, kv_used=0.5, running=requests)


def long(count: int = 2000, *, may_part: bool = True, planned: int = -1, pinned: int = -1) -> RouteRequest:
    return RouteRequest(packed(count), may_part=may_part, planned=planned, pinned=pinned)


@pytest.mark.parametrize("seed", seeds(20))
def test_the_prefill_group_with_the_lowest_sum_is_chosen_if_that_is_less(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(STEPS):
        count = rng.randrange(2, 6)
        work, queued = ([float(rng.randrange(4000)) for _ in range(count)] for _ in range(2))
        requests = [float(rng.choice((0, 0, 1, 5, 40))) for _ in range(count)]
        times = [(rng.choice((0.0, 50.0, 90.0)), rng.choice((0.0, 5.0, 60.0, 400.0))) for _ in range(count)]
        at, *prefills = rng.sample(range(count), count)
        settings = RoutingSettings(
            long_tokens=rng.choice((0, 512)),
            stream_weight=rng.choice((0.0, 0.3, 1.0)),
            apart_tokens=rng.choice((0, 256)),
            peer_worth=rng.choice((0.0, 0.5, 1.0)),
        )
        stream = StreamGroup(at, rng.randrange(2000), rng.randrange(4000), rng.random() < 0.5)
        prospect = Prospect(*(np.array(each) for each in (work, queued, requests, times)))
        chosen = prefill_group(stream, np.array(sorted(prefills)), prospect, settings)

        streams = requests[at] + stream.is_decode
        here = queued[at] + work[at] + stream.new * streams * settings.stream_weight

        apart = {}
        for group in prefills:
            is_known = times[at][1] > 0 and times[group][0] > 0
            pull = times[at][1] / times[group][0] if is_known else 1 - settings.peer_worth
            apart[group] = queued[group] + work[group] + stream.lacking * pull + settings.apart_tokens
        best = min(apart.values())
        if stream.new < settings.long_tokens or best > here * (1 + 1e-9):
            assert chosen == -1
        elif best < here * (1 - 1e-9):
            assert apart[chosen] == pytest.approx(best)


def test_a_long_prompt_is_computed_apart_and_its_stream_has_a_place() -> None:
    core = ready("prefill", "decode")
    decision = core.route(msgspec.structs.replace(long(), session="s"), 0.0)
    assert (decision.controller, decision.goes_on, decision.reason) == (0, 1, "prefill")
    core.sent(1, decision, msgspec.structs.replace(long(), session="s"), 0.0)
    assert core.loads.own_queued.tolist() == [2000, 0]
    assert core._sessions.find("s") == "1"


def test_pulls_that_take_longer_than_computing_are_not_planned() -> None:
    core = ready("prefill", "decode")
    core.traits.set_costs(0, 100.0, [])
    core.traits.set_costs(1, 50.0, [0, 0, 0, 0, 20.0])
    assert core.route(long(), 0.0).goes_on == 1
    core.traits.set_costs(1, 50.0, [0, 0, 0, 0, 200.0])
    assert core.route(long(), 0.0).goes_on == -1
    busy(core, 1, 5)
    assert core.route(long(), 0.0).goes_on == 1, "but streams wait even longer for the prompt"
    busy(core, 1, 0)
    core.traits.set_costs(0, 0.0, [])
    assert core.route(long(), 0.0).goes_on == 1, "a group that is new must compute to say what it takes"


def test_without_running_streams_a_group_for_both_computes_its_prompts_itself() -> None:
    core = ready("prefill", "both")
    assert core.route(long(), 0.0).goes_on < 0
    busy(core, 1, 3)
    assert core.route(long(), 0.0).goes_on == 1
    busy(core, 0, 0, queued=20_000)
    assert core.route(long(), 0.0).controller == 1, "the prefill group has too much to do"


def test_short_prompts_and_what_is_cached_stay() -> None:
    core = ready("prefill", "decode")
    busy(core, 1, 30)
    assert core.route(long(500), 0.0).controller == 1
    names = b"".join(prompt_names(long(), IDENTITY).chains[0].names)
    core.index.apply(1, names[: 16 * 100], bytes([1 << HOST]) * 100)  # 1,600 of 2,000 tokens
    decision = core.route(long(), 0.0)
    assert (decision.controller, decision.goes_on) == (1, -1)


def test_what_a_prefill_group_has_is_pulled_from_it() -> None:
    core = ready("prefill", "decode")
    names = b"".join(prompt_names(long(), IDENTITY).chains[0].names)
    core.index.apply(0, names[: 16 * 100], bytes([1 << HOST]) * 100)  # 1,600 of 2,000 tokens
    decision = core.route(long(), 0.0)
    assert (decision.controller, decision.goes_on, decision.pulled_tokens) == (1, -1, 1600)


@pytest.mark.parametrize("why", ["may not", "no exports", "other KV", "failed", "gone", "pinned"])
def test_what_cannot_be_parted_is_not(why: str) -> None:
    core = ready("prefill", "decode")
    request = long()
    match why:
        case "may not":
            request = long(may_part=False)
        case "no exports":
            core.traits.set_exports(0, [])
        case "other KV":
            core.traits.set_identity(0, OTHER)
        case "failed":
            request = msgspec.structs.replace(request, exclude=frozenset([0]))
        case "gone":
            core.set_available(0, False)
        case _:
            request = long(pinned=1)
    decision = core.route(request, 2.0)
    assert (decision.controller, decision.goes_on) == (1, -1)


def test_a_stream_goes_on_where_it_was_planned() -> None:
    core = ready("prefill", "decode", "decode", policy="least-loaded")
    busy(core, 2, 50)
    decision = core.route(long(may_part=False, planned=2), 0.0)
    assert (decision.controller, decision.reason) == (2, "planned")
    core.set_available(2, False)
    assert core.route(long(may_part=False, planned=2), 2.0).controller == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", seeds(4))
def test_roles_leave_no_request_without_a_group(seed: int, policy: str) -> None:
    """Groups change their roles, come, go and fail: whoever can take a request gets it, prefill groups last."""
    rng = random.Random(f"{seed} {policy}")
    count = rng.randrange(1, 6)
    core = ready(*["both"] * count, policy=policy)
    roles, there = ["both"] * count, [True] * count
    for step in range(STEPS):
        group = rng.randrange(count)
        match rng.choice(("role", "there", "load")):
            case "role":
                roles[group] = rng.choice(ROLES)
                core.traits.set_role(group, roles[group])
            case "there":
                there[group] = rng.random() < 0.7
                core.set_available(group, there[group])
            case _:
                busy(core, group, rng.randrange(40), rng.randrange(9000))
        exclude = frozenset(rng.sample(range(count), rng.randrange(count)))
        request = RouteRequest(
            packed(rng.choice((10, 600, 3000)), rng.randrange(9)),
            session=rng.choice(("", "s")),
            may_part=rng.random() < 0.6,
            planned=rng.randrange(-1, count),
            exclude=exclude,
        )
        usable = [each for each in range(count) if there[each]]
        if not usable:
            with pytest.raises(NoControllerError):
                core.route(request, float(step))
            continue
        allowed = [each for each in usable if each not in exclude] or usable
        others = [each for each in allowed if roles[each] != "prefill"]
        decision = core.route(request, float(step))
        assert decision.controller in allowed
        if decision.goes_on >= 0:
            assert request.may_part
            assert roles[decision.controller] == "prefill"
            assert decision.goes_on in others
        else:
            assert decision.controller in (others or allowed)
        if request.planned in (others or allowed):
            assert request.planned in (decision.controller, decision.goes_on)
