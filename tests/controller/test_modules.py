"""Prompts made of modules: what is computed once and found by whom, in every tier; which text comes out is
checked by the oracle throughout."""

from __future__ import annotations

import pytest
from controller.module_harness import ROOMY, ask, submit, words
from controller.tier_harness import miss_of, settle, simulate, sink, tiers_of
from msgspec.structs import replace
from simulation.driver import Simulation
from simulation.module_prompts import layout, text
from simulation.streams import Stream

from trunkline.controller.messages import Submit
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.kvstore.tier import TierKind
from trunkline.worker.messages import Sampling, StepPlan

ROOT = text(words(0, 10), 0)
CITY = text(words(20, 7), 10, parent=0)


@pytest.fixture
def simulation() -> Simulation:
    return Simulation(ROOMY)


def test_ten_requests_at_once_encode_a_text_once(simulation: Simulation) -> None:
    requests = [submit(simulation, [ROOT, CITY], [(17, 1)], own=[i]) for i in range(10)]
    simulation.finish()
    assert simulation.engine.counters.encoded_texts == 2
    assert simulation.workers.computed_tokens == 17 + 10 * 4
    cached = [simulation.streams[request].cached_tokens for request in requests]
    assert cached == [0] + [17] * 9  # the first had it computed
    assert all(simulation.streams[request].started.module_tokens == 17 for request in requests)  # type: ignore[union-attr]


def test_rows_share_blocks_of_texts_wherever_they_stand_in_their_tables(simulation: Simulation) -> None:
    """Four selections of three texts; each block is held once, and (as the workers assert) in runs of all rows."""
    a, b, c = text(words(0, 9), 0), text(words(20, 8), 9), text(words(40, 5), 17)
    for texts in ([a, b, c], [b, c], [c], [a, c]):
        submit(simulation, texts, [(22, 2)], max_tokens=40)
    for _ in range(8):
        simulation.step()
    assert len(simulation.workers.rows) == 4
    physical, logical = simulation.workers.blocks_held
    own = sum(len(s.private) + len(s.path) - s.stem.base for s in simulation.scheduler.running())
    assert physical - own == 3 + 2 + 2
    assert logical - own == 7 + 4 + 2 + 5
    assert {(first, stop - first, start) for first, stop, start, _ in simulation.workers.runs.tolist()} >= {
        (row, 1, 0) for row in range(4)
    }
    simulation.finish()


def test_the_same_text_at_another_place_is_found_and_shifted(simulation: Simulation) -> None:
    plans: list[StepPlan] = []
    simulation.workers.observer = plans.append
    ask(simulation, [ROOT, CITY], [(17, 1)])
    other = text(words(20, 7), 33, parent=0)
    stream = ask(simulation, [ROOT, text(words(60, 9), 20, parent=0), other], [(40, 2)])
    assert simulation.engine.counters.encoded_texts == 3
    assert stream.cached_tokens == 17
    extents = unpack_int32(plans[-1].joins[-1].extents if plans[-1].joins else _last_join(plans), 5).tolist()
    assert [(count, base, shift) for _, _, count, base, shift in extents] == [
        (10, 0, 0),
        (9, 20, 0),
        (7, 10, 23),
        (-1, 40, 0),
    ]


def _last_join(plans: list[StepPlan]) -> bytes:
    return next(plan.joins[-1].extents for plan in reversed(plans) if plan.joins)


def test_with_learned_positions_a_text_serves_at_its_own_place_only() -> None:
    simulation = Simulation(replace(ROOMY, positions_shift=False))
    ask(simulation, [ROOT, CITY], [(17, 1)])
    assert ask(simulation, [ROOT, CITY], [(17, 1)], own=[9]).cached_tokens == 17
    stream = ask(simulation, [ROOT, text(words(20, 7), 11, parent=0)], [(18, 1)])
    assert stream.cached_tokens == 10
    assert simulation.engine.counters.encoded_texts == 3


def test_a_text_is_another_one_under_other_texts(simulation: Simulation) -> None:
    """Whatever is seen before it is part of its name: alone, under a root, under another text below that root."""
    ask(simulation, [ROOT, CITY], [(17, 1)])
    ask(simulation, [text(words(20, 7), 0)], [(7, 1)])
    between = text(words(40, 5), 10, parent=0)
    ask(simulation, [ROOT, between, text(words(20, 7), 15, parent=1)], [(22, 1)])
    assert simulation.engine.counters.encoded_texts == 2 + 1 + 2


