"""A controller without an engine: real ZeroMQ, scripted tokens.

It runs in a thread. What it generates is in its `script`; a request's behaviour can be changed through the
attributes while it runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq

from trunkline.controller.messages import Abort, FlushCache, Ping, RouterRequest, Submit, TopLogprobs
from trunkline.kvstore.layout import pack_int32, unpack_int32
from trunkline.router.messages import Finished, FinishReason, Flushed, Outputs, RouterMessage, Started, State

Script = Callable[[Submit], Sequence[int]]


@dataclass
class _Live:
    router: bytes
    submit: Submit
    tokens: list[int]
    sent: int = 0


@dataclass
class Behaviour:
    """What the next requests meet."""

    script: Script
    seconds_per_token: float = 0.0
    hold: bool = False
    """Admit requests but bring no tokens."""
    mute: bool = False
    """Answer nothing at all, pings included."""
    refuse: FinishReason | None = None
    fail_after: int | None = None
    """Tokens after which a request ends with ENGINE_FAILED."""
    gap_after: int | None = None
    """Tokens after which a sequence number is skipped."""
    status: str = "ready"
    detail: str = ""
    max_context: int = 2048
    cached_tokens: int = 0
    submits: list[Submit] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)


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
        busy = bool(self._live) and not self.behaviour.hold and not self.behaviour.mute
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
        elif isinstance(message, Abort):
            behaviour.aborts.append(message.request)
            self._live.pop((router, message.request), None)
        elif isinstance(message, Submit):
            behaviour.submits.append(message)
            if behaviour.refuse is not None:
                refused = Finished(message.request, behaviour.refuse, "")
                self._send(socket, router, lambda seq: Outputs(seq, finished=[refused]))
                return
            tokens = list(behaviour.script(message))[: message.max_tokens]
            self._live[router, message.request] = _Live(router, message, tokens)
            started = Started(message.request, behaviour.cached_tokens)
            self._send(socket, router, lambda seq: Outputs(seq, started=[started]))

    def _state(self, sequence: int) -> State:
        behaviour = self.behaviour
        return State(
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
        )

    def _step(self, socket: zmq.Socket[bytes]) -> None:
        """One token for every request, packed in one message per router."""
        if self.behaviour.seconds_per_token:
            time.sleep(self.behaviour.seconds_per_token)
        for router in {live.router for live in self._live.values()}:
            rows = [live for live in self._live.values() if live.router == router]
            self._step_router(socket, router, rows)

    def _step_router(self, socket: zmq.Socket[bytes], router: bytes, rows: list[_Live]) -> None:
        behaviour = self.behaviour
        requests: list[int] = []
        tokens: list[int] = []
        finished: list[Finished] = []
        logprobs: dict[int, TopLogprobs] = {}
        for live in rows:
            submit = live.submit
            if live.sent < len(live.tokens):
                token = live.tokens[live.sent]
                live.sent += 1
                if submit.sampling.logprobs >= 0:
                    logprobs[len(tokens)] = make_logprobs(token, submit.sampling.logprobs)
                requests.append(submit.request)
                tokens.append(token)
            end: FinishReason | None = None
            if live.sent and live.tokens[live.sent - 1] in submit.stop_token_ids:
                end = FinishReason.STOP
            elif live.sent >= len(live.tokens):
                end = FinishReason.LENGTH
            elif behaviour.fail_after is not None and live.sent >= behaviour.fail_after:
                end = FinishReason.ENGINE_FAILED
            if end is not None:
                finished.append(Finished(submit.request, end, "worker 1 died" if "fail" in end else ""))
                del self._live[router, submit.request]
            if behaviour.gap_after is not None and live.sent >= behaviour.gap_after:
                self._sequence[router] += 1
                behaviour.gap_after = None
        self._send(
            socket,
            router,
            lambda seq: Outputs(
                seq, np.array(requests, "<u4").tobytes(), pack_int32(tokens), [], finished, logprobs or None
            ),
        )


def make_logprobs(token: int, count: int) -> TopLogprobs:
    """Plausible numbers: the sampled token first, then its neighbours."""
    ids = [token + offset for offset in range(count)]
    values = np.array([-0.25 - offset for offset in range(count)], "<f4")
    return TopLogprobs(-0.25, pack_int32(ids), values.tobytes())


def prompt_of(submit: Submit) -> list[int]:
    """A request's prompt."""
    return [int(token) for token in unpack_int32(submit.tokens)]
