"""The controller process: one thread, one poll loop around the pure engine.

    reports (PULL) ───►┐                          ┌─► plans, orders (XPUB)
    routers (ROUTER) ─►├─ [event, …] ─► step ─► Ready ─► disk changes (index file)
    signals, deadlines ┘                          └─► outputs (ROUTER), log

A turn of the loop collects what has arrived as events, gives them to `Engine.step`, and does what its `Ready` says
in the order of its fields: when a result arrives, the next plan goes out before the outputs do, but behind first
tokens while workers have another step. An idle loop sleeps in `poll`; it wakes each second to see silent routers.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from typing import Final

import msgspec
import structlog
import zmq

from trunkline.controller.config import ControllerConfig
from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import (
    CallTexts,
    EndAdapter,
    EndAll,
    EndWaiting,
    ExpectRequest,
    Ready,
    WorkersBack,
    WorkersLost,
)
from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.engine.validation import (
    is_request_number,
    problem_of_call,
    problem_of_prefetch,
    problem_of_submit,
    request_of_prefetch,
)
from trunkline.controller.engine_config import ConfigError
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
    Ping,
    Prefetch,
    RouterRequest,
    Submit,
    Told,
    WentOn,
)
from trunkline.controller.reports import StepResult
from trunkline.controller.sequences.sequence import Request
from trunkline.controller.service.membership import GroupLostError
from trunkline.controller.service.offers import LIVE
from trunkline.controller.service.request_log import RequestLog
from trunkline.controller.service.router_events import event_of
from trunkline.controller.service.routers import ROUTER_SHIFT, Routers
from trunkline.controller.service.status import Descriptions, EventPublisher, adapters_in_use, state_of
from trunkline.controller.service.turns import WRITE_SECONDS_MAX, Deadlines, Leaving, Pending, Status
from trunkline.controller.service.wakeup import WakeUps
from trunkline.controller.service.workers import WorkerGroup
from trunkline.controller.storage.persistence import Persistence
from trunkline.router.messages import Finished, FinishReason, Flushed, ModulesReply, Outputs, Prefetched
from trunkline.runtime.process import report_status
from trunkline.runtime.tracing import start as start_tracing
from trunkline.runtime.wire_gate import Gate
from trunkline.worker.messages import WorkerMessage

EXIT_CONFIG: Final = 2
"""Exit code of a controller whose configuration can never work, so that it is not started again."""
POLL_SECONDS_MAX: Final = 1.0
_STOPPING = "the controller is stopping"
READ_SECONDS_MAX = 2.0
"""Longest time in seconds for which a controller that stops waits for routers to read how their streams end."""

log = structlog.get_logger()


class ControllerService:
    """The sockets and the engine: `run` is the loop, `_turn` a turn of it, and in `_step` the engine decides."""

    def __init__(self, config: ControllerConfig) -> None:
        """
        Raises:
            DatabaseInUseError: another process has the disk tier's index.
            WireKeysError: the file of wire keys cannot be used.
        """
        self.config = config
        self.gate = Gate(zmq.Context(), config.wire_keys)
        self.group = WorkerGroup(self.gate, config)
        self.routers = Routers(self.gate, config.router_endpoint, config.local_endpoint)
        self.events = EventPublisher(self.gate, config.events_endpoint)
        self.descriptions = Descriptions()
        self._leaving = Leaving()
        self.persistence = Persistence(
            config.index_path, bytes.fromhex(config.tier_fingerprint), time.time(), time.monotonic()
        )
        self.engine: Engine | None = None
        self._pending = Pending()
        self._deadlines = Deadlines()
        self.status = Status.STARTING
        self.detail = ""
        tracer = start_tracing(config.otlp_endpoint, "controller", f"controller-{config.group}")
        self._request_log = RequestLog(tracer, config.member or str(config.group))
        self._wake_ups = WakeUps()

    def run(self) -> int:
        """Serve until the controller is drained; return 0.

        If workers are lost, wait for new ones. If the configuration can never work, return `EXIT_CONFIG`.
        """
        # Ctrl-C in a terminal reaches all processes; the supervisor alone decides what follows from it.
        self._wake_ups.install(ignore_interrupts=bool(self.config.parent_pid))
        report_status(self.config.status_path, self.status, epoch=self.group.epoch)
        poller = zmq.Poller()
        for readable in (self.group.plans, self.group.reports, self.routers.socket, self._wake_ups.fileno()):
            poller.register(readable, zmq.POLLIN)
        self.gate.open()
        try:
            while not self._drain():
                self._turn({readable for readable, _ in poller.poll(self._poll_ms())})
            self._let_routers_read()
            self.group.shut_down()
            log.info("stopped")
            return 0
        except ConfigError as error:  # the ranks have too few blocks
            self._fail(str(error))
            return EXIT_CONFIG
        finally:
            self.close()

    def close(self) -> None:
        """Close the sockets and the files."""
        self.gate.close()
        self.group.close()
        self.routers.close()
        self.events.close()
        self.gate.context.term()
        self.persistence.close()
        self._request_log.close()
        self._wake_ups.close()

    # -- stopping

    def _stop_requested(self) -> None:
        """Begin to drain; at the second request, stop without waiting any longer."""
        if self.status in (Status.STARTING, Status.READY):
            now = time.monotonic()
            self._deadlines.drain = now + self.config.drain_seconds
            if self.engine is not None:
                for call in self.engine.open_calls():  # requests do not depend on them
                    self._pending.cancel(call)
                # Routers send the waiting requests to other controllers, which can begin at once.
                self._pending.events.append(EndWaiting(FinishReason.DRAINING, _STOPPING))
                self.engine.hurry_writes()
                if self.engine.scheduler.kv.tree.node_count:
                    self._leaving.wait.begin(len(self.routers.indices()), now)
            self._set_status(Status.DRAINING, _STOPPING)
        else:
            self._deadlines.drain = 0.0

    def _drain(self) -> bool:
        """Bring a drain one step further, if there is one; return whether it is over."""
        if self.status is not Status.DRAINING:
            return False
        is_handed = self._leaving.wait.is_over(time.monotonic())
        if self.engine is None or (self.engine.is_written and is_handed):
            return True
        if self.engine.is_away:
            self._deadlines.drain = 0.0  # no new workers are waited for: routers continue the requests elsewhere
        if self.engine.is_idle and is_handed and not self.engine.is_away:
            # No client waits any more. Wait a moment for chunks that are not on disk yet.
            self._deadlines.writes = min(self._deadlines.writes, time.monotonic() + WRITE_SECONDS_MAX)
            if time.monotonic() >= self._deadlines.writes:
                return True
        if time.monotonic() < self._deadlines.drain:
            return False
        detail = "the controller was stopped before the request ended"
        self._pending.events.append(EndAll(detail, FinishReason.DRAINING))
        self._step(time.monotonic())
        return True

    def _let_routers_read(self) -> None:
        """Wait for routers that have not read how their streams end: closing a connection loses what it holds."""
        now = time.monotonic()
        until, silence = now + READ_SECONDS_MAX, self.config.router_silence_seconds_max
        self._pending.state_for.update(self.routers.behind(now, silence))  # to send shows which routers are gone
        while now < until and not self._wake_ups.read():
            self._send_state()
            if not self.routers.behind(now, silence):
                return
            self.routers.socket.poll(int((until - now) * 1000) + 1)
            self._read_routers(now := time.monotonic())

    # -- a turn of the loop

    def _poll_ms(self) -> int:
        """Return for how many milliseconds the loop may sleep if nothing arrives."""
        left = min(self._deadlines.next() - time.monotonic(), POLL_SECONDS_MAX)
        return math.ceil(1000 * max(0.0, left))

    def _turn(self, readable: set[object]) -> None:
        """Collect what has arrived, let the engine take a step, and do what follows from it. Only what is
        `readable` is read: to learn that a ZeroMQ socket has nothing takes several system calls.

        After a pause the processor's caches hold nothing of this program, and each function costs microseconds.
        So until `Deadlines.look`, a turn that has only a step's result does nothing else, and one that has only
        what routers say does everything else behind the engine's step. A calm step changes no chunk and no worker.
        """
        now = time.monotonic()
        has_one = now < self._deadlines.look and len(readable) == 1
        only_reports = has_one and self.group.reports in readable
        only_routers = has_one and self.routers.socket in readable
        if only_routers:
            self._read_routers(now)
            self._step(now)
            readable = set()
        if not only_reports:
            self._read_signals(readable)
        only_result = self._read_workers(readable, now, only_reports)
        if not only_result:
            self.group.reform(now)
            self._try_start(now)
            if self.routers.socket in readable:
                self._read_routers(now)
            self._forget_silent_routers(now)
        is_calm = False
        if self._pending.events or not only_routers:
            is_calm = self._step(now)
        if not (only_result and is_calm):
            self.events.turn(self.engine, now)
        if not only_result:
            self._look_around(now)

    def _read_signals(self, readable: set[object]) -> None:
        for number in self._wake_ups.read() if self._wake_ups.fileno() in readable else b"":
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop_requested()

    def _read_workers(self, readable: set[object], now: float, only_reports: bool) -> bool:
        """Take what the workers say; return whether this turn has a step's result, and nothing else.

        Args:
            only_reports: whether nothing but reports can be read, and it is not yet time to look at everything.
        """
        reports = []
        try:
            if self.group.plans in readable:
                self.group.membership_events(now)
            reports = self.group.receive(now) if self.group.reports in readable else []
            self._pending.events += reports if self.engine is not None else ()
            if only_reports and len(reports) == 1 and isinstance(reports[0], StepResult):
                return True
            self.group.check_loss(now)
        except GroupLostError as error:
            self._lose(str(error), now)
        return False

    def _read_routers(self, now: float) -> None:
        """Take what the routers want."""
        for router, message in self.routers.receive(now):
            self._handle(router, message, now)

    def _forget_silent_routers(self, now: float) -> None:
        """Give up routers that are gone. Call this once their messages are read."""
        self.routers.look(now)
        for router in self.routers.silent(now, self.config.router_silence_seconds_max):
            self.routers.forget(router)
            self._leaving.wait.gone(router, len(self.routers.indices()), now)
            if self.engine is not None:
                aborted = self._pending.abort_all(router, self.engine)
                (log.warning if aborted else log.info)(
                    "a router is gone; its requests were aborted", requests=aborted
                )

    def _look_around(self, now: float) -> None:
        """Do what need not be done with each step, and note when to do it again."""
        if self.engine is not None:
            self.group.loss.look(self.engine.oldest_step, now)
            if reason := self.group.loss.why_hanging(self.engine.predicted_step_s):
                self._lose(reason, now)
                self._step(now)
            self._request_log.look(self.engine, (), now)
        if self.group.adapters.turn(lambda: adapters_in_use(self.engine)):
            self._pending.state_for.update(self.routers.indices())
        self._send_state()
        for router, reply in self.group.adapters.take_replies():
            self.routers.send(router, reply)
        for router, description in self.descriptions.turn(self.engine, now):
            self.routers.send(router, description)
        for router, offers in self._leaving.offering.turn(self.engine, now):
            self.routers.send(router, offers)
        wait = 0.0 if self.descriptions.is_busy or self._leaving.offering.is_busy else self.group.patience_s
        self._deadlines.look = min(self.events.next_deadline, self._leaving.wait.deadline, now + wait)

    def _step(self, now: float) -> bool:
        """Give the engine the events of this turn, and do what it asks for until it can plan no more steps; return
        whether that was a calm step."""
        is_calm = True
        while self.engine is not None:
            events, self._pending.events = self._pending.events, []
            ready = self.engine.begin(events, now)
            reason = self._act(self.engine, ready) or ready.problem
            if ready.has_rest:
                is_calm = False
                ready = self.engine.finish(ready, now)
                reason = self._act(self.engine, ready) or reason
            if self.config.debug_checks:
                check_integrity(self.engine.scheduler)
            if reason:
                self._lose(reason, now)
            if not (ready.again or self._pending.events):
                self._deadlines.engine = ready.wake_at
                return is_calm
        return False

    def _act(self, engine: Engine, ready: Ready) -> str:
        """Do what the engine asks for, in the order of the fields of `Ready`; outputs and log lines in any case.
        Return why the workers are lost, if a rank takes no more messages."""
        reason = self._send((*ready.grammars, ready.plan) if ready.plan is not None else ready.grammars)
        if (outputs := ready.outputs) is not None:
            self.routers.publish(outputs)
            if outputs.modules or outputs.replies:
                self.routers.answer(outputs, self.group.block_bytes)
        if ready.disk_changes:
            self.persistence.note(ready.disk_changes)
        if ready.orders:
            reason = self._send(ready.orders) or reason
        if ready.ended:
            self._request_log.look(engine, ready.ended, time.monotonic())
        return reason

    def _send(self, messages: Sequence[WorkerMessage]) -> str:
        """Send messages to all workers; return why that is not possible any more, "" if it is."""
        try:
            for message in messages:
                self.group.send(message)
        except GroupLostError as error:
            return str(error)
        return ""

    # -- losing workers, and going on with others

    def _lose(self, reason: str, now: float) -> None:
        """Give up the workers: requests wait for new ones."""
        if not self.group.is_formed:
            self.routers.rare.warning("a process that is no member sent nonsense", now, reason=reason)
            return
        log.error("the workers are lost; others are waited for", reason=reason, epoch=self.group.epoch)
        self._deadlines.look = -math.inf
        self.group.lose(reason, now)
        if self.engine is not None:
            self._pending.events.append(WorkersLost(self.group.epoch))
        if self.status is Status.READY:
            self._set_status(Status.STARTING, reason)

    def _set_status(self, status: Status, detail: str) -> None:
        """Change the status; tell the supervisor now, and the routers after the engine's next step."""
        self.status, self.detail = status, detail
        self._deadlines.look = -math.inf
        report_status(self.config.status_path, status, detail, epoch=self.group.epoch)
        self._pending.state_for.update(self.routers.indices())

    def _try_start(self, now: float) -> None:
        """Start, or go on with new workers, if all ranks are ready; end the requests if that takes too long.

        Raises:
            ConfigError: the ranks have too few blocks.
        """
        has_waiting = self.engine is not None and self.engine.is_away and not self.engine.is_idle
        if has_waiting and self.group.loss.is_too_long(now):
            self._pending.events.append(EndAll(f"{self.group.loss.reason}; no others have come in time"))
        if self.status is not Status.STARTING:
            return
        self.detail = "; ".join(filter(None, [self.group.loss.reason, self.group.describe()]))
        if not self.group.is_equipped:
            return
        group = self.group
        limits = group.engine_config(self.config)
        problems = group.tier_problems
        if self.persistence.problem:
            problems.append(self.persistence.problem)
            limits = msgspec.structs.replace(limits, disk_slots=0)
        for problem in problems:
            log.warning("a tier is not used", problem=problem)
        limits.validate()
        stored = self.persistence.load(limits.disk_slots if limits.prefix_cache else 0, now)
        if self.engine is None:
            self.engine = Engine(limits, group.epoch, self.persistence.first_generation, stored, now)
        else:
            for key in adapters_in_use(self.engine) - group.adapters.present - {b""}:
                self._pending.events.append(EndAdapter(key, group.adapters.why_gone(key)))
            self._pending.events.append(WorkersBack(limits, stored))
        group.loss.ended()
        log.info("ready", epoch=group.epoch, blocks=limits.num_blocks, max_context=limits.longest_plain)
        self._set_status(Status.READY, "")

    # -- what routers ask for

    def _handle(self, router: int, message: RouterRequest, now: float) -> None:
        """Answer a router, or note what it wants for the engine's next step."""
        match message:
            case Submit():
                self._submit(router, message)
            case Ping():
                self.routers.note_read(router, message.read)
                self._pending.state_for.add(router)
            case FlushCache() if self.engine is None:
                self.routers.send(router, Flushed(0, message.ticket, 0))
            case Abort() | Told() | WentOn() | FlushCache() | Forget():
                event = None if self.engine is None else event_of(router, message, self.config.vocab_size)
                self._pending.events += [event] if event is not None else ()
            case Prefetch():
                self._prefetch(router, message)
            case ModulesCall():
                self._modules_call(router, message)
            case EventsCall():
                self.routers.send(router, self.events.log.answer(message, 0, now))
            case DescribeTree():
                self.descriptions.ask(router, message)
            case OffersCall():
                self._leaving.offering.ask(router, message)
                if message.kind == LIVE:
                    self._leaving.wait.asked(router)
            case Handed():
                self._leaving.wait.handed(router)
            case AdapterCall():
                self.group.call_adapter(router, message)

    def _submit(self, router: int, message: Submit) -> None:
        refusal = self._refusal(message)
        if refusal is not None:
            self._request_log.refused(message.request_id, refusal.reason, refusal.detail)
            self.routers.send(router, Outputs(0, finished=[refusal]))
            return
        trace = self._request_log.ids(message.trace)
        self._pending.events.append(Request.of(router << ROUTER_SHIFT | message.request, message, trace))

    def _prefetch(self, router: int, message: Prefetch) -> None:
        if self.engine is None or problem_of_prefetch(message, self.config.vocab_size):
            self.routers.send(router, Prefetched(0, message.ticket, 0, 0))
        else:
            caller, request = (router, message.ticket), request_of_prefetch(message)
            self._pending.events.append(ExpectRequest(caller, request, message.root, message.names))

    def _modules_call(self, router: int, call: ModulesCall) -> None:
        problem = problem_of_call(call, self.config.vocab_size) or self.group.adapters.problem_of(call.salt)
        if not is_request_number(call.ticket):
            return
        frees = call.op in ("cancel", "unpin", "forget")  # allowed while the controller stops, too
        if self.engine is None or not (frees or self.status in (Status.READY, Status.STARTING)):
            problem = problem or f"the group is {self.status}: {self.detail}"
        if problem:
            self.routers.send(router, ModulesReply(0, call.ticket, "failed", problem))
            return
        self._pending.events.append(CallTexts(router << ROUTER_SHIFT | call.ticket, call))

    def _refusal(self, message: Submit) -> Finished | None:
        """Return the answer to a request that must be refused; None if the engine may have it."""
        if self.status is Status.DRAINING:
            return Finished(message.request, FinishReason.DRAINING, self.detail)
        if self.status is Status.FAILED:
            return Finished(message.request, FinishReason.ENGINE_FAILED, self.detail)
        if self.engine is None or self.group.loss.is_too_long(time.monotonic()):
            return Finished(message.request, FinishReason.ENGINE_FAILED, f"the group is starting: {self.detail}")
        if problem := problem_of_submit(message, self.config.vocab_size):
            return Finished(message.request, FinishReason.INVALID, problem)
        if problem := self.group.adapters.problem_of(message.salt):  # other groups may have it
            return Finished(message.request, FinishReason.ENGINE_FAILED, problem)
        return None

    def _send_state(self) -> None:
        """Send the state to the routers that wait for it: after a ping, or a change of status."""
        for router in self._pending.state_for:
            group, config = self.group, self.config
            facts = (group.block_bytes, config.identity, group.exports, config.role, group.adapters.loaded)
            self.routers.send(router, state_of(self.engine, self.status, self.detail, *facts))
        self._pending.state_for.clear()

    def _fail(self, reason: str) -> None:
        """Tell every router that this controller fails, so that clients get an error."""
        log.error("this group cannot work", reason=reason)
        self._set_status(Status.FAILED, reason)
        self._pending.events.append(EndAll(reason))
        self._read_routers(now := time.monotonic())  # messages that have not been read yet get an answer, too
        self._step(now)
        self._send_state()
