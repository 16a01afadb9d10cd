"""A tier's threads: reads go before writes, and one thread is always there for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from worker.tier_driver import DEADLINE_S, wait_until

from trunkline.worker.messages import TierMove
from trunkline.worker.tiers.copier import Ticket
from trunkline.worker.tiers.tier_queue import BATCH_BYTES, BATCH_MAX, QueuedMove, TierQueue


def no_moves(moves: Sequence[QueuedMove]) -> None:
    raise AssertionError(f"nothing of this kind was queued: {moves}")


def test_reads_go_first_in_their_order() -> None:
    tasks, done = TierQueue("tier", 1, no_moves), list[str]()
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
    tasks, go_on = TierQueue("tier", 3, no_moves), threading.Event()
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
    tasks, done = TierQueue("tier", 1, no_moves), threading.Event()

    def fail() -> None:
        raise ValueError("surprise")

    for is_write in (False, True, True):
        tasks.put(fail, is_write=is_write)
    tasks.put(done.set, is_write=True)
    assert done.wait(DEADLINE_S)
    tasks.close(DEADLINE_S)


def test_closing_begins_nothing_more() -> None:
    tasks, go_on = TierQueue("tier", 1, no_moves), threading.Event()
    begun, late = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)

    tasks.put(hang, is_write=False)
    assert begun.wait(DEADLINE_S)
    tasks.put(late.set, is_write=False)
    assert not tasks.close(0.01), "it does not wait for what hangs"
    go_on.set()
    assert tasks.close(DEADLINE_S)
    assert not late.is_set()


def test_moves_that_wait_travel_together() -> None:
    """As many as leave each thread its share, in their order; a move that comes alone goes alone."""
    batches: list[list[int]] = []
    go_on = threading.Event()

    def carry_out(moves: Sequence[QueuedMove]) -> None:
        batches.append([queued.move.id for queued in moves])

    def wait() -> None:
        assert go_on.wait(DEADLINE_S)

    def move(number: int, *, is_write: bool) -> QueuedMove:
        return QueuedMove(TierMove(number, 3, is_write, 0, 0, -1, 0, b""), Ticket(0, 0))

    tasks, task_done = TierQueue("tier", 1, carry_out), threading.Event()
    tasks.put(move(0, is_write=False), is_write=False)
    wait_until(lambda: batches == [[0]])
    tasks.put(wait, is_write=False)
    for number in range(1, 2 * BATCH_MAX):
        tasks.put(move(number, is_write=False), is_write=False)
    tasks.put(task_done.set, is_write=False)
    for number in range(100, 103):
        tasks.put(move(number, is_write=True), is_write=True)
    go_on.set()
    wait_until(lambda: len(batches) == 4)
    assert task_done.is_set()
    numbers = list(range(1, 2 * BATCH_MAX))
    assert batches == [[0], numbers[:BATCH_MAX], numbers[BATCH_MAX:], [100, 101, 102]]
    tasks.close(DEADLINE_S)


def test_each_thread_has_its_share_of_the_moves() -> None:
    batches, go_on = list[int](), threading.Event()

    def carry_out(moves: Sequence[QueuedMove]) -> None:
        batches.append(len(moves))
        assert go_on.wait(DEADLINE_S)

    tasks, holding = TierQueue("tier", 3, carry_out), threading.Semaphore(0)

    def hold() -> None:
        holding.release()
        assert go_on.wait(DEADLINE_S)

    for _ in range(3):
        tasks.put(hold, is_write=False)
        assert holding.acquire(timeout=DEADLINE_S)
    for number in range(5):
        tasks.put(QueuedMove(TierMove(number, 3, False, 0, 0, -1, 0, b""), Ticket(0, 0)), is_write=False)
    go_on.set()
    wait_until(lambda: sum(batches) == 5)
    assert batches[0] == 2
    tasks.close(DEADLINE_S)


def test_large_moves_travel_alone() -> None:
    for move_bytes, expected in ((BATCH_BYTES // 2, [2, 1]), (BATCH_BYTES, [1, 1, 1]), (1, [3])):
        batches, go_on, holding = list[int](), threading.Event(), threading.Event()

        def carry_out(moves: Sequence[QueuedMove], batches: list[int] = batches) -> None:
            batches.append(len(moves))

        def is_done(batches: list[int] = batches) -> bool:
            return sum(batches) == 3

        tasks = TierQueue("tier", 1, carry_out, move_bytes)

        def hold(holding: threading.Event = holding, go_on: threading.Event = go_on) -> None:
            holding.set()
            assert go_on.wait(DEADLINE_S)

        tasks.put(hold, is_write=False)
        assert holding.wait(DEADLINE_S)
        for number in range(3):
            tasks.put(QueuedMove(TierMove(number, 3, False, 0, 0, -1, 0, b""), Ticket(0, 0)), is_write=False)
        go_on.set()
        wait_until(is_done)
        assert batches == expected
        tasks.close(DEADLINE_S)
