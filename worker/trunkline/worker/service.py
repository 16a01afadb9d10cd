"""Run a rank as a process: receive plans and send results by ZeroMQ, and notice the death of controller or peers.

      main thread      SUB: plans ──► Runner.execute ──► PUSH: results (rank 0)
                       moves, probes ──► TierService (threads of its own, also for peers' questions)
      outbox thread    outcomes of moves, answers to probes ──► PUSH
      watchdog thread  monitors the SUB connection; if the controller is gone, or has ended this rank's epoch,
                       makes the process leave

A process lives for one epoch of its group (docs/protocol.md): it says hello, is welcomed, and only then meets the
other ranks and loads.
Idle means blocked in a poll: a rank that waits costs nothing. Only while a grammar is compiled, beside the steps,
the main thread wakes up more often to report it.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec
import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from trunkline.controller.messages import (
    LoadProgress,
    MoveOutcome,
    MovesDone,
    Probed,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
    WorkerReport,
)
from trunkline.runtime.process import RareLog, node_id, report_status
from trunkline.runtime.tracing import start as start_tracing
from trunkline.runtime.wire_flags import NOBLOCK
from trunkline.runtime.wire_keys import Role
from trunkline.runtime.wire_sockets import HANDSHAKE_FAILED, WirePeer
from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import PeerLostError, PlanError, RankRefusedError, WorkerError, can_never_work
from trunkline.worker.messages import (
    LEAVE_TOPIC,
    CompileGrammar,
    ForgetGrammar,
    Leave,
    LoadAdapter,
    Refused,
    Shutdown,
    StepPlan,
    TierOrder,
    UnloadAdapter,
    Welcome,
    WorkerMessage,
    member_topic,
    plan_topic,
    rank_topic,
)
from trunkline.worker.runner import Runner
from trunkline.worker.step_traces import StepTraces
from trunkline.worker.tiers.tier_service import TierService

EXIT_CONFIG: Final = 2
"""Exit code of a rank whose configuration can never work: starting it again would be of no use."""
EXIT_LEFT: Final = 3
"""Exit code of a rank whose epoch is over, or whose controller is gone: nothing is wrong with it, and another
process is to take its place."""
_HELLO_EVERY_S: Final = 1.0
_READY_EVERY_S: Final = 1.0
"""Seconds between repetitions of `WorkerReady` until the first plan: a controller may start late, or restart
before it sends a plan."""
_POLL_MS: Final = 250
"""Longest sleep of the idle main thread before it looks whether the controller is gone."""
_COMPILING_POLL_MS: Final = 3
"""Longest sleep of the main thread while a grammar is compiled: a request waits for this rank's report."""
_LEAVE_WITHIN_S: Final = 0.7
"""Time that the main thread has to leave by itself once the controller is gone, or the rank has given up."""
_LINGER_MS: Final = 500
_HEARTBEAT_MS: Final = 1000
"""Interval of ZeroMQ's heartbeats. When a host dies, its TCP connections stay open: silence is the only sign."""

log = structlog.get_logger()
_rare = RareLog("trunkline.worker")


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
        """End the monitoring of connections: the monitor socket gets its last event."""
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


