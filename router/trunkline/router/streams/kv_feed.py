"""Follows the events by which controllers publish their chunks, and keeps the router's index up to date.

    KvEvents (SUB) ─────► FeedState ──► index: apply, snapshots, forget
    EventsReply ◄─ link ◄─── asks ┘ └─► buffer: what comes while it asks

Events are numbered. If one is missing (the first message of a stream, a number that jumps, a heartbeat that is
ahead), the router asks the controller through its ordinary connection. The controller replays the missing events,
or sends all its chunks, page by page. Meanwhile the index serves what it knows, and new events wait. A controller
that was started again has another stream: nothing of the old one counts.

`FeedState` does no I/O; for its controller it is the only writer of the index. `EventFeeds` has the sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog
import zmq

from trunkline.controller.messages import EventsCall
from trunkline.kvstore.chunks import NAME_BYTES
from trunkline.router.errors import ApiError
from trunkline.router.messages import EventsReply, KvEvents
from trunkline.runtime.process import RareLog
from trunkline.runtime.wire_keys import WireKeysError
from trunkline.runtime.wire_peer import WirePeer

STALE_SECONDS: Final = 5.0
"""Time in seconds without an event or heartbeat after which the index of a controller may be out of date."""
WAITING_BYTES_MAX: Final = 4 << 20
"""Largest total size of the events that wait for a snapshot. Further events are dropped, and asked for later."""
RETRY_SECONDS: Final = 0.25
"""Delay in seconds before a failed call is repeated. Each further failure doubles the delay."""
RETRY_SECONDS_MAX: Final = 4.0
"""Longest delay in seconds before a failed call is repeated."""
CALL_SECONDS: Final = 10.0
"""Time in seconds without an answer after which a controller is asked again."""
TICK_SECONDS: Final = 0.5
_MESSAGES_PER_TURN: Final = 16
"""Number of messages handled before other coroutines get a turn. One message may hold thousands of chunks."""
_HIGH_WATER: Final = 1_000
_PROBE_MS: Final = 1000
"""Interval of ZeroMQ's heartbeats in milliseconds. A dead host closes no TCP connection, and without heartbeats a
socket that only receives would never connect to the host's successor."""
_log = structlog.get_logger("trunkline.router.streams.kv_feed")
_rare = RareLog("trunkline.router.streams.kv_feed")


class ChunkMap(Protocol):
    """The methods by which a feed writes into the index (`trunkline.router.routing.index.ChunkIndex`)."""

    def apply(self, controller: int, names: bytes, tiers: bytes) -> None: ...

    def begin_snapshot(self, controller: int) -> None: ...

    def add_snapshot(self, controller: int, names: bytes, tiers: bytes) -> None: ...

    def end_snapshot(self, controller: int) -> None: ...

    def forget(self, controller: int) -> None: ...


class Caller(Protocol):
    """The method of a `ControllerLink` by which a feed asks for missing events."""

    async def call(self, make: Callable[[int], EventsCall], timeout_seconds: float | None) -> object: ...


class Ask(NamedTuple):
    """A call to be made. Its result goes to `FeedState.answered` or `FeedState.failed`, with the call's number."""

    number: int
    stream: bytes
    after: int
    page: int
    upto: int

    def call(self, ticket: int) -> EventsCall:
        return EventsCall(ticket, self.stream, self.after, self.page, self.upto)


