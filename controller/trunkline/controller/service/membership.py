"""Decide which process is which rank in which epoch of the group, and when a group hangs. Pure.

The process of a rank lives for one epoch at most. When one of them is lost, the epoch is over for all: the memory
of the others is worth nothing without the lost shard. The old processes leave, the supervisor (or Kubernetes)
starts new ones, and when each rank has a process that was in no old epoch, these processes form the next epoch:

    subscribed, hello ──► candidates ──form──► members ──subscribed (plans), ready──► complete
                              ▲                   │ gone, failed, hung
                              └── next epoch ◄──lose (Leave; processes that stay are killed)

A process is identified by its incarnation. It is present from its first subscription until that ends, which ZeroMQ
reports as soon as the process dies or its connection breaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from trunkline.controller.reports import WorkerFailed, WorkerHello, WorkerReady
from trunkline.worker.messages import member_topic, rank_topic

LEAVE_WITHIN_S: Final = 2.0
"""Seconds after which a rank of an old epoch that runs on this host is killed if it has not left."""
OLD_WAIT_S: Final = 10.0
"""Seconds that a new epoch waits for the ranks of the old epoch to leave, because they hold files and memory."""
REASON_WITHIN_S: Final = 0.2
"""Seconds to wait for a better reason when a member is gone without a message, or leaves because of another
member: the report of the member that failed may be on its way, and says what to do."""
EARLY_MAX: Final = 1024
"""Largest number of hellos that are kept of processes whose subscription has not been seen yet. Processes repeat
their hellos, so some may be forgotten."""
INCARNATION_BYTES: Final = 16


class GroupLostError(RuntimeError):
    """A rank died, hangs or gave up; the message says which and why."""


@dataclass(slots=True)
class _Process:
    rank: int
    incarnation: bytes
    number: int
    """The process's number, in the order in which processes have connected."""
    hello: WorkerHello | None = None
    epoch: int = 0
    """The epoch in which the process is, or was, a member; 0 if in none."""
    entered: bool = False
    """Whether the process has subscribed to its epoch's plans."""
    leaves: bool = False
    """Whether the process has reported that it leaves because of another rank."""
    kill_at: float = inf


@dataclass(slots=True)
class _Loss:
    """A loss of the epoch for which no final reason has been chosen yet."""

    reason: str
    names_cause: bool
    """Whether the reason names the rank that was lost; a rank that leaves because of another one knows less."""
    decided_at: float


