"""Who may run and when: refusals, the queue's limit and order, grammars waited for, prompts that are scored."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from simulation.driver import Simulation
from simulation.streams import verify

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch, Grammar, Submit
from trunkline.controller.reports import GrammarReady
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import CompileGrammar, ForgetGrammar, Sampling

SMALL = EngineConfig(num_blocks=64, chunk_size=4, max_context=96, token_budget=24, max_rows=8)
JSON = Grammar("json_schema", "{}", "response_format")


@pytest.fixture
def simulation() -> Simulation:
    return Simulation(SMALL)


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"n": 9}, "n", "9"),
        ({"beam": BeamSearch(9)}, "beam_width", "9"),
        ({"n": 4, "max_tokens": 80}, "n", "blocks"),
        ({"beam": BeamSearch(4), "max_tokens": 80}, "beam_width", "blocks"),
        ({"n": 0}, "n", "0"),
        ({"n": 3, "beam": BeamSearch(2)}, "n", "3"),
        ({"prompt": list(range(96))}, "prompt", "96"),
        ({"max_tokens": 0}, "max_tokens", "0"),
    ],
)
def test_what_can_never_run_is_refused_by_name(
    simulation: Simulation, options: dict[str, Any], param: str, said: str
) -> None:
    """Nothing else is disturbed by it."""
    simulation.submit([1, 2, 3], 20)
    simulation.step()
    wrong = simulation.submit(**{"prompt": [1, 2, 3], "max_tokens": 8, **options})
    ended = simulation.streams[wrong].ended
    assert ended is not None
    assert (ended.reason, ended.param) == ("invalid", param)
    assert said in ended.detail
    simulation.run()
    assert simulation.streams[1].reason == "length"


def test_the_widest_that_fits_runs() -> None:
    """12 prompt tokens in 3 blocks, then 61 blocks for 8 sequences: 7 of their own each."""
    for options in ({"n": 8}, {"beam": BeamSearch(8)}):
        simulation = Simulation(SMALL)
        simulation.submit(list(range(12)), 28, **options)
        assert simulation.streams[1].reason is None
        assert simulation.streams[simulation.submit(list(range(12)), 29, **options)].reason == "invalid"
        simulation.run()
        verify(simulation.streams[1], 96)


def test_output_ends_where_the_context_does(simulation: Simulation) -> None:
    simulation.submit(list(range(80)), 50)
    simulation.submit(list(range(80)), 50, n=2)
    simulation.submit(list(range(80)), 50, beam=BeamSearch(2))
    simulation.finish()
    assert [len(output) for i in (1, 2) for output in simulation.streams[i].outputs] == [16] * 3


def test_a_full_queue_refuses_and_says_how_full() -> None:
    simulation = Simulation(msgspec.structs.replace(SMALL, max_waiting=3))
    requests = [simulation.submit([i], 4, n=1 + i % 2) for i in range(5)]
    assert [simulation.streams[i].reason for i in requests] == [None] * 3 + ["queue_full"] * 2
    ended = simulation.streams[requests[3]].ended
    assert ended is not None
    assert "3" in ended.detail
    simulation.plan()
    assert simulation.streams[simulation.submit([9], 4)].reason is None
    simulation.run()


def test_first_come_first_served() -> None:
    """Equal requests of every kind, one at a time in the pool: they start in the order of arrival."""
    simulation = Simulation(msgspec.structs.replace(SMALL, num_blocks=24, max_rows=4))
    for i in range(9):
        beam = BeamSearch(3) if i % 3 == 2 else None
        simulation.submit([30 * i + j for j in range(10)], 16, n=3 if i % 3 else 1, beam=beam)
    started: list[int] = []
    while not simulation.engine.is_idle:
        simulation.step()
        started += [i for i, s in simulation.streams.items() if s.cached_tokens is not None and i not in started]
    assert started == sorted(started)
    simulation.finish()


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    """It needs nearly the whole pool, while small ones keep coming."""
    simulation = Simulation(msgspec.structs.replace(SMALL, num_blocks=24))
    for i in range(4):
        simulation.submit([i], 12, seed=i)
    simulation.step()
    large = simulation.submit(list(range(40)), 12, n=4)
    for i in range(400):
        simulation.step()
        simulation.submit([i % 50], 12, seed=i)
        if simulation.streams[large].reason:
            break
    assert simulation.streams[large].reason == "length"
    assert simulation.engine.counters.steps < 120
    simulation.finish()


def test_priorities_go_first() -> None:
    simulation = Simulation(msgspec.structs.replace(SMALL, max_rows=1, token_budget=16))
    priorities = [1, 0, 2, 0, -1, 1]
    requests = [simulation.submit([i, i], 3, priority=priority) for i, priority in enumerate(priorities)]
    ended: list[int] = []
    while not simulation.engine.is_idle:
        simulation.step()
        ended += simulation.take_ended()
    expected = sorted(requests, key=lambda request: (priorities[request - 1], request))
    assert ended == expected


# Grammars


def test_a_grammar_is_compiled_once_and_awaited_without_holding_anything(simulation: Simulation) -> None:
    waiting = [simulation.submit([1, 2, 3], 5, grammar=JSON) for _ in range(2)]
    plain = simulation.submit([1, 2, 3], 5)
    for _ in range(20):
        simulation.step()
    assert simulation.streams[plain].reason == "length", "others wait for a grammar that is not theirs"
    assert [simulation.streams[i].cached_tokens for i in waiting] == [None, None]
    assert not simulation.scheduler.running()
    assert list(simulation.grammars.values()) == [CompileGrammar(1, "json_schema", "{}")]
    simulation.compiled(1)
    simulation.finish()
    later = simulation.submit([1, 2, 3], 5, grammar=JSON)
    simulation.run()
    assert simulation.streams[later].reason == "length"


def test_a_grammar_that_is_under_way_is_asked_for_once_by_each_tenant(simulation: Simulation) -> None:
    """The second one's turn may come first; the workers compile it once."""
    text = "[a-z]"
    for tenant in (b"a", b"b", b"a", b"b"):
        simulation.submit([1, 2], 2, grammar=Grammar("regex", text, tenant=tenant))
    asked = simulation.engine.grammars.messages()
    assert asked == [CompileGrammar(1, "regex", text, tenant=tenant) for tenant in (b"a", b"b")]
    simulation.submit([1, 2], 2, grammar=Grammar("json_object", "", spaced=True, tenant=b"a"))
    simulation.submit([1, 2], 2, grammar=Grammar("json_object", "", tenant=b"a"))
    assert simulation.engine.grammars.messages() == [
        CompileGrammar(2, "json_object", "", spaced=True, tenant=b"a"),
        CompileGrammar(3, "json_object", "", tenant=b"a"),
    ]
    simulation.receive(GrammarReady(1))
    simulation.submit([1, 2], 2, grammar=Grammar("regex", text, tenant=b"c"))
    assert simulation.engine.grammars.messages() == [], "it is ready"


