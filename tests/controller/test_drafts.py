"""Drafts in the engine: texts are what they are without, in fewer steps, and nothing is held or shared wrongly."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace as with_fields

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray
from seeds import seeds
from simulation.drafts import RandomDrafts, draft_from
from simulation.driver import Simulation
from simulation.engines import ENGINES, MIXES, TINY
from simulation.oracle import expected_output
from simulation.traffic import Mix, Traffic

from trunkline.controller.engine.drafted import join_results, stretches_of
from trunkline.controller.engine.events import EngineOutputs
from trunkline.controller.messages import BeamSearch
from trunkline.controller.reports import StepResult, TopLogprobs
from trunkline.controller.sequences.decode_rows import RowSet
from trunkline.controller.sequences.draft_source import Slots
from trunkline.controller.sequences.plan_builder import InflightStep
from trunkline.kvstore.chunks import Int32Array, pack_int32, unpack_int32
from trunkline.worker.messages import StepPlan

ROOMY = replace(TINY, num_blocks=200, max_context=200, token_budget=64, max_rows=32)


class Guesses(RandomDrafts):
    """Always as many guesses as there is room for, `good` of them right."""

    good: int = 1000

    def planned(self, step: int, now: float, drafted: int) -> None:
        super().planned(step, now, drafted)
        self._waits = True

    def propose(self, slots: Slots, room: NDArray[np.int64], prefill_tokens: int) -> list[Int32Array]:
        found = []
        for slot, most in zip(slots.tolist(), room.tolist(), strict=True):
            coming = self._expected(self.here[slot])[self.lengths[slot] :] if slot in self.here else []
            guesses = [*coming, *[0] * most][: min(most, self._longest)]
            found.append(np.array([t + (i >= self.good) for i, t in enumerate(guesses)], np.int32))
        return found


def drafting(simulation: Simulation, *, good: int = 1000, longest: int = 4) -> Callable[[], Guesses]:
    """Let a simulation guess; return what gives the present source."""
    made: list[Guesses] = []

    def make(simulation: Simulation) -> Guesses:
        made.append(Guesses(simulation, 0, longest=longest))
        made[-1].good = good
        return made[-1]

    draft_from(simulation, make)
    return lambda: made[-1]


@pytest.mark.parametrize(
    "name", ["tiny, both", "one token a chunk", "little host memory, cuts", "modules, device only"]
)
@pytest.mark.parametrize("seed", seeds(1))
def test_texts_do_not_depend_on_drafts(name: str, seed: int) -> None:
    """Any requests, preempted, aborted, with workers lost: every stream is its oracle's, all invariants hold."""
    mix = with_fields(MIXES.get(name, Mix()), losses=0.003, preempts=0.01)
    traffic = Traffic(ENGINES[name], mix, seed)
    draft_from(traffic.simulation, lambda simulation: RandomDrafts(simulation, seed))
    traffic.run(25)
    counters = traffic.simulation.engine.counters
    assert 0 < counters.accepted_drafts < counters.drafted_tokens
    assert counters.drafted_tokens - counters.accepted_drafts >= traffic.simulation.workers.refused_tokens > 0
    told = traffic.simulation.wanted.drafts
    assert sum(drafts.accepted for drafts in told) == counters.accepted_drafts
    assert sum(drafts.tried for drafts in told) <= counters.drafted_tokens, "some requests ended meanwhile"
    assert {drafts.is_prediction for drafts in told} == {False, True}


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_right_drafts_save_their_steps(chunk_size: int) -> None:
    """One token with the prompt's step, then five a step."""
    simulation = Simulation(replace(ROOMY, chunk_size=chunk_size))
    drafting(simulation)
    simulation.ask([1, 2, 3], 31)
    counters = simulation.engine.counters
    assert counters.steps == 1 + 30 // 5
    assert counters.drafted_tokens == counters.accepted_drafts == 24
    assert [(drafts.tried, drafts.accepted) for drafts in simulation.wanted.drafts] == [(4, 4)] * 6
    assert simulation.workers.refused_tokens == 0


def test_wrong_drafts_cost_no_step() -> None:
    simulation = Simulation(ROOMY)
    drafting(simulation, good=0)
    simulation.ask([1, 2, 3], 31)
    counters = simulation.engine.counters
    assert counters.accepted_drafts == 0
    assert counters.steps == 31
    assert counters.drafted_tokens == simulation.workers.refused_tokens > 100
    assert sum(drafts.tried for drafts in simulation.wanted.drafts) == counters.drafted_tokens
    assert not any(drafts.accepted for drafts in simulation.wanted.drafts)


