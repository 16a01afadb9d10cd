"""Tenants take turns: the order of the queue, and what it means for requests behind many others."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace
from seeds import seeds
from simulation.driver import Simulation

from trunkline.controller.engine.validation import problem_of_submit
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.scheduling.fair_queue import LEVELS_MAX, LINES_MAX, FairQueue
from trunkline.controller.sequences.decode_rows import RowSet
from trunkline.controller.sequences.sequence import Request, SequenceGroup
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.messages import FinishReason
from trunkline.worker.messages import Sampling

QUANTUM = 100
ROWS_MAX = 1000


def group_of(number: int, tokens: int, tenant: str = "", priority: int = 0) -> SequenceGroup:
    submit = Submit(number, pack_int32([7] * tokens), tokens, 50, Sampling(), priority=priority, tenant=tenant)
    return SequenceGroup(Request.of(number, submit), number, 10_000, submit.sampling)


def set_decoding(queue: FairQueue, groups: list[SequenceGroup]) -> None:
    """Let the first sequences of these groups be the rows, in indices that change as groups come and go."""
    ids = np.array([group.id for group in groups], np.int64)
    sequences = [group.members[0] for group in groups]
    queue.set_decoding(RowSet(np.arange(len(ids)), ids, ids, ids), [*sequences, *[None] * (ROWS_MAX - len(ids))])


class Machine:
    """A queue and requests that run, beside plain bookkeeping of what each tenant has used."""

    def __init__(self, seed: int, tenants: int, priorities: int) -> None:
        self.rng = random.Random(seed)
        self.queue = FairQueue(QUANTUM)
        self.tenants = [f"tenant {number}" for number in range(tenants)]
        self.priorities = priorities
        self.running: list[SequenceGroup] = []
        self.arrivals = 0
        self.used: dict[tuple[int, str], int] = defaultdict(int)
        self.rounds: dict[int, int] = defaultdict(lambda: 1)
        self.places: dict[tuple[int, str], int] = {}
        self.begun = 0

    def line_of(self, group: SequenceGroup) -> tuple[int, str]:
        return group.request.submit.priority, group.request.submit.tenant

    def lines(self) -> dict[tuple[int, str], list[SequenceGroup]]:
        """The waiting requests of each tenant and priority, by place in line."""
        lines = defaultdict(list)
        for group in self.queue:
            lines[self.line_of(group)].append(group)
        return {line: sorted(groups, key=lambda g: (not g.preempted, g.arrival)) for line, groups in lines.items()}

    def floor(self, line: tuple[int, str]) -> int:
        return (self.rounds[line[0]] - 1) * QUANTUM

    def charge(self, line: tuple[int, str], tokens: int) -> None:
        self.used[line] = max(self.used[line], self.floor(line)) + tokens

    def deficit_round_robin(self) -> list[SequenceGroup]:
        """The order, as the algorithm is usually written: round by round, each tenant in its place."""
        lines, order = self.lines(), []
        for priority in sorted({line[0] for line in lines}):
            waiting = {line: list(groups) for line, groups in lines.items() if line[0] == priority}
            deficits = {
                line: self.rounds[priority] * QUANTUM - max(self.used[line], self.floor(line)) for line in waiting
            }
            places = sorted(waiting, key=self.places.__getitem__)
            while any(waiting.values()):
                for line in places:
                    while waiting[line] and deficits[line] > 0:
                        group = waiting[line].pop(0)
                        deficits[line] -= self.queue.tokens_of(group)
                        order.append(group)
                    deficits[line] += QUANTUM
        return order

    # Steps

    def add(self, group: SequenceGroup) -> None:
        line = self.line_of(group)
        if line not in self.lines():
            self.begun += 1
            self.places[line] = self.begun
            self.used[line] = max(self.used[line], self.floor(line))
        self.queue.add(group)

    def arrive(self) -> None:
        self.arrivals += 1
        tenant = self.tenants[min(self.rng.randrange(len(self.tenants)), self.rng.randrange(len(self.tenants)))]
        tokens = self.rng.choice([1, 5, 20, 60, 90, 350])
        self.add(group_of(self.arrivals, tokens, tenant, self.rng.randrange(self.priorities)))

    def start(self, *, skipped: int) -> None:
        order = list(self.queue)
        if skipped >= len(order):
            return
        group = order[skipped]
        self.check_turn(group, order, skipped)
        line, tokens = self.line_of(group), self.rng.randrange(self.queue.tokens_of(group) + 1)
        self.rounds[line[0]] = max(self.rounds[line[0]], self.used[line] // QUANTUM + 1)
        group.members[0].batch_seq_id = 1
        self.queue.started(group, tokens)
        self.queue.remove(group)
        self.charge(line, tokens)
        self.running.append(group)

    def check_turn(self, group: SequenceGroup, order: list[SequenceGroup], skipped: int) -> None:
        """The written invariants, of the request that starts now."""
        line = self.line_of(group)
        assert line[0] == min(self.line_of(other)[0] for other in order[skipped:])
        earlier = [g for g in order if self.line_of(g) == line and g not in order[:skipped]]
        assert group is min(earlier, key=lambda g: (not g.preempted, g.arrival))
        if skipped:
            return
        for other in {self.line_of(other) for other in order}:
            if other[0] == line[0]:
                ours, theirs = max(self.used[line], self.floor(line)), max(self.used[other], self.floor(other))
                assert ours - theirs < QUANTUM

    def step(self) -> None:
        set_decoding(self.queue, self.running)
        assert self.queue.decoding == Counter(map(self.line_of, self.running))
        self.queue.charge_rows()
        for group in self.running:
            self.charge(self.line_of(group), 1)

    def end(self) -> None:
        if self.running:
            self.running.pop(self.rng.randrange(len(self.running))).members[0].batch_seq_id = 0

    def preempt(self) -> None:
        if self.running:
            group = self.running.pop(self.rng.randrange(len(self.running)))
            group.members[0].batch_seq_id = 0
            group.preempted = True
            self.add(group)

    def give_up(self) -> None:
        if order := list(self.queue):
            self.queue.remove(self.rng.choice(order))

    def act(self) -> None:
        action = self.rng.random()
        if action < 0.3:
            self.arrive()
        elif action < 0.55:
            self.start(skipped=0 if self.rng.random() < 0.8 else self.rng.randrange(3))
        elif action < 0.8:
            self.step()
        elif action < 0.95:
            self.end()
        else:
            self.rng.choice([self.preempt, self.give_up])()


@pytest.mark.parametrize("tenants", [1, 2, 5])
@pytest.mark.parametrize("seed", seeds(8))
def test_the_order_is_that_of_deficit_round_robin(seed: int, tenants: int) -> None:
    machine = Machine(seed, tenants, priorities=1 + seed % 2)
    for number in range(1000):
        machine.act()
        order = list(machine.queue)
        assert len(order) == len(machine.queue)
        if number % 4 == 0:
            assert order == machine.deficit_round_robin()
        if tenants == 1:
            assert order == sorted(order, key=lambda g: (g.request.submit.priority, not g.preempted, g.arrival))
            assert order == sorted(order, key=lambda g: g.key)
        assert machine.queue.tokens == sum(machine.queue.tokens_of(group) for group in order)
        for group, other in pairwise(order):
            assert machine.queue.is_before(group, other)
            assert not machine.queue.is_before(other, group)


@pytest.mark.parametrize("seed", seeds(20))
def test_service_of_tenants_that_always_wait_differs_by_little(seed: int) -> None:
    """Whatever the sizes of their requests: some 1 token, some far more than the quantum, and answers."""
    rng = random.Random(seed)
    queue, served, number = FairQueue(QUANTUM), {"a": 0, "b": 0, "c": 0}, 0
    largest = {name: rng.choice([2, 30, 150, 400]) for name in served}
    outputs = {name: rng.choice([0, 3, 200]) for name in served}
    for _ in range(3):
        for name in served:
            number += 1
            queue.add(group_of(number, rng.randrange(1, largest[name] + 1), name))
    for _ in range(2000):
        group = next(iter(queue))
        name, tokens = group.request.submit.tenant, queue.tokens_of(group)
        group.members[0].batch_seq_id = 1
        queue.started(group, tokens)
        queue.remove(group)
        answer = rng.randrange(outputs[name] + 1)
        set_decoding(queue, [group] * answer)
        queue.charge_rows()
        served[name] += tokens + answer
        number += 1
        queue.add(group_of(number, rng.randrange(1, largest[name] + 1), name))
        most = max(largest[name] + outputs[name] for name in served)
        assert max(served.values()) - min(served.values()) <= QUANTUM + most


def test_a_new_tenant_waits_for_one_quantum_of_each_other_tenant() -> None:
    queue = FairQueue(QUANTUM)
    for number in range(1, 901):
        queue.add(group_of(number, 10, "ab"[number % 2]))
    for _ in range(200):
        group = next(iter(queue))
        group.members[0].batch_seq_id = 1
        queue.started(group, 10)
        queue.remove(group)
    queue.add(late := group_of(901, 10, "late"))
    before = list(queue).index(late)
    assert before <= 2 * QUANTUM // 10
    assert late.key < list(queue)[-1].key, "its chunks are fetched before those of requests that come after it"


def test_who_waited_for_nothing_has_no_credit() -> None:
    queue = FairQueue(QUANTUM)
    queue.add(group_of(1, 10, "idle"))
    queue.remove(next(iter(queue)))
    for number in range(2, 300):
        group = group_of(number, 50, "busy")
        queue.add(group)
        group.members[0].batch_seq_id = 1
        queue.started(group, 50)
        queue.remove(group)
    for number in range(300, 400):
        queue.add(group_of(number, 10, "busy"))
        queue.add(group_of(number + 100, 10, "idle"))
    tenants = [group.request.submit.tenant for group in queue][:40]
    assert 15 <= tenants.count("idle") <= 25


def test_a_called_request_keeps_its_turn() -> None:
    queue = FairQueue(QUANTUM)
    first, called = group_of(1, 10, "a"), group_of(2, 10, "a")
    others = [group_of(number, 10, "b") for number in range(3, 9)]
    for group in (first, called, *others):
        queue.add(group)
    set_decoding(queue, [first] * 500)
    queue.charge_rows()
    assert list(queue)[:2] == others[:2]
    queue.hold_turn(called)
    assert list(queue)[:3] == [first, called, others[0]]
    queue.hold_turn(None)
    assert list(queue)[:2] == others[:2]


def test_tenants_and_priorities_that_wait_for_nothing_are_forgotten() -> None:
    queue = FairQueue(QUANTUM)
    queue.add(waiting := group_of(1, 10, "waiting"))
    for number in range(2, 3 * LINES_MAX):
        queue.add(group := group_of(number, 10, f"tenant {number}", number % (2 * LEVELS_MAX)))
        queue.remove(group)
    assert list(queue) == [waiting]
    assert len(queue._levels) <= LEVELS_MAX
    assert all(len(level.lines) <= LINES_MAX for level in queue._levels.values())


def test_priorities_may_be_forgotten_while_the_queue_is_walked() -> None:
    queue = FairQueue(QUANTUM)
    for priority in range(LEVELS_MAX):
        queue.add(group := group_of(priority + 1, 10, priority=priority))
        if priority:
            queue.remove(group)
    walk = iter(queue)
    first = next(walk)
    queue.add(group_of(LEVELS_MAX + 1, 10, priority=-1))
    assert [first.id, *(group.id for group in walk)] == [1]


def test_a_tenants_name_is_bounded() -> None:
    submit = group_of(1, 3, "é" * 64).request.submit
    assert not problem_of_submit(submit, 0)
    assert "tenant has 129 bytes" in problem_of_submit(replace(submit, tenant="é" * 64 + "a"), 0)


# With an engine

FLOOD = EngineConfig(num_blocks=400, chunk_size=16, max_context=320, token_budget=64, max_rows=16)


@pytest.mark.parametrize(("tenant", "steps"), [("", (400, 10_000)), ("late", (1, 60))])
def test_many_requests_of_one_tenant_delay_another_one_little(tenant: str, steps: tuple[int, int]) -> None:
    """Of the same tenant, the last request waits for all 900; of another one, for a row."""
    simulation = Simulation(FLOOD, check=False)
    for number in range(900):
        simulation.submit([number % 31, *range(8, 28)], 10 + number % 20, tenant="")
    for _ in range(60):
        simulation.step()
    before = simulation.engine.counters.steps
    late = simulation.submit([3, *range(20, 30)], 4, tenant=tenant)
    while not simulation.streams[late].output:
        simulation.step()
    assert steps[0] <= simulation.engine.counters.steps - before <= steps[1]
    simulation.finish()


def test_long_answers_are_paid_for() -> None:
    """Both tenants always wait; one asks for answers of 3 tokens, the other for answers of 60."""
    simulation = Simulation(FLOOD, check=False)
    waiting = {"short": 3, "long": 60}
    tenant_of = {}
    for number in range(600):
        for tenant, tokens in waiting.items():
            tenant_of[simulation.submit([number % 31, *range(9)], tokens, tenant=tenant, seed=number)] = tenant
    for _ in range(500):
        simulation.step()
    served = dict.fromkeys(waiting, 0)
    for request, tenant in tenant_of.items():
        stream = simulation.streams[request]
        served[tenant] += len(stream.output) + 10 * (stream.started is not None)
    assert 0.8 < served["short"] / served["long"] < 1.25


def test_the_newest_group_of_the_tenant_that_used_most_is_preempted() -> None:
    simulation = Simulation(replace(FLOOD, num_blocks=28, max_rows=4), check=False)
    first = [simulation.submit([n, *range(20)], 200, tenant="much", seed=n) for n in range(2)]
    for _ in range(40):
        simulation.step()
    late = simulation.submit([9, *range(20)], 200, tenant="little", seed=9)
    while not simulation.scheduler.counters.preemptions:
        assert not simulation.engine.is_idle
        simulation.step()
    queue = list(simulation.scheduler.queue)
    assert [group.id for group in queue] == [first[1]]
    assert not simulation.streams[late].reason
    simulation.finish()


def test_a_full_queue_makes_room_for_the_tenant_that_has_less_of_it() -> None:
    simulation = Simulation(replace(FLOOD, max_waiting=20, max_rows=2), check=False)
    many = [simulation.submit([n, 1, 2], 30, tenant="many") for n in range(30)]
    refused = [n for n in many if simulation.streams[n].reason == FinishReason.QUEUE_FULL]
    assert refused == many[20:]
    few = [simulation.submit([n, 5], 30, tenant="few") for n in range(15)]
    kept = [n for n in many if simulation.streams[n].reason is None]
    assert kept == many[:10]
    assert [n for n in few if simulation.streams[n].reason is None] == few[:10]
    urgent = simulation.submit([4, 4], 30, tenant="many", priority=-1)
    assert simulation.streams[urgent].reason == FinishReason.QUEUE_FULL, "tenants have as much as each other"
    simulation.finish()
