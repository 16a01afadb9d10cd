"""A controller without an engine: real ZeroMQ, scripted tokens, samples and beams, made-up log-probabilities.

It runs in a thread. What it generates is in its `script`; a request's behaviour can be changed through the
attributes while it runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq

from trunkline.controller.messages import (
    Abort,
    DescribeTree,
    FlushCache,
    Forget,
    ModulesCall,
    Ping,
    Prefetch,
    PromptLayout,
    RouterRequest,
    Submit,
    Told,
    WentOn,
)
from trunkline.controller.reports import PromptLogprobs, TopLogprobs
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.router.messages import (
    PROTOCOL,
    BeamsFound,
    DraftsTried,
    Finished,
    FinishReason,
    Flushed,
    GroupIdentity,
    Hypothesis,
    ModulesReply,
    Outputs,
    Prefetched,
    PromptScored,
    RouterMessage,
    Started,
    State,
    TierState,
    TreeDescription,
)

Script = Callable[[Submit], Sequence[int]]
UNSATISFIABLE = "unsatisfiable"
"""A grammar with this word in it cannot be compiled here."""


@dataclass
class _Sample:
    tokens: list[int]
    sent: int = 0
    over: bool = False


@dataclass
class _Live:
    router: bytes
    submit: Submit
    samples: list[_Sample]


@dataclass
class _Step:
    """What one message to a router is made from."""

    requests: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    logprobs: dict[int, TopLogprobs] = field(default_factory=dict)
    beams: list[BeamsFound] = field(default_factory=list)


@dataclass
class Behaviour:
    """What the next requests meet."""

    script: Script
    sample_script: Callable[[Submit, int], Sequence[int]] | None = None
    """Where samples or beams differ: by request and index, in place of `script`."""
    problem_of: Callable[[Submit], Finished | None] = lambda submit: None
    """Requests that are refused, and how."""
    token_logprob: Callable[[int], float] = lambda sample: -0.25
    """Of every token of a sample."""
    report_of: Callable[[Submit], TopLogprobs | None] = lambda submit: None
    """What is reported with a token, in place of made-up log-probabilities; None: those, if they are asked for."""
    seconds_per_token: float = 0.0
    hold: bool = False
    """Admit requests but bring no tokens."""
    pause_after: int | None = None
    """Tokens of a sample after which its request gets no more: it waits in the middle of its answer."""
    queue: bool = False
    """Take requests without ever admitting them."""
    mute: bool = False
    """Answer nothing at all, pings included."""
    refuse: FinishReason | None = None
    burst: int = 1
    """Tokens of each sample in one message, as if drafts had been accepted."""
    drafts: tuple[int, int, bool] | None = None
    """What each message says of a request's drafts, behind its number (`DraftsTried`)."""
    fail_after: int | None = None
    """Tokens after which a request ends with ENGINE_FAILED …"""
    fail_when: Callable[[], bool] = lambda: True
    """… as soon as this is so; before, its last token is held back."""
    gap_after: int | None = None
    """Tokens after which a sequence number is skipped."""
    status: str = "ready"
    detail: str = ""
    group: GroupIdentity = GroupIdentity()  # noqa: RUF009 (it cannot change)
    told: dict[str, Any] = field(default_factory=dict)
    """Further fields of its state."""
    max_context: int = 2048
    max_rows: int = 256
    cached_tokens: int = 0
    found: Callable[[Submit], Started] | None = None
    """What a request's prompt meets in the cache, in place of `cached_tokens`."""
    tiers: list[TierState] = field(default_factory=list)
    misses: dict[str, int] = field(default_factory=dict)
    tree: TreeDescription | None = None
    """What it answers who asks for its tree; None: nothing."""
    described: list[DescribeTree] = field(default_factory=list)
    prefetches: list[Prefetch] = field(default_factory=list)
    forgets: list[Forget] = field(default_factory=list)
    modules: FakeModules = field(default_factory=lambda: FakeModules())
    submits: list[Submit] = field(default_factory=list)
    ends: list[Told] = field(default_factory=list)
    left: list[WentOn] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)
    """Single samples that were aborted: request and index."""


