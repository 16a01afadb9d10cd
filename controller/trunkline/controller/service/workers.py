"""The controller's sockets to its workers: plans go out, reports and subscriptions come in (docs/protocol.md).

`trunkline.controller.service.membership` decides which processes belong to the group. The broadcast of plans
starts only when every rank has subscribed to its epoch's plans and has sent `WorkerReady`; the plan socket never
drops a message, and at most two steps are unanswered.
"""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import suppress
from typing import Final

import msgspec
import structlog
import zmq

from trunkline.controller.config import ControllerConfig
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import AdapterCall
from trunkline.controller.reports import (
    COUNT_MAX,
    TEXT_CHARACTERS_MAX,
    AdapterReady,
    EngineReport,
    GrammarReady,
    LoadProgress,
    MovesDone,
    Probed,
    PromptLogprobs,
    StepResult,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
    WorkerReport,
)
from trunkline.controller.service.adapters import Adapters
from trunkline.controller.service.membership import (
    REASON_WITHIN_S,
    GroupLostError,
    Membership,
    WorkerLoss,
    disagreement,
)
from trunkline.kvstore.adapters import KEY_BYTES
from trunkline.runtime.process import RareLog, is_worker, node_id
from trunkline.runtime.wire_flags import MORE, NOBLOCK
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
"""Largest number of messages that may wait for one rank to read them. At most two of them are steps; the others
are orders to the rank's tiers, which it reads between two steps, and whose number is bounded by the moves in
flight."""
LEAVE_EVERY_S: Final = 0.5
"""Seconds between two `Leave` messages to ranks of the last epoch, until the next one is formed: a rank may have
connected only after the message before."""
_HEARTBEAT_MS: Final = 1000
"""Interval of ZeroMQ's heartbeats. When a host dies, its TCP connections stay open: silence is the only sign."""

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
        self._topic = plan_topic(self._membership.epoch)
        """Of messages for the ranks of the epoch."""
        self.loss = WorkerLoss(config.step_timeout_s, config.resume_seconds_max)
        self._terms = config.terms
        self.adapters = Adapters(config.adapters, config.lora_rank_max, config.tp)
        self._step_limits = (config.token_budget, config.max_rows)
        self._vocab_size = config.vocab_size
        self._progress: dict[int, LoadProgress] = {}
        self._leave_at = 0.0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[WorkerReport] = msgspec.msgpack.Decoder(WorkerReport)

    @property
    def epoch(self) -> int:
        """Return the number of the epoch that runs or is being formed."""
        return self._membership.epoch

    @property
    def is_formed(self) -> bool:
        """Return whether the epoch has all its ranks; some may still be loading."""
        return self._membership.is_formed

    @property
    def is_complete(self) -> bool:
        """Return whether every rank has subscribed and loaded."""
        return self._membership.is_complete

    @property
    def is_equipped(self) -> bool:
        """Return whether the ranks are complete and have their adapters."""
        are_loaded = self.is_complete and self.adapters.are_loaded()
        self.send_adapter_orders()
        return are_loaded

    @property
    def ready(self) -> dict[int, WorkerReady]:
        """Return the ranks that have loaded, with what they reported."""
        return self._membership.ready

    def engine_config(self, config: ControllerConfig) -> EngineConfig:
        """Return the engine's configuration for ranks that are all ready, with what each of them can hold."""
        reports = self.ready.values()
        return config.engine(
            num_blocks=min(report.num_blocks for report in reports),
            host_slots=min(report.host_slots for report in reports),
            swap_us_per_block=max(report.swap_us_per_block for report in reports),
            disk_slots=min(report.disk_slots for report in reports),
            remote=all(report.has_remote for report in reports),
            window=max(report.window for report in reports) if all(report.window for report in reports) else 0,
            part_window=max(report.part_window for report in reports),
            whole_blocks=min(report.whole_blocks for report in reports),
        )

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a chunk on all ranks together; 0 before any rank has loaded."""
        return sum(report.block_bytes for report in self.ready.values())

    @property
    def exports(self) -> list[str]:
        """Return where the ranks export chunks to peers, by rank; empty unless all ranks are ready and export."""
        reports = [self.ready[rank].exports for rank in sorted(self.ready)]
        return reports if self.is_complete and all(reports) else []

    @property
    def tier_problems(self) -> list[str]:
        """Return why ranks run without a tier that was configured."""
        return [f"rank {r.rank}: {r.tier_problem}" for r in self.ready.values() if r.tier_problem]

    def describe(self) -> str:
        """Return what each rank is doing, as text for the operator."""
        progress = {rank: f"{report.stage} {report.fraction:.0%}" for rank, report in self._progress.items()}
        return self._membership.describe(progress)

    def send(self, message: WorkerMessage) -> None:
        """Broadcast a plan, or a message about grammars or tiers.

        Raises:
            GroupLostError: a rank has stopped reading.
        """
        try:
            self._send(self._topic, message)
        except zmq.Again:
            raise GroupLostError("a rank takes no more step plans") from None

    def _send(self, topic: bytes, message: WorkerMessage | Leave) -> None:
        self.plans.send(topic, MORE)
        self.plans.send(self._encoder.encode(message), NOBLOCK)

    def _welcome(self, hello: WorkerHello) -> None:
        with suppress(zmq.Again):  # the rank says hello again
            self._send(
                rank_topic(hello.rank, hello.incarnation),
                Welcome(hello.incarnation, self.epoch, *self._step_limits),
            )

    def _refuse(self, hello: WorkerHello, reason: str) -> None:
        log.error("a rank is refused", reason=reason)
        with suppress(zmq.Again):  # the rank says hello again
            self._send(rank_topic(hello.rank, hello.incarnation), Refused(hello.incarnation, reason))

    def reform(self, now: float) -> None:
        """Until an epoch is formed: make the old epoch's ranks leave, and form the next one if it can be."""
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
        """Return after how many seconds to call `reform` and `check_loss` again if no message has come."""
        if self._membership.is_ending:
            return REASON_WITHIN_S
        return 1.0 if self.is_formed else LEAVE_EVERY_S

    def lose(self, reason: str, now: float) -> None:
        """End the epoch: ask all its ranks to leave, and wait for new ones."""
        self.loss.began(reason, now)
        self.adapters.lost_workers()
        self._membership.lose(_wall_ms(), now)
        self._topic = plan_topic(self._membership.epoch)
        self._progress.clear()
        self._leave_at = now

    def shut_down(self, seconds_max: float = 3.0) -> None:
        """Ask all ranks to leave after the steps that they have, and wait until they have left.

        A rank whose connection closed before that would report the controller's death. The wait is bounded well
        below the supervisor's limit.
        """
        for rank, incarnation in self._membership.present:
            with suppress(zmq.Again):  # a rank that reads no more messages cannot be asked
                self._send(rank_topic(rank, incarnation), Shutdown())
        deadline = time.monotonic() + seconds_max
        while self._membership.present and (left := deadline - time.monotonic()) > 0:
            self.plans.poll(int(left * 1000) + 1)
            self.membership_events(time.monotonic())

    def check_loss(self, now: float) -> None:
        """Raise if a member is gone. Call this after `membership_events` and `receive`.

        Raises:
            GroupLostError: a rank that was there is gone.
        """
        self._membership.check_loss(now)
        self.send_adapter_orders()

    def send_adapter_orders(self) -> None:
        """Send what the adapters' table wants of the ranks. That a rank has stopped reading is noticed with the
        next plan."""
        orders = self.adapters.orders
        with suppress(GroupLostError):
            while orders and self.is_complete:
                self.send(orders[0])
                del orders[0]

    def call_adapter(self, router: int, call: AdapterCall) -> None:
        """Begin to load an adapter, or unload one."""
        self.adapters.call(router, call)
        self.send_adapter_orders()

    def membership_events(self, now: float) -> None:
        """Read which subscriptions have begun or ended, and tell the membership."""
        while True:
            try:
                event = self.plans.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if event[:1] == b"\x01":
                self._membership.subscribed(event[1:])
            else:
                self._membership.unsubscribed(event[1:], now)

    def receive(self, now: float) -> list[StepResult | EngineReport]:
        """Read waiting reports up to the next step's result or the end of a rank, and return those that are for
        the engine. If there are more, the next poll returns at once.

        Raises:
            GroupLostError: a rank says that it cannot go on, or something that is no report.
        """
        results: list[StepResult | EngineReport] = []
        while True:
            try:
                report = self._decoder.decode(self.reports.recv(NOBLOCK))
            except zmq.Again:
                return results
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise GroupLostError(f"a worker's report cannot be decoded: {error}") from error
            if nonsense := problem_of_report(report, self._membership.tp, self._vocab_size):
                if not isinstance(report, WorkerHello | LoadProgress):
                    raise GroupLostError(f"a worker's report makes no sense: {nonsense}")
                # Such reports also come from processes that are no members: the members go on.
                _rare.warning("a worker's report makes no sense; ignored", time.monotonic(), problem=nonsense)
                continue
            match report:
                case StepResult():
                    results.append(report)
                    return results
                case GrammarReady() | MovesDone() | Probed():
                    results.append(report)
                case AdapterReady():
                    self.adapters.report(report)
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
                    return results

    def close(self) -> None:
        self.plans.close()
        self.reports.close()


