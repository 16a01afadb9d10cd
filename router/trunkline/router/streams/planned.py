"""Planned continuations: a long prompt is computed at a prefill group, and the stream goes on at another group.

    first attempt ──► prefill group: prompt, first token ──► its end, as planned ──► continuation
                          │ KvEvents: chunks in host memory                              │ holders
                          ▼                                                              ▼
                      Prefetch with holders, piece by piece ───────────────────────► decode group

The continuation is the same as after a loss (`dispatch.py`), only that nothing was lost. So if one of the two
groups dies or drains at any moment, the stream goes on as any other does.

While the prompt is computed, the decode group is told a few times what it can pull, so that it has most of the
KV by the first token. The prompt's last, partial chunk does not travel: the decode group computes it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from trunkline.controller.messages import Holder, Prefetch, Submit
from trunkline.kvstore.chunks import TOKEN_BYTES
from trunkline.router.messages import FinishReason
from trunkline.router.routing.core import RoutingCore
from trunkline.router.routing.index import EXPECTED, HOST
from trunkline.router.routing.names import prompt_names
from trunkline.router.routing.request import Decision, RouteRequest
from trunkline.router.streams.links import Links

if TYPE_CHECKING:
    from trunkline.router.jobs.job import Job
    from trunkline.router.streams.link import ControllerLink
    from trunkline.router.streams.streams import RoutedRequest

PIECES_MAX: Final = 4
"""Largest number of times that the decode group is told what it can pull of one prompt."""
PIECE_CHUNKS_MIN: Final = 4
"""Smallest number of chunks of which it is told at a time."""


@dataclass(slots=True, eq=False)
class Plan:
    """Where a request's prompt is computed, and where its stream is to go on."""

    ticket: int
    """Ticket of the attempt that computes the prompt."""
    computes: ControllerLink
    goes_on: ControllerLink
    route: RouteRequest
    names: list[bytes]
    """Names of the prompt's whole chunks."""
    told: int
    """Number of the prompt's first chunks that the group where the stream goes on has or was told of."""
    piece: int
    """Number of further chunks of which it is told at a time."""
    is_over: bool = False
    """Whether the outcome is counted."""


def can_part(job: Job) -> bool:
    """Return whether a job's prompt can be computed at another group than its output: a plain prompt with one
    output of several tokens, and no log-probabilities of the prompt."""
    return (
        job.decoding.samples == 1
        and job.decoding.beam is None
        and job.max_tokens > 1
        and job.sampling.prompt_logprobs < 0
        and job.modules is None
        and not job.cut.drops
    )


def only_first(submit: Submit) -> Submit:
    """Return the message that asks for a request's prompt and first token only."""
    return msgspec.structs.replace(submit, max_tokens=1)


class PlannedContinuations:
    """The plans of all requests of a router. Call its methods from the event loop's thread only."""

    def __init__(self, links: Links, core: RoutingCore, on_outcome: Callable[[str], None]) -> None:
        """
        Args:
            on_outcome: called once for each plan, for metrics: "went_on" (as planned), "elsewhere" (at another
                group), "ended" (the first token was the last one, or the client left), or the `FinishReason` with
                which the prefill group gave the prompt up.
        """
        self._links = links
        self._core = core
        self._on_outcome = on_outcome
        self._plans: dict[int, dict[int, Plan]] = {}
        """The plans whose prompts are being computed, by the controller that computes and the ticket."""

    def routed(self, routed: RoutedRequest, route: RouteRequest, *, is_new: bool) -> RouteRequest:
        """Return a request as routing is to see it: whether its prompt may be computed apart, or where its stream
        goes on.

        Args:
            is_new: whether it has no output yet, and groups publish their chunks.
        """
        if routed.plan is None:
            may_part = is_new and can_part(routed.job)
            return msgspec.structs.replace(route, may_part=True) if may_part else route
        goes_on = routed.plan.goes_on
        if routed.plan.is_over or goes_on not in self._links:
            return route
        return msgspec.structs.replace(route, planned=goes_on.index)

    def begin(self, routed: RoutedRequest, ticket: int, decision: Decision, route: RouteRequest) -> None:
        """Note that a request was sent to a prefill group, as decided."""
        computes, goes_on = self._links[decision.controller], self._links[decision.goes_on]
        identity = self._core.traits.identity(decision.controller)
        names = list(prompt_names(route, identity).chains[-1].names) if identity is not None else []
        has = int(self._core.index.match(names, _now())[decision.goes_on][:EXPECTED].sum())
        piece = max(PIECE_CHUNKS_MIN, -(-(len(names) - has) // PIECES_MAX))
        plan = routed.plan = Plan(ticket, computes, goes_on, route, names, has, piece)
        self._plans.setdefault(computes.index, {})[ticket] = plan

    def progressed(self, controller: int) -> None:
        """Note that a controller has published chunks. Tell groups what they can pull of the prompts that it
        computes."""
        for plan in self._plans.get(controller, {}).values():
            match = self._core.index.look_up(plan.names[plan.told :], _now())
            in_host = 1 << self._core.index.shift(controller) + HOST
            more = next((at for at in range(match.known) if not match.mask(at) & in_host), match.known)
            if more >= plan.piece:
                self._tell(plan, plan.told + more)

    def _tell(self, plan: Plan, stop: int) -> None:
        """Have the group where a stream goes on pull the next chunks of its prompt."""
        state, route = plan.computes.state, plan.route
        start, plan.told = plan.told, stop
        if state is None or not state.exports or not plan.goes_on.ready:
            return
        tokens = route.tokens[: stop * state.chunk_size * TOKEN_BYTES]
        holder = Holder(plan.computes.name, state.exports, start, stop)
        plan.goes_on.tell(lambda ticket: Prefetch(ticket, tokens, route.salt, holders=[holder]))

    def holders(self, routed: RoutedRequest, link: ControllerLink, decision: Decision) -> list[Holder]:
        """Return the peers from which a group can pull a request's chunks. If it goes on as planned, this is the
        group that has computed the prompt, with all chunks: the last ones may not have been published yet."""
        plan = routed.plan
        if plan is None or plan.is_over or link is plan.computes or not any(routed.stream.outputs):
            return decision.holders
        state = plan.computes.state
        if state is None or not state.exports:
            return decision.holders
        return [Holder(plan.computes.name, state.exports, 0, len(plan.names))]

    def ended(self, routed: RoutedRequest, ticket: int, reason: str) -> bool:
        """Note that an attempt has ended, with a `FinishReason`; return whether the request is to go on as
        planned, unless its first token was the last one."""
        plan = routed.plan
        if plan is None or plan.ticket != ticket:
            return False
        self._plans[plan.computes.index].pop(ticket, None)
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self._over(plan, reason)
        return reason == FinishReason.LENGTH

    def sent(self, routed: RoutedRequest, link: ControllerLink) -> None:
        """Note that a request was sent to a group that is to do all the rest of it."""
        if routed.plan is not None and not routed.plan.is_over:
            self._over(routed.plan, "went_on" if link is routed.plan.goes_on else "elsewhere")

    def released(self, routed: RoutedRequest) -> None:
        """Note that a request is over."""
        plan = routed.plan
        if plan is not None and not plan.is_over:
            self._plans[plan.computes.index].pop(plan.ticket, None)
            self._over(plan, "ended")

    def _over(self, plan: Plan, outcome: str) -> None:
        plan.is_over = True
        self._on_outcome(outcome)


def _now() -> float:
    return asyncio.get_running_loop().time()
