"""`LoopBudget` lets other requests run while one with many prompts or tokens is worked on."""

from __future__ import annotations

import asyncio
import time
from typing import Final

_BUDGET_S: Final = 0.005
"""Longest time in seconds for which one piece of work keeps the event loop. It is also how long a thread waits for
Python's lock."""


class LoopBudget:
    """Limits how long a piece of work keeps the event loop: other tasks run in between."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    async def yield_if_spent(self) -> None:
        """Let other tasks run if this one has kept the loop for `_BUDGET_S`. Call it between small steps."""
        if time.monotonic() - self._began >= _BUDGET_S:
            await asyncio.sleep(0)
            self._began = time.monotonic()
