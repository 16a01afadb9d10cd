"""One long piece of work per turn of the event loop, so that tokens leave between them.

To begin a request takes a millisecond of the loop, and to end one about as long. When 64 clients come in the same
moment, asyncio would run all 64 beginnings before it looks at its sockets again, and the streams that run would
stand still for as long. Ends go first: an answer that is complete does not wait for requests that have just come.
"""

from __future__ import annotations

import asyncio
from collections import deque


class LoopTurns:
    """Lets one coroutine per turn of the event loop pass, ends before beginnings, each in the order of arrival."""

    __slots__ = ("_beginning", "_ending", "_is_taken")

    def __init__(self) -> None:
        self._beginning: deque[asyncio.Future[None]] = deque()
        self._ending: deque[asyncio.Future[None]] = deque()
        self._is_taken = False
        """Whether a coroutine has passed in this turn."""

    async def enter(self, *, is_end: bool = False) -> None:
        """Wait for a turn in which no other coroutine has passed; mostly that is the present one."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn = loop.create_future()
            (self._ending if is_end else self._beginning).append(turn)
            await turn
        else:
            self._is_taken = True
            loop.call_soon(self._next, False)

    def _next(self, has_woken: bool) -> None:
        """Let the next one pass. What this wakes runs in the next turn, in front of the next call.

        Args:
            has_woken: whether a coroutine that was woken has passed in this turn already.
        """
        while waiting := self._ending or self._beginning:
            turn = waiting.popleft()
            if not turn.done():  # else its coroutine was cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next, True)
                return
        if has_woken:
            asyncio.get_running_loop().call_soon(self._next, False)
        else:
            self._is_taken = False