class FeedState:
    """The progress of one controller's events: which of them have been applied to the index. Time is an argument,
    in seconds.

    Methods return the call that is to be made next, if any. There is one call at a time.
    """

    def __init__(self, controller: int, index: ChunkMap, now: float) -> None:
        self.controller = controller
        self.stream = b""
        """Id of the controller process whose events are followed; empty: none has arrived yet."""
        self.seq = 0
        """All events up to this number are in the index."""
        self.is_lacking = True
        """Whether later events are missing."""
        self.heard_at = now
        self._index = index
        self._asked: Ask | None = None
        self._calls = 0
        self._retry_at = now
        self._retry_seconds = RETRY_SECONDS
        self._snapshot: tuple[int, int] | None = None
        """The snapshot that is being fetched: the number of the last event in the snapshot, and the number of the
        next page."""
        self._waiting: deque[KvEvents] = deque()
        """Events that have arrived while earlier ones are missing."""
        self._waiting_bytes = 0

    def status(self, now: float) -> str:
        """Return "current", "catching up", or "stale" (the index may be old)."""
        if now - self.heard_at > STALE_SECONDS:
            return "stale"
        return "catching up" if self.is_lacking else "current"

    def heard(self, events: KvEvents, now: float) -> Ask | None:
        """Apply or keep a message of the controller's PUB socket.

        Raises:
            ValueError: the message is malformed; it was ignored.
        """
        _check_lengths(events.names, events.tiers)
        self.heard_at = now
        if events.stream != self.stream:
            is_first = not self.stream
            self._begin(events.stream)
            self.is_lacking = events.seq > (1 if events.names else 0)  # else there was nothing before it
            if is_first and not self.is_lacking:
                self._index.forget(self.controller)  # what it knows is of an earlier life of the controller
        if not self.is_lacking:
            if events.seq <= self.seq:
                return None
            if events.names and events.seq == self.seq + 1:
                self._apply(events)
                return None
            self.is_lacking = True
        if events.names:
            self._keep(events)
        return self._ask(now)

    def answered(self, number: int, reply: EventsReply, now: float) -> Ask | None:
        """Apply the answer to an `Ask`; the answer to an outdated one is ignored.

        Raises:
            ValueError: the answer is malformed; call `failed` for it.
        """
        asked = self._asked
        if asked is None or asked.number != number:
            return None
        _check_lengths(reply.names, reply.tiers)
        is_new = reply.stream != self.stream
        if not reply.snapshot and (is_new or reply.upto < self.seq or (reply.more and reply.upto == self.seq)):
            raise ValueError("the controller replays what was not asked for")
        self._asked = None
        self._retry_seconds = RETRY_SECONDS
        if is_new:  # the controller was started again, and this answer is the first to show it
            self._begin(reply.stream)
        if reply.snapshot:
            self._take_page(asked, reply)
        else:
            self._index.apply(self.controller, reply.names, reply.tiers)
            self.seq = reply.upto
        return self._ask(now) if reply.more else self._catch_up(now)

    def failed(self, number: int, now: float) -> None:
        """Note that an `Ask` has failed; it is repeated later."""
        if self._asked is not None and self._asked.number == number:
            self._asked = None
            self._retry_at = now + self._retry_seconds
            self._retry_seconds = min(2 * self._retry_seconds, RETRY_SECONDS_MAX)

    def tick(self, now: float) -> Ask | None:
        """Return the call that is due by now, if any."""
        return self._ask(now) if self.is_lacking and self.stream else None

    def _begin(self, stream: bytes) -> None:
        if self.stream:
            self._index.forget(self.controller)
        self.stream, self.seq, self.is_lacking = stream, 0, True
        self._asked = self._snapshot = None
        self._retry_at, self._retry_seconds = float("-inf"), RETRY_SECONDS
        self._waiting.clear()
        self._waiting_bytes = 0

    def _apply(self, events: KvEvents) -> None:
        self._index.apply(self.controller, events.names, events.tiers)
        self.seq = events.seq

    def _keep(self, events: KvEvents) -> None:
        size = len(events.names) + len(events.tiers)
        if self._waiting_bytes + size <= WAITING_BYTES_MAX:  # else it is dropped, and the gap is noticed later
            self._waiting.append(events)
            self._waiting_bytes += size

    def _ask(self, now: float) -> Ask | None:
        if self._asked is not None or now < self._retry_at:
            return None
        self._calls += 1
        upto, page = self._snapshot or (0, 0)
        self._asked = Ask(self._calls, self.stream, self.seq, page, upto)
        return self._asked

    def _take_page(self, asked: Ask, reply: EventsReply) -> None:
        page = asked.page
        if self._snapshot is None or reply.upto != self._snapshot[0]:
            self._index.begin_snapshot(self.controller)  # the first page, or the controller began a newer snapshot
            page = 0
        self._index.add_snapshot(self.controller, reply.names, reply.tiers)
        self._snapshot = (reply.upto, page + 1)
        if not reply.more:
            self._index.end_snapshot(self.controller)
            self.seq, self._snapshot = reply.upto, None

    def _catch_up(self, now: float) -> Ask | None:
        """Apply the events that have waited, up to the next gap."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
        self.is_lacking = False
        for events in waiting:
            if self.is_lacking:
                self._keep(events)
            elif events.seq == self.seq + 1:
                self._apply(events)
            elif events.seq > self.seq:
                self.is_lacking = True
                self._keep(events)
        return self._ask(now) if self.is_lacking else None


def _check_lengths(names: bytes, tiers: bytes) -> None:
    if len(names) != NAME_BYTES * len(tiers):
        raise ValueError(f"{len(names)} bytes of names do not go with the tiers of {len(tiers)} chunks")


class _Feed:
    """One controller's SUB socket, and the calls that ask for missing events."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        link: Caller,
        state: FeedState,
        on_load: Callable[[int, int, int], None],
        peer: WirePeer,
    ) -> None:
        self.state = state
        self._endpoint = endpoint
        self._link = link
        self._on_load = on_load
        self._loop = asyncio.get_running_loop()
        self._decoder = msgspec.msgpack.Decoder(KvEvents)
        self._call: asyncio.Task[None] | None = None
        self._closed = False
        self._socket = context.socket(zmq.SUB)
        self._socket.set(zmq.RCVHWM, _HIGH_WATER)
        if endpoint.startswith("tcp:"):
            self._socket.set(zmq.HEARTBEAT_IVL, _PROBE_MS)
            self._socket.set(zmq.HEARTBEAT_TIMEOUT, 10 * _PROBE_MS)
        self._socket.set(zmq.RECONNECT_IVL, 100)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.subscribe(b"")
        self._peer = peer
        self._attempt = -1
        """The value of the peer's `attempts` when this socket was connected, which tells whose keys were used."""
        self._connect_after = 0.0
        """Earliest loop time in seconds at which a silent socket is connected again. Without that, a socket whose
        connection was refused would stay silent forever."""
        try:
            self._connect()
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise
        descriptor = self._socket.get(zmq.FD)
        assert isinstance(descriptor, int)
        self._descriptor = descriptor
        self._loop.add_reader(descriptor, self._on_readable)
        # ZeroMQ's descriptor signals edges only: one may have come already.
        self._loop.call_soon(self._on_readable)

    def _connect(self) -> None:
        self._connect_after = self._loop.time() + STALE_SECONDS
        is_first, self._attempt = self._attempt < 0, self._peer.attempts
        try:
            if is_first:
                self._peer.connect(self._socket, self._endpoint)
            else:
                self._peer.again(self._socket, self._endpoint)
        except WireKeysError as error:
            _rare.warning("events_not_connected", self._loop.time(), endpoint=self._endpoint, error=str(error))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._call is not None:
            self._call.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)

    def _on_readable(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            if self._closed:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frame)
        self._loop.call_soon(self._on_readable)

    def _receive(self, frame: bytes) -> None:
        try:
            events = self._decoder.decode(frame)
            ask = self.state.heard(events, self._loop.time())
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # the gap will be noticed
            _rare.warning("unreadable_events", self._loop.time(), endpoint=self._endpoint, error=str(error))
            return
        self._on_load(self.state.controller, events.requests, events.queued_tokens)
        self._make(ask)

    def tick(self) -> None:
        now = self._loop.time()
        is_deaf = now - self.state.heard_at > STALE_SECONDS and now > self._connect_after
        if is_deaf or self._attempt != self._peer.attempts:
            self._connect()
        self._make(self.state.tick(now))

    def _make(self, ask: Ask | None) -> None:
        if ask is not None:
            if self._call is not None:
                self._call.cancel()  # it asks for events of a stream that has ended
            self._call = self._loop.create_task(self._ask(ask))

    async def _ask(self, ask: Ask | None) -> None:
        while ask is not None:
            number = ask.number
            try:
                reply = await self._link.call(ask.call, CALL_SECONDS)
                if not isinstance(reply, EventsReply):
                    raise ValueError(f"the answer is a {type(reply).__name__}")
                ask = self.state.answered(number, reply, self._loop.time())
            except (ApiError, ValueError) as error:
                _log.debug("events_not_answered", endpoint=self._endpoint, error=str(error))
                self.state.failed(number, self._loop.time())
                return