def test_a_chain_is_encoded_in_order_and_shown_in_part(simulation: Simulation) -> None:
    """A scaffold: each text sees all before it; the root's own version is context only."""
    chain = [
        text(words(0, 6), 0, seen=[]),
        text(words(10, 6), 6, parent=0),
        text(words(20, 6), 12, parent=1, seen=[(0, 2), (4, 6)]),
        text(words(30, 6), 18, parent=2),
    ]
    stream = ask(simulation, chain, [(14, 2), (24, 3)])
    assert simulation.engine.counters.encoded_texts == 4
    assert stream.started is not None
    assert stream.started.module_tokens == 6 + 4 + 6


def test_the_order_in_which_texts_are_named_changes_nothing(simulation: Simulation) -> None:
    """Own tokens are found, too, and so is the output, by a prompt that goes on from it."""
    b, c = text(words(20, 7), 10, parent=0), text(words(30, 7), 20, parent=0)
    first = ask(simulation, [ROOT, b, c], [(17, 2), (27, 6)], 6)
    again = ask(simulation, [ROOT, c, b], [(17, 2), (27, 6)], 6)
    assert again.output == first.output
    assert again.cached_tokens == len(again.prompt) - 1
    own = [*words(500, 8), *first.output]
    longer = ask(simulation, [ROOT, c, b], [(17, 2), (27, 12)], 6, own=own)
    assert longer.cached_tokens == len(longer.prompt) - 1
    elsewhere = ask(simulation, [ROOT, c, b], [(18, 2), (27, 6)], 6)
    assert elsewhere.cached_tokens == 24, "own tokens at another place are others"


def test_own_tokens_of_modules_are_never_found_by_plain_prompts(simulation: Simulation) -> None:
    ask(simulation, [], [(0, 12)])
    plain = simulation.submit(words(500, 12), 4)
    simulation.finish()
    assert simulation.streams[plain].cached_tokens == 0


def test_the_same_text_twice_in_a_prompt_is_computed_once(simulation: Simulation) -> None:
    stream = ask(simulation, [text(words(0, 9), 0), text(words(0, 9), 30)], [(39, 2)])
    assert simulation.engine.counters.encoded_texts == 1
    assert stream.started is not None
    assert stream.started.module_tokens == 18


def test_texts_that_begin_alike_share_what_they_have_in_common(simulation: Simulation) -> None:
    ask(simulation, [text(words(0, 10), 0)], [(10, 1)])
    computed = simulation.workers.computed_tokens
    ask(simulation, [text([*words(0, 9), 90, 91], 5)], [(16, 1)], 1)
    assert simulation.workers.computed_tokens - computed == 2 + 1
    assert simulation.engine.counters.encoded_tokens == 21


def resume(simulation: Simulation, stream: Stream, tokens: int, max_tokens: int) -> None:
    """Another engine goes on with a stream of which so many tokens are known: `tokens` hold them, behind the
    prompt's own."""
    known = [*stream.own, *stream.output[:tokens]]
    submit = Submit(77, pack_int32(known), len(stream.own), max_tokens, Sampling(), layout=stream.layout)
    stream.outputs[0], stream.reasons = stream.output[:tokens], {}
    stream.cached_tokens = stream.started = stream.ended = None
    simulation.streams[77] = stream
    simulation.receive(Request.of(77, submit))
    simulation.run()


@pytest.mark.parametrize("known", [1, 5, 7])
def test_a_stream_that_is_resumed_goes_on(known: int) -> None:
    whole = ask(Simulation(ROOMY), [ROOT, CITY], [(17, 3)], 8)
    simulation = Simulation(ROOMY)
    resume(simulation, whole, known, 8)
    simulation.finish()
    assert len(whole.output) == 8


def test_a_stream_at_the_last_position_cannot_be_resumed() -> None:
    whole = ask(Simulation(ROOMY), [ROOT, CITY], [(90, 2)], 8)
    assert len(whole.output) == 4
    simulation = Simulation(ROOMY)
    resume(simulation, whole, 4, 8)
    assert whole.reason == "invalid"
    assert whole.ended is not None
    assert "position 96" in whole.ended.detail


