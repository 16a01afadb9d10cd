"""A router's connection to one controller: a DEALER socket, the requests that run over it, its health.

    submit/abort/call ──► DEALER ──────────► controller (ROUTER)
    streams ◄── attempts ◄─┘ Outputs, State, answers to calls: one sequence number over all of them
    monitor ──► the peer closed the connection: it is dead, at once
    timer   ──► a ping each second; silence for `silence_seconds`: it is dead as well

When the controller is dead or a message was lost, every receiver of the link is told once, the socket is
thrown away and a new one is opened: under a new identity nothing of the old connection can arrive, on
either side. The new connection counts as alive when its first `State` has come. One that is refused, or does not
last, is followed by the next with the timer, so that nothing turns in circles.

Requests in flight are the keys of one dictionary; a load counter that could leak does not exist.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from trunkline.controller.messages import (
    Abort,
    DescribeTree,
    EventsCall,
    FlushCache,
    ModulesCall,
    Ping,
    Prefetch,
    RecordCall,
    RouterRequest,
    Submit,
)
from trunkline.router.errors import unavailable
from trunkline.router.messages import (
    PROTOCOL,
    EventsReply,
    Finished,
    FinishReason,
    Flushed,
    ModulesReply,
    Outputs,
    Prefetched,
    RecordReply,
    RouterMessage,
    State,
    TreeDescription,
)
from trunkline.router.streams.reply_checks import problem_of_reply
from trunkline.router.streams.streams import Attempt, Event, Stream
from trunkline.runtime.process import RareLog
from trunkline.runtime.wire_keys import WireKeysError, is_network
from trunkline.runtime.wire_sockets import HANDSHAKE_FAILED, WirePeer

PING_SECONDS: Final = 1.0
_MESSAGES_PER_TURN: Final = 64
"""Messages handled before other coroutines get a turn."""
_RECONNECT_POLL_SECONDS: Final = 0.05
_HIGH_WATER: Final = 20_000
_LASTING_SECONDS: Final = 1.0
"""After a connection that was lost sooner the next one waits for the timer."""
Call = FlushCache | Prefetch | ModulesCall | RecordCall | EventsCall | DescribeTree
Answer = Flushed | Prefetched | ModulesReply | RecordReply | EventsReply | TreeDescription
_log = structlog.get_logger("trunkline.router.streams.link")
_rare = RareLog("trunkline.router.streams.link")


class ControllerLink:
    """One controller, as this router sees it. All calls from the event loop's thread."""

    patience = 0.0
    """Seconds for which a caller may wait for a connection that was there before (`again`)."""

    def __init__(
        self,
        index: int,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        silence_seconds: float,
        peer: WirePeer | None = None,
    ) -> None:
        """
        Args:
            peer: the controller's wire keys; None: it has none.
        """
        self.index = index
        self.endpoint = endpoint
        self.state: State | None = None
        """The last report of the present connection; None: not connected."""
        self.last_token_at = float("-inf")
        """Loop time at which a token last arrived, in seconds."""
        self.down_reason = "no controller has answered yet"
        self.connections = 0
        """Made so far, and worker groups behind them. What a controller or its workers hold in memory only may be
        gone when there is another one."""
        self.on_change: Callable[[ControllerLink], None] = lambda link: None
        """Called when a `State` has come, and when the connection is lost, before its receivers are told."""
        self._dial = functools.partial(_Socket, context, endpoint, peer or WirePeer())
        self._silence_seconds = silence_seconds
        self._loop = asyncio.get_running_loop()
        self._socket: _Socket | None = None
        self._receivers: dict[int, Attempt | Stream] = {}
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._ids = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None

    # -- life

    def open(self) -> None:
        """Begin to connect; never waits."""
        self._connect()
        self._tick(self._loop.time())

    def close(self) -> None:
        """End all streams (as failed) and the connection."""
        if self._timer is not None:
            self._timer.cancel()
        self._fail_all("the router is closing")
        if self._socket is not None:
            self._socket.close(linger_ms=200)
            self._socket = None

    @property
    def ready(self) -> bool:
        """Whether the controller takes requests now."""
        return self.state is not None and self.state.status == "ready" and self.state.protocol == PROTOCOL

    @property
    def inflight(self) -> int:
        """How many requests of this router run there."""
        return len(self._receivers)

    def why_not_ready(self) -> str:
        """Return why this controller takes no requests, for messages to people."""
        if self.state is None:
            return f"not connected: {self.down_reason}"
        if self.state.protocol != PROTOCOL:
            return f"it speaks protocol {self.state.protocol}, this router {PROTOCOL}: update the older of them"
        return f"{self.state.status}: {self.state.detail}" if self.state.detail else self.state.status

    # -- requests

    def submit(self, make: Callable[[int], Submit], receiver: Attempt | Stream) -> int:
        """Send what `make` makes of a fresh number; `receiver` gets what comes back for it, until `release`.

        Returns:
            the number.

        Raises:
            ApiError: 503, the connection does not take it.
        """
        request = next(self._ids) & 0xFFFF_FFFF
        while request in self._receivers:
            request = next(self._ids) & 0xFFFF_FFFF
        if not self._send(make(request)):
            raise unavailable("the connection to the engine is down")
        self._receivers[request] = receiver
        return request

    def release(self, request: int, *, abort: bool) -> None:
        """Forget a request that has no reader any more. `abort`: it may still run there. May be called again."""
        if self._receivers.pop(request, None) is not None and abort:
            self._send(Abort(request))

    def drop_sample(self, request: int, sample: int) -> None:
        """End one of several samples there."""
        if request in self._receivers:
            self._send(Abort(request, sample))

    async def flush_cache(self, timeout_seconds: float) -> int:
        """Have the controller drop unused cached blocks; return how many there were.

        Raises:
            ApiError: 503, no answer.
        """
        answer = await self.call(FlushCache, timeout_seconds)
        return answer.blocks_freed if isinstance(answer, Flushed) else 0

    async def call(
        self,
        make: Callable[[int], Call],
        timeout_seconds: float | None,
        *,
        give_up: Callable[[int], Call] | None = None,
    ) -> Answer:
        """Send what `make` makes of a fresh ticket, and wait for the answer; None: as long as it takes.

        Args:
            give_up: what is sent with the same ticket if nobody waits for the answer any more.

        Raises:
            ApiError: 503, no answer; whether the call was carried out is not known.
        """
        ticket = next(self._ids) & 0xFFFF_FFFF
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._calls[ticket] = future
        try:
            if not self._send(make(ticket)):
                # Who has just died is noticed in a moment; then whoever may wait knows what for.
                await asyncio.sleep(_RECONNECT_POLL_SECONDS)
                raise unavailable("the connection to the engine is down")
            async with asyncio.timeout(timeout_seconds):
                return await future
        except (TimeoutError, asyncio.CancelledError) as error:
            if give_up is not None:
                self._send(give_up(ticket))
            if isinstance(error, asyncio.CancelledError):
                raise
            raise unavailable(f"the engine did not answer within {timeout_seconds:.0f} s") from None
        finally:
            self._calls.pop(ticket, None)

    async def again(self, deadline: float) -> bool:
        """Return whether a call without an answer should be made again, because the connection was lost and
        there is a new one. Waits for that until `deadline` (loop time), if there ever was one."""
        while self.state is None and self.connections and self._loop.time() < deadline:
            await asyncio.sleep(_RECONNECT_POLL_SECONDS)
        return self.state is not None and self._loop.time() < deadline

    def tell(self, make: Callable[[int], Call]) -> None:
        """Send a call whose answer is not waited for. Without a connection nothing is sent."""
        self._send(make(next(self._ids) & 0xFFFF_FFFF))

    def _fail_all(self, detail: str) -> None:
        receivers, self._receivers = self._receivers, {}
        for request, receiver in receivers.items():
            receiver.receive(Finished(request, FinishReason.ENGINE_FAILED, detail))
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(unavailable(detail))

    # -- connection

    def _connect(self) -> None:
        self.state = None
        try:
            self._socket = self._dial(self)
        except WireKeysError as error:
            self.refused(str(error))

    def refused(self, reason: str) -> None:
        """Note that no connection could be made; the timer tries again."""
        self.down_reason = reason
        _rare.warning("controller_refuses", self._loop.time(), endpoint=self.endpoint, reason=reason)
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close(linger_ms=0)

    def lost(self, reason: str) -> None:
        """Start anew: the controller is dead, or the connection cannot be trusted any more."""
        _log.warning("controller_lost", endpoint=self.endpoint, reason=reason, streams=len(self._receivers))
        socket, self._socket = self._socket, None
        lasted = socket is None or self._loop.time() - socket.born >= _LASTING_SECONDS
        if socket is not None:
            # If it lives after all it should stop working for streams that nobody reads any more.
            for request in self._receivers:
                socket.send(Abort(request))
            socket.close(linger_ms=200)
        self.state = None
        self.down_reason = reason
        try:
            self.on_change(self)
            self._fail_all(f"the connection to the engine was lost: {reason}")
        finally:
            if lasted:
                self._connect()

    def _send(self, message: RouterRequest) -> bool:
        return self._socket is not None and self._socket.send(message)

    def ping(self) -> None:
        """Ask for a `State`; also keeps the controller from taking this router for dead."""
        if self._socket is not None:
            self._socket.send_ping()

    def _tick(self, due: float) -> None:
        now = self._loop.time()
        self._timer = self._loop.call_at(now + PING_SECONDS, self._tick, now + PING_SECONDS)
        if self._socket is None:
            self._connect()
        socket = self._socket
        if socket is not None and socket.heard_at is not None:
            # For as long as this is late the event loop stood still: nobody was asked, and nobody heard.
            socket.heard_at = min(now, socket.heard_at + now - due)
            silence = now - socket.heard_at
            if silence > self._silence_seconds:
                self.lost(f"no answer for {silence:.0f} s")
        self.ping()

    # -- messages

    def receive(self, message: RouterMessage) -> None:
        """Take a message whose sequence number was in order."""
        if isinstance(message, Outputs):
            self._pass_on(message)
        elif isinstance(message, State):
            self._update_state(message)
        else:
            future = self._calls.get(message.ticket)
            if future is not None and not future.done():
                future.set_result(message)

    def _pass_on(self, outputs: Outputs) -> None:
        self._tell_each(outputs.started)
        self._tell_each(outputs.prompt_logprobs)
        if outputs.tokens:
            self.last_token_at = self._loop.time()
            requests = np.frombuffer(outputs.requests, dtype="<u4").tolist()
            tokens = np.frombuffer(outputs.tokens, dtype="<i4").tolist()
            if outputs.samples or outputs.logprobs:
                self._push_each(requests, tokens, outputs)
            else:  # the usual step
                receivers = self._receivers
                for request, token in zip(requests, tokens, strict=True):
                    receiver = receivers.get(request)
                    if receiver is not None:  # else it was aborted while this token was on its way
                        receiver.push(token)
        self._tell_each(outputs.beams)
        self._tell_each(outputs.finished)

    def _tell_each(self, events: Sequence[Event]) -> None:
        for event in events:
            receiver = self._receivers.get(event.request)
            if receiver is not None:
                receiver.receive(event)

    def _push_each(self, requests: list[int], tokens: list[int], outputs: Outputs) -> None:
        """Pass on tokens with their samples and log-probabilities."""
        samples = np.frombuffer(outputs.samples, dtype="<u2").tolist() if outputs.samples else [0] * len(tokens)
        logprobs = outputs.logprobs or {}
        for index, (request, token, sample) in enumerate(zip(requests, tokens, samples, strict=True)):
            receiver = self._receivers.get(request)
            if receiver is not None:
                receiver.push(token, logprobs.get(index), sample)

    def _update_state(self, state: State) -> None:
        if self.state is None or self.state.status != state.status:
            _log.info("controller_state", endpoint=self.endpoint, status=state.status, detail=state.detail)
        self.connections += self.state is None or state.epoch != self.state.epoch
        if self.state is not None and state.output_tokens > self.state.output_tokens:
            self.last_token_at = self._loop.time()  # of any request, perhaps of another router
        self.state = state
        if state.protocol != PROTOCOL:
            reason, now = self.why_not_ready(), self._loop.time()
            _rare.warning("controller_of_another_version", now, endpoint=self.endpoint, reason=reason)
        self.on_change(self)
        if state.status == "failed":
            self._fail_all(state.detail or "the engine failed")


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    descriptor = socket.get(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor


class _Socket:
    """One connection attempt's sockets and their callbacks; thrown away as a whole."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, peer: WirePeer, link: ControllerLink
    ) -> None:
        self._link = link
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self.born = self._loop.time()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RouterMessage)
        self._expected: int | None = None
        self._pings = 0
        self.heard_at: float | None = None
        """Loop time of the last message; set when the connection is made, so that a mute peer is noticed."""
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for a controller that is not there
        self._socket.set(zmq.SNDHWM, _HIGH_WATER)
        self._socket.set(zmq.RCVHWM, _HIGH_WATER)
        self._socket.set(zmq.RECONNECT_IVL, 100)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        )
        self._closed = False
        try:
            peer.connect(self._socket, endpoint)
        except WireKeysError:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)
            raise
        self._loop.add_reader(_descriptor(self._monitor), self._on_monitor)
        self._loop.add_reader(_descriptor(self._socket), self._on_readable)
        self._socket.connect(endpoint)
        self._loop.call_soon(self._on_monitor)

    def close(self, *, linger_ms: int) -> None:
        """Close both sockets; messages already sent may leave within `linger_ms`."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(_descriptor(self._monitor))
        self._loop.remove_reader(_descriptor(self._socket))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def send(self, message: RouterRequest) -> bool:
        """Send without waiting; False if there is no connection or its queue is full."""
        if self._closed:
            return False
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # ZeroMQ's descriptor signals edges only: an edge may have been consumed by this send.
        self._loop.call_soon(self._on_readable)
        return True

    def send_ping(self) -> None:
        """Send the next ping, if there is a connection."""
        self._pings += 1
        self.send(Ping(self._pings))

    def _on_readable(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frames[-1])
        self._loop.call_soon(self._on_readable)

    def _receive(self, frame: bytes) -> None:
        self.heard_at = self._loop.time()
        try:
            message = self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._link.lost(f"an unreadable message, perhaps of another version: {error}")
            return
        if nonsense := problem_of_reply(message):
            self._link.lost(f"a message that makes no sense: {nonsense}")
            return
        if self._expected is not None and message.seq != self._expected:
            self._link.lost(f"messages were lost (number {message.seq} came instead of {self._expected})")
            return
        self._expected = message.seq + 1
        try:
            self._link.receive(message)
        except ValueError as error:  # packed arrays whose lengths do not fit
            self._link.lost(f"a malformed message: {error}")

    def _on_monitor(self) -> None:
        while not self._closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            kind = event["event"]
            if kind & HANDSHAKE_FAILED:
                reason = self._peer.explain(event)
                self._peer.advance()
                self._link.refused(reason)
            elif kind == zmq.EVENT_DISCONNECTED and self.heard_at is None:
                self._link.refused(
                    "the process there is no controller: it closes the connection, or speaks another protocol"
                    if is_network(self._link.endpoint)
                    else "the controller has ended, or is just starting"
                )
            elif kind == zmq.EVENT_DISCONNECTED:
                self._link.lost("the controller closed the connection")
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.heard_at = self._loop.time()
                self.send_ping()
