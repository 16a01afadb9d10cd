"""What routers ask of the engine about texts: encode, pin, look, unpin, cancel."""

from __future__ import annotations

import random

import pytest
from controller.module_harness import ROOMY, WIDE, ask, call, jobs_of, submit, tiers_in, words
from controller.tier_harness import TIERED, settle, simulate, sink
from msgspec.structs import replace
from seeds import seeds
from simulation.driver import Simulation
from simulation.module_prompts import text

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import CallTexts, EndAll
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import ModulesCall, ModuleText
from trunkline.controller.scheduling.module_calls import JOBS_AT_ONCE, TEXTS_PER_STEP
from trunkline.kvstore.chunks import unpack_int32
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import ModulesReply

SCHEMA = [
    text(words(0, 10), 0),
    text(words(20, 7), 10, parent=0),
    text(words(30, 12), 10, parent=0),
    text(words(50, 4), 22, parent=0),
]
TOKENS, CHUNKS = 33, [3, 2, 3, 1]


def others(simulation: Simulation, count: int) -> None:
    """So many blocks are wanted by somebody else."""
    simulation.ask(words(1000 + simulation.next_id * 100, 4 * count - 1), 1)


@pytest.fixture
def simulation() -> Simulation:
    return Simulation(ROOMY)


def test_a_schema_is_encoded_before_anybody_asks_for_it(simulation: Simulation) -> None:
    assert tiers_in(call(simulation, "look", SCHEMA)) == [-1] * 4
    reply = call(simulation, "encode", SCHEMA)
    assert (reply.status, reply.computed_tokens) == ("ok", TOKENS)
    assert tiers_in(reply) == tiers_in(call(simulation, "look", SCHEMA)) == [0] * 4
    assert unpack_int32(reply.blocks).tolist() == CHUNKS
    assert call(simulation, "encode", SCHEMA).computed_tokens == 0
    stream = ask(simulation, [SCHEMA[0], SCHEMA[2]], [(22, 1)])
    assert stream.cached_tokens == 22
    assert simulation.engine.counters.encoded_texts == 4


def test_a_call_about_nothing(simulation: Simulation) -> None:
    assert call(simulation, "encode", [], pin_name="x").status == "ok"
    assert simulation.scheduler.encoding.calls.begin_again() == []
    assert call(simulation, "look", []).tiers == b""
    assert call(simulation, "unpin", [], pin_name="nobody").status == "ok"
    simulation.cancel_call(12345)
    assert simulation.engine.is_idle


def test_requests_that_come_during_a_long_call_do_not_wait_for_its_end(simulation: Simulation) -> None:
    texts = [text(words(20 * i, 20), 0) for i in range(80)]
    ticket = simulation.modules_call("encode", texts)
    for _ in range(3):
        simulation.step()
    request = simulation.submit(words(5000, 5), 2)
    simulation.step_until(lambda: simulation.streams[request].ended)
    assert ticket not in simulation.replies
    assert simulation.engine.counters.encoded_texts < 40
    simulation.run()
    assert simulation.replies[ticket].computed_tokens == 1600


def test_a_cancelled_call_encodes_no_more() -> None:
    simulation = Simulation(replace(ROOMY, token_budget=13))
    texts = [text(words(100, 60), 0), text(words(200, 30), 60, parent=0), text(words(300, 30), 0)]
    ticket = simulation.modules_call("encode", texts, pin_name="schema")
    request = submit(simulation, texts[:1], [(60, 1)])
    simulation.step()
    simulation.cancel_call(ticket)
    assert simulation.replies[ticket].status == "cancelled"
    assert len(jobs_of(simulation)) == 1, "one text is wanted by a request"
    simulation.cancel_call(ticket)
    simulation.finish()
    assert simulation.streams[request].reasons
    assert simulation.engine.counters.encoded_texts == 1
    assert simulation.tree.active_count == 0


def test_what_is_pinned_on_the_device_stays_there() -> None:
    simulation = Simulation(replace(ROOMY, num_blocks=24))
    call(simulation, "encode", SCHEMA, pin_name="schema")
    for _ in range(3):
        others(simulation, 14)
    assert tiers_in(call(simulation, "look", SCHEMA)) == [0] * 4
    call(simulation, "unpin", [], pin_name="schema")
    for _ in range(3):
        others(simulation, 20)
    assert tiers_in(call(simulation, "look", SCHEMA)) == [-1] * 4


