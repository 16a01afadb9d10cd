"""The controller's side of its worker group: who is there, plans out, reports in (docs/protocol.md).

A rank counts as present from its subscription to its `rank_topic` until ZeroMQ reports that subscription's
end, which happens as soon as the process dies. The broadcast starts only when every rank is present and
has said `WorkerReady`; the plan socket never drops, and at most two steps are unanswered.
"""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec
import zmq

from trunkline.controller.config import ControllerConfig
from trunkline.controller.messages import (
    GrammarReady,
    LoadProgress,
    MovesDone,
    Probed,
    StepResult,
    WorkerFailed,
    WorkerReady,
    WorkerReport,
)
from trunkline.worker.messages import PLAN_TOPIC, Shutdown, WorkerMessage, rank_topic

PLANS_QUEUED_MAX = 4096
"""Messages that a rank has not read. Steps are at most two of them; the others are orders to its tiers, which it
reads between two steps, and whose number is bounded by the moves in flight."""
_HEARTBEAT_MS = 1000
"""Over TCP a dead host closes nothing: silence is the only sign."""


class GroupLostError(RuntimeError):
    """A rank died or gave up; the message says which and why."""


class WorkerGroup:
    """Sockets and membership of a group's ranks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: ControllerConfig) -> None:
        self.plans = context.socket(zmq.XPUB)
        self.plans.setsockopt(zmq.XPUB_NODROP, 1)
        self.plans.setsockopt(zmq.SNDHWM, PLANS_QUEUED_MAX)
        self.plans.setsockopt(zmq.LINGER, 1000)
        if config.plan_endpoint.startswith("tcp:"):
            self.plans.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            self.plans.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_MS)
        self.reports = context.socket(zmq.PULL)
        self.plans.bind(config.plan_endpoint)
        self.reports.bind(config.report_endpoint)
        self._tp = config.tp
        self._epoch = config.epoch
        self._present: set[int] = set()
        self.ready: dict[int, WorkerReady] = {}
        self.progress: dict[int, LoadProgress] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[WorkerReport] = msgspec.msgpack.Decoder(WorkerReport)
        self._topics = {rank_topic(rank): rank for rank in range(config.tp)}

    @property
    def is_complete(self) -> bool:
        """Every rank has subscribed and loaded."""
        return len(self._present) == self._tp and len(self.ready) == self._tp

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
        parts = []
        for rank in range(self._tp):
            if rank in self.ready:
                parts.append(f"rank {rank} ready")
            elif rank in self.progress:
                report = self.progress[rank]
                parts.append(f"rank {rank} {report.stage} {report.fraction:.0%}")
            else:
                parts.append(f"rank {rank} starting")
        return ", ".join(parts)

    def send(self, message: WorkerMessage) -> None:
        """Broadcast a plan, or what concerns grammars or tiers.

        Raises:
            GroupLostError: a rank has stopped reading.
        """
        try:
            self.plans.send_multipart([PLAN_TOPIC, self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            raise GroupLostError("a rank takes no more step plans") from None

    def shut_down(self, seconds_max: float = 3.0) -> None:
        """Ask all ranks to leave after the steps they have, and wait for them: a rank whose connection
        closes first would take that for our death. Bounded well below the supervisor's patience."""
        with suppress(zmq.Again):  # a rank reads no more: it will not leave by itself, the others may
            self.plans.send_multipart([PLAN_TOPIC, self._encoder.encode(Shutdown())], zmq.NOBLOCK)
        deadline = time.monotonic() + seconds_max
        while self._present and (left := deadline - time.monotonic()) > 0:
            self.plans.poll(int(left * 1000) + 1)
            with suppress(GroupLostError):
                self.membership_events()

    def membership_events(self) -> None:
        """Read subscriptions and their ends.

        Raises:
            GroupLostError: a rank that was there is gone.
        """
        while True:
            try:
                event = self.plans.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            rank = self._topics.get(event[1:])
            if rank is None:
                continue
            if event[:1] == b"\x01":
                self._present.add(rank)
            elif rank in self._present:
                self._present.discard(rank)
                raise GroupLostError(f"worker rank {rank} is gone (its connection closed)")

    def receive(self) -> list[StepResult | GrammarReady | MovesDone | Probed]:
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
            match report:
                case StepResult() | GrammarReady() | MovesDone() | Probed():
                    results.append(report)
                case WorkerReady() if report.epoch == self._epoch and 0 <= report.rank < self._tp:
                    self.ready[report.rank] = report
                case LoadProgress():
                    self.progress[report.rank] = report
                case WorkerFailed():
                    raise GroupLostError(f"worker rank {report.rank} failed: {report.reason}")
                case _:
                    pass

    def close(self) -> None:
        self.plans.close()
        self.reports.close()
