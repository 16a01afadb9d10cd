"""The load of each controller. Pure.

A router knows its own requests exactly, and of all others what controllers report. A report counts this router's
requests, too, so what others have is what was reported less its own at that moment; between reports its own move
on. Its own load is the set of its live tickets: each is released exactly once, whatever happens to it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(slots=True)
class Live:
    """A request that was sent and has not ended."""

    controller: int
    new_tokens: int
    """Prompt tokens that it was expected to compute."""
    blocks: int
    """Chunks that its prompt takes."""
    sent_at: float
    started: bool = False


class Loads:
    """Of all controllers: arrays by controller."""

    def __init__(self, controllers: int) -> None:
        self._live: dict[int, Live] = {}
        self.own_inflight = np.zeros(controllers)
        """Requests of this router that have not ended, …"""
        self.own_queued = np.zeros(controllers)
        """… the prompt tokens that those of them that have not started have to compute, …"""
        self.own_blocks = np.zeros(controllers)
        """… and the chunks of the prompts of all of them."""
        self.other_inflight = np.zeros(controllers)
        """The same of other routers, as of the last report."""
        self.other_queued = np.zeros(controllers)
        self.kv_used = np.zeros(controllers)
        """As reported: part of the blocks that running requests hold, …"""
        self.running = np.zeros(controllers)
        """… and how many run."""

    @property
    def inflight(self) -> FloatArray:
        """Requests of all routers."""
        return self.own_inflight + self.other_inflight

    @property
    def queued(self) -> FloatArray:
        """Prompt tokens of all routers' requests that have still to be computed."""
        return self.own_queued + self.other_queued

    def find(self, ticket: int) -> Live | None:
        """Return a live request; None: it is not live."""
        return self._live.get(ticket)

    def tickets(self) -> dict[int, Live]:
        """All live requests. Not to be changed."""
        return self._live

    def report(self, controller: int, *, requests: int, queued_tokens: int, kv_used: float, running: int) -> None:
        """Take a controller's report about the requests of all routers."""
        self.other_inflight[controller] = max(0.0, requests - self.own_inflight[controller])
        self.other_queued[controller] = max(0.0, queued_tokens - self.own_queued[controller])
        self.kv_used[controller] = kv_used
        self.running[controller] = running

    def lost(self, controller: int) -> None:
        """Forget a controller's report. Requests that were sent there end ticket by ticket."""
        for reported in (self.other_inflight, self.other_queued, self.kv_used, self.running):
            reported[controller] = 0.0

    def sent(self, ticket: int, live: Live) -> None:
        """Add a request that was sent.

        Raises:
            ValueError: its ticket is in use.
        """
        if ticket in self._live:
            raise ValueError(f"ticket {ticket} is in use; a ticket is one dispatch of one request")
        self._live[ticket] = live
        self.own_inflight[live.controller] += 1
        self.own_queued[live.controller] += live.new_tokens
        self.own_blocks[live.controller] += live.blocks

    def started(self, ticket: int) -> Live | None:
        """Note that a prompt is computed, and return its request; None: it is not live, or has started before."""
        live = self._live.get(ticket)
        if live is None or live.started:
            return None
        live.started = True
        self.own_queued[live.controller] -= live.new_tokens
        return live

    def ended(self, ticket: int) -> Live | None:
        """Remove a request, and return it; None: it was not live."""
        live = self._live.pop(ticket, None)
        if live is None:
            return None
        self.own_inflight[live.controller] -= 1
        self.own_blocks[live.controller] -= live.blocks
        if not live.started:
            self.own_queued[live.controller] -= live.new_tokens
        return live


class SessionPlaces:
    """Where this router has last sent each session; bounded in number."""

    def __init__(self, sessions_max: int) -> None:
        self._places: OrderedDict[str, int] = OrderedDict()
        self._sessions_max = sessions_max

    def __len__(self) -> int:
        return len(self._places)

    def find(self, session: str) -> int:
        """Return the session's controller; -1: not known."""
        return self._places.get(session, -1)

    def sent(self, session: str, controller: int) -> None:
        """Note that a request of the session was sent to a controller."""
        self._places[session] = controller
        self._places.move_to_end(session)
        if len(self._places) > self._sessions_max:
            self._places.popitem(last=False)
