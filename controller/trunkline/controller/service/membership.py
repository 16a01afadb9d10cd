"""Which process is which rank, and in which epoch of the group. Pure.

A rank process lives for one epoch at most. When any of them is lost, the epoch is over for all: what their
memory held is worth nothing without the lost shard. The old ones leave, whoever starts processes starts new ones,
and when each rank has one that is not of an old epoch, they are the next epoch:

    subscribed, hello ──► candidates ──form──► members ──subscribed (plans), ready──► complete
                              ▲                   │ gone, failed, hung
                              └── next epoch ◄──lose (Leave; who stays is killed)

A process is known by its incarnation. It is there from its first subscription until the end of that, which ZeroMQ
reports as soon as the process dies or its connection breaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from trunkline.controller.messages import WorkerFailed, WorkerHello, WorkerReady
from trunkline.worker.messages import member_topic, rank_topic

LEAVE_WITHIN_S: Final = 2.0
"""A rank of an old epoch on this host that is there for longer is killed."""
OLD_WAIT_S: Final = 10.0
"""For so long a new epoch waits for the ranks of the old one to be gone, who hold files and memory."""
REASON_WITHIN_S: Final = 0.2
"""A member that is gone without a word, or that leaves because of another one, may be the consequence of a failure
that another member is about to report. For so long that report is waited for, because it says what to do."""
EARLY_MAX: Final = 1024
"""Hellos of processes whose subscription has not been seen yet; they are repeated, so some may be forgotten."""
INCARNATION_BYTES: Final = 16


class GroupLostError(RuntimeError):
    """A rank died, hangs or gave up; the message says which and why."""


@dataclass(slots=True)
class _Process:
    rank: int
    incarnation: bytes
    number: int
    """In the order of their coming."""
    hello: WorkerHello | None = None
    epoch: int = 0
    """In which it is, or was, a member; 0: in none."""
    entered: bool = False
    """Whether plans of its epoch reach it."""
    leaves: bool = False
    """Whether it has said that it leaves because of another rank."""
    kill_at: float = inf


@dataclass(slots=True)
class _Loss:
    """The epoch is lost; what is to be named as the reason is not decided yet."""

    reason: str
    names_cause: bool
    """It names the rank that was lost; a report of a rank that leaves because of another one says less."""
    decided_at: float


class Membership:
    """The processes of a group's ranks that are there."""

    def __init__(self, tp: int, node: str, first_epoch: int) -> None:
        """
        Args:
            node: where this controller runs, as in `WorkerHello`; "": not known.
        """
        self.tp = tp
        self.epoch = first_epoch
        """The one that runs or is being formed; all before it are over."""
        self.ready: dict[int, WorkerReady] = {}
        self._node = node
        self._processes: dict[bytes, _Process] = {}
        self._topics: dict[bytes, bytes] = {}
        """`member_topic` → incarnation."""
        self._early: dict[bytes, WorkerHello] = {}
        self._members: dict[int, _Process] = {}
        self._count = 0
        self._lost_at = -inf
        self._failure = ""
        self._loss: _Loss | None = None

    @property
    def is_formed(self) -> bool:
        """Whether the epoch has its members, who may still be loading."""
        return bool(self._members)

    @property
    def is_complete(self) -> bool:
        """Every rank reads plans, has loaded, and is still there."""
        entered = all(member.entered for member in self._members.values())
        return self.is_formed and entered and len(self.ready) == self.tp and not self.is_ending

    @property
    def is_ending(self) -> bool:
        """Whether a member is gone, and `check_loss` is still waiting for the reason."""
        return self._loss is not None

    @property
    def present(self) -> list[tuple[int, bytes]]:
        """(rank, incarnation) of all processes that are there."""
        return [(process.rank, process.incarnation) for process in self._processes.values()]

    # What processes do

    def subscribed(self, topic: bytes) -> None:
        """A subscription has been made."""
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
        """A subscription has ended. If it was that of a member, `check_loss` raises soon."""
        found = _parsed(topic, self.tp)
        process = self._processes.pop(found[1], None) if found is not None else None
        if process is None:
            return
        del self._topics[member_topic(process.incarnation)]
        if self._members.get(process.rank) is process:
            reason = f"worker rank {process.rank} is gone (its connection closed)"
            self._note_loss(reason, now, names_cause=not process.leaves)

    def hello(self, hello: WorkerHello) -> bool:
        """A process says that it belongs to no epoch; whether it has to be told again that it does."""
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
        """A rank has loaded; whether it must be told that its epoch is over."""
        if report.epoch == self.epoch and report.rank in self._members:
            self.ready[report.rank] = report
        return report.epoch < self.epoch

    def failed(self, report: WorkerFailed, now: float) -> None:
        """A process gives up. If it leaves because of another rank, `check_loss` raises soon.

        Raises:
            GroupLostError: it is a member, and the failure is its own.
        """
        process = self._processes.get(report.incarnation) or self._member(report.incarnation)
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

    def _member(self, incarnation: bytes) -> _Process | None:
        """The member with this incarnation, also if its connection has closed."""
        return next((member for member in self._members.values() if member.incarnation == incarnation), None)

    def _note_loss(self, reason: str, now: float, *, names_cause: bool) -> None:
        if self._loss is None:
            self._loss = _Loss(reason, names_cause, now + REASON_WITHIN_S)
        elif names_cause and not self._loss.names_cause:
            self._loss.reason, self._loss.names_cause = reason, True

    # What follows from it

    def check_loss(self, now: float) -> None:
        """
        Raises:
            GroupLostError: a member is gone, and no better reason has come in time.
        """
        if self._loss is not None and now >= self._loss.decided_at:
            raise GroupLostError(self._loss.reason)

    def form(self, now: float) -> list[WorkerHello]:
        """Make the epoch's members of those who are there for it, if that is possible now; they are returned,
        to be told of it."""
        if self.is_formed or (self._has_old and now < self._lost_at + OLD_WAIT_S):
            return []
        newest: dict[int, _Process] = {}
        for process in self._processes.values():  # in the order of their coming: who came last replaces the others
            if process.hello is not None and not process.epoch:
                newest[process.rank] = process
        if len(newest) < self.tp:
            return []
        self._members = newest
        self._failure = ""
        for process in newest.values():
            process.epoch = self.epoch
        return [process.hello for process in newest.values() if process.hello is not None]

    @property
    def _has_old(self) -> bool:
        return any(0 < process.epoch < self.epoch for process in self._processes.values())

    def lose(self, next_epoch: int, now: float) -> None:
        """The epoch is over.

        Args:
            next_epoch: number of the next, if that is greater than this one's.
        """
        for process in self._members.values():
            process.kill_at = now + LEAVE_WITHIN_S
        self.epoch = max(self.epoch + 1, next_epoch)
        self._members = {}
        self._loss = None
        self.ready = {}
        self._lost_at = now

    def to_kill(self, now: float) -> list[WorkerHello]:
        """Those of an old epoch who should have left, and whom a signal reaches from here. Each is named again
        after a while if it is still there."""
        chosen = []
        for process in self._processes.values():
            if process.kill_at <= now and process.hello is not None and self._node == process.hello.node != "":
                process.kill_at = now + LEAVE_WITHIN_S
                chosen.append(process.hello)
        return chosen

    def describe(self, progress: dict[int, str]) -> str:
        """For the person who waits: what each rank is doing.

        Args:
            progress: by rank, of those who are loading.
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
    """Rank and incarnation of a `rank_topic`."""
    parts = topic.split(b":")
    if len(parts) != 3 or parts[0] != b"rank":
        return None
    try:
        rank, incarnation = int(parts[1]), bytes.fromhex(parts[2].decode())
    except ValueError:
        return None
    is_sound = 0 <= rank < tp and len(incarnation) == INCARNATION_BYTES
    return (rank, incarnation) if is_sound and rank_topic(rank, incarnation) == topic else None


class StepClock:
    """Notices a step that is not answered. Time in which nobody looked does not count: then this process itself
    was stopped, and perhaps the ranks with it."""

    LOOKS_WITHIN_S: Final = 5.0
    """The service looks once a second at least."""

    def __init__(self) -> None:
        self._step = 0
        self._waited_s = 0.0
        self._looked_at = -inf

    def waited_s(self, step: int, now: float) -> float:
        """For how long the oldest step has been unanswered; 0 if none is (`step` 0).

        Args:
            step: its number; one that was looked at before has not been answered since.
        """
        passed = now - self._looked_at
        self._looked_at = now
        if step != self._step or not step:
            self._step, self._waited_s = step, 0.0
        elif passed <= self.LOOKS_WITHIN_S:
            self._waited_s += passed
        return self._waited_s


def disagreement(terms: Mapping[str, str], hello: WorkerHello) -> str:
    """What differs, for people; "": nothing that both know of."""
    for name, mine in terms.items():
        theirs = hello.terms.get(name, "")
        if mine and theirs and theirs != mine:
            what = "another checkpoint or quantization" if name == "model" else f"another {name}"
            return f"rank {hello.rank} has {what} ({theirs[:80]}) than the group ({mine})"
    return ""