def test_pins_on_the_device_are_limited_and_give_way_when_nothing_else_goes() -> None:
    simulation = Simulation(replace(ROOMY, num_blocks=24))
    assert call(simulation, "encode", SCHEMA, pin_name="a").status == "ok"
    second = [text(words(100, 16), 0)]
    reply = call(simulation, "encode", second, pin_name="b")
    assert reply.status == "quota"
    assert "4 chunks" in reply.detail
    assert tiers_in(reply) == [0], "it is there all the same"
    assert call(simulation, "encode", SCHEMA[:2], pin_name="c").status == "ok", (
        "what is pinned already costs nothing"
    )
    others(simulation, 24)
    assert tiers_in(call(simulation, "look", SCHEMA)) == [-1] * 4
    assert not simulation.scheduler.encoding.held


def test_a_row_that_grows_is_not_starved_by_pins() -> None:
    simulation = Simulation(replace(ROOMY, num_blocks=16))
    call(simulation, "encode", [text(words(0, 32), 0)], pin_name="a")
    request = simulation.submit(words(100, 10), 50)
    simulation.finish(500)
    assert len(simulation.streams[request].output) == 50
    assert simulation.scheduler.counters.preemptions == 0


def test_what_is_pinned_under_a_name_replaces_what_was() -> None:
    simulation = Simulation(replace(ROOMY, num_blocks=24))
    call(simulation, "encode", SCHEMA, pin_name="schema")
    call(simulation, "encode", SCHEMA[:1], pin_name="schema")
    assert len(simulation.scheduler.encoding.held) == 3
    call(simulation, "unpin", [], pin_name="schema")
    assert not simulation.scheduler.encoding.held
    call(simulation, "unpin", [], pin_name="schema")


@pytest.mark.parametrize("remote", [False, True])
def test_what_is_pinned_stays_in_some_tier(remote: bool) -> None:
    config = replace(TIERED, num_blocks=24, host_slots=16, disk_slots=40, remote=remote)
    simulation = simulate(config)
    assert call(simulation, "encode", SCHEMA, pin_name="schema").status == "ok"
    settle(simulation)
    for _ in range(12):
        others(simulation, 20)
        settle(simulation)
    assert -1 not in tiers_in(call(simulation, "look", SCHEMA))
    stream = ask(simulation, [SCHEMA[0], SCHEMA[2]], [(22, 1)])
    assert stream.cached_tokens == 22
    simulation.modules_call("unpin", [], pin_name="schema")
    settle(simulation)
    assert simulation.tree.tiers.pinned_count == 0


def test_a_second_host_pin_beyond_the_quota_is_refused() -> None:
    simulation = simulate(replace(TIERED, host_slots=16, disk_slots=0, remote=False))
    statuses = []
    for i in range(8):
        texts = [text(words(100 * i, 12), 0)]
        statuses.append(call(simulation, "encode", texts, pin_name=f"schema {i}").status)
        settle(simulation)
    assert statuses[0] == "ok"
    assert statuses[-1] == "quota"
    for i in range(8):
        simulation.modules_call("unpin", [], pin_name=f"schema {i}")
    settle(simulation)
    assert simulation.tree.tiers.pinned_count == 0


def pin(
    simulation: Simulation, sources: list[ModuleText], pin_name: str, tenant: str = "a", pins: float = 0.25
) -> ModulesReply:
    return call(simulation, "encode", sources, pin_name=pin_name, tenant=tenant, pins=pins)


@pytest.mark.parametrize("config", [replace(ROOMY, num_blocks=48), replace(TIERED, host_slots=16, disk_slots=48)])
def test_a_tenants_pins_have_a_part_of_the_room(config: EngineConfig) -> None:
    simulation, other = simulate(config), [text(words(100, 8), 0)]  # there is room for 24 pinned chunks
    assert pin(simulation, SCHEMA[:2], "a 1").status == "ok", "5 chunks"
    refused = pin(simulation, other, "a 2")
    assert (refused.status, refused.computed_tokens) == ("quota", 8)
    assert refused.detail == "the tenant would have 7 chunks pinned; it may have 6 in this group"
    assert pin(simulation, SCHEMA[:1], "a 3").status == "ok", "they are pinned already"
    assert pin(simulation, other, "b 1", "b").status == "ok"
    assert pin(simulation, other, "any", "").status == "ok"
    call(simulation, "unpin", [], pin_name="a 1")
    assert pin(simulation, other, "a 2").status == "ok"
    assert pin(simulation, [text(words(200, 4), 0)], "a 1").status == "ok"
    none = pin(simulation, [text(words(300, 1), 0)], "c", "c", 0.0)
    assert none.detail == "the tenant would have 1 chunks pinned; it may have 0 in this group"