@pytest.mark.parametrize("at", range(12))
def test_a_stop_token_ends_a_stream_among_accepted_drafts(at: int) -> None:
    """Also where the drafts behind it are what the model would say."""
    prompt = [7, 7, at]
    whole = expected_output(prompt, 0, 40)
    simulation = Simulation(ROOMY)
    drafting(simulation)
    stream = simulation.ask(prompt, 40, stop_ids=(whole[at],))
    assert stream.output == whole[: whole.index(whole[at]) + 1]
    assert stream.reason == "stop"


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_no_draft_goes_beyond_the_length(max_tokens: int) -> None:
    simulation = Simulation(ROOMY)
    drafting(simulation, longest=20)
    simulation.ask([1, 2], max_tokens)
    assert simulation.engine.counters.drafted_tokens == max(0, max_tokens - 2)


def test_samples_and_searches_beside_drafts() -> None:
    """Beams have none; samples each their own, right from the fork on."""
    simulation = Simulation(ROOMY)
    drafting(simulation)
    plans: list[StepPlan] = []
    simulation.workers.observer = plans.append
    simulation.submit([1, 2, 3, 4, 5], 20, n=4, seed=3)
    simulation.submit([1, 2, 3, 4, 5], 12, beam=BeamSearch(3), n=2)
    simulation.finish()
    assert any(sum(map(bool, plan.drafts)) == 4 for plan in plans)
    assert simulation.engine.counters.accepted_drafts > 20


