"""The two halves of an engine's step: what workers and clients wait for comes before all that follows from it."""

from __future__ import annotations

import pytest

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import AbortRequest, Ready
from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.reports import StepResult
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Sampling

PROMPT = [7] * 40


class Halves:
    """An engine whose steps are taken by halves."""

    def __init__(self, max_rows: int = 8) -> None:
        limits = EngineConfig(num_blocks=40, chunk_size=16, max_context=160, host_slots=8, max_rows=max_rows)
        self.engine = Engine(limits)
        self.step = 0

    def send(self, request: int, max_tokens: int) -> tuple[Ready, Ready]:
        """Send a request; return the halves of the step that plans it."""
        submit = Submit(request, pack_int32(PROMPT), len(PROMPT), max_tokens, Sampling(seed=1))
        begun = self.engine.begin([Request.of(request, submit)], 0.0)
        return begun, self.engine.finish(begun, 0.0)

    def begin(self, tokens: list[int]) -> Ready:
        """Answer the oldest step; return the first half of the next one."""
        self.step += 1
        return self.engine.begin([StepResult(self.step, 1, pack_int32(tokens), 1000)], 0.0)


def test_the_last_token_is_told_before_what_the_request_held_is_released() -> None:
    halves = Halves()
    halves.send(1, 1)
    begun = halves.begin([5])
    assert begun.outputs is not None
    assert begun.outputs.tokens[0].tolist() == [5]
    assert [finished.request for finished in begun.outputs.finished] == [1]
    assert begun.plan is None
    assert not begun.ended
    assert halves.engine.scheduler.running_count == 1
    rest = halves.engine.finish(begun, 0.0)
    assert [timeline.request.id for timeline in rest.ended] == [1]
    assert rest.outputs is None
    assert halves.engine.scheduler.running_count == 0
    assert halves.engine.scheduler.kv.tree.node_count == 3  # its chunks stay cached
    check_integrity(halves.engine.scheduler)


def test_rows_that_go_on_get_their_plan_before_the_end_of_another_is_told() -> None:
    halves = Halves()
    halves.send(1, 50)
    halves.send(2, 1)
    halves.begin([5])
    begun = halves.begin([6, 9])
    assert begun.outputs is not None
    assert [finished.request for finished in begun.outputs.finished] == [2]
    assert begun.plan is not None
    assert begun.plan.leaves == pack_int32([2])  # so what it held is free already
    assert halves.engine.scheduler.running_count == 1


@pytest.mark.parametrize("is_ahead", [False, True])
def test_first_tokens_leave_before_the_next_plan_if_workers_have_a_step_to_compute(is_ahead: bool) -> None:
    halves = Halves()
    halves.send(1, 50)
    if is_ahead:
        assert halves.engine.step([], 0.0).plan is not None
    begun = halves.begin([5])
    rest = halves.engine.finish(begun, 0.0)
    assert begun.outputs is not None
    assert begun.outputs.tokens[0].tolist() == [5]
    assert (begun.plan is None) == is_ahead
    assert (rest.plan is None) != is_ahead
    following = halves.begin([6])  # of a later token workers and clients hear as ever
    assert following.plan is not None
    assert following.outputs is not None


def test_a_plan_comes_before_what_the_tiers_are_to_do() -> None:
    begun, rest = Halves().send(1, 5)
    assert begun.plan is not None
    assert begun.has_rest
    assert begun.outputs is None
    assert not begun.orders
    assert rest.plan is None


def test_a_second_event_finds_the_end_of_a_request_settled() -> None:
    halves = Halves()
    halves.send(1, 1)
    again = Submit(1, pack_int32(PROMPT), len(PROMPT), 1, Sampling(seed=1))
    begun = halves.engine.begin([StepResult(1, 1, pack_int32([5]), 1000), Request.of(1, again)], 0.0)
    assert begun.outputs is not None
    assert [finished.reason for finished in begun.outputs.finished] == ["length"]  # the id is free again
    assert begun.plan is not None


@pytest.mark.parametrize("by_halves", [False, True])
def test_both_ways_to_step_end_alike(by_halves: bool) -> None:
    halves = Halves()
    halves.send(1, 1)
    event = StepResult(1, 1, pack_int32([5]), 1000)
    if by_halves:
        begun = halves.engine.begin([event], 0.0)
        ready = begun.followed_by(halves.engine.finish(begun, 0.0))
    else:
        ready = halves.engine.step([event], 0.0)
    assert ready.outputs is not None
    assert len(ready.outputs.finished) == len(ready.ended) == 1
    assert halves.engine.is_idle


@pytest.mark.parametrize("must_wait", [False, True])
def test_the_tiers_hear_of_a_prompt_on_the_device_only_if_its_request_must_wait(must_wait: bool) -> None:
    halves = Halves(max_rows=1)
    halves.send(1, 50)
    nodes = list(halves.engine.scheduler.kv.tree.nodes())
    if not must_wait:
        halves.engine.step([AbortRequest(1)], 0.0)
    halves.send(2, 5)
    assert [bool(node.wants) for node in nodes] == [must_wait] * len(nodes)
    assert halves.engine.scheduler.waiting_count == must_wait
    if must_wait:  # and what they have heard ends with the wait
        halves.engine.step([AbortRequest(1)], 0.0)
        for _ in range(2):  # those in flight
            halves.engine.finish(halves.begin([5]), 0.0)
        assert halves.engine.scheduler.waiting_count == 0
        assert not any(node.wants for node in nodes)