@pytest.mark.parametrize("seed", seeds(3))
def test_no_tenant_pins_more_than_its_part(seed: int) -> None:
    rng = random.Random(seed)
    simulation = simulate(replace(ROOMY, num_blocks=48))
    parts = {"a": 0.25, "b": 0.5, "c": 1.0}
    pinned: dict[str, dict[str, set[int]]] = {tenant: {} for tenant in parts}
    outcomes = set()
    for _ in range(120):
        tenant, name = rng.choice(list(parts)), str(rng.randrange(4))
        texts = sorted(rng.sample(range(6), rng.randint(1, 3)))
        if rng.random() < 0.3:
            call(simulation, "unpin", [], pin_name=f"{tenant} {name}")
            pinned[tenant].pop(name, None)
            continue
        sources = [text(words(100 * number, 8), 0) for number in texts]
        reply = pin(simulation, sources, f"{tenant} {name}", tenant, parts[tenant])
        outcomes.add(reply.status)
        pinned[tenant].pop(name, None)
        before = set().union(*pinned[tenant].values())
        if 2 * len(before | set(texts)) > parts[tenant] * 24:
            assert reply.status == "quota"
        if reply.status == "ok":
            pinned[tenant][name] = set(texts)
    assert outcomes == {"ok", "quota"}
    assert simulation.scheduler.encoding.calls.pinned_count == 2 * len(
        set().union(*(texts for holders in pinned.values() for texts in holders.values()))
    )


@pytest.mark.parametrize("place", [None, TierKind.DISK, TierKind.REMOTE])
def test_what_only_a_deleted_schema_has_is_gone_from_every_tier(place: TierKind | None) -> None:
    simulation = simulate(TIERED)
    other = [SCHEMA[0], text([*words(20, 4), 99], 10, parent=0)]  # shares a text and a chunk
    call(simulation, "encode", SCHEMA)
    call(simulation, "encode", other, pin_name="other")
    if place is not None:
        sink(simulation, place)
    settle(simulation)
    call(simulation, "forget", SCHEMA)
    settle(simulation)
    assert tiers_in(call(simulation, "look", SCHEMA))[1:] == [-1] * 3
    assert -1 not in tiers_in(call(simulation, "look", other)), "pinned by another schema"
    call(simulation, "unpin", [], pin_name="other")
    call(simulation, "forget", other)
    settle(simulation)
    assert not simulation.tree.node_count
    assert not simulation.tree.tiers.stats()[TierKind.DISK].used
    assert not any(simulation.tiers.remote)
    assert call(simulation, "forget", SCHEMA).status == "ok"


def test_texts_of_running_requests_stay(simulation: Simulation) -> None:
    call(simulation, "encode", SCHEMA)
    request = submit(simulation, [SCHEMA[0], SCHEMA[2]], [(22, 1)], 8)
    simulation.step()
    simulation.replies.pop(simulation.modules_call("forget", SCHEMA))
    assert tiers_in(call(simulation, "look", SCHEMA))[::2] == [0, 0]
    simulation.finish()
    assert simulation.streams[request].output


def test_a_large_schema_is_forgotten_beside_the_steps() -> None:
    simulation = Simulation(WIDE)
    texts = [text(words(20 * i, 4), 0) for i in range(2 * TEXTS_PER_STEP + 9)]
    call(simulation, "encode", texts)
    ticket = simulation.modules_call("forget", texts)
    assert simulation.tree.node_count
    assert ticket not in simulation.replies
    simulation.run()
    assert simulation.replies[ticket].status == "ok"
    assert not simulation.tree.node_count


def test_texts_that_are_encoded_for_a_time(simulation: Simulation) -> None:
    call(simulation, "encode", SCHEMA, ttl=50.0)
    simulation.now += 40.0
    call(simulation, "encode", SCHEMA[:1], ttl=50.0)  # is kept again
    simulation.now += 40.0
    simulation.plan()
    assert tiers_in(call(simulation, "look", SCHEMA)) == [0, -1, -1, -1]