class Watchdog:
    """Notices that the controller is gone, or has ended this rank's epoch; makes sure that the process leaves."""

    def __init__(self, link: Link) -> None:
        self.controller_gone = threading.Event()
        self.epoch = 0
        """The epoch of this rank; 0: none yet."""
        self._exit_code: int | None = None
        self._link = link
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def give_up(self, exit_code: int) -> None:
        """Note that the main thread is about to report a failure and to leave with this code.

        From now on an order to leave changes neither the report nor the code: the order may arrive before the
        report has been sent.
        """
        self._exit_code = exit_code

    def stop(self) -> None:
        """End the watchdog: the main thread has left its loop."""
        self._left.set()
        self._link.stop_monitor()
        self._thread.join()

    def _watch(self) -> None:
        monitor, leave = self._link.monitor, self._link.open_leave()
        try:
            if not self._controller_leaves(monitor, leave):
                return
            self.controller_gone.set()
            # The main thread may be in a long step or blocked in a collective whose peer has died as well; no
            # Python exception can reach it there.
            self._end_late()
        finally:
            monitor.close(linger=0)  # by the thread that used it: sockets are not thread-safe
            leave.close(linger=0)

    def _controller_leaves(self, monitor: zmq.Socket[bytes], leave: zmq.Socket[bytes]) -> bool:
        """Wait until the controller is gone; return False if the main thread left first."""
        connected = False
        poller = zmq.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(leave, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                if socket is leave:
                    self._obey(leave.recv_multipart()[-1])
                    continue
                event = recv_monitor_message(monitor)
                kind = event["event"]
                if kind == zmq.EVENT_MONITOR_STOPPED:
                    return False
                if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    connected, self._link.is_refused = True, False
                    self._link.connect_leave(leave)
                elif connected:
                    return True
                elif kind & HANDSHAKE_FAILED:
                    self._link.is_refused = True
                    reason = self._link.peer.explain(event)
                    _rare.warning("the controller refuses this rank", time.monotonic(), reason=reason)

    def _end_late(self) -> None:
        """End the process unless the main thread leaves in time."""
        if not self._left.wait(_LEAVE_WITHIN_S):
            os._exit(EXIT_LEFT if self._exit_code is None else self._exit_code)

    def _obey(self, payload: bytes) -> None:
        try:
            order = msgspec.msgpack.decode(payload, type=Leave)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        if not 0 < self.epoch <= order.epoch:
            return
        if self._exit_code is not None:
            self._end_late()
            return
        log.warning("this rank's epoch is over", epoch=self.epoch)
        # Whatever the main thread does, also if it waits for a GPU that waits for a dead peer: its state is worth
        # nothing without the other ranks', and what is on disk says itself whether it is whole.
        os._exit(EXIT_LEFT)


def serve(config: WorkerConfig, load: Callable[[WorkerConfig, Callable[[str, float], None]], Runner]) -> int:
    """Run a rank until it is told to leave; return the exit code.

    Args:
        load: `Runner.load`.

    A failure of any kind is reported as `WorkerFailed`. The exit code is then 1; `EXIT_CONFIG` if the failure will
    come again however often the rank is started; `EXIT_LEFT` if another rank or the controller has failed.
    """
    link = Link(config)
    watchdog = Watchdog(link)
    watchdog.start()
    try:
        welcome = _wait_for_welcome(link, watchdog)
        if welcome is None:
            return EXIT_LEFT if watchdog.controller_gone.is_set() else 0
        return _serve_epoch(_welcomed(config, welcome), link, watchdog, load)
    except PeerLostError as error:
        # Nothing is wrong with this rank; but without the others its epoch is over.
        watchdog.give_up(EXIT_LEFT)
        log.warning("the group is lost", error=str(error))
        link.offer(WorkerFailed(config.rank, str(error), link.incarnation, is_consequence=True))
        return EXIT_LEFT
    except RankRefusedError as error:  # the controller knows
        log.error(str(error))
        return 1
    except Exception as error:  # whatever it is, the controller must hear of it
        is_final = can_never_work(error)
        code = EXIT_CONFIG if is_final else 1
        watchdog.give_up(code)
        if is_final:
            log.error("this configuration cannot work", error=str(error))
        else:
            log.error("rank failed", error=str(error), exc_info=True)
        reason = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
        link.offer(WorkerFailed(config.rank, reason, link.incarnation))
        return code
    finally:
        watchdog.stop()
        link.close()


def _welcomed(config: WorkerConfig, welcome: Welcome) -> WorkerConfig:
    """Return the configuration of a rank that belongs to an epoch, with the controller's limits of a step."""
    if welcome.token_budget > 1 and welcome.max_rows > 0:
        config = msgspec.structs.replace(config, token_budget=welcome.token_budget, max_rows=welcome.max_rows)
    return config.of_epoch(welcome.epoch)


def _wait_for_welcome(link: Link, watchdog: Watchdog) -> Welcome | None:
    """Say hello until the controller welcomes this process to an epoch; return None if the process is to leave."""
    next_hello = 0.0
    report_status(link.status_path, "starting")
    while not watchdog.controller_gone.is_set():
        now = time.monotonic()
        if now >= next_hello:
            link.connect_again()
            link.say_hello()
            next_hello = now + _HELLO_EVERY_S
        message = link.receive(_POLL_MS)
        if isinstance(message, Shutdown):
            return None
        if isinstance(message, Refused):
            raise RankRefusedError(f"the controller refuses this rank: {message.reason}")
        if isinstance(message, Welcome):
            watchdog.epoch = message.epoch
            link.enter(message.epoch)
            return message
    log.error("the controller is gone")
    return None


def _serve_epoch(
    config: WorkerConfig,
    link: Link,
    watchdog: Watchdog,
    load: Callable[[WorkerConfig, Callable[[str, float], None]], Runner],
) -> int:
    outbox = Outbox(config, link)
    try:
        runner = load(config, _progress(config, link, watchdog))
        tiers = TierService(config, runner.copier, outbox.put, runner.head_shard)
        if config.rank == 0:
            tiers.try_remote()
        tracer = start_tracing(config.otlp_endpoint, "worker", f"{config.group}/rank-{config.rank}")
        traces = StepTraces(tracer, config.rank, config.group_label, config.epoch)
        try:
            return _loop(config, link, watchdog, runner, tiers, traces)
        finally:
            traces.close()
    finally:
        outbox.close()


def _progress(config: WorkerConfig, link: Link, watchdog: Watchdog) -> Callable[[str, float], None]:
    def progress(stage: str, fraction: float) -> None:
        if watchdog.controller_gone.is_set():
            raise PeerLostError("the controller left while this rank was loading")
        link.offer(LoadProgress(config.rank, stage, fraction))

    return progress


def _loop(
    config: WorkerConfig, link: Link, watchdog: Watchdog, runner: Runner, tiers: TierService, traces: StepTraces
) -> int:
    ready = WorkerReady(
        rank=config.rank,
        epoch=config.epoch,
        pid=os.getpid(),
        num_blocks=runner.num_blocks,
        block_bytes=runner.block_bytes,
        device=config.device,
        host_slots=runner.host_slots,
        swap_us_per_block=runner.swap_us_per_block,
        disk_slots=tiers.disk_slots,
        tier_problem=tiers.problem,
        has_remote=tiers.has_remote,
        exports=tiers.exports,
        **runner.windows,
    )
    log.info("ready", blocks=runner.num_blocks, block_bytes=runner.block_bytes, device=config.device)
    report_status(config.status_path, "ready", epoch=config.epoch)
    started, next_ready = False, 0.0
    while True:
        now = time.monotonic()
        if not started and now >= next_ready:
            link.offer(ready)
            next_ready = now + _READY_EVERY_S
        runner.launched.report_ended(link.report)
        poll_ms = _COMPILING_POLL_MS if runner.is_preparing else _POLL_MS
        message = link.receive(runner.launched.patience_ms(poll_ms))
        started |= message is not None and not isinstance(message, Welcome)  # which may come twice
        if isinstance(message, StepPlan):
            began = time.monotonic()
            runner.launch(message)
            if traces.is_on:
                traces.step(message, began, time.monotonic())
        elif isinstance(message, TierOrder):
            tiers.take(message)
        elif isinstance(message, CompileGrammar):
            runner.compile_grammar(message)
        elif isinstance(message, ForgetGrammar):
            runner.forget_grammar(message.grammar)
        elif isinstance(message, LoadAdapter):
            runner.adapters.load(message)
        elif isinstance(message, UnloadAdapter):
            runner.adapters.unload(message.key)
        elif isinstance(message, Shutdown):
            log.info("shutting down")
            return 0
        elif watchdog.controller_gone.is_set():
            log.error("the controller is gone")
            return EXIT_LEFT
        elif message is None and traces.is_on and not runner.is_preparing:
            traces.idle()
        runner.check()
        for report in runner.reports():
            link.report(report)
