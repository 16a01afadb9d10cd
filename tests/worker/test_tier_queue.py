"""A tier's threads: reads go before writes, and one thread is always there for them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from worker.tier_driver import DEADLINE_S, wait_until

from trunkline.worker.tiers.tier_service import TierQueue


def test_reads_go_first_in_their_order() -> None:
    tasks, done = TierQueue("tier", 1), list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)

    def note(name: str) -> Callable[[], None]:
        return lambda: done.append(name)

    tasks.put(first, is_write=True)
    assert begun.wait(DEADLINE_S)
    for name in ("w1", "r1", "w2", "r2", "w3"):
        tasks.put(note(name), is_write=name[0] == "w")
    go_on.set()
    wait_until(lambda: len(done) == 5)
    assert done == ["r1", "r2", "w1", "w2", "w3"]
    tasks.close(DEADLINE_S)


def test_a_thread_is_left_for_reads() -> None:
    """However many writes hang."""
    tasks, go_on = TierQueue("tier", 3), threading.Event()
    writing, read = threading.Semaphore(0), threading.Event()

    def write() -> None:
        writing.release()
        assert go_on.wait(DEADLINE_S)

    for _ in range(5):
        tasks.put(write, is_write=True)
    for _ in range(2):
        assert writing.acquire(timeout=DEADLINE_S)
    tasks.put(read.set, is_write=False)
    assert read.wait(DEADLINE_S)
    assert not writing.acquire(blocking=False)
    go_on.set()
    for _ in range(3):
        assert writing.acquire(timeout=DEADLINE_S)
    tasks.close(DEADLINE_S)


def test_a_failed_task_does_not_end_the_thread() -> None:
    tasks, done = TierQueue("tier", 1), threading.Event()

    def fail() -> None:
        raise ValueError("surprise")

    for is_write in (False, True, True):
        tasks.put(fail, is_write=is_write)
    tasks.put(done.set, is_write=True)
    assert done.wait(DEADLINE_S)
    tasks.close(DEADLINE_S)


def test_closing_begins_nothing_more() -> None:
    tasks, go_on = TierQueue("tier", 1), threading.Event()
    begun, late = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)

    tasks.put(hang, is_write=False)
    assert begun.wait(DEADLINE_S)
    tasks.put(late.set, is_write=False)
    tasks.close(0.01)  # does not wait for what hangs
    go_on.set()
    tasks.close(DEADLINE_S)
    assert not late.is_set()
