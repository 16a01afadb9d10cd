"""Requests from their arrival to their end: how they become groups, and what routers are told of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from trunkline.controller.allocation.modules import lay_out, prompt_of
from trunkline.controller.allocation.prefix_match import cut_group
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.engine.events import EngineOutputs
from trunkline.controller.engine.grammars import GrammarBook
from trunkline.controller.engine.timeline import Timelines
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import PromptLogprobs
from trunkline.controller.scheduling.quarantine import Quarantine
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.sequence import CacheReport, Request, Sequence, SequenceGroup
from trunkline.kvstore.module_names import RelocationRule
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import Finished, FinishReason, Started
from trunkline.worker.messages import Sampling


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    row_set_changes: int = 0
    """Steps that carried a new row set; all others copy no plan (ChunkAttention §3.3)."""
    plan_copies: int = 0
    """Steps for which the workers rebuilt their decode plan: new rows, or a row that filled its block."""
    kv_bytes_read: int = 0
    """By decode attention on rank 0."""
    tier_tokens: list[int] = field(default_factory=lambda: [0] * len(TierKind))
    """`cached_tokens` by tier."""
    misses: dict[str, int] = field(default_factory=dict)
    """Requests by reason."""

    def found(self, found: CacheReport) -> None:
        """Add what was found in the cache for a request that starts."""
        self.cached_tokens += found.tokens
        for tier, tokens in enumerate(found.tier_tokens):
            self.tier_tokens[tier] += tokens
        if found.miss:
            self.misses[found.miss] = self.misses.get(found.miss, 0) + 1


class RequestTable:
    """The requests that have not ended. They outlive their scheduler, which ends with its workers."""

    def __init__(self) -> None:
        self.groups: dict[int, SequenceGroup] = {}
        """By request, in the order of arrival."""
        self.grammars = GrammarBook()
        self.scores = ScoreLedger()
        self.quarantine = Quarantine()
        self.timelines = Timelines()
        self.counters = EngineCounters()
        self.pending_outputs = EngineOutputs()
        """Since the last `take_outputs`."""

    def started(self, group: SequenceGroup, now: float) -> None:
        """Report a request whose prompt is computed with the step that is being planned."""
        found = group.found
        assert found is not None
        self.timelines.started(group, now)
        cut = "" if not group.request.drops else "kept" if group.cut is not None else "recomputed"
        if not group.started:
            group.started = True
            self.counters.prompt_tokens += group.prompt_len - group.holes
            self.counters.found(found)
        elif cut == found.cut or not cut:
            return  # it comes back from a preemption, or from workers that are gone
        found.cut = cut
        self.pending_outputs.started.append(
            Started(
                group.id,
                found.tokens,
                found.tier_tokens,
                found.miss,
                found.miss_token,
                found.exact,
                cut,
                found.module_tokens,
                found.queued_s,
            )
        )

    def end_sequence(self, scheduler: Scheduler, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a sample that has come to its own end; the request ends with its last one."""
        group = sequence.group
        if len(group.members) == 1:
            sample = -1 if group.request.submit.n == 1 else sequence.sample
            self.end(scheduler, group, Finished(group.id, reason, sample=sample), now)
            return
        self.timelines.sampled(group.id, _output_tokens(scheduler, sequence))
        scheduler.end(sequence, now)
        self.pending_outputs.finished.append(Finished(group.id, reason, sample=sequence.sample))

    def end(self, scheduler: Scheduler, group: SequenceGroup, finished: Finished, now: float) -> None:
        """End a request and release everything that it holds, exactly once: all requests that hold anything end
        here."""
        del self.groups[group.id]
        for sequence in reversed(group.members.copy()):
            self.timelines.sampled(group.id, _output_tokens(scheduler, sequence))
            scheduler.end(sequence, now)
        if group.request.submit.grammar is not None:
            self.grammars.leave(group.request.submit.grammar, group.id)
        self.gone(finished)

    def gone(self, finished: Finished) -> None:
        """Report the end of a request that holds nothing any more."""
        self.scores.ended(finished.request)
        self.quarantine.ended(finished.request)
        self.timelines.ended(finished)
        self.pending_outputs.finished.append(finished)

    def take_outputs(self) -> EngineOutputs | None:
        """Return what routers have to be told since the last call, if anything."""
        if not self.pending_outputs:
            return None
        outputs, self.pending_outputs = self.pending_outputs, EngineOutputs()
        return outputs


def _output_tokens(scheduler: Scheduler, sequence: Sequence) -> int:
    known = sequence.tokens.count if sequence.slot < 0 else int(scheduler.rows.known[sequence.slot])
    return max(0, known - sequence.prompt_len)


_INT32_BYTES = 4


class ScoreLedger:
    """How far the scores of each prompt have been reported. They come in the order of positions; a prompt that is
    computed again begins again at its start."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        """By request: the first position that has not been reported."""

    def news(self, request: int, scores: PromptLogprobs) -> PromptLogprobs | None:
        """What has not been reported of these, which is taken for reported from now on."""
        count = len(scores.token_logprobs) // _INT32_BYTES
        known = min(max(0, self._next.get(request, 0) - scores.start), count)
        if known == count:
            return None
        self._next[request] = scores.start + count
        if not known:
            return scores
        top = known * (len(scores.top_ids) // count)
        return PromptLogprobs(
            scores.start + known,
            scores.token_logprobs[known * _INT32_BYTES :],
            scores.ranks[known * _INT32_BYTES :],
            scores.top_ids[top:],
            scores.top_logprobs[top:],
        )

    def ended(self, request: int) -> None:
        """Nothing more comes of it."""
        self._next.pop(request, None)


def from_its_start(request: Request) -> Request:
    """The request as it can be begun here. A search that comes from elsewhere starts again: only its own beams
    could say what came of it."""
    prompt_len = request.submit.prompt_len
    if request.submit.beam is not None and len(request.tokens) > prompt_len:
        return replace(request, tokens=request.tokens[:prompt_len])
    return request


def limit_of(request: Request, config: EngineConfig) -> int:
    """Tokens, of those that it sees, at which each of its sequences ends."""
    dropped = sum(stop - start for start, stop in request.drops)
    return min(request.submit.prompt_len - dropped + request.submit.max_tokens, config.longest_sequence)


def moves_of(config: EngineConfig, *, relocate: bool) -> RelocationRule:
    """Where texts of modules may act, if their client lets them `relocate`."""
    return RelocationRule.of(config.positions_shift, relocate)


def group_of(
    request: Request, arrival: int, limit: int, sampling: Sampling, tree: RadixCache, config: EngineConfig
) -> SequenceGroup:
    """A new group of one sequence; what it does not see and texts of modules are in its table.

    Args:
        limit: `limit_of` it; 0: it is only announced.
        sampling: the request's, with what the engine added to it.
    """
    group = SequenceGroup(request, arrival, limit, sampling)
    if request.drops:
        cut_group(group, tree, config)
    if request.submit.layout is not None:
        moves = moves_of(config, relocate=request.submit.layout.relocate)
        lay_out(group, prompt_of(tree, request.submit.salt, request.submit.layout, moves), config.max_context)
    return group
