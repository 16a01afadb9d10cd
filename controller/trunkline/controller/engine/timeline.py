"""When what happened to each request: its log line, its report to the router and its spans are made of this. Pure.

Each request has a `RequestTimeline` from its arrival to its end. What costs something at every step is kept for
traced requests only (`Request.trace`). Times are the engine's (`now`, seconds of any origin).
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
class RequestTimeline:
    """When what happened to one request."""

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
        """Note a part of the prompt that a step computes."""
        self.batch_seq_ids.add(batch_seq_id)
        self.computed_tokens += tokens
        self.chunk_count += 1
        if len(self.chunks) < EVENTS_MAX:
            self.chunks.append((now, step, tokens))


class Timelines:
    """The timelines of all requests that have not ended, and of those that ended since the last `take_done`."""

    def __init__(self) -> None:
        self._going: dict[int, RequestTimeline] = {}
        self._done: list[RequestTimeline] = []

    def came(self, request: Request, now: float) -> None:
        """Begin the timeline of a request that was accepted."""
        self._going[request.id] = RequestTimeline(request, now)

    def of(self, request: int) -> RequestTimeline | None:
        """Return the timeline of a request that has not ended."""
        return self._going.get(request)

    def started(self, group: SequenceGroup, now: float) -> None:
        """Note that the step which computes the end of a prompt is planned; set `CacheReport.queued_s` once."""
        timeline, found = self._going.get(group.id), group.found
        if timeline is None or found is None or timeline.planned >= 0:
            return
        timeline.admitted, timeline.planned = found.at, now
        timeline.cached_tokens, timeline.tier_tokens = found.tokens, found.tier_tokens
        found.queued_s = found.at - timeline.came

    def planned(self, draft: PlanBuilder) -> tuple[int, ...]:
        """Note the parts of traced prompts that a step computes; return those that get their first token."""
        first = []
        sampling = {sequence.group.id for sequence in draft.sampling}
        for group, batch_seq_id, tokens in draft.traced:
            timeline = self._going.get(group.id)
            if timeline is None:
                continue
            if timeline.admitted < 0:
                timeline.admitted = draft.now
            timeline.chunk(draft.now, draft.step, batch_seq_id, tokens)
            if group.id in sampling and timeline.first_token < 0:
                first.append(group.id)
        return tuple(first)

    def got_token(self, request: int, now: float) -> None:
        """Note the first token of a traced request."""
        if (timeline := self._going.get(request)) is not None and timeline.first_token < 0:
            timeline.first_token = now

    def lost(self, now: float) -> None:
        """Note that the workers are gone."""
        for timeline in self._going.values():
            timeline.past_batch_seq_ids += len(timeline.batch_seq_ids)
            timeline.batch_seq_ids.clear()
            if len(timeline.losses) < EVENTS_MAX:
                timeline.losses.append(now)

    def sampled(self, request: int, tokens: int) -> None:
        """Add the output tokens of a sample that is over."""
        if (timeline := self._going.get(request)) is not None:
            timeline.output_tokens += tokens

    def ended(self, finished: Finished) -> None:
        """Close the timeline of a request that has ended."""
        if (timeline := self._going.pop(finished.request, None)) is not None:
            timeline.reason = finished.reason
            self._done.append(timeline)

    def take_done(self) -> list[RequestTimeline]:
        """Return the timelines of the requests that have ended since the last call."""
        if not self._done:
            return []
        done, self._done = self._done, []
        return done
