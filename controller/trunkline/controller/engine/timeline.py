"""When what happened to each request: what its log line, its report to the router and its spans are made of. Pure.

Each request has a `Journey` from its coming to its end. What costs something at every step is kept of those only
whose client is traced (`Request.trace`). Times are the engine's (`now`, seconds of any origin).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from trunkline.controller.sequences.plan_builder import PlanBuilder
from trunkline.controller.sequences.sequence import Request, SequenceGroup
from trunkline.router.messages import Finished

EVENTS_MAX: Final = 64
"""Chunks and mishaps kept of a traced request; of more only how many there were."""


@dataclass(slots=True)
class Journey:
    """One request's way."""

    request: Request
    came: float
    admitted: float = -1.0
    """First admission to the batch; -1: not yet."""
    planned: float = -1.0
    """When the step that computes the last part of its prompt was planned."""
    first_token: float = -1.0
    cached_tokens: int = 0
    tier_tokens: list[int] = field(default_factory=list)
    """`cached_tokens` by where they were."""
    computed_tokens: int = 0
    chunks: list[tuple[float, int, int]] = field(default_factory=list)
    """Of a traced one: when a part of its prompt was planned, the step, its tokens; …"""
    chunk_count: int = 0
    """… and how many there were."""
    batch_seq_ids: set[int] = field(default_factory=set)
    """Of a traced one: its stays in the batch with these workers. A second one came after a preemption."""
    past_batch_seq_ids: int = 0
    """With workers that were lost."""
    losses: list[float] = field(default_factory=list)
    """When its workers were lost."""
    output_tokens: int = 0
    reason: str = ""
    """Why it ended."""

    @property
    def returns(self) -> int:
        """How often it came back to the batch, after a preemption or with other workers; of a traced one."""
        return max(0, self.past_batch_seq_ids + len(self.batch_seq_ids) - 1)

    def chunk(self, now: float, step: int, batch_seq_id: int, tokens: int) -> None:
        """A part of its prompt is computed in a step."""
        self.batch_seq_ids.add(batch_seq_id)
        self.computed_tokens += tokens
        self.chunk_count += 1
        if len(self.chunks) < EVENTS_MAX:
            self.chunks.append((now, step, tokens))


class Journeys:
    """Of all requests that have not ended, and those that have since somebody looked."""

    def __init__(self) -> None:
        self._going: dict[int, Journey] = {}
        self._done: list[Journey] = []

    def came(self, request: Request, now: float) -> None:
        """It was accepted."""
        self._going[request.id] = Journey(request, now)

    def of(self, request: int) -> Journey | None:
        """A request's that has not ended."""
        return self._going.get(request)

    def started(self, group: SequenceGroup, now: float) -> None:
        """The step that computes the end of its prompt is planned. Sets `CacheReport.queued_s` at the first time."""
        journey, found = self._going.get(group.id), group.found
        if journey is None or found is None or journey.planned >= 0:
            return
        journey.admitted, journey.planned = found.at, now
        journey.cached_tokens, journey.tier_tokens = found.tokens, found.tier_tokens
        found.queued_s = found.at - journey.came

    def planned(self, draft: PlanBuilder) -> tuple[int, ...]:
        """A step computes parts of traced prompts. Those whose first token it brings."""
        first = []
        sampling = {sequence.group.id for sequence in draft.sampling}
        for group, batch_seq_id, tokens in draft.traced:
            journey = self._going.get(group.id)
            if journey is None:
                continue
            if journey.admitted < 0:
                journey.admitted = draft.now
            journey.chunk(draft.now, draft.step, batch_seq_id, tokens)
            if group.id in sampling and journey.first_token < 0:
                first.append(group.id)
        return tuple(first)

    def got_token(self, request: int, now: float) -> None:
        """A traced request has its first token."""
        if (journey := self._going.get(request)) is not None and journey.first_token < 0:
            journey.first_token = now

    def lost(self, now: float) -> None:
        """The workers are gone."""
        for journey in self._going.values():
            journey.past_batch_seq_ids += len(journey.batch_seq_ids)
            journey.batch_seq_ids.clear()
            if len(journey.losses) < EVENTS_MAX:
                journey.losses.append(now)

    def sampled(self, request: int, tokens: int) -> None:
        """One of its samples is over, with so many tokens."""
        if (journey := self._going.get(request)) is not None:
            journey.output_tokens += tokens

    def ended(self, finished: Finished) -> None:
        """It is over."""
        if (journey := self._going.pop(finished.request, None)) is not None:
            journey.reason = finished.reason
            self._done.append(journey)

    def take_done(self) -> list[Journey]:
        """Those that have ended since the last call."""
        if not self._done:
            return []
        done, self._done = self._done, []
        return done
