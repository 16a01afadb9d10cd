"""Requests that may be what kills the workers. Pure.

A request that makes the workers die or hang would do so again and again, and with it everybody else would wait for
ever. Nobody knows which one it was: all that ran are suspected, until a token of theirs has come.

    lost ──► 1: goes on like all ──lost again, no token between──► 2: tried alone ──lost──► 3: ends
              ▲                                                        │
              └──────────────── no suspect any more ◄─────a token──────┘

Who was there twice is tried alone: it comes in when all others in the batch have had a token, and nobody comes in
before it has had one. So the third loss hits who is to blame, and who merely ran beside it goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from trunkline.controller.sequences.decode_rows import Int64Array

LOSSES_ALONE: Final = 2
"""With so many losses in a row it is tried alone, …"""
LOSSES_MAX: Final = 3
"""… and with so many it ends."""
DEADLY: Final = f"the workers were lost {LOSSES_MAX} times while they computed this, and no token came between"
"""What is said of such an end."""


class Quarantine:
    """They outlive workers and schedulers. Requests are named by their ids."""

    def __init__(self) -> None:
        self._losses: dict[int, int] = {}
        """In a row, without a token between; none: not in here."""
        self._alone: int | None = None
        """Who is being tried."""
        self._fresh: set[int] = set()
        """Those in the batch that have had no token yet, noted while anybody is suspected."""

    def __len__(self) -> int:
        """Requests that have had no token since a loss."""
        return len(self._losses)

    def lost(self, running: Iterable[int]) -> list[int]:
        """The workers were lost.

        Args:
            running: requests that they were computing.

        Returns:
            those of them that are to end.
        """
        self._alone = None
        self._fresh.clear()
        ending = []
        for request in running:
            losses = self._losses[request] = self._losses.get(request, 0) + 1
            if losses >= LOSSES_MAX:
                ending.append(request)
        return ending

    def must_wait(self, request: int) -> bool:
        """Whether it may not come into the batch now; then nobody behind it should."""
        if self._alone is not None:
            return self._alone != request
        return self._losses.get(request, 0) >= LOSSES_ALONE and bool(self._fresh - {request})

    def came(self, request: int) -> None:
        """It is in the batch. May be said again."""
        if not self._losses:
            return
        self._fresh.add(request)
        if self._losses.get(request, 0) >= LOSSES_ALONE:
            self._alone = request

    def left(self, request: int) -> None:
        """It is not in the batch any more."""
        self._fresh.discard(request)
        if self._alone == request:
            self._alone = None

    def got_tokens(self, requests: Int64Array) -> None:
        """Workers have computed these, and are still there."""
        if self._losses or self._fresh:
            for request in np.unique(requests).tolist():
                self.ended(request)

    def ended(self, request: int) -> None:
        """Nothing is to be known of it any more."""
        self._losses.pop(request, None)
        self.left(request)
