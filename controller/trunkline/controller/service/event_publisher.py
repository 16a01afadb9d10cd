"""The controller's PUB socket: tells routers where chunks are, and how much there is to do.

After each turn of the service the differences go out (`trunkline.controller.cache.kv_events`), with the load; and
if there are none for a while, the load alone, as a heartbeat. Nothing waits for a slow router: what does not fit
its queue is dropped, it notices the gap by the numbers and asks (`EventsCall`).
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
from trunkline.runtime.wire_gate import SUBSCRIPTION_BYTES_MAX, Gate
from trunkline.runtime.wire_keys import Role

STREAM_BYTES: Final = 8
IDLE_SECONDS: Final = 1.0
"""Between two heartbeats while there are no requests, …"""
BUSY_SECONDS: Final = 0.25
"""… and while there are: the load changes, though chunks do not."""
HIGH_WATER: Final = 1_000
"""Messages that wait for one router."""
_PROBE_MS: Final = 1000
"""Over TCP a dead host closes nothing, and its queue would stay full."""


class EventPublisher:
    """Sends what a `KvEventLog` says."""

    def __init__(self, gate: Gate, endpoint: str) -> None:
        """
        Args:
            endpoint: to bind; "": nothing is told.
        """
        self.log = KvEventLog(os.urandom(STREAM_BYTES))
        self.descriptions = Descriptions()
        """Of the whole tree, for people."""
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
        """Tell what the turn has changed; without an engine (yet), that nothing is here."""
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
        """To a router that has missed something; `seq` is the reply's."""
        return self.log.answer(call, seq, now)

    @property
    def next_deadline(self) -> float:
        """When the next heartbeat is due; may be infinite."""
        return self._next_beat if self._socket is not None else float("inf")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
