"""The controller's side of its worker group: who is there, plans out, reports in (docs/protocol.md).

`trunkline.controller.service.membership` decides who belongs to the group; here are the sockets. The broadcast
starts only when every rank's subscription to its epoch's plans has been seen and each has said `WorkerReady`; the
plan socket never drops, and at most two steps are unanswered.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Final

import msgspec
import structlog
import zmq

from trunkline.controller.config import ControllerConfig
from trunkline.controller.messages import (
    GrammarReady,
    LoadProgress,
    MovesDone,
    Probed,
    StepResult,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
    WorkerReport,
)
from trunkline.controller.service.membership import REASON_WITHIN_S, GroupLostError, Membership, disagreement
from trunkline.controller.service.validation import problem_of_report
from trunkline.runtime.host import is_worker, node_id
from trunkline.runtime.rare_log import RareLog
from trunkline.runtime.wire_gate import MESSAGE_BYTES_MAX, SUBSCRIPTION_BYTES_MAX, Gate
from trunkline.runtime.wire_keys import Role
from trunkline.worker.messages import (
    LEAVE_TOPIC,
    Leave,
    Refused,
    Shutdown,
    Welcome,
    WorkerMessage,
    plan_topic,
    rank_topic,
)

PLANS_QUEUED_MAX: Final = 4096
"""Messages that a rank has not read. Steps are at most two of them; the others are orders to its tiers, which it
reads between two steps, and whose number is bounded by the moves in flight."""
LEAVE_EVERY_S: Final = 0.5
"""Until the next epoch has its members, who is left of the last one is told so again: it may just have
connected."""
_HEARTBEAT_MS: Final = 1000
"""Over TCP a dead host closes nothing: silence is the only sign."""

log = structlog.get_logger()
_rare = RareLog("trunkline.controller.service.workers")


class WorkerGroup:
    """Sockets and membership of a group's ranks."""

    def __init__(self, gate: Gate, config: ControllerConfig) -> None:
        self.plans = gate.context.socket(zmq.XPUB)
        self.plans.setsockopt(zmq.XPUB_NODROP, 1)
        self.plans.setsockopt(zmq.SNDHWM, PLANS_QUEUED_MAX)
        self.plans.setsockopt(zmq.LINGER, 1000)
        if config.plan_endpoint.startswith("tcp:"):
            self.plans.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            self.plans.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_MS)
        self.reports = gate.context.socket(zmq.PULL)
        gate.bind(self.plans, config.plan_endpoint, Role.WORKER, SUBSCRIPTION_BYTES_MAX)
        gate.bind(self.reports, config.report_endpoint, Role.WORKER, MESSAGE_BYTES_MAX)
        self._membership = Membership(config.tp, node_id(), config.epoch or _wall_ms())
        self._terms = config.terms
        self._step_limits = (config.token_budget, config.max_rows)
        self._progress: dict[int, LoadProgress] = {}
        self._leave_at = 0.0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[WorkerReport] = msgspec.msgpack.Decoder(WorkerReport)

    @property
    def epoch(self) -> int:
        """The one that runs or is being formed."""
        return self._membership.epoch

    @property
    def is_formed(self) -> bool:
        """Whether the epoch has its ranks, who may still be loading."""
        return self._membership.is_formed

    @property
    def is_complete(self) -> bool:
        """Every rank has subscribed and loaded."""
        return self._membership.is_complete

    @property
    def ready(self) -> dict[int, WorkerReady]:
        """Ranks that have loaded."""
        return self._membership.ready

    @property
    def num_blocks(self) -> int:
        """Blocks that every rank can hold."""
        return min(report.num_blocks for report in self.ready.values())

    @property
    def host_slots(self) -> int:
        """Blocks that every rank's host pool holds."""
        return min(report.host_slots for report in self.ready.values())

    @property
    def swap_us_per_block(self) -> float:
        """Time of the slowest rank."""
        return max(report.swap_us_per_block for report in self.ready.values())

    @property
    def disk_slots(self) -> int:
        """Blocks that every rank's disk tier holds; 0 if a rank has none."""
        return min(report.disk_slots for report in self.ready.values())

    @property
    def has_remote(self) -> bool:
        """Whether every rank has been given a remote tier."""
        return all(report.has_remote for report in self.ready.values())

    @property
    def tier_problems(self) -> list[str]:
        """Why ranks go without a tier that was asked for."""
        return [f"rank {r.rank}: {r.tier_problem}" for r in self.ready.values() if r.tier_problem]

    def describe(self) -> str:
        """For the person who waits: what each rank is doing."""
        progress = {rank: f"{report.stage} {report.fraction:.0%}" for rank, report in self._progress.items()}
        return self._membership.describe(progress)

    def send(self, message: WorkerMessage) -> None:
        """Broadcast a plan, or what concerns grammars or tiers.

        Raises:
            GroupLostError: a rank has stopped reading.
        """
        try:
            self._send(plan_topic(self.epoch), message)
        except zmq.Again:
            raise GroupLostError("a rank takes no more step plans") from None

    def _send(self, topic: bytes, message: WorkerMessage | Leave) -> None:
        self.plans.send_multipart([topic, self._encoder.encode(message)], zmq.NOBLOCK)

    def _welcome(self, hello: WorkerHello) -> None:
        with suppress(zmq.Again):  # it says hello again
            self._send(
                rank_topic(hello.rank, hello.incarnation),
                Welcome(hello.incarnation, self.epoch, *self._step_limits),
            )

    def _refuse(self, hello: WorkerHello, reason: str) -> None:
        log.error("a rank is refused", reason=reason)
        with suppress(zmq.Again):  # it says hello again
            self._send(rank_topic(hello.rank, hello.incarnation), Refused(hello.incarnation, reason))

    def reform(self, now: float) -> None:
        """While there is no epoch: see to it that the old one's ranks leave, and that the next one begins."""
        for hello in self._membership.to_kill(now):
            if is_worker(hello.pid):
                log.warning("a rank of an old epoch does not leave and is killed", rank=hello.rank, pid=hello.pid)
                with suppress(OSError):
                    os.kill(hello.pid, signal.SIGKILL)
        if self.is_formed:
            return
        if now >= self._leave_at:
            self._leave_at = now + LEAVE_EVERY_S
            self._say_leave()
        for hello in self._membership.form(now):
            self._welcome(hello)

    def _say_leave(self) -> None:
        with suppress(zmq.Again):
            self._send(LEAVE_TOPIC, Leave(self.epoch - 1))

    @property
    def patience_s(self) -> float:
        """After so long `reform` and `check_loss` should be called again although nothing has come."""
        if self._membership.is_ending:
            return REASON_WITHIN_S
        return 1.0 if self.is_formed else LEAVE_EVERY_S

    def lose(self, now: float) -> None:
        """The epoch is over: all its ranks are to leave, and others are waited for."""
        self._membership.lose(_wall_ms(), now)
        self._progress.clear()
        self._leave_at = now

    def shut_down(self, seconds_max: float = 3.0) -> None:
        """Ask all ranks to leave after the steps they have, and wait for them: a rank whose connection
        closes first would take that for our death. Bounded well below the supervisor's patience."""
        for rank, incarnation in self._membership.present:
            with suppress(zmq.Again):  # it reads no more: it will not leave by itself, the others may
                self._send(rank_topic(rank, incarnation), Shutdown())
        deadline = time.monotonic() + seconds_max
        while self._membership.present and (left := deadline - time.monotonic()) > 0:
            self.plans.poll(int(left * 1000) + 1)
            self.membership_events(time.monotonic())

    def check_loss(self, now: float) -> None:
        """To be called after `membership_events` and `receive`.

        Raises:
            GroupLostError: a rank that was there is gone.
        """
        self._membership.check_loss(now)

    def membership_events(self, now: float) -> None:
        """Read subscriptions and their ends."""
        while True:
            try:
                event = self.plans.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if event[:1] == b"\x01":
                self._membership.subscribed(event[1:])
            else:
                self._membership.unsubscribed(event[1:], now)

    def receive(self, now: float) -> list[StepResult | GrammarReady | MovesDone | Probed]:
        """Read all waiting reports; those among them that are for the engine.

        Raises:
            GroupLostError: a rank says that it cannot go on, or something that is no report.
        """
        results: list[StepResult | GrammarReady | MovesDone | Probed] = []
        while True:
            try:
                report = self._decoder.decode(self.reports.recv(zmq.NOBLOCK))
            except zmq.Again:
                return results
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise GroupLostError(f"a worker's report cannot be decoded: {error}") from error
            if nonsense := problem_of_report(report, self._membership.tp):
                if not isinstance(report, WorkerHello | LoadProgress):
                    raise GroupLostError(f"a worker's report makes no sense: {nonsense}")
                # Of a process that need not be a member: those who are go on.
                _rare.warning("a worker's report makes no sense; ignored", time.monotonic(), problem=nonsense)
                continue
            match report:
                case StepResult() | GrammarReady() | MovesDone() | Probed():
                    results.append(report)
                case WorkerHello() if problem := disagreement(self._terms, report):
                    self._refuse(report, problem)
                case WorkerHello():
                    if self._membership.hello(report):
                        self._welcome(report)
                case WorkerReady():
                    if self._membership.says_ready(report):
                        self._say_leave()
                case LoadProgress():
                    self._progress[report.rank] = report
                case WorkerFailed():
                    self._membership.failed(report, now)

    def close(self) -> None:
        self.plans.close()
        self.reports.close()


def _wall_ms() -> int:
    """Greater than any that an earlier controller of this group has seen, as far as clocks can be trusted."""
    return time.time_ns() // 1_000_000
