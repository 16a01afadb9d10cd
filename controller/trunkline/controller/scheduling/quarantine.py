"""Quarantine: find the request that kills the workers, and end it. Pure.

A request that makes the workers die or hang would do so again after each restart, and all others would wait for
ever. It is not known which request it was, so all that were running are suspected, until they get a token.

    lost ──► 1: goes on like all ──lost again, no token between──► 2: tried alone ──lost──► 3: ends
              ▲                                                        │
              └──────────────── no suspect any more ◄─────a token──────┘

A request that was running at two losses is tried alone: it enters when all others in the batch have had a token,
and no other request enters before it has had one. So the third loss ends the culprit, and its former neighbours go
on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from trunkline.controller.sequences.plan_builder import Int64Array

LOSSES_ALONE: Final = 2
"""After so many losses in a row a request is tried alone."""
LOSSES_MAX: Final = 3
"""After so many losses in a row a request ends."""
DEADLY: Final = f"the workers were lost {LOSSES_MAX} times while they computed this, and no token came between"
"""What the client is told then."""


class Quarantine:
    """Suspected requests, by id. Outlives workers and schedulers."""

    def __init__(self) -> None:
        self._losses: dict[int, int] = {}
        """Losses in a row without a token between, by request."""
        self._alone: int | None = None
        """The request that is being tried alone."""
        self._fresh: set[int] = set()
        """Requests in the batch without a token yet; noted only while there are suspects."""

    def __len__(self) -> int:
        """Number of requests that have had no token since a loss."""
        return len(self._losses)

    def lost(self, running: Iterable[int]) -> list[int]:
        """Note that the workers were lost.

        Args:
            running: the requests that they were computing.

        Returns:
            those of them that must end.
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
        """Return whether a request, and all behind it, must not enter the batch now."""
        if self._alone is not None:
            return self._alone != request
        return self._losses.get(request, 0) >= LOSSES_ALONE and bool(self._fresh - {request})

    def came(self, request: int) -> None:
        """Note that a request is in the batch; repeating this is harmless."""
        if not self._losses:
            return
        self._fresh.add(request)
        if self._losses.get(request, 0) >= LOSSES_ALONE:
            self._alone = request

    def left(self, request: int) -> None:
        """Note that a request has left the batch."""
        self._fresh.discard(request)
        if self._alone == request:
            self._alone = None

    def got_tokens(self, requests: Int64Array) -> None:
        """Clear requests that got tokens: the workers survived them."""
        if self._losses or self._fresh:
            for request in np.unique(requests).tolist():
                self.ended(request)

    def ended(self, request: int) -> None:
        """Forget a request."""
        self._losses.pop(request, None)
        self.left(request)