@dataclass
class FakeModules:
    """Texts of modules that were computed, and who pins them."""

    calls: list[ModulesCall] = field(default_factory=list)
    texts: set[tuple[bytes, bytes]] = field(default_factory=set)
    """Salt and tokens."""
    pins: dict[str, int] = field(default_factory=dict)
    """Texts by pin name."""
    status: str = "ok"
    """What becomes of an "encode"."""
    detail: str = ""
    hold: bool = False
    """Do not answer "encode" until it is cancelled."""

    def handle(self, call: ModulesCall, seq: int) -> ModulesReply | None:
        """The answer, unless it is held back."""
        self.calls.append(call)
        missing = [text for text in call.texts if (call.salt, text.tokens) not in self.texts]
        computed = 0
        if call.op == "encode":
            if self.hold:
                return None
            if self.status in ("ok", "quota"):
                computed = sum(len(text.tokens) // 4 for text in missing)
                self.texts |= {(call.salt, text.tokens) for text in missing}
            if call.pin_name and self.status == "ok":
                self.pins[call.pin_name] = len(call.texts)
        elif call.op == "forget":
            self.texts -= {(call.salt, text.tokens) for text in call.texts}
        elif call.op == "unpin":
            self.pins.pop(call.pin_name, None)
        elif call.op == "cancel":
            return ModulesReply(seq, call.ticket, "cancelled")
        there = [(call.salt, text.tokens) in self.texts for text in call.texts]
        blocks = [-(-len(text.tokens) // 256) * found for text, found in zip(call.texts, there, strict=True)]
        return ModulesReply(
            seq,
            call.ticket,
            self.status if call.op == "encode" else "ok",
            self.detail if call.op == "encode" else "",
            pack_int32([0 if found else -1 for found in there]),
            pack_int32(blocks),
            computed,
            block_bytes=1000,
        )


class FakeController:
    """Serves `Behaviour` on an endpoint until `stop`; not to be started again."""

    def __init__(self, endpoint: str, script: Script) -> None:
        self.endpoint = endpoint
        self.behaviour = Behaviour(script)
        self._live: dict[tuple[bytes, int], _Live] = {}
        self._sequence: dict[bytes, int] = {}
        self._routers: set[bytes] = set()
        self._decoder = msgspec.msgpack.Decoder(RouterRequest)
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="fake-controller", daemon=True)

    def start(self) -> FakeController:
        """Begin to serve."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Die: the connection closes, nothing is said."""
        self._stopping.set()
        self._thread.join(10)
        self._context.destroy(linger=0)
        if self._failure is not None:
            raise self._failure

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._thread.is_alive()

    @property
    def live(self) -> int:
        """Requests that run."""
        return len(self._live)

    @property
    def paused(self) -> int:
        """Requests that wait in the middle of their answers."""
        return sum(not self._goes_on(live) for live in [*self._live.values()])

    @property
    def sent(self) -> int:
        """Tokens of the requests that run."""
        return sum(sample.sent for live in [*self._live.values()] for sample in live.samples)

    def _run(self) -> None:
        try:
            socket = self._context.socket(zmq.ROUTER)
            socket.set(zmq.SNDHWM, 0)  # like the real one: nothing is dropped for a slow router
            try:
                socket.bind(self.endpoint)
                while not self._stopping.is_set():
                    self._turn(socket)
            finally:
                socket.close(linger=0)
        except BaseException as error:  # noqa: BLE001 (shown by `stop`)
            self._failure = error

    def _turn(self, socket: zmq.Socket[bytes]) -> None:
        busy = not self.behaviour.hold and not self.behaviour.mute and any(map(self._goes_on, self._live.values()))
        if socket.poll(0 if busy else 5):
            while True:
                try:
                    router, frame = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if not self.behaviour.mute:
                    self._handle(socket, router, self._decoder.decode(frame))
        elif busy:
            self._step(socket)

    def _send(self, socket: zmq.Socket[bytes], router: bytes, make: Callable[[int], RouterMessage]) -> None:
        sequence = self._sequence.get(router, 0)
        self._sequence[router] = sequence + 1
        socket.send_multipart([router, msgspec.msgpack.encode(make(sequence))])

    def _handle(self, socket: zmq.Socket[bytes], router: bytes, message: RouterRequest) -> None:
        behaviour = self.behaviour
        if isinstance(message, Ping):
            self._routers.add(router)
            self._send(socket, router, self._state)
        elif isinstance(message, FlushCache):
            self._send(socket, router, lambda seq: Flushed(seq, message.ticket, 7))
        elif isinstance(message, DescribeTree):
            behaviour.described.append(message)
            tree = behaviour.tree
            if tree is not None:
                answer_with = msgspec.structs.replace
                self._send(socket, router, lambda seq: answer_with(tree, seq=seq, ticket=message.ticket))
        elif isinstance(message, Prefetch):
            if message.tokens or message.layout is not None:  # else it only introduces peers
                behaviour.prefetches.append(message)
            known = len(message.tokens) // 4
            self._send(socket, router, lambda seq: Prefetched(seq, message.ticket, known, known // 2))
        elif isinstance(message, Told):
            behaviour.ends.append(message)
        elif isinstance(message, WentOn):
            behaviour.left.append(message)
        elif isinstance(message, Forget):
            behaviour.forgets.append(message)
        elif isinstance(message, ModulesCall):
            answer = behaviour.modules.handle(message, self._sequence.get(router, 0))
            if answer is not None:
                self._send(socket, router, lambda seq: answer)
        elif isinstance(message, Abort):
            live = self._live.get((router, message.request))
            if message.sample >= 0:
                behaviour.dropped.append((message.request, message.sample))
                if live is not None:
                    live.samples[message.sample].over = True
            else:
                behaviour.aborts.append(message.request)
                self._live.pop((router, message.request), None)
        elif isinstance(message, Submit):
            behaviour.submits.append(message)
            refused = self._refusal(message)
            if refused is not None:
                self._send(socket, router, lambda seq: Outputs(seq, finished=[refused]))
                return
            if behaviour.queue:
                return
            script = behaviour.sample_script or (lambda submit, _: behaviour.script(submit))
            done = len(message.tokens) // 4 - message.prompt_len  # of a stream that began elsewhere
            texts = [list(script(message, index))[done : message.max_tokens] for index in range(message.n)]
            self._live[router, message.request] = _Live(router, message, [_Sample(text) for text in texts])
            started = Started(message.request, behaviour.cached_tokens, cut="kept" if message.drops else "")
            if message.layout is not None:
                started = Started(
                    message.request, behaviour.cached_tokens, module_tokens=seen_tokens(message.layout)
                )
            if behaviour.found is not None:
                started = behaviour.found(message)
            scored = [PromptScored(message.request, piece) for piece in score_prompt(message)]
            self._send(socket, router, lambda seq: Outputs(seq, started=[started], prompt_logprobs=scored[:1]))
            for piece in scored[1:]:
                self._send(socket, router, lambda seq, p=piece: Outputs(seq, prompt_logprobs=[p]))  # type: ignore[misc]

    def _refusal(self, submit: Submit) -> Finished | None:
        if self.behaviour.refuse is not None:
            return Finished(submit.request, self.behaviour.refuse, "")
        grammar = submit.grammar
        if grammar is not None and UNSATISFIABLE in grammar.text:
            detail = f"`{grammar.param}` cannot be compiled"
            return Finished(submit.request, FinishReason.INVALID, detail, param=grammar.param)
        return self.behaviour.problem_of(submit)

    def _state(self, sequence: int) -> State:
        behaviour = self.behaviour
        state = State(
            seq=sequence,
            status=behaviour.status,
            detail=behaviour.detail,
            running=len(self._live),
            waiting=0,
            blocks_total=100,
            blocks_free=90,
            blocks_cached=5,
            prompt_tokens=11,
            cached_tokens=3,
            output_tokens=17,
            preemptions=0,
            steps=23,
            plan_copies=2,
            kv_bytes_read=29,
            evicted_blocks=0,
            max_context=behaviour.max_context,
            max_rows=behaviour.max_rows,
            tiers=behaviour.tiers,
            misses=behaviour.misses,
            protocol=PROTOCOL,
            group=behaviour.group,
        )
        return msgspec.structs.replace(state, **behaviour.told)

    def _goes_on(self, live: _Live) -> bool:
        behaviour, sent = self.behaviour, max(sample.sent for sample in live.samples)
        if behaviour.fail_after is not None and sent + behaviour.burst >= behaviour.fail_after:
            return behaviour.fail_when()
        return behaviour.pause_after is None or sent < behaviour.pause_after

    def _step(self, socket: zmq.Socket[bytes]) -> None:
        """One token for every request that goes on, packed in one message per router."""
        if self.behaviour.seconds_per_token:
            time.sleep(self.behaviour.seconds_per_token)
        going_on = [live for live in self._live.values() if self._goes_on(live)]
        for router in {live.router for live in going_on}:
            self._step_router(socket, router, [live for live in going_on if live.router == router])

    def _step_router(self, socket: zmq.Socket[bytes], router: bytes, rows: list[_Live]) -> None:
        behaviour = self.behaviour
        step = _Step()
        for live in rows:
            if live.submit.beam is not None:
                self._search(live, step)
            else:
                for index, sample in enumerate(live.samples * behaviour.burst):
                    if not sample.over:
                        self._advance(live, index % len(live.samples), sample, step)
            if all(sample.over for sample in live.samples):
                self._live.pop((router, live.submit.request), None)
            if behaviour.gap_after is not None and live.samples[0].sent >= behaviour.gap_after:
                self._sequence[router] += 1
                behaviour.gap_after = None
        self._send(
            socket,
            router,
            lambda seq: Outputs(
                seq,
                np.array(step.requests, "<u4").tobytes(),
                pack_int32(step.tokens),
                [],
                step.finished,
                step.logprobs or None,
                np.array(step.samples, "<u2").tobytes() if any(step.samples) else b"",
                step.beams,
                drafts=[DraftsTried(live.submit.request, *behaviour.drafts) for live in rows]
                if behaviour.drafts
                else [],
            ),
        )

    def _advance(self, live: _Live, index: int, sample: _Sample, step: _Step) -> None:
        """The next token of a sample, and its end if that was the last."""
        behaviour, submit = self.behaviour, live.submit
        if sample.sent < len(sample.tokens):
            token = sample.tokens[sample.sent]
            sample.sent += 1
            report = behaviour.report_of(submit)
            if report is not None:
                step.logprobs[len(step.tokens)] = report
            elif submit.sampling.logprobs >= 0:
                own = behaviour.token_logprob(index)
                step.logprobs[len(step.tokens)] = make_logprobs(token, submit.sampling.logprobs, own)
            step.requests.append(submit.request)
            step.tokens.append(token)
            step.samples.append(index)
        if behaviour.fail_after is not None and sample.sent >= behaviour.fail_after:
            step.finished.append(Finished(submit.request, FinishReason.ENGINE_FAILED, "worker 1 died"))
            for each in live.samples:
                each.over = True
        elif sample.sent and sample.tokens[sample.sent - 1] in submit.stop_token_ids:
            step.finished.append(Finished(submit.request, FinishReason.STOP, sample=index))
            sample.over = True
        elif sample.sent >= len(sample.tokens):
            step.finished.append(Finished(submit.request, FinishReason.LENGTH, sample=index))
            sample.over = True

    def _search(self, live: _Live, step: _Step) -> None:
        """All of a beam search at once: the scripted texts, each a little worse than the one before."""
        submit = live.submit
        found = []
        for index, sample in enumerate(live.samples):
            sample.over = True
            ends = next((i + 1 for i, t in enumerate(sample.tokens) if t in submit.stop_token_ids), None)
            total = -1.5 - index
            reason = FinishReason.LENGTH if ends is None else FinishReason.STOP
            tokens = sample.tokens[:ends]
            found.append(Hypothesis(pack_int32(tokens), total / max(len(tokens), 1), total, reason))
        step.beams.append(BeamsFound(submit.request, found))
        step.finished.append(Finished(submit.request, FinishReason.STOP))


def make_logprobs(token: int, count: int, own: float = -0.25) -> TopLogprobs:
    """Plausible numbers: the sampled token first, then its neighbours."""
    ids = [token + offset for offset in range(count)]
    values = np.array([own - offset for offset in range(count)], "<f4")
    return TopLogprobs(own, pack_int32(ids), values.tobytes())


def score_prompt(submit: Submit) -> list[PromptLogprobs]:
    """What was asked of a prompt, in two pieces that overlap, as they may after a preemption.

    Position p has log-probability -p / 8 and rank 2; the likeliest tokens are the next ids, from -p / 16 down.
    """
    count = submit.sampling.prompt_logprobs
    prompt = prompt_of(submit)
    if count < 0 or len(prompt) < 2:
        return []
    middle = (1 + len(prompt)) // 2
    return [
        PromptLogprobs(
            start,
            np.array([-position / 8 for position in range(start, stop)], "<f4").tobytes(),
            pack_int32([2] * (stop - start)),
            pack_int32([prompt[p] + 1 + i for p in range(start, stop) for i in range(count)]),
            np.array([-p / 16 - i for p in range(start, stop) for i in range(count)], "<f4").tobytes(),
        )
        for start, stop in ((1, middle + 1 if middle < len(prompt) else middle), (middle, len(prompt)))
        if stop > start
    ]


def drops_of(submit: Submit | Prefetch | Forget) -> list[tuple[int, int]]:
    """Ranges of a request's prompt that it does not see."""
    return [(int(start), int(stop)) for start, stop in unpack_int32(submit.drops, 2)]


def seen_tokens(layout: PromptLayout) -> int:
    """Tokens of modules that a prompt sees."""
    return sum(int(stop - start) for text in layout.texts for start, stop in unpack_int32(text.seen, 2))


def prompt_of(submit: Submit | Prefetch | Forget) -> list[int]:
    """A request's prompt."""
    return [int(token) for token in unpack_int32(submit.tokens)]