def _wall_ms() -> int:
    """Return the wall clock's milliseconds: a number greater than all epochs of earlier controllers of this
    group."""
    return time.time_ns() // 1_000_000


def problem_of_report(report: WorkerReport, ranks: int, vocab_size: int) -> str:
    """Return why no correct worker of a group of this size sends such a report; "": a correct worker may send
    it. Numbers have been looked at by the decoder (`trunkline.controller.reports`).

    Args:
        vocab_size: 0 if unknown.
    """
    match report:
        case StepResult():
            problem = _problem_of_ids(report, vocab_size or COUNT_MAX)
            is_scored = report.logprobs or report.prompt_logprobs
            return problem or (_problem_of_scores(report) if is_scored else "")
        case WorkerReady():
            return _problem_of_rank(report.rank, ranks) or _too_long(report.exports)
        case WorkerHello():
            return _problem_of_rank(report.rank, ranks) or _too_long(report.node)
        case LoadProgress():
            is_sound = math.isfinite(report.fraction)
            problem = _too_long(report.stage) or ("" if is_sound else "its progress is no number")
            return _problem_of_rank(report.rank, ranks) or problem
        case MovesDone() | Probed():
            return _problem_of_rank(report.rank, ranks)
        case GrammarReady():
            return ""
        case AdapterReady():
            bad_key = "" if len(report.key) in (0, KEY_BYTES) else f"an adapter's key has {len(report.key)} bytes"
            return _problem_of_rank(report.rank, ranks) or _too_long(report.problem) or bad_key
        case WorkerFailed():
            return ""  # its epoch ends in any case, and operators need to see its reason


