"""The queue of one tier below a rank's host pool: tasks for a few threads, and moves that may travel together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import structlog

from trunkline.worker.messages import TierMove
from trunkline.worker.tiers.copier import Ticket

BATCH_MAX: Final = 4
"""Largest number of moves that travel together. More save little, and the controller, which learns from the times
between two ends what a read costs, takes a longer pause for a stall (`tier_health.SURPRISE_MAX`)."""

BATCH_BYTES: Final = 1 << 20
"""Largest size of moves that travel together. Of small chunks the round trip is what costs; large ones come sooner
one by one, because one is verified while the next is on its way (`benchmarks/kv_travel.py`)."""

log = structlog.get_logger()

Task = Callable[[], None]


class QueuedMove(NamedTuple):
    """A move, and the copies of its host slot that come before it."""

    move: TierMove
    ticket: Ticket


class TierQueue:
    """A queue of tasks for a few threads. Reads are begun in the order in which they were added, and so are
    writes.

    A thread takes several waiting moves of a kind at once if there are more of them than threads: as many as leave
    each thread its share. So a single move waits for no other one."""

    def __init__(
        self, name: str, threads: int, carry_out: Callable[[Sequence[QueuedMove]], None], move_bytes: int = 0
    ) -> None:
        """
        Args:
            move_bytes: bytes of one move.
            threads: number of threads. If there are several, they never all write at once, so that a read need not
                wait for a write to end.
            carry_out: carries out moves that travel together, all writes or all reads. It must not raise.
        """
        self._reads: deque[Task | QueuedMove] = deque()
        self._writes: deque[Task | QueuedMove] = deque()
        self._carry_out = carry_out
        self._together = min(BATCH_MAX, max(1, BATCH_BYTES // max(1, move_bytes)))
        self._writers = 0
        self._writers_max = max(1, threads - 1)
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, task: Task | QueuedMove, *, is_write: bool) -> None:
        """Add a task, or a move that may travel with others. A task must not raise."""
        with self._changed:
            (self._writes if is_write else self._reads).append(task)
            self._changed.notify()

    def close(self, within_s: float) -> bool:
        """Begin no more tasks; wait a moment for those that have begun. Return whether all have ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(within_s / len(self._threads))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._is_closed or self._reads or self._may_write()):
                    self._changed.wait()
                if self._is_closed:
                    return
                is_write = not self._reads
                task = self._next(self._writes if is_write else self._reads, is_write=is_write)
                self._writers += is_write
            try:
                task()
            except Exception as error:  # the thread serves others after this one
                log.error("a tier's task failed", error=str(error), exc_info=True)
            if is_write:
                with self._changed:
                    self._writers -= 1
                    self._changed.notify()

    def _next(self, waiting: deque[Task | QueuedMove], *, is_write: bool) -> Task:
        """Take the first task, or the first moves."""
        threads = self._writers_max if is_write else len(self._threads)
        share = min(self._together, -(-len(waiting) // threads))
        first = waiting.popleft()
        if not isinstance(first, QueuedMove):
            return first
        batch = [first]
        while len(batch) < share and isinstance(following := waiting[0], QueuedMove):
            batch.append(following)
            waiting.popleft()
        return partial(self._carry_out, batch)

    def _may_write(self) -> bool:
        return bool(self._writes) and self._writers < self._writers_max
