"""What large requests may cost this process: bytes of bodies at once, one thread for their work, and memory that
is given back when they are over.

Small requests never come here. A large one is counted while its body arrives, and until its answer has been sent;
beyond the bound it is refused (503). Its JSON is parsed and its parameters are checked in one thread for all, one
request after the other: each further thread would compete with the event loop for Python's lock.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from trunkline.router.errors import ApiError

SMALL_BYTES: Final = 64 << 10
"""Bodies up to this are not counted, and parsed in the event loop: in 20 ms at most, mostly in 1."""
BODIES_AT_ONCE: Final = 16
"""So many of the largest bodies may be in memory at once."""
_HELD: Final = "trunkline.body_bytes"
"""In a request's scope: how much of the bound it takes."""
_TRIM_BYTES: Final = 1 << 20
"""A request of so many bytes leaves memory worth giving back, …"""
_TRIM_DELAY_S: Final = 0.5
"""… so much later: once for many that come together."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's names for what `mallopt` sets."""
_BLOCK_BYTES: Final = 1 << 20
_T = TypeVar("_T")


class LargeRequests:
    """Of one router. All calls from the event loop's thread."""

    def __init__(self, body_bytes_max: int) -> None:
        """`body_bytes_max`: of one body."""
        self.bytes_max = BODIES_AT_ONCE * body_bytes_max
        self.bytes_held = 0
        """Of bodies that are arriving, and of requests that are not over."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large-requests")
        self._trim_timer: asyncio.TimerHandle | None = None

    def hold(self, scope: MutableMapping[str, Any], size: int) -> None:
        """Count a request whose body has `size` bytes so far.

        Raises:
            ApiError: 503, too much is held already.
        """
        held = scope.get(_HELD, 0)
        if size <= max(held, SMALL_BYTES):
            return
        if self.bytes_held + size - held > self.bytes_max:
            raise ApiError(
                503,
                f"the bodies of the requests that this router works on have {self.bytes_held} bytes, and "
                f"{self.bytes_max} is the limit for all of them; try again later",
                kind="service_unavailable_error",
                code="too_many_large_requests",
            )
        self.bytes_held += size - held
        scope[_HELD] = size

    def holds(self, scope: MutableMapping[str, Any]) -> bool:
        """Whether a request is a large one."""
        return _HELD in scope

    def release(self, scope: MutableMapping[str, Any]) -> None:
        """Release the bytes of a request that is over. May be called for any request, and again."""
        held = scope.pop(_HELD, 0)
        self.bytes_held -= held
        if held >= _TRIM_BYTES:
            self.trim_soon()

    def trim_soon(self) -> None:
        """Give memory back to the system soon, when large requests are over."""
        if self._trim_timer is None:
            self._trim_timer = asyncio.get_running_loop().call_later(_TRIM_DELAY_S, self._trim)

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, done in the thread, in this context."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: context.run(work))

    def close(self) -> None:
        """Stop the thread."""
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _trim(self) -> None:
        self._trim_timer = None
        self._thread.submit(give_memory_back)


def bound_heap() -> None:
    """Make glibc give large blocks back as soon as they are free: by default it learns from one of 16 MiB that is
    freed to keep such blocks. Without glibc it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _BLOCK_BYTES)
        mallopt(_TRIM_THRESHOLD, _BLOCK_BYTES)


def give_memory_back() -> None:
    """Return free pages of all heaps to the system. Python's lock is not held, and each thread's heap is locked
    only while it is looked through: the event loop's own has little to give back.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
