"""A router's connection to one controller: the requests that run over it, calls with answers, and its health.

    submit, release, call ──► ControllerSocket ──────► controller
    Attempt, Stream ◄─── Outputs ──┤ State, answers to calls
    timer ──► a ping each second; a controller that is silent for `silence_seconds` counts as dead

When the controller is dead or a message was lost, every attempt on the link is told once, and the socket is thrown
away. A new one is opened under a new identity, so that nothing of the old connection can arrive on either side.
The new connection counts once its first `State` has arrived. After a connection that was refused or lasted only a
moment, the timer opens the next one, so that failing connections do not follow each other without a pause.

The requests in flight are the keys of one dictionary, so no separate counter of load can go wrong.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

import numpy as np
import structlog
import zmq

from trunkline.controller.messages import (
    Abort,
    AdapterCall,
    DescribeTree,
    EventsCall,
    FlushCache,
    Forget,
    Handed,
    ModulesCall,
    OffersCall,
    Prefetch,
    RouterRequest,
    Submit,
    Told,
    WentOn,
)
from trunkline.router.errors import unavailable
from trunkline.router.membership.member import Member
from trunkline.router.messages import (
    PROTOCOL,
    AdapterReply,
    EventsReply,
    Finished,
    FinishReason,
    Flushed,
    ModulesReply,
    Offers,
    Outputs,
    Prefetched,
    RouterMessage,
    State,
    TreeDescription,
)
from trunkline.router.streams.controller_socket import ControllerSocket
from trunkline.router.streams.streams import Attempt, Event, Stream
from trunkline.runtime.process import RareLog
from trunkline.runtime.wire_keys import WireKeysError
from trunkline.runtime.wire_peer import WirePeer

PING_SECONDS: Final = 1.0
_RECONNECT_POLL_SECONDS: Final = 0.05
_LASTING_SECONDS: Final = 1.0
"""Time in seconds after which a lost connection is replaced at once. If it was lost sooner, the timer opens the
next one."""
Call = FlushCache | Prefetch | ModulesCall | EventsCall | DescribeTree | OffersCall | AdapterCall
Answer = Flushed | Prefetched | ModulesReply | EventsReply | TreeDescription | Offers | AdapterReply
_log = structlog.get_logger("trunkline.router.streams.link")
_rare = RareLog("trunkline.router.streams.link")


class Standing(NamedTuple):
    """What a router thinks of a group, by what the group has said of itself."""

    model: str = ""
    """Main name of the model that the group serves; "": not known."""
    problem: str = ""
    """Why requests must not go to the group, for people; "": they may."""
    rival: str = ""
    """Why requests must not go to it as long as other groups serve the model; "": they may."""

    def may_serve(self, model: str) -> bool:
        """Return whether the group serves a model, as far as is known. `model`: "" stands for any."""
        return not model or self.model in ("", model)


class ControllerLink:
    """This router's connection to one controller. Call its methods from the event loop's thread only."""

    judge: Callable[[Member, State], Standing] = staticmethod(lambda member, state: Standing())
    """Decides what to think of the group. Called when a connection begins and when the group describes itself in
    another way."""
    patience = 0.0
    """Seconds for which a caller may wait until a lost connection is there again (see `again`)."""

    def __init__(
        self,
        index: int,
        member: Member,
        context: zmq.Context[zmq.Socket[bytes]],
        silence_seconds: float,
        peer: WirePeer | None = None,
    ) -> None:
        """
        Args:
            index: the controller's slot in routing.
            peer: the controller's wire keys; None: it has none.
        """
        self.index = index
        self.member = member
        self.state: State | None = None
        """The last report of the present connection; None: not connected."""
        self.standing = Standing()
        self.last_token_at = float("-inf")
        """Loop time at which a token last arrived, in seconds."""
        self.down_reason = "no controller has answered yet"
        self.connections = 0
        """Number of connections so far, plus the number of times that the controller got new workers. When it has
        grown, the contents of the memory of the controller and its workers may be lost."""
        self.on_change: Callable[[ControllerLink], None] = lambda link: None
        """Called when a `State` has arrived, and when the connection is lost, before its attempts learn of
        that."""
        self._dial = functools.partial(ControllerSocket, context, member.address, peer or WirePeer())
        self._silence_seconds = silence_seconds
        self._socket: ControllerSocket | None = None
        self._receivers: dict[int, Attempt | Stream] = {}
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._ids = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    # -- life

    def open(self) -> None:
        """Begin to connect. Does not wait for the connection."""
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
    def name(self) -> str:
        """The controller's name, which is unique in the cluster."""
        return self.member.id

    @property
    def endpoint(self) -> str:
        """ZeroMQ endpoint of the controller."""
        return self.member.address

    @property
    def ready(self) -> bool:
        """Whether the controller takes requests now."""
        state, standing = self.state, self.standing
        is_up = state is not None and state.status == "ready" and state.protocol == PROTOCOL
        return is_up and not standing.problem and not standing.rival  # as `problem`, which says why

    @property
    def problem(self) -> str:
        """Why this group must not be used, although it is connected; "": it may."""
        return self.fault or self.standing.rival

    @property
    def fault(self) -> str:
        """Why this group must not be used, whatever others do; "": it may."""
        if self.state is not None and self.state.protocol != PROTOCOL:
            return f"it speaks protocol {self.state.protocol}, this router {PROTOCOL}: update the older of them"
        return self.standing.problem

    @property
    def weights(self) -> str:
        """The digest of the group's weights; "": not known, or not connected."""
        return "" if self.state is None else self.state.group.weights

    def set_rival(self, why: str) -> bool:
        """Set why the group must not be used as long as others serve its model; return whether that is new."""
        if why == self.standing.rival:
            return False
        self.standing = self.standing._replace(rival=why)
        if why:
            _log.warning("group_refused", group=self.name, endpoint=self.endpoint, reason=why)
        return True

    @property
    def inflight(self) -> int:
        """Number of this router's requests that the controller has."""
        return len(self._receivers)

    def why_not_ready(self) -> str:
        """Return why this controller takes no requests, for messages to people."""
        if self.state is None:
            return f"not connected: {self.down_reason}"
        if self.problem:
            return f"not used: {self.problem}"
        return f"{self.state.status}: {self.state.detail}" if self.state.detail else self.state.status

    # -- requests

    def submit(self, make: Callable[[int], Submit], receiver: Attempt | Stream) -> int:
        """Send a request, and return its number. Until `release`, `receiver` gets its tokens and news.

        Args:
            make: makes the message of the request's number.

        Raises:
            ApiError: 503, the message cannot be sent.
        """
        request = next(self._ids) & 0xFFFF_FFFF
        while request in self._receivers:
            request = next(self._ids) & 0xFFFF_FFFF
        if not self._send(make(request)):
            raise unavailable("the connection to the engine is down")
        self._receivers[request] = receiver
        return request

    def release(self, request: int, *, abort: bool) -> None:
        """Forget a request. May be called again. `abort`: tell the controller, where the request may still run."""
        if self._receivers.pop(request, None) is not None and abort:
            self._send(Abort(request))

    def drop_sample(self, request: int, sample: int) -> None:
        """Have the controller end one of several samples of a request."""
        if request in self._receivers:
            self._send(Abort(request, sample))

    async def flush_cache(self, timeout_seconds: float) -> int:
        """Have the controller drop all cached blocks that no request uses; return how many these were.

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
        """Send a call and return its answer.

        Args:
            make: makes the message of the call's ticket.
            timeout_seconds: longest time to wait for the answer; None: no limit.
            give_up: makes a message with the same ticket, which is sent if the caller stops waiting.

        Raises:
            ApiError: 503, there was no answer; the controller may have carried the call out all the same.
        """
        ticket = next(self._ids) & 0xFFFF_FFFF
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._calls[ticket] = future
        try:
            if not self._send(make(ticket)):
                # A controller that has just died is noticed in a moment; then the caller can wait in `again`.
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
        """Wait for a new connection after a call without an answer; return whether to repeat the call.

        Args:
            deadline: loop time until which to wait, if there ever was a connection.
        """
        while self.state is None and self.connections and self._loop.time() < deadline:
            await asyncio.sleep(_RECONNECT_POLL_SECONDS)
        return self.state is not None and self._loop.time() < deadline

    def tell(self, make: Callable[[int], Call | Forget | Handed | Told | WentOn]) -> None:
        """Send a call without waiting for its answer, or a message that has none. Without a connection nothing is
        sent."""
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
        """Throw the connection away and open a new one: the controller is dead, or messages were lost."""
        if self.state is not None and self.state.status == "draining":
            _log.info("controller_left", endpoint=self.endpoint, streams=len(self._receivers))
        else:
            _log.warning("controller_lost", endpoint=self.endpoint, reason=reason, streams=len(self._receivers))
        socket, self._socket = self._socket, None
        lasted = socket is None or self._loop.time() - socket.born >= _LASTING_SECONDS
        if socket is not None:
            # If the controller lives after all, it should stop working for streams without a reader.
            for request in self._receivers:
                socket.send(Abort(request))
            socket.close(linger_ms=200)
        self.state = None
        self.down_reason = reason
        with ExitStack() as whatever_fails:
            if lasted:
                whatever_fails.callback(self._connect)
            whatever_fails.callback(self._fail_all, f"the connection to the engine was lost: {reason}")
            self.on_change(self)

    def _send(self, message: RouterRequest) -> bool:
        return self._socket is not None and self._socket.send(message)

    def ping(self) -> None:
        """Ask for a `State`. Pings also tell the controller that this router lives."""
        if self._socket is not None:
            self._socket.send_ping()

    def _tick(self, due: float) -> None:
        now = self._loop.time()
        self._timer = self._loop.call_at(now + PING_SECONDS, self._tick, now + PING_SECONDS)
        if self._socket is None:
            self._connect()
        socket = self._socket
        if socket is not None and socket.heard_at is not None:
            # While this timer was late the event loop stood still, so nothing could be received: that is no
            # silence.
            socket.heard_at = min(now, socket.heard_at + now - due)
            silence = now - socket.heard_at
            if silence > self._silence_seconds:
                self.lost(f"no answer for {silence:.0f} s")
        self.ping()

    # -- messages

    def receive(self, message: RouterMessage, offered: list[Stream]) -> None:
        """Act on a message from the socket, which has checked it and its sequence number. Streams that get tokens
        for their takers are added to `offered`."""
        if isinstance(message, Outputs):
            self._pass_on(message, offered)
        elif isinstance(message, State):
            self._update_state(message)
        else:
            future = self._calls.get(message.ticket)
            if future is not None and not future.done():
                future.set_result(message)

    def _pass_on(self, outputs: Outputs, offered: list[Stream]) -> None:
        self._tell_each(outputs.started)
        self._tell_each(outputs.prompt_logprobs)
        for drafts in outputs.drafts:
            if (receiver := self._receivers.get(drafts.request)) is not None:
                receiver.drafts.add(drafts)
        if outputs.tokens:
            self.last_token_at = self._loop.time()
            requests, tokens = array("I", outputs.requests), array("i", outputs.tokens)
            if outputs.samples or outputs.logprobs:
                self._push_each(requests, tokens, outputs, offered)
            else:  # the usual step
                receivers = self._receivers
                for request, token in zip(requests, tokens, strict=True):
                    receiver = receivers.get(request)
                    if receiver is None:
                        continue  # the request was aborted while this token was on its way
                    if (stream := receiver.push(token)) is not None:
                        offered.append(stream)
        self._tell_each(outputs.beams)
        self._tell_each(outputs.finished)
        if outputs.finished and self.state is not None and self.state.status == "draining":
            self.ping()  # the controller does not close the connection before it knows that this was read

    def _tell_each(self, events: Sequence[Event]) -> None:
        for event in events:
            receiver = self._receivers.get(event.request)
            if receiver is not None:
                receiver.receive(event)

    def _push_each(
        self, requests: Sequence[int], tokens: Sequence[int], outputs: Outputs, offered: list[Stream]
    ) -> None:
        """Pass on tokens with their samples and log-probabilities."""
        samples = np.frombuffer(outputs.samples, dtype="<u2").tolist() if outputs.samples else [0] * len(tokens)
        logprobs = outputs.logprobs or {}
        for index, (request, token, sample) in enumerate(zip(requests, tokens, samples, strict=True)):
            receiver = self._receivers.get(request)
            if receiver is not None:
                stream = receiver.push(token, logprobs.get(index), sample)
                if stream is not None:
                    offered.append(stream)

    def _update_state(self, state: State) -> None:
        if self.state is None or self.state.status != state.status:
            _log.info("controller_state", endpoint=self.endpoint, status=state.status, detail=state.detail)
        self.connections += self.state is None or state.epoch != self.state.epoch
        if self.state is not None and state.output_tokens > self.state.output_tokens:
            self.last_token_at = self._loop.time()  # a token of any request, perhaps of another router's
        problem = self.problem
        if self.state is None or state.group != self.state.group:
            self.standing = self.judge(self.member, state)._replace(rival=self.standing.rival)
        self.state = state
        if self.problem and self.problem != problem:
            _log.warning("group_refused", group=self.name, endpoint=self.endpoint, reason=self.problem)
        try:
            self.on_change(self)
        finally:
            if state.status == "failed":
                self._fail_all(state.detail or "the engine failed")
