"""Preemption of whole groups, before and after their forks, with recovery by recomputation and by swapping."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest
from simulation.driver import Simulation
from simulation.oracle import expected_output
from simulation.streams import Options, verify

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch
from trunkline.controller.sequences.beam_search import sample_seed
from trunkline.kvstore.chunks import unpack_int32
from trunkline.worker.messages import StepPlan

ROOMY = EngineConfig(num_blocks=96, chunk_size=4, max_context=96, token_budget=24, max_rows=12, host_slots=60)
TINY = msgspec.structs.replace(ROOMY, num_blocks=24)
KINDS: dict[str, Options] = {
    "one": {"seed": 5},
    "samples": {"seed": 5, "n": 3},
    "beams": {"beam": BeamSearch(3), "n": 3, "stop_ids": (3, 30)},
    "scored": {"seed": 5, "prompt_logprobs": 1, "n": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("after", "preemption"),
    [
        (1, "swap"),
        (2, "recompute"),
        (3, "auto"),
        (4, "swap"),
        (5, "recompute"),
        (8, "swap"),
        (14, "auto"),
        (15, "swap"),
        (16, "recompute"),
    ],
)
def test_resumed_output_is_the_undisturbed_one(kind: str, preemption: str, after: int) -> None:
    """At any event: in the prompt, right after the fork, with results on their way, in the middle of decoding."""
    simulation = Simulation(msgspec.structs.replace(ROOMY, preemption=preemption))
    request = simulation.submit([(3 * i) % 29 for i in range(30)], 12, **KINDS[kind])
    simulation.submit([(3 * i) % 29 for i in range(27)], 12, seed=1)
    simulation.events(after)
    taken = simulation.preempt(request)
    simulation.step()
    again = simulation.preempt(request)
    simulation.finish()
    assert simulation.scheduler.counters.preemptions == taken + again > 0
    # Nothing needed the blocks meanwhile: the cache has all but tails, and what was in flight.
    assert simulation.workers.computed_tokens <= 30 + 27 + (3 + 1) * 12 + 2 * (3 * (4 + 2) + 30)


class Squeezed:
    """A request that is preempted with eleven tokens of output, and loses all its blocks to another one."""

    HEAD: Final = tuple(range(8))

    def __init__(self, *, head: bool = False, **config: Any) -> None:
        """
        Args:
            head: whether the first two chunks of its prompt of 16 tokens were computed for an earlier request, and
                are on the host only when it comes.
        """
        self.simulation = simulation = Simulation(msgspec.structs.replace(TINY, **config))
        self.plans: list[StepPlan] = []
        if head:
            simulation.submit([*self.HEAD, 99], 1)
            simulation.run()
            self._take_the_pool()
        self.request = simulation.submit([*self.HEAD, *range(50, 58)], 20, seed=3)
        while len(simulation.streams[self.request].output) < 11:
            simulation.step()
        self._take_the_pool()

    def _take_the_pool(self) -> None:
        """Another fills it, which goes before a request that is preempted."""
        simulation = self.simulation
        other = simulation.submit([200 + i for i in range(93)], 2, priority=-1)
        for group in {sequence.group for sequence in simulation.scheduler.running()}:
            simulation.scheduler.preempt(group, simulation.now)
        while simulation.streams[other].reason is None:
            simulation.step()

    def come_back(self) -> tuple[int, int]:
        """Prompt and output tokens that are computed again until the request decodes, and blocks loaded for it."""
        simulation = self.simulation
        known = sum(len(output) for output in simulation.streams[self.request].outputs)
        loaded = simulation.workers.pool.loaded_blocks
        simulation.workers.observer = self.plans.append
        simulation.finish()
        assert simulation.scheduler.counters.preemptions == 1
        assert known < sum(len(output) for output in simulation.streams[self.request].outputs)
        prefilled = sum(int(unpack_int32(plan.prefill, 5)[:, 2].sum()) for plan in self.plans if plan.prefill)
        return prefilled, simulation.workers.pool.loaded_blocks - loaded

    @property
    def known(self) -> int:
        """Tokens of prompt and output of a sequence."""
        return 16 + len(self.simulation.streams[self.request].output)


def blocks(tokens: int) -> int:
    return -(-tokens // TINY.chunk_size)


@pytest.mark.parametrize("head", [False, True])
def test_with_swap_all_is_loaded_and_one_token_computed(head: bool) -> None:
    squeezed = Squeezed(head=head, preemption="swap")
    known = squeezed.known
    assert squeezed.simulation.scheduler.counters.swapped == 1
    assert squeezed.come_back() == (1, blocks(known - 1))


@pytest.mark.parametrize("head", [False, True])
def test_with_recompute_what_it_had_computed_is_computed_again_and_what_it_had_found_is_loaded(head: bool) -> None:
    squeezed = Squeezed(head=head, preemption="recompute")
    known = squeezed.known
    found = squeezed.simulation.streams[squeezed.request].cached_tokens
    assert found == (8 if head else 0)
    assert squeezed.simulation.scheduler.counters.swapped == 0
    assert squeezed.come_back() == (known - found, found // TINY.chunk_size)


@pytest.mark.parametrize(("move_us", "mode"), [(10, "swap"), (1000, "recompute")])
def test_auto_does_what_is_faster(move_us: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers take 25 µs for a token, 100 for the four of a block, and say what a moved block took."""
    monkeypatch.setattr("simulation.worker.MOVE_US", move_us)
    squeezed = Squeezed(preemption="auto", swap_us_per_block=2.0 * move_us)
    known = squeezed.known
    assert squeezed.simulation.scheduler.counters.swapped == (mode == "swap")
    assert squeezed.come_back() == ((1, blocks(known - 1)) if mode == "swap" else (known, 0))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("ended", [0, 1])