@pytest.mark.parametrize(
    ("texts", "words_of_it"),
    [
        ([text(words(0, 10), 90)], "text 0 ends at position 100"),
        (
            [text(words(0, 40), 0), text(words(0, 44), 40, parent=0)],
            "text 1 and those that it sees need 21 blocks",
        ),
    ],
)
def test_texts_that_can_never_be_encoded(texts: list[ModuleText], words_of_it: str) -> None:
    simulation = Simulation(replace(ROOMY, num_blocks=20))
    reply = call(simulation, "encode", texts)
    assert reply.status == "failed"
    assert words_of_it in reply.detail


def test_without_a_cache_there_are_no_modules() -> None:
    simulation = Simulation(replace(ROOMY, prefix_cache=False))
    assert "prefix cache is off" in call(simulation, "encode", SCHEMA).detail
    request = submit(simulation, SCHEMA[:1], [(10, 1)])
    ended = simulation.streams[request].ended
    assert ended is not None
    assert (ended.reason, ended.param) == ("invalid", "prompt")
    assert "prefix cache is off" in ended.detail


def test_calls_end_when_the_workers_are_gone(simulation: Simulation) -> None:
    ticket = simulation.modules_call("encode", SCHEMA)
    simulation.step()
    simulation.engine.receive(EndAll("gone"), simulation.now)
    outputs = simulation.engine.take_outputs()
    assert outputs is not None
    assert [(done.ticket, done.status, done.detail) for done in outputs.modules] == [(ticket, "failed", "gone")]
    assert simulation.engine.is_idle


def test_a_call_about_very_many_texts_goes_step_by_step() -> None:
    simulation = Simulation(WIDE, check=False)
    texts = [text([i], i) for i in range(3 * TEXTS_PER_STEP)]
    ticket = simulation.modules_call("look", texts)
    assert ticket not in simulation.replies
    request = simulation.submit(words(5000, 5), 2)
    simulation.run()
    assert simulation.streams[request].output
    assert tiers_in(simulation.replies[ticket]) == [-1] * len(texts)
    assert tiers_in(call(simulation, "encode", texts)) == [0] * len(texts)
    assert tiers_in(call(simulation, "look", texts)) == [0] * len(texts)
    assert simulation.wanted.wake_at == float("inf")


def test_calls_share_what_is_encoded_at_once() -> None:
    simulation = Simulation(replace(WIDE, token_budget=13), check=False)
    for i in range(4):
        simulation.modules_call("encode", [text(words(1000 * i + 10 * k, 9), 0) for k in range(JOBS_AT_ONCE)])
    simulation.plan()
    assert JOBS_AT_ONCE - 4 < len(jobs_of(simulation)) <= JOBS_AT_ONCE
    simulation.run()
    assert len(simulation.replies) == 4


def test_a_ticket_that_is_used_twice_is_refused() -> None:
    engine = Engine(ROOMY)
    for _ in range(2):
        engine.receive(CallTexts(5, ModulesCall(5, "encode", SCHEMA)), 0.0)
    outputs = engine.take_outputs()
    assert outputs is not None
    assert [(done.ticket, done.status) for done in outputs.modules] == [(5, "failed")]
    assert engine.open_calls() == [5], "the first goes on"


@pytest.mark.parametrize("config", [ROOMY, TIERED])
def test_what_was_pinned_beyond_its_time_goes_when_it_is_not_any_more(config: EngineConfig) -> None:
    simulation = Simulation(config)
    texts = [text(words(0, 30), 0)]
    call(simulation, "encode", texts, pin_name="schema", ttl=5.0)
    simulation.now += 50.0
    simulation.plan()
    assert tiers_in(call(simulation, "look", texts)) == [0]
    call(simulation, "unpin", [], pin_name="schema")
    simulation.now += 50.0
    simulation.plan()
    assert tiers_in(call(simulation, "look", texts)) == [-1]


def test_a_schema_that_cannot_stay_whole_is_not_pinned() -> None:
    simulation = Simulation(replace(ROOMY, num_blocks=24))
    reply = call(simulation, "encode", [text(words(100 * i, 32), 0) for i in range(4)], pin_name="schema")
    assert reply.status == "quota"
    assert "no room" in reply.detail
    assert not simulation.scheduler.encoding.held
