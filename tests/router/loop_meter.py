"""How long a router's event loop is kept from other requests, in CPU time: other work does not count.

A *turn* is what the loop does between two chances of others: all callbacks that were ready. A heartbeat in the
loop reads the CPU clock of the loop's thread whenever it comes round; the longest difference is the longest turn
(with at most `_BEAT_S` of shorter ones).

Threads beside the loop stop it as well while they hold Python's lock, as a single call of a C function does to its
end unless that lets go of it. A *step* of such a thread is what it does between two events that Python's profiler
sees: calls and returns of Python's and of C's functions. The longest, in CPU time of that thread, bounds what the
loop waits for it. Calls that work without the lock are left out.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from router.harness import RunningRouter

from trunkline.runtime.process import spare_the_collector

_BEAT_S: Final = 0.001
_WITHOUT_LOCK: Final = frozenset({"encode_batch_fast", "cumsum", "accumulate", "acquire", "give_memory_back"})
_THREADS: Final = ("large-requests", "tokenizer", "asyncio_")
"""How the names of a router's threads begin."""


class LoopMeter:
    """The longest turn of a loop, and the longest step of the threads beside it, so far."""

    def __init__(self) -> None:
        self.turn_s = 0.0
        self.step_s = 0.0
        self.step = ""
        """What that was."""
        self._over = False

    async def beat(self) -> None:
        """Measure turns, in the loop to measure."""
        before = time.thread_time()
        while not self._over:
            await asyncio.sleep(_BEAT_S)
            now = time.thread_time()
            self.turn_s = max(self.turn_s, now - before)
            before = now

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Python's profiler, in every thread that is started from now on, until it is known whose thread it is."""
        of_router = threading.current_thread().name.startswith(_THREADS)
        sys.setprofile(self._watch() if of_router else None)

    def _watch(self) -> Callable[[FrameType, str, Any], None]:
        """Return the profiler of one thread. It is called millions of times for one request."""
        clock, last = time.thread_time, time.thread_time()

        def watch(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal last
            now = clock()
            if now - last > self.step_s:
                name = getattr(arg, "__name__", "") if event.startswith("c_") else frame.f_code.co_name
                if not (event.endswith("return") and name in _WITHOUT_LOCK):
                    self.step_s = now - last
                    self.step = f"{event} of {name} in {frame.f_code.co_qualname}:{frame.f_lineno}"
                now = clock()
            last = now

        return watch

    def reset(self) -> None:
        """Forget what was."""
        self.turn_s = self.step_s = 0.0
        self.step = ""

    def stop(self) -> None:
        """Measure no more."""
        self._over = True


@contextmanager
def metered(router: RunningRouter) -> Iterator[LoopMeter]:
    """Measure a router that has had no large requests yet, as its threads are seen from their start only.

    Garbage is collected as in a router process.
    """
    meter = LoopMeter()
    thresholds = gc.get_threshold()
    spare_the_collector()
    threading.setprofile(meter.profile)
    router.spawn(meter.beat())
    try:
        yield meter
    finally:
        threading.setprofile(None)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        meter.stop()
