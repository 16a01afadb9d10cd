"""A rank's sockets to its controller: plans and orders come in, reports go out (docs/protocol.md).

main thread      SUB ◄── plans of its epoch, orders to this process        PUSH ──► results, readiness
outbox thread    PUSH ──► outcomes of moves, answers to probes, also while the main thread is in a step
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
from typing import Final

import msgspec
import structlog
import zmq

from trunkline.controller.reports import MoveOutcome, MovesDone, Probed, WorkerHello, WorkerReport
from trunkline.runtime.process import node_id
from trunkline.runtime.wire_flags import NOBLOCK
from trunkline.runtime.wire_keys import Role
from trunkline.runtime.wire_peer import HANDSHAKE_FAILED, WirePeer
from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import PlanError
from trunkline.worker.messages import LEAVE_TOPIC, WorkerMessage, member_topic, plan_topic, rank_topic

_LINGER_MS: Final = 500
_HEARTBEAT_MS: Final = 1000
"""Interval of ZeroMQ's heartbeats. When a host dies, its TCP connections stay open: silence is the only sign."""

log = structlog.get_logger()


class Link:
    """A rank's two sockets. Reports may be sent from the main thread only."""

    def __init__(self, config: WorkerConfig) -> None:
        self.incarnation = secrets.token_bytes(16)
        """Random bytes that name this process."""
        self._config = config
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
        self.peer = WirePeer(config.wire_keys, Role.WORKER)
        """The wire keys for the connection to the controller."""
        self.status_path = config.status_path
        self.is_refused = False
        """Whether the controller has refused this rank's connection; set by the watchdog."""
        self._plans = self._subscriber()
        self._timeout_ms = -1
        """Longest time that the socket waits now."""
        self.monitor = self._plans.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | HANDSHAKE_FAILED
        )
        self._reports = self.open_reports()
        self._plans.subscribe(rank_topic(config.rank, self.incarnation))
        self.peer.connect(self._plans, config.plan_endpoint)

    def connect_again(self) -> None:
        """Connect again, perhaps with other keys, if the controller has refused this rank's connection."""
        if self.is_refused:
            self.is_refused = False
            self.peer.advance()
            self.peer.again(self._plans, self._config.plan_endpoint)
            self.peer.again(self._reports, self._config.report_endpoint)

    def _subscriber(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.SUB)
        # A dropped plan would stop the group, so the queue has no limit; the controller keeps it short.
        socket.set(zmq.RCVHWM, 0)
        if self._config.plan_endpoint.startswith("tcp:"):
            socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.set(zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_MS)
        return socket

    def open_leave(self) -> zmq.Socket[bytes]:
        """Return a socket for `Leave`, to be used by the calling thread only and closed before `close`. It is
        connected when the controller has accepted this rank's connection."""
        socket = self._subscriber()
        socket.subscribe(LEAVE_TOPIC)
        return socket

    def connect_leave(self, socket: zmq.Socket[bytes]) -> None:
        """Connect the socket of `open_leave`; called by the same thread."""
        self.peer.connect(socket, self._config.plan_endpoint)

    def say_hello(self) -> None:
        """Tell the controller that this process has started and belongs to no epoch."""
        self.offer(WorkerHello(self._config.rank, os.getpid(), node_id(), self.incarnation, self._config.terms))

    def enter(self, epoch: int) -> None:
        """Subscribe to the plans of an epoch, then to the topic that tells the controller so."""
        # In this order, so that the controller sees the second subscription only when the first is there.
        self._plans.subscribe(plan_topic(epoch))
        self._plans.subscribe(member_topic(self.incarnation))

    def open_reports(self, *, has_limit: bool = True) -> zmq.Socket[bytes]:
        """Return a socket for reports, to be used by the calling thread only and closed before `close`.

        Args:
            has_limit: Whether sending waits when many reports have not been taken by the controller.
        """
        reports = self._context.socket(zmq.PUSH)
        reports.set(zmq.LINGER, _LINGER_MS)
        if not has_limit:
            reports.set(zmq.SNDHWM, 0)
        self.peer.connect(reports, self._config.report_endpoint)
        return reports

    def report(self, message: WorkerReport) -> None:
        """Send a report; wait for the controller if it is slow."""
        self._reports.send(self._encoder.encode(message))

    def offer(self, message: WorkerReport) -> None:
        """Send a report, or drop it if too many wait: for messages that are repeated or only informative."""
        try:
            self._reports.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("report dropped: the controller takes none", message=type(message).__name__)

    def receive(self, timeout_ms: int) -> WorkerMessage | None:
        """Return the next message; None if none comes within `timeout_ms`.

        Raises:
            PlanError: something that is not a message of this protocol.
        """
        if timeout_ms != self._timeout_ms:
            self._timeout_ms = timeout_ms
            self._plans.set(zmq.RCVTIMEO, timeout_ms)
        # Of two frames, and without a poller: every step waits for this.
        try:
            self._plans.recv()
        except zmq.Again:
            return None
        try:
            payload = self._plans.recv(NOBLOCK)
        except zmq.Again:
            raise PlanError("a message has a topic and nothing else") from None
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise PlanError(f"undecodable plan of {len(payload)} bytes: {error}") from error

    def stop_monitor(self) -> None:
        """End the monitoring of connections: the monitor socket, which must be open, gets its last event."""
        self._plans.disable_monitor()

    def close(self) -> None:
        """Close the sockets; the last report has a moment to be sent. The monitor socket must be closed before."""
        self._plans.close(linger=0)
        self._reports.close(linger=_LINGER_MS)
        self._context.term()


class Outbox:
    """Sends the reports of the tiers' threads at once, also while the main thread is in a long step."""

    def __init__(self, config: WorkerConfig, link: Link) -> None:
        self._config = config
        self._link = link
        self._waiting: queue.SimpleQueue[list[MoveOutcome] | Probed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="outbox", daemon=True)
        self._thread.start()

    def put(self, report: list[MoveOutcome] | Probed) -> None:
        """Send outcomes or an answer soon. May be called from any thread."""
        self._waiting.put(report)

    def close(self) -> None:
        """Send what was put before, then end the thread. To be called before the link is closed."""
        self._waiting.put(None)
        self._thread.join()

    def _send(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        reports = self._link.open_reports(has_limit=False)
        is_open = True
        while is_open:
            outcomes: list[MoveOutcome] = []
            report = self._waiting.get()
            # Whatever has come meanwhile goes along.
            while True:
                if isinstance(report, list):
                    outcomes += report
                elif isinstance(report, Probed):
                    reports.send(encoder.encode(report))
                else:
                    is_open = False
                if self._waiting.empty():
                    break
                report = self._waiting.get()
            if outcomes:
                reports.send(encoder.encode(MovesDone(self._config.rank, self._config.epoch, outcomes)))
        reports.close(linger=_LINGER_MS)