def _problem_of_rank(rank: int, ranks: int) -> str:
    return "" if 0 <= rank < ranks else f"rank {rank} reports; the group has {ranks}"


def _too_long(text: str) -> str:
    return f"a name has {len(text)} characters" if len(text) > TEXT_CHARACTERS_MAX else ""


def _problem_of_ids(result: StepResult, vocab_size: int) -> str:
    """The next workers would be given them as tokens of a prompt. -1: behind a refused draft."""
    beams = [beams.tokens for beams in result.beams.values()] if result.beams else []
    forced = result.forced.values() if result.forced else ()
    for packed in (result.tokens, *beams, *forced):
        if packed and len(packed) % 4 == 0:
            ids = memoryview(packed).cast("i")
            if min(ids) < -1 or max(ids) >= vocab_size:
                return f"step {result.step} draws tokens {min(ids)} to {max(ids)} of {vocab_size}"
    return ""


def _problem_of_scores(result: StepResult) -> str:
    for top in (result.logprobs or {}).values():
        if len(top.top_ids) != len(top.top_logprobs) or len(top.top_ids) % 4:
            return f"log-probabilities of step {result.step} do not go with their tokens"
        if len(top.pooled) % 4:
            return f"a pooled state of step {result.step} has {len(top.pooled)} bytes, which are no float32"
    for scored in (result.prompt_logprobs or {}).values():
        if not _fit(scored):
            return f"scores of a prompt in step {result.step} do not go with their tokens"
    return ""


def _fit(scored: PromptLogprobs) -> bool:
    count, top = len(scored.token_logprobs), len(scored.top_ids)
    return (
        0 <= scored.start < COUNT_MAX
        and count > 0
        and count % 4 == 0
        and len(scored.ranks) == count
        and len(scored.top_logprobs) == top
        and top % count == 0
    )
