"""Drives an engine with simulated workers, step by step, with up to two steps in flight.

What clients see is collected in `Stream`s, and every rule of `Outputs` is asserted on the way: nothing comes
twice, out of order, or after an end. `simulation.streams.verify` compares a stream with its oracle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

import numpy as np
from msgspec.structs import replace
from simulation.module_checks import check_places, expected_reaches, joining_modules
from simulation.module_oracle import prompt_tokens
from simulation.streams import Options, Stream, verify
from simulation.tiers import SimulatedTiers
from simulation.told import Listener
from simulation.worker import SimulatedWorkers

from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.engine.disk_chunks import DiskChange
from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import (
    AbortRequest,
    CallTexts,
    DropCache,
    EngineOutputs,
    Event,
    ExpectRequest,
    ForgetPrompt,
    Ready,
    RequestTimeline,
    WorkersBack,
    WorkersLost,
)
from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Holder, KeptChunks, ModulesCall, ModuleText, Submit
from trunkline.controller.reports import GrammarReady, PromptLogprobs, StepResult
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.draft_source import DraftSource
from trunkline.controller.sequences.sequence import Request
from trunkline.controller.storage.persistence import Persistence
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.router.messages import DraftsTried, Finished, FinishReason, ModulesReply, Prefetched
from trunkline.worker.messages import CompileGrammar, Sampling, StepPlan, TierOrder


class CallOptions(TypedDict, total=False):
    """What a call about texts may have besides them."""

    salt: bytes
    pin_name: str
    ttl: float
    relocate: bool
    tenant: str
    pins: float


@dataclass
class Wanted:
    """What the engine wants done and the simulation has not done yet, or leaves to the test."""

    disk_changes: list[DiskChange] = field(default_factory=list)
    """Not noted, because there is no `persistence`."""
    orders: list[TierOrder] = field(default_factory=list)
    """Not given to the tiers yet."""
    timelines: list[RequestTimeline] = field(default_factory=list)
    """Of requests that have ended."""
    wake_at: float = float("inf")
    expected: tuple[int, int] = (0, 0)
    """The answer to the last announcement."""
    ended: list[int] = field(default_factory=list)
    """Requests, since the last `take_ended`."""
    drafts: list[DraftsTried] = field(default_factory=list)
    """What came of drafts, in the order of the steps."""


class Simulation:
    """An engine, its workers and its clients. Results return after the next plan where the engine allows."""

    holders_of: Callable[[Submit], list[Holder]] | None = None
    """What a router says of peers that have chunks of a prompt; None: nothing."""
    kept_of: Callable[[Submit], KeptChunks | None] = staticmethod(lambda submit: None)
    """What a router says of peers that have kept chunks behind a prompt's cut."""
    texts_of: Callable[[list[ModuleText], bytes, bool], list[ModuleText]] | None = None
    """The texts of a prompt or call, of a salt, that may be relocated, with what a router says of peers; None:
    nothing."""

    make_drafts: Callable[[Simulation], DraftSource] | None = None
    """Makes the source of drafts of a new scheduler (`simulation.drafts.draft_from`); None: there is none."""

    plans_with_answers = False
    """Whether steps are planned with the result before them in one call, as a service does."""

    def __init__(self, config: EngineConfig, *, check: bool = True, seed: int = 0) -> None:
        self.engine = Engine(config)
        self.seed = seed
        self.workers = SimulatedWorkers(config.num_blocks, config.chunk_size, config.host_slots, seed)
        self.workers.window, self.workers.part_window = config.window, config.part_window
        self.workers.pool.whole_blocks = config.whole_blocks
        self.tiers = SimulatedTiers(self.workers.pool, config.ranks, seed)
        self.persistence: Persistence | None = None
        """What is on disk is found again by other workers if it is there."""
        self.pace_s = 1.0
        """Time from step to step."""
        self.tier_pace = 0.5
        """The share of the moves under way that end per step."""
        self.streams: dict[int, Stream] = {}
        self.results: deque[StepResult] = deque()
        self.grammars: dict[int, CompileGrammar] = {}
        """Sent to the workers, not yet compiled."""
        self.replies: dict[int, ModulesReply] = {}
        """To calls about texts of modules."""
        self.now = 0.0
        self.wanted = Wanted()
        self.listener = Listener() if check else None
        """A router that hears where chunks are; None: nothing is checked."""
        self.next_id = 1

    def begin_drafts(self) -> None:
        """Give a new scheduler its source of drafts."""
        if self.make_drafts is not None:
            self.engine.scheduler.drafting.source = self.make_drafts(self)

    def submit(self, prompt: list[int], max_tokens: int = 8, **options: Unpack[Options]) -> int:
        request_id = self.next_id
        self.next_id += 1
        seed, stop_ids, drops = options.get("seed", 0), options.get("stop_ids", ()), options.get("drops", ())
        n, beam, scored = options.get("n", 1), options.get("beam"), options.get("prompt_logprobs", -1)
        layout, pooling = options.get("layout"), options.get("pooling", 0)
        seen = [token for i, token in enumerate(prompt) if not any(a <= i < b for a, b in drops)]
        if layout is not None:
            seen = prompt_tokens(layout, prompt)
        stream = Stream(seen, seed, max_tokens, stop_ids, n, beam, scored, layout, prompt)
        stream.positions, stream.pooling = self.engine.config.max_context, pooling
        self.streams[request_id] = stream
        penalty = 0.5 * options.get("history", False)
        submit = Submit(
            request_id,
            pack_int32(prompt),
            len(prompt),
            max_tokens,
            Sampling(
                options.get("temperature", 1.0),
                seed=seed,
                prompt_logprobs=scored,
                presence_penalty=penalty,
                pooling=pooling,
            ),
            stop_token_ids=list(stop_ids),
            salt=options.get("salt", b""),
            drops=pack_int32(np.array(drops, np.int32)),
            ttl=options.get("ttl", 0.0),
            n=n,
            beam=beam,
            priority=options.get("priority", 0),
            tenant=options.get("tenant", ""),
            kv_floor=options.get("kv_share", (0.0, 1.0))[0],
            kv_ceiling=options.get("kv_share", (0.0, 1.0))[1],
            grammar=options.get("grammar"),
            layout=layout,
            next_s=options.get("next_s", 0.0),
            is_last=options.get("is_last", False),
        )
        if self.holders_of is not None:
            submit = replace(submit, holders=self.holders_of(submit), kept=self.kept_of(submit))
        if self.texts_of is not None and submit.layout is not None:
            texts = self.texts_of(submit.layout.texts, submit.salt, submit.layout.relocate)
            submit = replace(submit, layout=replace(submit.layout, texts=texts))
        self.receive(Request.of(request_id, submit))
        return request_id

    def receive(self, event: Event) -> None:
        """Give the engine one event, and nothing to plan yet."""
        self.engine.receive(event, self.now)
        self._collect()

    def abort(self, request_id: int, sample: int = -1) -> None:
        """Abort a request, or one of its samples if it has others by then."""
        group = self.engine._requests.groups.get(request_id)
        if group is None or sample < 0 or group.request.submit.beam is not None:
            self.receive(AbortRequest(request_id, sample))
            return
        has_forked, samples = group.forked, {member.sample for member in group.members}
        if has_forked and len(samples) > 1:
            self.streams[request_id].given_up |= samples & {sample}
        self.receive(AbortRequest(request_id, sample))
        assert has_forked or request_id in self.engine.requests(), "a request ended with samples to come"

    def flush_cache(self) -> None:
        self.receive(DropCache())

    def unpin(self, pin_name: str) -> None:
        self.replies.pop(self.modules_call("unpin", [], pin_name=pin_name))

    def expect(self, request: Request) -> tuple[int, int]:
        """Announce a request; return the tokens of it that are known, and those that have to be fetched."""
        self.receive(ExpectRequest((0, 0), request))
        return self.wanted.expected

    def forget(self, request: Request) -> None:
        """Say that no request will have this one's prompt any more."""
        self.receive(ForgetPrompt(request))

    def modules_call(self, op: str, texts: list[ModuleText], **options: Unpack[CallOptions]) -> int:
        """Ask something about texts; the answer comes to `replies` under the number that is returned."""
        ticket = self.next_id
        self.next_id += 1
        if self.texts_of is not None:
            texts = self.texts_of(texts, options.get("salt", b""), options.get("relocate", True))
        self._call(ticket, ModulesCall(ticket, op, texts, **options))
        return ticket

    def cancel_call(self, ticket: int) -> None:
        """The answer to an earlier call is not waited for any more."""
        self._call(ticket, ModulesCall(ticket, "cancel"))

    def _call(self, ticket: int, call: ModulesCall) -> None:
        self.receive(CallTexts(ticket, call))

    def compiled(self, grammar: int, problem: str = "") -> None:
        """The workers report a grammar."""
        del self.grammars[grammar]
        if not problem and grammar in self.workers.grammars:
            self.workers.grammars[grammar] = True
        self.receive(GrammarReady(grammar, problem))

    def step(self) -> bool:
        """Plan as far ahead as allowed, then answer the oldest step; False when nothing is left to do."""
        self.now += self.pace_s
        planned = self.plan()
        moved = self.move_chunks()
        return self.answer() or planned or moved

    def move_chunks(self) -> bool:
        """Give the tiers their orders, and the engine some of their answers; False: nothing is under way."""
        for order in self.wanted.orders:
            self.tiers.receive(order)
        self.wanted.orders.clear()
        busy = self.tiers.is_busy
        for report in self.tiers.work(self.tier_pace):
            self.engine.receive(report, self.now)
            self._verify()
        return busy

    def plan(self, events: Iterable[Event] = ()) -> bool:
        planned = False
        while True:
            ready, events = self.engine.begin(events, self.now), ()
            self._act(ready)
            planned |= ready.plan is not None
            if ready.has_rest:
                ready = self.engine.finish(ready, self.now)
                self._act(ready)
                planned |= ready.plan is not None
            self._verify()
            if not ready.again:
                return planned

    def _act(self, ready: Ready) -> None:
        """Do what the engine asks for."""
        assert not ready.problem
        for message in ready.grammars:
            self.workers.prepare(message)
            if isinstance(message, CompileGrammar):
                self.grammars[message.grammar] = message
        if ready.plan is not None:
            self.results.append(self._execute(ready.plan))
        if self.persistence is not None:
            self.persistence.note(ready.disk_changes)
        else:
            self.wanted.disk_changes += ready.disk_changes
        self.wanted.orders += ready.orders
        if ready.outputs is not None:
            self._collect_from(ready.outputs)
        self.wanted.timelines += ready.ended
        self.wanted.wake_at = ready.wake_at

    def _execute(self, plan: StepPlan) -> StepResult:
        """Besides what a plan says, the simulated workers are told which sequences have modules."""
        modules = joining_modules(self.engine.scheduler, plan)
        if not modules:
            return self.workers.execute(plan)
        reaches = {batch_seq_id: expected_reaches(sequence) for batch_seq_id, sequence in modules.items()}
        result = self.workers.execute(plan, reaches)
        for batch_seq_id, sequence in modules.items():
            check_places(sequence, self.workers.residents[batch_seq_id].layout, self.engine.config)
        return result

    def answer(self) -> bool:
        if not self.results:
            return False
        if self.plans_with_answers:
            self.plan([self.results.popleft()])
        else:
            self.receive(self.results.popleft())
            self._verify()
        return True

    def lose_workers(self) -> None:
        """They are gone, with all that was in their memory. What they had said comes late, and counts nothing."""
        engine = self.engine
        self.receive(WorkersLost(engine.epoch + 1))
        self.begin_drafts()
        self._verify()
        late = [GrammarReady(grammar, "nobody waits for this") for grammar in self.grammars]
        for event in (*self.results, *self.tiers.work(1.0), *late):
            self.receive(event)
        self.results.clear()
        self.grammars.clear()
        self.wanted.orders.clear()
        self._act(engine.step((), self.now))
        assert not engine.scheduler.running_count

    def replace_workers(self, config: EngineConfig | None = None) -> None:
        """Others have come; their disks are those of the first ones.

        Args:
            config: None: they hold as much as those.
        """
        config, epoch = config or self.engine.config, self.engine.epoch
        tiers = self.tiers
        self.workers = SimulatedWorkers(
            config.num_blocks, config.chunk_size, config.host_slots, self.seed + epoch, like=self.workers
        )
        self.workers.window, self.workers.part_window = config.window, config.part_window
        self.workers.pool.whole_blocks = config.whole_blocks
        self.tiers = SimulatedTiers(self.workers.pool, config.ranks, self.seed + epoch, epoch)
        self.tiers.faults, self.tiers.disk, self.tiers.remote = tiers.faults, tiers.disk, tiers.remote
        self.tiers.network = tiers.network
        stored = self.persistence.load(config.disk_slots, self.now) if self.persistence is not None else None
        self.receive(WorkersBack(config, stored))
        self.begin_drafts()
        self._verify()

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    @property
    def tree(self) -> RadixCache:
        return self.engine.scheduler.kv.tree

    def ask(self, prompt: list[int], max_tokens: int = 8, **options: Unpack[Options]) -> Stream:
        """Send a request, run until everything has ended, and compare all streams with their oracles."""
        request = self.submit(prompt, max_tokens, **options)
        self.finish()
        return self.streams[request]

    def finish(self, steps_max: int = 100_000) -> None:
        """Run until everything has ended, and compare all streams with their oracles."""
        self.run(steps_max)
        for stream in self.streams.values():
            verify(stream, stream.longest(self.engine.config))

    def step_until(self, condition: Callable[[], object]) -> None:
        """Go on until a condition holds; fail if nothing is left to do before that."""
        while not condition():
            assert self.step() or self.wanted.wake_at < float("inf"), "nothing is left to do"

    def events(self, count: int) -> None:
        """Cause single events: two plans, an answer, two plans, …"""
        for event in range(count):
            _ = self.answer() if event % 3 == 2 else self.plan()

    def preempt(self, request: int | None = None) -> bool:
        """Preempt a request, or all that run; return whether anything was running."""
        groups = {s.group for s in self.scheduler.running() if request in (None, s.request_id)}
        for group in groups:
            self.scheduler.preempt(group, self.now)
        return bool(groups)

    def run(self, steps_max: int = 100_000) -> None:
        """Until everything ended. Grammars are compiled when nothing else can go on."""
        for _ in range(steps_max):
            if self.step():
                continue
            if self.grammars:
                self.compiled(next(iter(self.grammars)))
            elif self.engine.is_idle:
                return
            elif self.wanted.wake_at < float("inf"):
                continue
            else:
                # Only a result, a request or a grammar makes the service plan again: it would wait for ever.
                raise AssertionError(f"requests {list(self.engine.requests())} wait, and nothing runs")
        raise AssertionError(f"requests are still running after {steps_max} steps")

    def take_ended(self) -> list[int]:
        """Requests that have ended since the last call."""
        ended, self.wanted.ended = self.wanted.ended, []
        return ended

    def _verify(self) -> None:
        if self.listener is not None:
            check_integrity(self.engine.scheduler)
            self.listener.follow(self.engine.scheduler.kv.tree)

    # Collecting

    def _collect(self) -> None:
        if (outputs := self.engine.take_outputs()) is not None:
            self._collect_from(outputs)

    def _collect_from(self, outputs: EngineOutputs) -> None:
        for started in outputs.started:
            stream = self.streams[started.request]
            if stream.started is not None:
                assert {stream.started.cut, started.cut} == {"kept", "recomputed"}, "a request started twice"
                stream.started = started
                continue
            stream.cached_tokens = started.cached_tokens
            stream.started = started
            assert sum(started.tier_tokens) == started.cached_tokens, "tokens were found in no tier"
            assert started.cached_tokens < len(stream.prompt), "the last token is always computed"
            assert bool(started.miss) == (started.cached_tokens < len(stream.prompt) - 1)
            assert started.module_tokens == (len(stream.prompt) - len(stream.own) if stream.layout else 0)
            assert started.exact == (stream.layout is None and started.cut != "kept")
        self._collect_tokens(outputs)
        self.wanted.drafts += outputs.drafts
        for scored in outputs.prompt_logprobs:
            self._collect_scores(self.streams[scored.request], scored.logprobs)
        for found in outputs.beams:
            stream = self.streams[found.request]
            assert stream.hypotheses is None, "a beam search has two results"
            stream.hypotheses = found.hypotheses
        for done in outputs.modules:
            assert done.ticket not in self.replies, "a call is answered twice"
            self.replies[done.ticket] = done
        for _, reply in outputs.replies:
            if isinstance(reply, Prefetched):
                self.wanted.expected = (reply.known_tokens, reply.coming_tokens)
        for finished in outputs.finished:
            self._collect_end(self.streams[finished.request], finished)

    def _collect_tokens(self, outputs: EngineOutputs) -> None:
        for requests, samples, tokens, reports in zip(
            outputs.requests, outputs.samples, outputs.tokens, outputs.logprobs, strict=True
        ):
            rows = list(zip(requests.tolist(), samples.tolist(), strict=True))
            assert self.scheduler.drafting.source or len(set(rows)) == len(rows), "two tokens of a sample at once"
            for index, ((request, sample), token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
                stream = self.streams[request]
                if stream.pooling:
                    assert stream.pooled is None, "a prompt is pooled twice"
                    stream.pooled = (reports or {})[index].pooled
                assert stream.ended is None, "a token after the end"
                assert sample not in stream.reasons, "a token after a sample's end"
                assert sample not in stream.given_up, "a token of a sample that was given up"
                assert stream.cached_tokens is not None, "a token before the start"
                assert stream.beam is None, "a beam search has no stream of tokens"
                stream.outputs[sample].append(token)

    def _collect_scores(self, stream: Stream, scores: PromptLogprobs) -> None:
        assert stream.ended is None, "a score after the end"
        values = np.frombuffer(scores.token_logprobs, "<f4").tolist()
        ids = unpack_int32(scores.top_ids).reshape(len(values), -1).tolist()
        tops = np.frombuffer(scores.top_logprobs, "<f4").reshape(len(values), -1).tolist()
        rows = zip(values, unpack_int32(scores.ranks).tolist(), ids, tops, strict=True)
        for position, row in enumerate(rows, scores.start):
            assert position not in stream.scored, "a position is scored twice"
            stream.scored[position] = row

    def _collect_end(self, stream: Stream, finished: Finished) -> None:
        assert stream.ended is None, "a request ended twice"
        if stream.beam is None and finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
            sample = 0 if stream.n == 1 else finished.sample
            assert 0 <= sample < stream.n
            assert sample not in stream.reasons, "a sample ended twice"
            stream.reasons[sample] = finished.reason
            if len(stream.reasons) + len(stream.given_up) < stream.n:
                return
        else:
            assert finished.sample == -1, "a request that ends whole ends with all its samples"
        stream.ended = finished
        self.wanted.ended.append(finished.request)
