"""The controller's PUB socket: tells routers where chunks are, and how much there is to do.

After each turn of the service the changes of chunks are sent (`trunkline.controller.cache.kv_events`), with the
load. If nothing changes for a while, the load is sent alone, as a heartbeat. The controller never waits for a slow
router: messages that do not fit its queue are dropped. It sees the gap in their numbers and asks (`EventsCall`).
"""

from __future__ import annotations

import os
from typing import Final

import msgspec
import zmq

from trunkline.controller.cache.kv_events import KvEventLog
from trunkline.controller.engine.engine import Engine
from trunkline.controller.messages import EventsCall
from trunkline.controller.service.status import load_of
from trunkline.controller.service.tree_view import Descriptions
from trunkline.router.messages import EventsReply, KvEvents
from trunkline.runtime.wire_keys import Role
from trunkline.runtime.wire_sockets import SUBSCRIPTION_BYTES_MAX, Gate

STREAM_BYTES: Final = 8
IDLE_SECONDS: Final = 1.0
"""Time between two heartbeats while there are no requests."""
BUSY_SECONDS: Final = 0.25
"""Time between two heartbeats while there are requests: the load changes even if no chunk does."""
HIGH_WATER: Final = 1_000
"""Most messages that wait for one router."""
_PROBE_MS: Final = 1000
"""Interval of ZeroMQ's heartbeats. A dead host's TCP connection stays open, and its queue would stay full."""


class EventPublisher:
    """Publishes the events of a `KvEventLog` to the routers."""

    def __init__(self, gate: Gate, endpoint: str) -> None:
        """
        Args:
            endpoint: Address to bind; "" if no events are to be published.
        """
        self.log = KvEventLog(os.urandom(STREAM_BYTES))
        self.descriptions = Descriptions()
        """Descriptions of the whole tree, which operators ask for."""
        self._encoder = msgspec.msgpack.Encoder()
        self._next_beat = 0.0
        self._epoch = 0
        self._socket: zmq.Socket[bytes] | None = None
        if endpoint:
            self._socket = gate.context.socket(zmq.PUB)
            self._socket.set(zmq.SNDHWM, HIGH_WATER)
            if endpoint.startswith("tcp:"):
                self._socket.set(zmq.HEARTBEAT_IVL, _PROBE_MS)
                self._socket.set(zmq.HEARTBEAT_TIMEOUT, 10 * _PROBE_MS)
            gate.bind(self._socket, endpoint, Role.ROUTER, SUBSCRIPTION_BYTES_MAX)

    def turn(self, engine: Engine | None, now: float) -> None:
        """Publish what this turn has changed; without an engine, that this controller has no chunks."""
        if self._socket is None:
            return
        batches = []
        if engine is not None:
            # Of workers that were lost nobody may have noted every chunk.
            regrouped = engine.epoch != self._epoch
            self._epoch = engine.epoch
            batches = self.log.follow(engine.scheduler.kv.tree, look_again=regrouped)
        if not batches and now < self._next_beat:
            return
        self.log.forget_old(now)
        requests, queued_tokens = load_of(engine) if engine is not None else (0, 0)
        for batch in batches:
            self._send(KvEvents(self.log.stream, *batch, requests, queued_tokens))
        if not batches:
            self._send(KvEvents(self.log.stream, self.log.seq, requests=requests, queued_tokens=queued_tokens))
        self._next_beat = now + (BUSY_SECONDS if requests else IDLE_SECONDS)

    def _send(self, message: KvEvents) -> None:
        assert self._socket is not None
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)  # a PUB socket drops, and never blocks

    def answer(self, call: EventsCall, seq: int, now: float) -> EventsReply:
        """Return the answer to a router that has missed events; `seq` is the reply's number."""
        return self.log.answer(call, seq, now)

    @property
    def next_deadline(self) -> float:
        """Return when the next heartbeat is due; may be infinite."""
        return self._next_beat if self._socket is not None else float("inf")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
