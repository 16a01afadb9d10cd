"""The table of a group's adapters: orders, answers of ranks, unloading while requests run, new workers."""

from __future__ import annotations

import random

import pytest
from seeds import seeds

from trunkline.controller.messages import AdapterCall
from trunkline.controller.reports import AdapterReady
from trunkline.controller.service.adapters import Adapters
from trunkline.kvstore.adapters import adapter_key, adapter_of, adapter_salt
from trunkline.worker.messages import LoadAdapter, UnloadAdapter

KEY, OTHER = adapter_key("one", b"files"), adapter_key("one", b"other files")


def ready(table: Adapters, ranks: int, key: bytes = KEY, problem: str = "") -> None:
    """All ranks answer the order that is open."""
    order = next(order for order in table.orders if isinstance(order, LoadAdapter))
    table.orders.remove(order)
    for rank in range(ranks):
        table.report(AdapterReady(rank, order.ticket, b"" if problem else key, problem))


def served(ranks: int = 2, **configured: str) -> Adapters:
    """A table whose workers have everything."""
    table = Adapters(configured, 16, ranks)
    while not table.are_loaded():
        ready(table, ranks)
    return table


def names(table: Adapters) -> list[str]:
    return [each.name for each in table.loaded]


def test_salts() -> None:
    assert adapter_of(b"tenant") == adapter_of(b"") == b""
    assert adapter_of(adapter_salt(KEY, b"tenant")) == KEY
    assert adapter_salt(b"", b"tenant") == b"tenant"
    assert len({KEY, OTHER, adapter_key("two", b"files"), adapter_key("", b"onefiles")}) == 4


def test_new_workers_are_given_all_adapters() -> None:
    table = Adapters({"one": "/one"}, 16, 2)
    assert not table.are_loaded()
    assert [(order.name, order.rank_max) for order in table.orders if isinstance(order, LoadAdapter)] == [
        ("one", 16)
    ]
    assert not names(table)
    assert table.problem_of(adapter_salt(KEY, b""))
    ready(table, 1)
    assert not table.are_loaded()  # the other rank has not answered
    table.report(AdapterReady(1, 1, KEY))
    assert table.are_loaded()
    assert names(table) == ["one"]
    assert table.turn(set)
    assert not table.turn(set)
    assert not table.problem_of(adapter_salt(KEY, b"salt"))
    assert not table.problem_of(b"salt")
    table.lost_workers()
    assert not table.are_loaded()
    table.report(AdapterReady(0, 1, KEY))  # late, of the workers before
    assert not names(table)
    ready(table, 2)
    assert table.are_loaded()
    assert names(table) == ["one"]


@pytest.mark.parametrize("problem", ["no such folder", ""])
def test_one_that_a_rank_refuses_is_dropped(problem: str) -> None:
    """Or that ranks found other files of."""
    table = served()
    table.call(3, AdapterCall(7, "one", "/one"))
    order = table.orders.pop()
    assert isinstance(order, LoadAdapter)
    table.report(AdapterReady(0, order.ticket, KEY))
    table.report(AdapterReady(1, order.ticket, b"" if problem else OTHER, problem))
    [(router, reply)] = table.take_replies()
    assert (router, reply.ticket) == (3, 7)
    assert (problem or "the ranks read other files") in reply.problem
    assert {order.key for order in table.orders if isinstance(order, UnloadAdapter)} >= {KEY}
    assert not names(table)


def test_unloading_waits_for_requests() -> None:
    table = served(one="/one")
    table.call(0, AdapterCall(1, "one"))
    assert not table.take_replies()[0][1].problem
    assert not names(table)
    assert table.problem_of(adapter_salt(KEY, b""))
    table.turn(lambda: {KEY, b""})
    assert not table.orders
    table.lost_workers()
    assert not table.are_loaded()  # a request still needs it
    ready(table, 2)
    assert table.present == {KEY}
    table.turn(lambda: {b""})
    assert table.orders == [UnloadAdapter(KEY)]
    table.call(0, AdapterCall(2, "one"))
    assert table.take_replies()[0][1].was_so


def test_loaded_again_while_the_old_one_leaves() -> None:
    table = served(one="/one")
    table.call(0, AdapterCall(1, "one"))
    table.call(0, AdapterCall(2, "one", "/one"))
    ready(table, 2)
    table.turn(set)
    assert not table.orders  # the ranks have it under the same key
    assert names(table) == ["one"]


def test_calls_that_change_nothing() -> None:
    table = served(one="/one")
    for call, problem in (
        (AdapterCall(1, "one", "/one"), ""),
        (AdapterCall(2, "one", "/two"), "is loaded from /one; unload it first"),
        (AdapterCall(3, "", "/two"), "characters"),
        (AdapterCall(4, "x" * 300, "/two"), "characters"),
    ):
        table.call(0, call)
        [(_, reply)] = table.take_replies()
        assert problem in reply.problem
        assert reply.was_so == (not problem)
    table.lost_workers()
    table.call(0, AdapterCall(5, "two", "/two"))
    assert "starting" in table.take_replies()[0][1].problem
    assert not table.orders


@pytest.mark.parametrize("seed", seeds(3, always=(659748001,)))
def test_random_calls(seed: int) -> None:
    """Whatever happens, ranks have what requests may use, and every call is answered once."""
    rng, ranks = random.Random(seed), 2
    table = Adapters({"a": "/a"}, 16, ranks)
    workers: list[set[bytes]] = [set() for _ in range(ranks)]
    inbox: list[list[LoadAdapter | UnloadAdapter]] = [[] for _ in range(ranks)]
    used: set[bytes] = set()
    asked = answered = 0
    is_starting = True
    for ticket in range(1, 400):
        is_starting &= not table.are_loaded()
        choice = rng.randrange(8)
        if choice < 3:
            name = rng.choice("abc")
            table.call(0, AdapterCall(ticket, name, f"/{name}" if rng.random() < 0.6 else ""))
            asked += 1
        elif choice == 3 and table.loaded:
            used.add(rng.choice(table.loaded).key)
        elif choice == 4 and used:
            used.remove(rng.choice(sorted(used)))
        elif choice == 5 and rng.random() < 0.1 and not any(inbox):
            table.lost_workers()
            workers, is_starting = [set() for _ in range(ranks)], True
            used &= table.present
            continue
        for order in table.orders:
            for box in inbox:
                box.append(order)
        table.orders.clear()
        rank = rng.randrange(ranks)
        if inbox[rank]:
            order = inbox[rank].pop(0)
            if isinstance(order, LoadAdapter):
                key = adapter_key(order.name, order.path.encode())
                refuses = rng.random() < 0.1
                workers[rank] |= set() if refuses else {key}
                table.report(AdapterReady(rank, order.ticket, b"" if refuses else key, "no" if refuses else ""))
                if table.are_loaded():
                    is_starting = False
                    used &= table.present  # the service ends requests whose adapter could not be loaded again
            else:
                assert order.key not in used or is_starting  # before all are loaded no request runs
                workers[rank].discard(order.key)
        table.turn(used.copy)
        answered += len(table.take_replies())
        for each in table.loaded:
            if not any(inbox) and not table.orders:
                assert all(each.key in has for has in workers)
    assert asked - 3 <= answered <= asked