@pytest.mark.parametrize("tier", list(TierKind)[: TierKind.PEER])
def test_texts_come_back_from_every_tier(tier: TierKind) -> None:
    """Their last chunks, which are not full, too."""
    simulation = simulate()
    ask(simulation, [ROOT, CITY], [(17, 1)])
    if tier is not TierKind.DEVICE:
        sink(simulation, tier)
        assert not any(node.on_device for node in simulation.tree.nodes())
    computed = simulation.workers.computed_tokens
    stream = ask(simulation, [ROOT, CITY], [(17, 2)], own=[7, 8])
    expected = [0] * TierKind.PEER
    expected[tier] = 17
    assert tiers_of(stream) == expected
    assert simulation.workers.computed_tokens - computed == 2 + 3
    assert simulation.engine.counters.encoded_texts == 2


def test_why_a_text_was_missed() -> None:
    simulation = Simulation(replace(ROOMY, num_blocks=10))
    assert miss_of(ask(simulation, [ROOT, CITY], [(17, 1)])) == ("new", 0)
    assert miss_of(ask(simulation, [ROOT, CITY], [(17, 1)])) == ("", 0)
    assert miss_of(ask(simulation, [ROOT, CITY], [(17, 2)], own=[1, 2])) == ("diverged", 17)
    simulation.ask(words(200, 38), 1)
    stream = ask(simulation, [ROOT, CITY], [(17, 1)])
    assert miss_of(stream) == ("evicted", 0)
    assert stream.cached_tokens == 0


def test_other_tenants_texts_are_not_found(simulation: Simulation) -> None:
    for salt in (b"", b"a", b"b", b"a"):
        ask(simulation, [ROOT, CITY], [(17, 1)], salt=salt)
    assert simulation.engine.counters.encoded_texts == 6


def test_a_text_is_forgotten_after_its_time(simulation: Simulation) -> None:
    """That of the request which wanted it for longest."""
    for ttl in (50.0, 500.0, 50.0):
        simulation.submit([5], 2, layout=layout([ROOT, CITY], [(17, 1)], ttl))
        simulation.run()
        simulation.now += 60.0
        simulation.plan()
    assert simulation.engine.counters.encoded_texts == 4
    simulation.now += 500.0
    simulation.plan()
    stream = ask(simulation, [ROOT, CITY], [(17, 1)])
    assert (stream.cached_tokens, miss_of(stream)) == (0, ("ttl", 0))


def test_an_announcement_brings_texts_into_host_memory() -> None:
    simulation = simulate()
    ask(simulation, [ROOT, CITY], [(17, 2)])
    sink(simulation, TierKind.DISK)
    assert simulation.streams[1].layout is not None
    submit = Submit(0, b"", 0, 1, Sampling(), layout=replace(simulation.streams[1].layout, runs=b""))
    assert simulation.expect(Request.of(0, submit)) == (17, 17)
    settle(simulation)
    assert sum(node.host_ready for node in simulation.tree.nodes()) == 3 + 2


def cached(simulation: Simulation, root: int, city: int, *, relocate: bool) -> int:
    """Tokens found of a text below another, which stand at these positions."""
    texts = [text(words(0, 10), root), text(words(20, 7), city, parent=0)]
    asked = replace(layout(texts, [(city + 7, 1)]), relocate=relocate)
    request = simulation.submit([500], 2, layout=asked)
    simulation.finish()
    found = simulation.streams[request].cached_tokens
    assert found is not None
    return found


def test_a_text_moves_with_its_parent_only(simulation: Simulation) -> None:
    assert cached(simulation, 0, 10, relocate=False) == 0
    assert cached(simulation, 0, 10, relocate=False) == 17
    assert cached(simulation, 0, 30, relocate=False) == 10, "its parent is further away"
    assert cached(simulation, 20, 30, relocate=False) == 17, "both have moved"
    assert simulation.engine.counters.encoded_texts == 3


def test_who_lets_texts_move_has_texts_of_its_own(simulation: Simulation) -> None:
    assert cached(simulation, 0, 10, relocate=True) == 0
    assert cached(simulation, 0, 30, relocate=True) == 17
    # A text above all others moves freely; one below is another's if distances count.
    assert cached(simulation, 0, 30, relocate=False) < 17
