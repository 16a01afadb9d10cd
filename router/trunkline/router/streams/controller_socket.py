"""The socket of a connection to a controller, and the checks of what comes over it.

    send ──► DEALER ──────────────────────► controller (ROUTER)
    ControllerLink.receive ◄── checks ◄──── messages: one sequence number over all of them
    ControllerLink.refused, lost ◄── monitor: the handshake failed, or the peer closed the connection

A message that no correct controller sends ends the connection before it is used. Its types are checked by the
decoder, but every number fits an `int`, and NaN is a `float`. Answers to a request are checked where they are
used; the checks here are of the reports that all requests depend on.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from trunkline.controller.messages import Ping, RouterRequest
from trunkline.router.messages import Outputs, RouterMessage, State, TierState
from trunkline.router.streams.takers import pass_to_takers
from trunkline.runtime.wire_flags import NOBLOCK, has_message
from trunkline.runtime.wire_keys import WireKeysError, is_network
from trunkline.runtime.wire_peer import HANDSHAKE_FAILED, WirePeer

if TYPE_CHECKING:
    from trunkline.router.streams.link import ControllerLink
    from trunkline.router.streams.streams import Stream

_MESSAGES_PER_TURN: Final = 64
"""Messages behind a first one that are handled before other coroutines get a turn; their tokens leave together."""
_HIGH_WATER: Final = 20_000
_STATUSES: Final = ("starting", "ready", "draining", "failed")
_COUNT_MAX: Final = (1 << 63) - 1
_INT32_MAX: Final = (1 << 31) - 1
_TEXT_MAX: Final = 65_536
_RANKS_MAX: Final = 1024
_TIERS_MAX: Final = 16
_REASONS_MAX: Final = 16
_NAME_MAX: Final = 32
"""Longest name of a tier or of a reason."""
_ENDPOINT_MAX: Final = 512
_MOST: Final = {"chunk_size": 1 << 16, "max_context": _INT32_MAX, "max_rows": _INT32_MAX}
"""Largest values of the numbers that the router calculates with; all other numbers are only shown."""


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    descriptor = socket.get(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor


class ControllerSocket:
    """The socket and the monitor of one connection. They are not reused for another connection: both are closed
    with it."""

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
        self.heard_at: float | None = None
        """Loop time of the last message, in seconds. It is set when the connection is made, so that a peer that
        says nothing is noticed; None: not connected."""
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.IMMEDIATE, 1)  # queue no message before there is a connection
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
        except (WireKeysError, zmq.ZMQError):
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)
            raise
        self._loop.add_reader(_descriptor(self._monitor), self._on_monitor)
        self._loop.add_reader(_descriptor(self._socket), self._on_readable)
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
        """Send without waiting; return False if there is no connection, or its queue is full."""
        if self._closed:
            return False
        try:
            self._socket.send(self._encoder.encode(message), NOBLOCK)
        except zmq.Again:
            return False
        # ZeroMQ's descriptor signals edges only, and this send may have consumed one.
        self._loop.call_soon(self._look, 1)
        return True

    def send_ping(self) -> None:
        """Send a ping, if there is a connection."""
        self.send(Ping(0 if self._expected is None else self._expected - 1))

    def _on_readable(self, messages_max: int = 1) -> None:
        left = messages_max
        offered: list[Stream] = []
        while left and not self._closed:
            try:
                frame = self._socket.recv(NOBLOCK)
            except zmq.Again:
                break
            self._receive(frame, offered)
            left -= 1
        if offered:
            pass_to_takers(offered, self._loop.time)
        if not left:
            # Streams that wait for the first message get it before the next look, which mostly finds nothing.
            self._loop.call_soon(self._look, _MESSAGES_PER_TURN)

    def _look(self, messages_max: int) -> None:
        if not self._closed and has_message(self._socket):
            self._on_readable(messages_max)

    def _receive(self, frame: bytes, offered: list[Stream]) -> None:
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
            self._link.receive(message, offered)
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


def problem_of_reply(message: RouterMessage) -> str:
    """Return what is wrong with a message that no correct controller of this version sends; "": nothing."""
    match message:
        case State():
            return _problem_of_state(message)
        case Outputs():
            return _problem_of_outputs(message)
    return ""


def _problem_of_state(state: State) -> str:
    if state.status not in _STATUSES:
        return f"its status is {state.status[:40]!r}; known are {', '.join(_STATUSES)}"
    problem = _problem_of_numbers(state)
    if problem:
        return problem
    if len(state.exports) > _RANKS_MAX or any(len(endpoint) > _ENDPOINT_MAX for endpoint in state.exports):
        return f"it exports at more than {_RANKS_MAX} endpoints, or at one of more than {_ENDPOINT_MAX} characters"
    if max(len(state.tiers), len(state.load_us)) > _TIERS_MAX:
        return f"it reports {max(len(state.tiers), len(state.load_us))} tiers; at most {_TIERS_MAX} are allowed"
    for tier in state.tiers:
        # A later version may have tiers and reasons that this one does not know; they are only shown.
        if len(tier.name) > _NAME_MAX:
            return f"the name of a tier has {len(tier.name)} characters; at most {_NAME_MAX} are allowed"
        if problem := _problem_of_numbers(tier):
            return problem
    if not all(0.0 <= us < math.inf for us in state.load_us):
        return "loading takes no time that could be"
    for reasons in (state.misses, state.pulls_given_up):
        if len(reasons) > _REASONS_MAX or any(len(reason) > _NAME_MAX for reason in reasons):
            return f"it counts {len(reasons)} reasons; allowed are {_REASONS_MAX} short ones"
        if not all(0 <= count <= _COUNT_MAX for count in reasons.values()):
            return "it counts below zero"
    return ""


def _problem_of_numbers(report: State | TierState) -> str:
    for name in report.__struct_fields__:  # `msgspec.structs.fields` would describe their types anew each time
        value: Any = getattr(report, name)
        match value:
            case bool():
                pass
            case int():
                most = _MOST.get(name, _COUNT_MAX)
                if not 0 <= value <= most:
                    return f"{name} is {value}; allowed are 0 to {most}"
            case float():
                if not 0.0 <= value < math.inf:
                    return f"{name} is {value}; it is a time"
            case str() | bytes():
                if len(value) > _TEXT_MAX:
                    return f"{name} is {len(value)} long; at most {_TEXT_MAX} is allowed"
    return ""


def _problem_of_outputs(outputs: Outputs) -> str:
    for started in outputs.started:
        counts = (started.cached_tokens, started.miss_token, started.module_tokens, *started.tier_tokens)
        if min(counts) < 0 or max(counts) > _INT32_MAX or not 0.0 <= started.queued_s < math.inf:
            return f"request {started.request} starts with counts that cannot be"
        if len(started.tier_tokens) > _TIERS_MAX or len(started.miss) > _NAME_MAX:
            return f"request {started.request} found its tokens in too many tiers, or not for a long reason"
    for drafts in outputs.drafts:
        if not 0 <= drafts.accepted <= drafts.tried <= _INT32_MAX:
            return f"request {drafts.request} has {drafts.accepted} of {drafts.tried} drafts accepted"
    for top in (outputs.logprobs or {}).values():
        if len(top.top_ids) != len(top.top_logprobs) or len(top.top_ids) % 4:
            return "log-probabilities do not go with their tokens"
        if len(top.pooled) % 4:
            return f"a pooled state has {len(top.pooled)} bytes, which are no float32"
    for scored in outputs.prompt_logprobs:
        parts, count = scored.logprobs, len(scored.logprobs.token_logprobs)
        is_whole = count > 0 and count % 4 == 0 and len(parts.ranks) == count
        if not is_whole or len(parts.top_ids) != len(parts.top_logprobs) or len(parts.top_ids) % count:
            return "scores of a prompt do not go with their tokens"
    return ""