def test_a_grammar_that_cannot_be_compiled_ends_its_requests_only(simulation: Simulation) -> None:
    wrong = [simulation.submit([1, 2], 5, grammar=Grammar("regex", "(", "guided_regex"), n=2) for _ in range(2)]
    right = simulation.submit([1, 2], 5, grammar=JSON)
    simulation.plan()
    simulation.compiled(1, "unbalanced parenthesis")
    for request in wrong:
        ended = simulation.streams[request].ended
        assert ended is not None
        assert (ended.reason, ended.detail, ended.param) == ("invalid", "unbalanced parenthesis", "guided_regex")
    simulation.run()
    assert simulation.streams[right].reason == "length"


def test_grammars_do_not_pile_up(simulation: Simulation) -> None:
    """Clients may send another schema each time."""
    forgotten = 0
    for i in range(300):
        simulation.submit([1, 2], 2, grammar=Grammar("json_schema", str(i)))
        simulation.run()
        forgotten += sum(isinstance(m, ForgetGrammar) for m in simulation.engine.grammars.messages())
        assert len(simulation.workers.grammars) <= 200
    assert not forgotten  # the driver has passed all of them on to the workers
    simulation.finish()


# Prompt log-probabilities


@pytest.mark.parametrize("length", [1, 4, 5, 23, 60])
def test_all_positions_are_computed_and_scored(simulation: Simulation, length: int) -> None:
    """Also where the prompt is cached: then it is computed, but not stored, again."""
    prompt = [(7 * i) % 60 for i in range(length)]
    simulation.ask(prompt, 2)
    written = simulation.workers.written_tokens
    simulation.submit(prompt, 3, prompt_logprobs=2, n=2)
    simulation.ask(prompt, 3, prompt_logprobs=0)
    assert simulation.workers.written_tokens - written <= 2 * length + 3 * 2
    assert [stream.cached_tokens for stream in simulation.streams.values()][1:] == [0, 0]


def test_resumed_streams_keep_their_sample_and_seed(simulation: Simulation) -> None:
    submit = Submit(1, pack_int32([1, 2, 3, 4]), 2, 9, Sampling(), n=2)
    simulation.engine.receive(Request.of(1, submit), 0.0)
    outputs = simulation.engine.take_outputs()
    assert outputs is not None
    assert [(ended.reason, ended.param) for ended in outputs.finished] == [("invalid", "n")]
