"""The engine of a group: requests in, step plans out; results in, tokens out. Pure and deterministic.

    submit, abort ─►┌────────┐─► next_step() ─► StepPlan ─► workers
                    │ Engine │
    step_done ─────►└────────┘─► outputs() ─► routers

No sockets, clocks, threads or randomness: time comes as `now` (seconds, any origin), so that tests drive
thousands of steps from a seed. Up to two steps are in flight: step k + 1 is planned as if every row went
on, and what it computed for rows that ended in step k is discarded when its result arrives.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from trunkline.controller.config import EngineConfig
from trunkline.controller.draft import InflightStep, PlanDraft
from trunkline.controller.messages import StepResult, TopLogprobs
from trunkline.controller.rows import Int64Array, RowSet
from trunkline.controller.scheduler import Scheduler
from trunkline.controller.sequence import Phase, Sequence
from trunkline.kvstore.layout import Int32Array, unpack_int32
from trunkline.router.messages import Finished, FinishReason, Started
from trunkline.worker.messages import Sampling, StepPlan


class ProtocolError(RuntimeError):
    """The workers answered something that no correct worker answers; the group cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the engine needs to know of a request; ids are the caller's, unique among live requests."""

    id: int
    tokens: Int32Array
    max_tokens: int
    sampling: Sampling
    prompt_len: int = -1
    """-1: all of `tokens`."""
    stop_ids: tuple[int, ...] = ()
    salt: bytes = b""


@dataclass(slots=True)
class EngineOutputs:
    """What happened since the last call of `outputs`. Meaning in order: started, tokens, finished."""

    started: list[Started] = field(default_factory=list)
    requests: list[Int64Array] = field(default_factory=list)
    """Per result: request of each token …"""
    tokens: list[Int32Array] = field(default_factory=list)
    """… and the tokens."""
    logprobs: list[dict[int, TopLogprobs] | None] = field(default_factory=list)
    """Per result: by index into its tokens."""
    finished: list[Finished] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.started or self.tokens or self.finished)


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