class Membership:
    """The processes of a group's ranks that are connected, and the epoch that they form."""

    def __init__(self, tp: int, node: str, first_epoch: int) -> None:
        """
        Args:
            node: The node that this controller runs on, as in `WorkerHello`; "" if it is not known.
        """
        self.tp = tp
        self.epoch = first_epoch
        """Number of the epoch that runs or is being formed; all earlier ones are over."""
        self.ready: dict[int, WorkerReady] = {}
        self._node = node
        self._processes: dict[bytes, _Process] = {}
        self._topics: dict[bytes, bytes] = {}
        """The incarnation of each process, by its `member_topic`."""
        self._early: dict[bytes, WorkerHello] = {}
        self._members: dict[int, _Process] = {}
        self._count = 0
        self._lost_at = -inf
        self._failure = ""
        self._loss: _Loss | None = None

    @property
    def is_formed(self) -> bool:
        """Return whether the epoch has all its members; some may still be loading."""
        return bool(self._members)

    @property
    def is_complete(self) -> bool:
        """Return whether every rank has subscribed to plans, has loaded, and is still connected."""
        entered = all(member.entered for member in self._members.values())
        return self.is_formed and entered and len(self.ready) == self.tp and not self.is_ending

    @property
    def is_ending(self) -> bool:
        """Return whether a member is gone and `check_loss` is still waiting for the reason."""
        return self._loss is not None

    @property
    def present(self) -> list[tuple[int, bytes]]:
        """Return (rank, incarnation) of all connected processes."""
        return [(process.rank, process.incarnation) for process in self._processes.values()]

    # What processes have done

    def subscribed(self, topic: bytes) -> None:
        """Note that a subscription has begun."""
        if (incarnation := self._topics.get(topic)) is not None:
            self._processes[incarnation].entered = True
            return
        found = _parsed(topic, self.tp)
        if found is None:
            return
        rank, incarnation = found
        self._count += 1
        process = _Process(rank, incarnation, self._count, self._early.pop(incarnation, None))
        self._processes[incarnation] = process
        self._topics[member_topic(incarnation)] = incarnation

    def unsubscribed(self, topic: bytes, now: float) -> None:
        """Note that a process has ended its subscription. If it was a member, `check_loss` raises soon."""
        found = _parsed(topic, self.tp)
        process = self._processes.pop(found[1], None) if found is not None else None
        if process is None:
            return
        del self._topics[member_topic(process.incarnation)]
        if self._members.get(process.rank) is process:
            reason = f"worker rank {process.rank} is gone (its connection closed)"
            self._note_loss(reason, now, names_cause=not process.leaves)

    def hello(self, hello: WorkerHello) -> bool:
        """Note that a process reports to be in no epoch; return whether to tell it again that it is a member."""
        if not 0 <= hello.rank < self.tp or len(hello.incarnation) != INCARNATION_BYTES:
            return False
        process = self._processes.get(hello.incarnation)
        if process is None:
            if len(self._early) >= EARLY_MAX:
                self._early.clear()
            self._early[hello.incarnation] = hello
            return False
        process.hello = hello
        return process.epoch == self.epoch and not process.entered

    def says_ready(self, report: WorkerReady) -> bool:
        """Note that a rank has loaded; return whether to tell it that its epoch is over."""
        if report.epoch == self.epoch and report.rank in self._members:
            self.ready[report.rank] = report
        return report.epoch < self.epoch

    def failed(self, report: WorkerFailed, now: float) -> None:
        """Note that a process gives up. If it leaves because of another rank, `check_loss` raises soon.

        Raises:
            GroupLostError: The process is a member, and the failure is its own.
        """
        members = {member.incarnation: member for member in self._members.values()}
        # A member's connection may have closed already.
        process = self._processes.get(report.incarnation) or members.get(report.incarnation)
        if process is None:
            return
        reason = f"worker rank {process.rank} failed: {report.reason}"
        if self._members.get(process.rank) is process:
            if not report.is_consequence:
                raise GroupLostError(reason)
            process.leaves = True
            self._note_loss(reason, now, names_cause=False)
            return
        if not process.epoch:
            process.hello = None
            self._failure = reason

    def _note_loss(self, reason: str, now: float, *, names_cause: bool) -> None:
        if self._loss is None:
            self._loss = _Loss(reason, names_cause, now + REASON_WITHIN_S)
        elif names_cause and not self._loss.names_cause:
            self._loss.reason, self._loss.names_cause = reason, True

    # What follows from that

    def check_loss(self, now: float) -> None:
        """Raise if the epoch is lost.

        Raises:
            GroupLostError: A member is gone, and no better reason has come in time.
        """
        if self._loss is not None and now >= self._loss.decided_at:
            raise GroupLostError(self._loss.reason)

    def form(self, now: float) -> list[WorkerHello]:
        """Form the epoch if each rank has a candidate; return the hellos of the new members, to welcome them."""
        has_old = any(0 < process.epoch < self.epoch for process in self._processes.values())
        if self.is_formed or (has_old and now < self._lost_at + OLD_WAIT_S):
            return []
        newest: dict[int, _Process] = {}
        for process in self._processes.values():  # in order of arrival: the newest process of a rank is chosen
            if process.hello is not None and not process.epoch:
                newest[process.rank] = process
        if len(newest) < self.tp:
            return []
        self._members = newest
        self._failure = ""
        for process in newest.values():
            process.epoch = self.epoch
        return [process.hello for process in newest.values() if process.hello is not None]

    def lose(self, next_epoch: int, now: float) -> None:
        """End the epoch.

        Args:
            next_epoch: Number of the next epoch, if it is greater than this one's.
        """
        for process in self._members.values():
            process.kill_at = now + LEAVE_WITHIN_S
        self.epoch = max(self.epoch + 1, next_epoch)
        self._members = {}
        self._loss = None
        self.ready = {}
        self._lost_at = now

    def to_kill(self, now: float) -> list[WorkerHello]:
        """Return the processes of old epochs on this node that should have left by now, to be killed.

        A process that is still connected after `LEAVE_WITHIN_S` is returned again.
        """
        chosen = []
        for process in self._processes.values():
            if process.kill_at <= now and process.hello is not None and self._node == process.hello.node != "":
                process.kill_at = now + LEAVE_WITHIN_S
                chosen.append(process.hello)
        return chosen

    def describe(self, progress: dict[int, str]) -> str:
        """Return what each rank is doing, as text for the operator.

        Args:
            progress: How far ranks that are loading have come, by rank.
        """
        parts = [self._failure] if self._failure else []
        for rank in range(self.tp):
            if rank in self.ready:
                what = "ready"
            elif rank in self._members:
                what = progress.get(rank, "starting")
            elif any(p.rank == rank and p.hello is not None and not p.epoch for p in self._processes.values()):
                what = "there"
            else:
                what = "not there"
            parts.append(f"rank {rank} {what}")
        return ", ".join(parts)


