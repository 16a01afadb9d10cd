"""What a turn of the controller's loop has collected, when it must turn again, and the controller's status."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import AbortRequest, CallTexts, Event
from trunkline.controller.messages import ModulesCall
from trunkline.controller.sequences.sequence import Request
from trunkline.controller.service.handover import HandoverWait
from trunkline.controller.service.offers import Offering
from trunkline.controller.service.routers import NUMBER_MASK, ROUTER_SHIFT

WRITE_SECONDS_MAX: Final = 2.0
"""Longest time for which a controller that stops waits for chunks to be written to disk."""


class Status(StrEnum):
    """The values of `State.status`."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(slots=True)
class Deadlines:
    """The times at which the loop has to turn even if nothing arrives."""

    drain: float = math.inf
    """Time at which a drain stops waiting for running requests."""
    writes: float = math.inf
    """Time at which a drain without requests stops waiting for chunks to be written to disk."""
    engine: float = math.inf
    """Time at which the engine wants its next step (`Ready.wake_at`)."""
    look: float = -math.inf
    """Time at which everything is looked at again that need not be looked at with each step."""

    def next(self) -> float:
        """Return the earliest of them."""
        return min(self.drain, self.writes, self.engine, self.look)


@dataclass(slots=True)
class Leaving:
    """What other groups may have of this one's chunks."""

    offering: Offering = field(default_factory=Offering)
    wait: HandoverWait = field(default_factory=HandoverWait)


@dataclass(slots=True)
class Pending:
    """The events and answers that this turn of the loop has collected."""

    events: list[Event] = field(default_factory=list)
    """Events for the engine's next step."""
    state_for: set[int] = field(default_factory=set)
    """Indices of the routers that are sent the state after the engine's next step."""

    def abort_all(self, router: int, engine: Engine) -> int:
        """Abort the requests and calls of a router that is gone; return the number of its requests."""
        requests = [*engine.requests(), *(event.id for event in self.events if isinstance(event, Request))]
        calls = [*engine.open_calls(), *(event.id for event in self.events if isinstance(event, CallTexts))]
        mine = [request for request in requests if request >> ROUTER_SHIFT == router]
        self.events += [AbortRequest(request) for request in mine]
        for call in calls:
            if call >> ROUTER_SHIFT == router:
                self.cancel(call)
        return len(mine)

    def cancel(self, call: int) -> None:
        """Cancel a call about texts of modules."""
        self.events.append(CallTexts(call, ModulesCall(call & NUMBER_MASK, "cancel")))
