"""Turns at the compiler are fair between tenants, and what takes long holds up nothing else. Counts trials."""

from __future__ import annotations

import random

from trunkline.worker.grammar.compiler import REFUSALS_MAX, REFUSED_S, GrammarCache, GrammarQueue, Line
from trunkline.worker.grammar.process import Wanted

HOSTILE, OTHER, THIRD = b"hostile", b"other", b"third"


def drain(queue: GrammarQueue, line: Line) -> list[int]:
    taken = []
    while (grammar := queue.take(line)) is not None:
        queue.remove(grammar)
        taken.append(grammar)
    return taken


def test_eight_hostile_clients_cost_another_tenant_one_slice() -> None:
    """Each sends its next grammar when the last one was refused; the other's trivial one comes at any time."""
    rng = random.Random(3)
    queue, next_id = GrammarQueue(), 100

    def hostile() -> None:
        nonlocal next_id
        queue.add(next_id, HOSTILE)
        next_id += 1

    for _ in range(8):
        hostile()
    for trivial in range(50):
        for _ in range(rng.randrange(5)):  # it comes in the middle of whatever goes on
            grammar = queue.take(Line.FIRST)
            assert grammar is not None
            queue.late(grammar)
            long = queue.take(Line.LONG)
            assert long is not None
            queue.remove(long)  # refused
            hostile()
        under_way = queue.take(Line.FIRST)
        queue.add(trivial, OTHER)
        assert under_way is not None
        queue.late(under_way)
        slices = 1
        while (grammar := queue.take(Line.FIRST)) != trivial:
            assert grammar is not None
            queue.late(grammar)
            slices += 1
        assert slices <= 2, "the one that was under way, and a turn of the hostile tenant"
        queue.remove(trivial)
        for refused in drain(queue, Line.LONG):
            assert refused >= 100
            hostile()


def test_tenants_take_turns_and_their_own_come_in_order() -> None:
    queue = GrammarQueue()
    for grammar, tenant in ((1, HOSTILE), (2, HOSTILE), (3, HOSTILE), (4, OTHER), (5, OTHER), (6, THIRD)):
        queue.add(grammar, tenant)
    assert drain(queue, Line.FIRST) == [1, 4, 6, 2, 5, 3]
    assert len(queue) == 0


def test_long_ones_take_turns_too_and_wait_apart() -> None:
    queue = GrammarQueue()
    for grammar, tenant in ((1, HOSTILE), (2, HOSTILE), (3, OTHER)):
        queue.add(grammar, tenant)
    for grammar in (1, 3, 2):
        assert queue.take(Line.FIRST) == grammar
        queue.late(grammar)
    queue.add(4, HOSTILE)
    assert queue.take(Line.FIRST) == 4
    assert drain(queue, Line.LONG) == [1, 3, 2]


def test_what_two_tenants_want_comes_with_the_first_turn_of_either() -> None:
    """Else whoever sends a common schema behind a hundred slow grammars delays all who use it."""
    queue = GrammarQueue()
    for grammar in range(100):
        queue.add(grammar, HOSTILE)
    assert queue.take(Line.FIRST) == 0
    queue.add(99, OTHER)
    assert [queue.take(Line.FIRST) for _ in range(2)] == [1, 99]
    assert 99 not in drain(queue, Line.FIRST), "it is tried once"
    queue.late(99)
    queue.add(99, THIRD)
    assert drain(queue, Line.LONG) == [99]


def test_what_was_removed_never_comes() -> None:
    queue = GrammarQueue()
    for grammar in (1, 2, 3):
        queue.add(grammar, HOSTILE)
    assert queue.take(Line.FIRST) == 1
    queue.remove(1)  # while it is tried
    queue.late(1)
    queue.remove(2)
    assert 2 not in queue
    assert 3 in queue
    assert (drain(queue, Line.FIRST), drain(queue, Line.LONG)) == ([3], [])


class Compiled:
    bytes = 1


def test_refusals_are_kept_for_a_while_and_not_without_end() -> None:
    cache: GrammarCache[Compiled] = GrammarCache()
    bad, good = Wanted("regex", "("), Compiled()
    assert cache.find(bad, 0.0) is None
    cache.refuse(bad, "not closed", 0.0)
    assert cache.find(bad, REFUSED_S - 1) == "not closed"
    assert cache.find(Wanted("ebnf", "("), 0.0) is None
    assert cache.find(bad, REFUSED_S) is None, "the machine may have been busy"
    cache.refuse(bad, "not closed", 0.0)
    cache.keep(Wanted("json_schema", "{}"), good)
    for i in range(REFUSALS_MAX):
        cache.refuse(Wanted("regex", str(i)), "x", 0.0)
    assert cache.find(bad, 0.0) is None
    assert cache.find(Wanted("json_schema", "{}"), 0.0) is good
    assert cache.find(Wanted("json_schema", "{}", spaced=True), 0.0) is None, "another grammar"
