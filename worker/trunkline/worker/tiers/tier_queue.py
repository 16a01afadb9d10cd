"""Threads that do the blocking work of one tier. Reads go before writes, since requests wait for reads only."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import structlog

log = structlog.get_logger()

Task = Callable[[], None]


class TierQueue:
    """Tasks for a few threads. Each kind is begun in its order."""

    def __init__(self, name: str, threads: int) -> None:
        """
        Args:
            threads: all but one of which write at a time, at most: a read need not wait for a write to end.
        """
        self._reads: deque[Task] = deque()
        self._writes: deque[Task] = deque()
        self._writers = 0
        self._writers_max = max(1, threads - 1)
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, task: Task, *, is_write: bool) -> None:
        """Add a task. It must not raise."""
        with self._changed:
            (self._writes if is_write else self._reads).append(task)
            self._changed.notify()

    def close(self, within_s: float) -> None:
        """Begin no more tasks; wait a moment for those that have begun."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(within_s / len(self._threads))

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._is_closed or self._reads or self._may_write()):
                    self._changed.wait()
                if self._is_closed:
                    return
                is_write = not self._reads
                task = self._writes.popleft() if is_write else self._reads.popleft()
                self._writers += is_write
            try:
                task()
            except Exception as error:  # the thread serves others after this one
                log.error("a tier's task failed", error=str(error), exc_info=True)
            if is_write:
                with self._changed:
                    self._writers -= 1
                    self._changed.notify()

    def _may_write(self) -> bool:
        return bool(self._writes) and self._writers < self._writers_max
