"""Long work in the event loop, which lets others have their turn."""

from __future__ import annotations

import asyncio
import time
from typing import Final

_TURN_S: Final = 0.005
"""As long as threads wait for Python's lock: what runs in the loop waits no longer."""


class LoopTurns:
    """Counts how long the loop has been kept."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    async def others(self) -> None:
        """To be called between small steps: waits for a turn of the loop if this one has been long."""
        if time.monotonic() - self._began >= _TURN_S:
            await asyncio.sleep(0)
            self._began = time.monotonic()