class EventFeeds:
    """The feeds of all controllers that publish events. Call it from the event loop's thread only."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        index: ChunkMap,
        on_load: Callable[[int, int, int], None],
    ) -> None:
        """
        Args:
            on_load: called with a controller's number, and its numbers of requests and of queued tokens over all
                routers.
        """
        self._context = context
        self._index = index
        self._on_load = on_load
        self._feeds: dict[int, _Feed] = {}
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Begin to check the feeds from time to time."""
        self._tick()

    def add(self, controller: int, endpoint: str, link: Caller, peer: WirePeer | None = None) -> None:
        """Subscribe to a controller. Does not wait for the connection.

        Args:
            endpoint: address of the controller's PUB socket.
            link: the connection over which missing events are asked for (`trunkline.router.streams.link`).
            peer: the controller's wire keys, the same object as its link has; None: it has none.
        """
        state = FeedState(controller, self._index, asyncio.get_running_loop().time())
        feed = _Feed(self._context, endpoint, link, state, self._on_load, peer or WirePeer())
        self._feeds[controller] = feed

    def remove(self, controller: int) -> None:
        """Unsubscribe from a controller. The index keeps what it knows."""
        feed = self._feeds.pop(controller, None)
        if feed is not None:
            feed.close()

    def _tick(self) -> None:
        # First: what may fail below must not end the checks for good.
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        for feed in self._feeds.values():
            feed.tick()

    def status(self, controller: int) -> str:
        """Return "current", "catching up", "stale" (no message for a while) or "off" (the controller publishes no
        events)."""
        feed = self._feeds.get(controller)
        return "off" if feed is None else feed.state.status(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Unsubscribe. The index keeps what it knows."""
        if self._timer is not None:
            self._timer.cancel()
        for feed in self._feeds.values():
            feed.close()
        self._feeds.clear()