class Engine:
    """One group's brain. Not thread-safe; the shell calls it from one thread."""

    def __init__(self, config: EngineConfig, epoch: int = 1) -> None:
        config.validate()
        self.config = config
        self.epoch = epoch
        self.scheduler = Scheduler(config)
        self.counters = EngineCounters()
        self._sequences: dict[int, Sequence] = {}
        self._inflight: deque[InflightStep] = deque()
        self._step = 0
        self._arrivals = 0
        self._outputs = EngineOutputs()

    # Requests

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not self._sequences and not self._inflight

    def request_ids(self) -> list[int]:
        """Requests that have not ended."""
        return list(self._sequences)

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. One that cannot run gets its `Finished` at once, with the reason."""
        refusal = self._refusal(request)
        if refusal is not None:
            self._outputs.finished.append(refusal)
            return
        prompt_len = request.prompt_len if request.prompt_len >= 0 else len(request.tokens)
        limit = min(prompt_len + request.max_tokens, self.config.longest_sequence)
        self._arrivals += 1
        sequence = Sequence(request.id, self._arrivals, request.tokens, prompt_len, limit, request.sampling)
        sequence.stop_ids = request.stop_ids
        sequence.salt = request.salt
        self._sequences[request.id] = sequence
        self.scheduler.waiting[request.id] = sequence

    def _refusal(self, request: Request) -> Finished | None:
        count, longest = len(request.tokens), self.config.longest_sequence
        problem = ""
        if request.id in self._sequences:
            problem = f"request id {request.id} is in use"
        elif count == 0 or not (request.prompt_len == -1 or 0 < request.prompt_len <= count):
            problem = f"the prompt is empty or its length ({request.prompt_len}) does not fit {count} tokens"
        elif request.max_tokens < 1:
            problem = f"max_tokens is {request.max_tokens}; at least 1 is needed"
        elif count >= longest:
            problem = f"the prompt has {count} tokens; this group holds {longest}, prompt and output together"
        elif 0 <= request.prompt_len <= count - request.max_tokens:
            problem = f"{count - request.prompt_len} output tokens are given; max_tokens is {request.max_tokens}"
        if problem:
            return Finished(request.id, FinishReason.INVALID, problem)
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            return Finished(
                request.id, FinishReason.QUEUE_FULL, f"{self.config.max_waiting} requests are waiting already"
            )
        return None

    def abort(self, request_id: int, now: float) -> None:
        """End a request; its computed KV stays cached. An unknown id (it has just ended) is fine."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.ABORT, now)

    def flush_cache(self) -> int:
        """Drop every chunk that no running sequence holds; blocks freed."""
        return self.scheduler.residence.tree.evict(self.config.num_blocks)

    def fail_all(self, detail: str) -> None:
        """The workers are gone: every request ends with `ENGINE_FAILED`, all KV is lost."""
        for sequence in self._sequences.values():
            self._outputs.finished.append(Finished(sequence.request, FinishReason.ENGINE_FAILED, detail))
            sequence.phase = Phase.ENDED
        self._sequences.clear()
        self._inflight.clear()
        self.scheduler = Scheduler(self.config)

    # Steps

    def next_step(self, now: float) -> StepPlan | None:
        """The next plan to broadcast, or None: nothing to do, or two steps are unanswered."""
        if not self._sequences or len(self._inflight) >= self.config.max_inflight_steps:
            return None
        draft = self.scheduler.plan(self._step + 1, now)
        if draft is None:
            return None
        self._step += 1
        self._inflight.append(InflightStep(draft.step, self._result_rows(draft)))
        for sequence in draft.sampling:
            self._note_started(sequence)
        self.counters.steps += 1
        self.counters.row_set_changes += draft.new_runs is not None
        return draft.message(self.epoch)

    def _result_rows(self, draft: PlanDraft) -> RowSet:
        if not draft.sampling:
            return draft.rows
        return RowSet(
            np.append(draft.rows.slots, [s.slot for s in draft.sampling]),
            np.append(draft.rows.stays, [s.stay for s in draft.sampling]),
            np.append(draft.rows.requests, [s.request for s in draft.sampling]),
        )

    def _note_started(self, sequence: Sequence) -> None:
        if sequence.started:
            return  # it comes back from a preemption
        sequence.started = True
        self.counters.prompt_tokens += sequence.prompt_len
        self.counters.cached_tokens += sequence.cached_tokens
        self._outputs.started.append(Started(sequence.request, sequence.cached_tokens))

    def step_done(self, result: StepResult, now: float) -> None:
        """Take in the tokens of the oldest unanswered step.

        Raises:
            ProtocolError: it answers another step, or its tokens or log-probabilities do not fit the step.
        """
        if result.epoch != self.epoch:
            return  # from a group that was given up
        if not self._inflight or self._inflight[0].step != result.step:
            expected = self._inflight[0].step if self._inflight else "none"
            raise ProtocolError(f"the workers answered step {result.step}; expected was {expected}")
        rows = self._inflight.popleft().rows
        self.counters.plan_copies += result.plan_copies
        self.counters.kv_bytes_read += result.kv_bytes_read
        if len(result.tokens) != 4 * len(rows):
            raise ProtocolError(
                f"step {result.step} samples {len(rows)} int32 tokens; {len(result.tokens)} bytes came back"
            )
        if result.logprobs and not all(0 <= index < len(rows) for index in result.logprobs):
            raise ProtocolError(f"step {result.step} has log-probabilities beyond its {len(rows)} tokens")
        if len(rows):
            self._accept(rows, unpack_int32(result.tokens), result.logprobs, now)

    def _accept(
        self, rows: RowSet, tokens: Int32Array, logprobs: dict[int, TopLogprobs] | None, now: float
    ) -> None:
        state = self.scheduler.rows
        valid, slots, stopped = state.accept(rows, tokens)
        requests = rows.requests
        if len(slots) != len(rows):
            if logprobs:
                position = np.cumsum(valid) - 1
                logprobs = {int(position[i]): value for i, value in logprobs.items() if valid[i]}
            requests, tokens = requests[valid], tokens[valid]
        if not len(slots):
            return
        self._outputs.requests.append(requests)
        self._outputs.tokens.append(tokens)
        self._outputs.logprobs.append(logprobs)
        self.counters.output_tokens += len(slots)
        known = state.known[slots]
        ended = stopped | (known >= state.limit[slots])
        for index in np.flatnonzero(((known - 1) % self.config.chunk_size == 0) & ~ended).tolist():
            self.scheduler.seal(int(slots[index]), int(known[index]) - 1, now)
        for index in np.flatnonzero(ended).tolist():
            sequence = state.sequences[slots[index]]
            assert sequence is not None
            self._end(sequence, FinishReason.STOP if stopped[index] else FinishReason.LENGTH, now)

    def _end(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """The one place where a request ends: everything it holds is released exactly once."""
        del self._sequences[sequence.request]
        if sequence.phase is Phase.WAITING:
            if self.scheduler.waiting.pop(sequence.request, None) is None:
                self.scheduler.preempted.remove(sequence)
        else:
            self.scheduler.release(sequence, now)
        sequence.phase = Phase.ENDED
        self._outputs.finished.append(Finished(sequence.request, reason))

    def outputs(self) -> EngineOutputs | None:
        """What happened since the last call, or None."""
        if not self._outputs:
            return None
        outputs, self._outputs = self._outputs, EngineOutputs()
        return outputs