@pytest.mark.parametrize(("max_rows", "token_budget"), [(6, 64), (20, 21)])
def test_rows_and_drafts_stay_within_the_limits_of_a_step(max_rows: int, token_budget: int) -> None:
    simulation = Simulation(replace(ROOMY, max_rows=max_rows, token_budget=token_budget))
    drafting(simulation, longest=20)
    tokens: list[int] = []

    def count(plan: StepPlan) -> None:
        prefill = int(unpack_int32(plan.prefill, columns=5)[:, 2].sum())
        tokens.append(prefill + len(simulation.workers.rows) + sum(map(len, plan.drafts)) // 4)

    simulation.workers.observer = count
    for seed in range(5):
        simulation.submit([seed, *[9] * 30], 30, seed=seed)
    simulation.finish()
    assert simulation.workers.max_rows <= max_rows
    assert max(tokens) <= token_budget
    assert max_rows in (simulation.workers.max_rows, max(tokens) - 1)


@pytest.mark.parametrize("seed", seeds(4))
def test_drafts_preempt_nobody(seed: int) -> None:
    """In the smallest pool in which, without drafts, all run at once and nobody is preempted. Refused drafts need
    the most room."""
    rng = random.Random(seed)
    requests = [([number] * rng.randrange(1, 20), rng.randrange(2, 50)) for number in range(5)]

    def is_enough(blocks: int, *, drafts: bool) -> bool:
        config = replace(
            ROOMY, chunk_size=8, num_blocks=blocks, token_budget=256, max_context=70, prefix_cache=False
        )
        simulation = Simulation(config, check=False)
        if drafts:
            drafting(simulation, good=0, longest=7)
        for prompt, max_tokens in requests:
            simulation.submit(prompt, max_tokens)
        simulation.plan()
        waiting = simulation.scheduler.waiting_count
        simulation.finish()
        return not (waiting or simulation.engine.counters.preemptions)

    blocks = 40
    while is_enough(blocks - 1, drafts=False):
        blocks -= 1
    assert is_enough(blocks, drafts=True)


@pytest.mark.parametrize("blocks", [10, 12, 200])
@pytest.mark.parametrize("good", [0, 1, 1000])
def test_drafts_take_nothing_from_the_cache(good: int, blocks: int) -> None:
    """What is found of an answer, and of a prompt that the pool has no room for beside it, is what would be found
    without drafts."""
    prompt, other, found = [1, 2, 3], [9] * 61, []
    for drafts in (False, True):
        simulation = Simulation(replace(ROOMY, chunk_size=8, num_blocks=blocks, max_context=80))
        if drafts:
            drafting(simulation, good=good, longest=20)
        simulation.ask(other, 2)
        answer = simulation.ask(prompt, 41).output
        cached = [simulation.engine.counters.cached_tokens]
        for again in ([*prompt, *answer, 7], [*other, 8]):
            simulation.ask(again, 2)
            cached.append(simulation.engine.counters.cached_tokens - sum(cached))
        found.append(cached)
        assert (simulation.engine.counters.drafted_tokens > 30) == drafts
    assert found[0] == found[1]
    assert found[0][1] == 43
    assert (found[0][2] < 61) == (blocks < 13)


def test_a_step_with_drafts_is_waited_for() -> None:
    simulation = Simulation(ROOMY)
    source = drafting(simulation)
    simulation.submit([1, 2, 3], 30)
    simulation.plan()
    simulation.answer()
    simulation.plan()
    assert source().steps == 1
    assert len(simulation.results) == 1
    assert not simulation.engine.step((), simulation.now).again
    simulation.finish()


def test_an_abort_while_drafts_are_computed() -> None:
    """The blocks come back; a second request takes the slot before the result of the first one's comes."""
    simulation = Simulation(ROOMY)
    drafting(simulation)
    request = simulation.submit([1, 2, 3], 30)
    simulation.step()
    simulation.plan()
    simulation.abort(request)
    simulation.submit([4, 5, 6], 30)
    simulation.finish()
    assert simulation.scheduler.kv.tree.active_count == 0


# Results


def step_of(drafts: list[list[int]], others: int = 0) -> InflightStep:
    count = len(drafts) + others
    numbers = np.arange(count)
    rows = RowSet(numbers.astype(np.intp), numbers + 10, numbers + 20, numbers * 0)
    chains = tuple(np.array(chain, np.int32) for chain in drafts)
    return InflightStep(1, rows, count, 0, {}, drafts=chains)


def drawn(step: InflightStep, tokens: list[int]) -> list[dict[int, int]]:
    """Return the tokens by slot, position by position."""
    found = stretches_of(step, np.array(tokens, np.int32), None)
    assert all(len(part.rows) for part in found)
    assert len({len(part.rows) for part in found}) == len(found), "each stretch has all positions of its rows"
    return [
        dict(zip(part.rows.slots.tolist(), position, strict=True))
        for part in found
        for position in part.tokens.tolist()
    ]


def test_the_positions_of_a_result() -> None:
    step = step_of([[5, 6], [8], []], others=1)
    assert step.places == 7
    assert drawn(step, [5, 7, -1, 9, -1, 3, 4]) == [{0: 5, 1: 9, 2: 3, 3: 4}, {0: 7}]
    assert drawn(step, [5, 6, 1, 8, 2, 3, 4]) == [{0: 5, 1: 8, 2: 3, 3: 4}, {0: 6, 1: 2}, {0: 1}]
    # What is said behind a refused draft does not count.
    assert drawn(step, [1, 6, 1, 9, 2, 3, 4]) == [{0: 1, 1: 9, 2: 3, 3: 4}]


@pytest.mark.parametrize("seed", range(20))
def test_results_are_read_as_position_by_position(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        drafts = [[rng.randrange(3) for _ in range(rng.choice([0, 1, 3, 8]))] for _ in range(rng.randint(1, 6))]
        if not any(drafts):
            continue
        others = rng.randrange(3)
        places = [[rng.randrange(3) for _ in range(len(draft) + 1)] for draft in drafts + [[]] * others]
        expected: list[dict[int, int]] = []
        for slot, (draft, said) in enumerate(zip(drafts + [[]] * others, places, strict=True)):
            for position, token in enumerate(said):
                if position and draft[position - 1] != said[position - 1]:
                    said[position:] = [-1] * (len(said) - position)
                    break
                expected += [{}] * (position == len(expected))
                expected[position] = {**expected[position], slot: token}
        assert drawn(step_of(drafts, others), [token for said in places for token in said]) == expected


@pytest.mark.parametrize("tokens", [[5, -1, -1, 9, -1, 3], [5, 6, -1, 9, -1, 3], [-1, 6, 1, 9, -1, 3]])
def test_a_token_that_must_have_been_drawn_is_missing(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="no token behind"):
        drawn(step_of([[5, 6], [8], []]), tokens)


def test_reports_follow_their_tokens() -> None:
    step = step_of([[5, 6], [], [8]])
    reports = {place: TopLogprobs(-float(place), b"", b"") for place in (0, 1, 3, 4, 5)}
    found = stretches_of(step, np.array([5, 7, -1, 9, 8, 3], np.int32), reports)
    outputs = EngineOutputs()
    for part in found:
        outputs.requests.append(part.rows.requests)
        outputs.samples.append(part.rows.samples)
        outputs.tokens.append(part.tokens[0])
        outputs.logprobs.append(part.logprobs)
    join_results(outputs, 0)
    assert outputs.requests[0].tolist() == [20, 21, 22, 20, 22]
    assert outputs.tokens[0].tolist() == [5, 9, 8, 7, 3]
    values = {index: report.token_logprob for index, report in (outputs.logprobs[0] or {}).items()}
    assert values == {0: 0.0, 1: -3.0, 2: -4.0, 3: -1.0, 4: -5.0}
    assert [len(part) for part in (outputs.requests, outputs.samples, outputs.tokens, outputs.logprobs)] == [1] * 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tokens: tokens[:-1], "samples 5 int32 tokens"),
        (lambda tokens: [tokens[0], -1, *tokens[2:]], "no token behind 1 accepted"),
    ],
)
def test_workers_that_answer_drafts_wrongly_cannot_be_trusted(
    change: Callable[[list[int]], list[int]], reason: str
) -> None:
    simulation = Simulation(ROOMY)
    drafting(simulation)
    simulation.submit([1, 2, 3], 30)
    simulation.step()
    simulation.plan()
    result: StepResult = simulation.results.popleft()
    wrong = replace(result, tokens=pack_int32(change(unpack_int32(result.tokens).tolist())))
    assert reason in simulation.engine.step([wrong], simulation.now).problem