def test_samples_resume_together(preemption: str, ended: int) -> None:
    """Three samples that have parted come back under a budget of 8 tokens a step: none decodes before the last is
    in. With `ended`, one of them has reached a stop token before."""
    prompt, seed = list(range(14)), 7
    outputs = [expected_output(prompt, sample_seed(seed, i), 22) for i in range(3)]
    stops = [token for token in outputs[1][:10] if token not in outputs[0] + outputs[2]][:ended]
    assert len(stops) == ended
    config = msgspec.structs.replace(TINY, token_budget=8, max_rows=4, preemption=preemption)
    simulation = Simulation(config)
    request = simulation.submit(prompt, 22, n=3, seed=seed, stop_ids=tuple(stops))
    simulation.step_until(lambda: len(simulation.streams[request].output) >= 12)
    other = simulation.submit([200 + i for i in range(93)], 2, priority=-1)
    simulation.preempt(request)
    simulation.step_until(lambda: simulation.streams[other].reason)
    plans: list[StepPlan] = []
    simulation.workers.observer = plans.append
    simulation.finish()
    assert len(simulation.streams[request].reasons) == 3
    joined = sorted(join.sequence for plan in plans for join in plan.joins)
    assert len(joined) == 3 - ended
    rows = [sorted(unpack_int32(plan.rows).tolist()) for plan in plans if plan.rows]
    assert rows[0] == joined, "the first step in which any of them decodes has all of them"
    steps = sum(bool(plan.prefill) for plan in plans)
    assert steps > 2 if preemption == "recompute" else steps <= 1


def test_the_newest_group_goes_first_and_whole() -> None:
    simulation = Simulation(msgspec.structs.replace(TINY, preemption="recompute"))
    old = simulation.submit(list(range(9)), 30, seed=1)
    new = simulation.submit(list(range(50, 59)), 20, n=3)
    scheduler = simulation.scheduler
    simulation.step_until(lambda: scheduler.counters.preemptions)
    assert {sequence.request_id for sequence in scheduler.running()} == {old}
    simulation.finish()
    assert simulation.streams[new].reason == "length"


def test_a_better_priority_is_not_preempted_for_a_worse_one() -> None:
    simulation = Simulation(msgspec.structs.replace(TINY, num_blocks=16, preemption="recompute"))
    worse = simulation.submit(list(range(9)), 40, seed=1, priority=1)
    simulation.step_until(lambda: simulation.streams[worse].output)
    better = simulation.submit(list(range(50, 59)), 40, seed=2)
    simulation.step_until(lambda: simulation.scheduler.counters.preemptions)
    assert {sequence.request_id for sequence in simulation.scheduler.running()} == {better}
    simulation.finish()


@pytest.mark.parametrize(("length", "n"), [(110, 1), (10, 7)], ids=["blocks", "rows"])
def test_a_search_that_is_coming_in_goes_before_better_priorities(length: int, n: int) -> None:
    """One beam is back and holds blocks and a promise of rows; it computes nothing before the others are there."""
    config = EngineConfig(
        num_blocks=40, chunk_size=4, max_context=120, token_budget=9, max_rows=8, max_inflight_steps=1
    )
    simulation = Simulation(config)
    search = simulation.submit(list(range(40)), 12, n=4, beam=BeamSearch(4), priority=1)
    for _ in range(9):
        simulation.step()
    scheduler = simulation.scheduler
    scheduler.preempt(scheduler.running()[0].group, simulation.now)
    simulation.flush_cache()
    while not scheduler.parked:
        assert simulation.step()
    assert len(scheduler.running()) == 1
    other = simulation.submit([7] * length, 4, n=n)
    simulation.run(300)
    for request in (search, other):
        assert simulation.streams[request].reason == "length"
        verify(simulation.streams[request], config.longest_sequence)
