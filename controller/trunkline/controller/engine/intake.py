"""Let requests in: refuse those that cannot run here, make groups of the others, and queue them. Pure.

Request ──► submit ──► queue: make_group, wait for a turn; meanwhile the tiers fetch what the prompt needs
              │          ▲
              └─ refused └─ RequestSnapshot: a request that lost its workers (`recovery.py`)
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from trunkline.controller.allocation.modules import lay_out, prompt_of
from trunkline.controller.allocation.prefix_match import cut_group, known_tokens, shorten_history
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.engine.recovery import RequestSnapshot, restore
from trunkline.controller.engine.requests import RequestTable
from trunkline.controller.engine.validation import problem_of_request
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.reports import GrammarReady
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.sequence import Request, SequenceGroup
from trunkline.controller.tiers.prefetch import Prefetcher
from trunkline.kvstore.module_names import RelocationRule
from trunkline.router.messages import Finished, FinishReason
from trunkline.worker.messages import Sampling


class Intake:
    """Lets requests into the queue of one scheduler. It is made anew with the scheduler."""

    def __init__(
        self, config: EngineConfig, requests: RequestTable, scheduler: Scheduler, prefetcher: Prefetcher
    ) -> None:
        self._config = config
        self._requests = requests
        self._scheduler = scheduler
        self._prefetcher = prefetcher

    def submit(self, request: Request, step: int, now: float) -> None:
        """Queue a new request, or end it at once if it cannot run here.

        Args:
            step: number of the next plan.
        """
        if (refusal := self._refusal(request, now)) is not None:
            self._requests.pending_outputs.finished.append(refusal)
            return
        self._requests.arrivals += 1
        self._requests.timelines.came(request, now)
        self.queue(_from_its_start(request), self._requests.arrivals, step, now)

    def queue(
        self, request: Request, arrival: int, step: int, now: float, survivor: RequestSnapshot | None = None
    ) -> None:
        """Make a group of a request, and let it wait for its turn.

        Args:
            arrival: the request's number in the order of arrival.
            step: number of the next plan.
            survivor: what earlier workers have computed for the request; None for a new request.
        """
        requests, scheduler = self._requests, self._scheduler
        sampling, grammar = request.submit.sampling, None
        if request.submit.grammar is not None:
            grammar = requests.grammars.use(request.submit.grammar, request.id)
            sampling = msgspec.structs.replace(sampling, grammar=grammar.id)
        group = make_group(request, arrival, sampling, scheduler.kv.tree, self._config)
        requests.groups[request.id] = group
        if survivor is not None and not restore(survivor, group, sampling):
            detail = f"the workers are new and hold {request.longest(self._config)} tokens, fewer than it has"
            requests.end(scheduler, group, Finished(group.id, FinishReason.ENGINE_FAILED, detail), now)
            return
        scheduler.queue.add(group)
        scheduler.encoding.jobs.encode_missing_texts(group, step, now)  # from the next plan on
        if self._config.prefix_cache and self._config.host_slots:
            scheduler.queue.found(group, self._prefetcher.fetch_unless_near(group, step, now))
        elif self._config.prefix_cache:  # without a tier below the device, nothing is fetched
            scheduler.queue.found(group, self._prefetcher.known_tokens(group, step))
        self.expect_texts(step, now)
        if grammar is not None:
            group.waits_for_grammar = not grammar.ready
            if grammar.problem:
                self._refuse_grammar(group, grammar.problem, now)

    def expect_texts(self, step: int, now: float) -> None:
        """Look in the remote tier for texts that are about to be encoded: other controllers may have saved
        them."""
        for job in self._scheduler.encoding.jobs.take_new():
            if self._config.host_slots and job.members:
                self._prefetcher.fetch(job, step, now)

    def grammar_ready(self, message: GrammarReady, now: float) -> None:
        """Let the requests that wait for a grammar go on, or end them if it cannot be compiled."""
        entry = self._requests.grammars.ready(message)
        if entry is None:
            return
        for request in sorted(entry.users):
            group = self._requests.groups[request]
            group.waits_for_grammar = False
            if entry.problem:
                self._refuse_grammar(group, entry.problem, now)

    def _refuse_grammar(self, group: SequenceGroup, problem: str, now: float) -> None:
        assert group.request.submit.grammar is not None
        finished = Finished(group.id, FinishReason.INVALID, problem, param=group.request.submit.grammar.param)
        self._requests.end(self._scheduler, group, finished, now)

    def _refusal(self, request: Request, now: float) -> Finished | None:
        """Return the end of a request that cannot run here; None: it can.

        If the queue is full, a request of the tenant that has most waiting may be ended in its place.
        """
        if request.id in self._requests.groups:
            return Finished(request.id, FinishReason.INVALID, f"request id {request.id} is in use")
        problem, param = problem_of_request(request, self._config)
        if problem:
            return Finished(request.id, FinishReason.INVALID, problem, param=param)
        most, scheduler = self._config.max_waiting, self._scheduler
        if len(scheduler.queue) < most or scheduler.waiting_count < most:
            return None
        detail = f"{most} requests are waiting already"
        if (other := scheduler.queue.makes_way(request.submit)) is None:
            return Finished(request.id, FinishReason.QUEUE_FULL, detail)
        detail += ", most of them of this tenant; another tenant's request took the place of this one"
        self._requests.end(scheduler, other, Finished(other.id, FinishReason.QUEUE_FULL, detail), now)
        return None


def _from_its_start(request: Request) -> Request:
    """Return a request in the form in which it can begin here.

    A beam search that another controller began starts again, without its output: the state of its beams is lost.
    """
    prompt_len = request.submit.prompt_len
    if request.submit.beam is not None and len(request.tokens) > prompt_len:
        return replace(request, tokens=request.tokens[:prompt_len])
    return request


def make_group(
    request: Request,
    arrival: int,
    sampling: Sampling,
    tree: RadixCache,
    config: EngineConfig,
    *,
    is_announced: bool = False,
) -> SequenceGroup:
    """Return a new group of one sequence. Dropped parts and texts of modules are in its block table.

    Args:
        sampling: the request's sampling parameters, with the engine's additions.
        is_announced: whether the request is only expected; then the group is never computed.
    """
    group = _make_group(request, arrival, sampling, tree, config, is_announced=is_announced)
    shorter = shorten_history(request, tree) if request.drops and config.prefix_cache else None
    if shorter is not None:
        other = _make_group(shorter, arrival, sampling, tree, config, is_announced=is_announced)
        if known_tokens(tree, other) > known_tokens(tree, group):
            return other
    return group


def _make_group(
    request: Request,
    arrival: int,
    sampling: Sampling,
    tree: RadixCache,
    config: EngineConfig,
    *,
    is_announced: bool,
) -> SequenceGroup:
    seen = request.submit.prompt_len
    for start, stop in request.drops:
        seen -= stop - start
    longest = request.longest(config)
    limit = min(seen + request.submit.max_tokens, longest)
    group = SequenceGroup(request, arrival, 0 if is_announced else limit, sampling)
    if request.drops:
        cut_group(group, tree, config)
    if request.submit.layout is not None:
        moves = RelocationRule.of(config.positions_shift, request.submit.layout.relocate)
        lay_out(group, prompt_of(tree, request.submit.salt, request.submit.layout, moves), config.max_context)
    return group