def _parsed(topic: bytes, tp: int) -> tuple[int, bytes] | None:
    """Return rank and incarnation of a `rank_topic`."""
    parts = topic.split(b":")
    if len(parts) != 3 or parts[0] != b"rank":
        return None
    try:
        rank, incarnation = int(parts[1]), bytes.fromhex(parts[2].decode())
    except ValueError:
        return None
    is_sound = 0 <= rank < tp and len(incarnation) == INCARNATION_BYTES
    return (rank, incarnation) if is_sound and rank_topic(rank, incarnation) == topic else None


def disagreement(terms: Mapping[str, str], hello: WorkerHello) -> str:
    """Return in which of the group's terms a rank differs, as text for operators; "" if in none that both know."""
    for name, mine in terms.items():
        theirs = hello.terms.get(name, "")
        if mine and theirs and theirs != mine:
            what = "another checkpoint or quantization" if name == "model" else f"another {name}"
            return f"rank {hello.rank} has {what} ({theirs[:80]}) than the group ({mine})"
    return ""


PREDICTED_STEPS: Final = 20.0
"""Factor for the time limit of a step: it is taken to hang when it lasts this many times its predicted time, and
longer than `step_timeout_s`."""
LOOKS_WITHIN_S: Final = 5.0
"""Longest time between two looks at the oldest step that counts as waiting; the service looks once a second."""


class WorkerLoss:
    """State of a wait for the workers: how long they have not answered a step, and since when, and why, they are
    lost."""

    def __init__(self, step_timeout_s: float, resume_seconds_max: float) -> None:
        """
        Args:
            step_timeout_s: A step that lasts less never hangs.
            resume_seconds_max: Seconds that requests wait for new workers.
        """
        self.reason = ""
        """The reason why there are no workers; "" while there are some, or if there have been none yet."""
        self._since = inf
        self._step_timeout_s = step_timeout_s
        self._resume_seconds_max = resume_seconds_max
        self._step = 0
        self._waited_s = 0.0
        self._looked_at = -inf

    def began(self, reason: str, now: float) -> None:
        """Note that the workers are lost. If new workers are lost before they were ready, the outage goes on."""
        self.reason = reason
        self._since = min(self._since, now)

    def ended(self) -> None:
        """Note that new workers are ready: the outage is over."""
        self.reason, self._since = "", inf

    def look(self, step: int, now: float) -> None:
        """Note the number of the oldest unanswered step (0: there is none) at this time.

        A time between two looks that is longer than `LOOKS_WITHIN_S` does not count as waiting: then this process
        itself was stopped, and perhaps the ranks with it.
        """
        passed = now - self._looked_at
        self._looked_at = now
        if step != self._step or not step:
            self._step, self._waited_s = step, 0.0
        elif passed <= LOOKS_WITHIN_S:
            self._waited_s += passed

    def why_hanging(self, predicted_step_s: float) -> str:
        """Return why the oldest unanswered step is taken to hang; "" if it is not.

        Args:
            predicted_step_s: How long that step should take the workers.
        """
        if self._waited_s < max(self._step_timeout_s, PREDICTED_STEPS * predicted_step_s):
            return ""
        return f"the workers have not answered step {self._step} for {self._waited_s:.0f} s"

    def is_too_long(self, now: float) -> bool:
        """Return whether the outage has lasted so long that requests wait for its end no longer."""
        return now >= self._since + self._resume_seconds_max
