"""Who belongs to a group, against a model that knows who lives; and steps that are never answered."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import inf

import pytest

from trunkline.controller.reports import WorkerFailed, WorkerHello, WorkerReady
from trunkline.controller.service.membership import (
    LEAVE_WITHIN_S,
    OLD_WAIT_S,
    REASON_WITHIN_S,
    GroupLostError,
    Membership,
    WorkerLoss,
)
from trunkline.worker.messages import member_topic, rank_topic

HERE = "this kernel"


def ready(rank: int, epoch: int) -> WorkerReady:
    return WorkerReady(rank, epoch, 1, 8, 1, "simulated")


@dataclass
class Process:
    """A rank process as it really is."""

    rank: int
    incarnation: bytes
    node: str
    subscribed: bool = False
    said_hello: bool = False
    epoch: int = 0
    entered: bool = False
    stubborn: bool = False
    """It does not leave by itself."""
    lost_at: float = 0.0
    """When its epoch ended."""

    @property
    def hello(self) -> WorkerHello:
        return WorkerHello(self.rank, 1000 + self.incarnation[0], self.node, self.incarnation)


@dataclass
class World:
    """A group and all processes that there are."""

    seed: int
    tp: int
    now: float = 0.0
    losses: int = 0
    last_loss: float = 0.0
    formed: int = 0
    alive: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.epochs = Membership(self.tp, HERE, 5)
        self.members: dict[int, Process] = {}
        self.used: set[int] = set()

    def start(self, rank: int) -> None:
        node = self.rng.choice([HERE, HERE, "elsewhere", ""])
        process = Process(rank, self.rng.randbytes(16), node, stubborn=self.rng.random() < 0.2)
        self.alive.append(process)

    def die(self, process: Process) -> None:
        self.alive.remove(process)
        if not process.subscribed:
            return
        is_member = self.members.get(process.rank) is process
        self.epochs.unsubscribed(rank_topic(process.rank, process.incarnation), self.now)
        if process.entered:
            self.epochs.unsubscribed(member_topic(process.incarnation), self.now)
        if is_member:
            self.epochs.check_loss(self.now)
            assert not self.epochs.is_complete
            with pytest.raises(GroupLostError, match=f"rank {process.rank} is gone"):
                self.epochs.check_loss(self.now + REASON_WITHIN_S)
            self.lose()
        self.epochs.check_loss(inf)

    def lose(self) -> None:
        before = self.epochs.epoch
        self.epochs.lose(self.rng.choice([0, before, before + 10]), self.now)
        assert self.epochs.epoch > before
        assert not self.epochs.is_formed
        for member in self.members.values():
            member.lost_at = self.now
        self.members = {}
        self.losses += 1
        self.last_loss = self.now

    def act(self) -> None:
        rng, epochs = self.rng, self.epochs
        self.now += rng.choice([0.0, 0.1, 1.0])
        if len(self.alive) < 2 * self.tp and rng.random() < 0.2:
            self.start(rng.randrange(self.tp))
        if not self.alive:
            return
        process = rng.choice(self.alive)
        match rng.randrange(8):
            case 0 | 1:
                if not process.subscribed:
                    process.subscribed = True
                    epochs.subscribed(rank_topic(process.rank, process.incarnation))
            case 2 | 3:
                process.said_hello |= True
                again = epochs.hello(process.hello)
                if process.subscribed:
                    in_it = self.members.get(process.rank) is process
                    assert again == (in_it and not process.entered)
            case 4:
                if process.epoch and not process.entered:
                    process.entered = True
                    epochs.subscribed(member_topic(process.incarnation))
                if process.epoch:
                    assert epochs.says_ready(ready(process.rank, process.epoch)) == (process.epoch < epochs.epoch)
            case 5:
                self.leave_or_die(process)
            case 6:
                self.fail(process)
            case _:
                self.nonsense()

    def leave_or_die(self, process: Process) -> None:
        is_old = 0 < process.epoch < self.epochs.epoch
        if (is_old and not process.stubborn) or self.rng.random() < 0.1:
            self.die(process)

    def fail(self, process: Process) -> None:
        if self.rng.random() > 0.1:
            return
        report = WorkerFailed(process.rank, "broken", process.incarnation)
        if self.members.get(process.rank) is process:
            with pytest.raises(GroupLostError, match="broken"):
                self.epochs.failed(report, self.now)
            self.lose()
        else:
            self.epochs.failed(report, self.now)

    def nonsense(self) -> None:
        epochs = self.epochs
        for topic in (b"", b"leave", b"rank:", b"rank:0:zz", b"rank:99:" + b"0" * 32, b"rank:-1:" + b"0" * 32):
            epochs.subscribed(topic)
            epochs.unsubscribed(topic, self.now)
        assert not epochs.hello(WorkerHello(self.tp, 1, HERE, bytes(16)))
        assert not epochs.hello(WorkerHello(0, 1, HERE, b"short"))
        epochs.failed(WorkerFailed(0, "who is that", bytes(16)), self.now)
        epochs.says_ready(ready(self.tp, epochs.epoch))

    def form(self) -> None:
        """As the service does after each turn, and what must hold of it."""
        old = [p for p in self.alive if p.subscribed and 0 < p.epoch < self.epochs.epoch]
        before = self.epochs.is_formed
        welcomed = self.epochs.form(self.now)
        if welcomed:
            assert not before
            assert sorted(hello.rank for hello in welcomed) == list(range(self.tp))
            by_incarnation = {process.incarnation: process for process in self.alive}
            for hello in welcomed:
                process = by_incarnation[hello.incarnation]  # who is dead is not welcomed
                assert process.subscribed
                assert not process.epoch, "a process belongs to two epochs"
                process.epoch = self.epochs.epoch
                self.members[process.rank] = process
            assert self.epochs.epoch not in self.used, "an epoch is used twice"
            self.used.add(self.epochs.epoch)
            self.formed += 1
            assert not old or self.now >= self.last_loss + OLD_WAIT_S
        members_ready = [
            rank for rank, member in self.members.items() if member.entered and rank in self.epochs.ready
        ]
        assert self.epochs.is_complete == (len(members_ready) == self.tp)
        for hello in self.epochs.to_kill(self.now):
            victim = next(p for p in self.alive if p.incarnation == hello.incarnation)
            assert victim.node == HERE
            assert 0 < victim.epoch < self.epochs.epoch, "somebody is killed who may stay"
            assert self.now >= victim.lost_at + LEAVE_WITHIN_S
            self.die(victim)
        self.epochs.describe({0: "loading 5%"})
        assert sorted(self.epochs.present) == sorted((p.rank, p.incarnation) for p in self.alive if p.subscribed)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_random_lives(seed: int, tp: int) -> None:
    world = World(seed, tp)
    for _ in range(3000):
        world.act()
        world.form()
    assert world.formed > 2
    assert world.losses > 2
    # In the end a fresh process for each rank is all that it takes.
    for process in list(world.alive):
        world.die(process)
    if world.epochs.is_formed:
        world.lose()
    for rank in range(tp):
        world.start(rank)
        world.epochs.hello(world.alive[-1].hello)
        world.alive[-1].subscribed = True
        world.epochs.subscribed(rank_topic(rank, world.alive[-1].incarnation))
    world.form()
    assert world.epochs.is_formed


def pair(epochs: Membership, rank: int, letter: bytes, node: str = HERE) -> bytes:
    """A process that is there and has said hello."""
    incarnation = letter * 16
    epochs.subscribed(rank_topic(rank, incarnation))
    epochs.hello(WorkerHello(rank, 7, node, incarnation))
    return incarnation


def test_who_came_last_is_the_one() -> None:
    epochs = Membership(2, HERE, 1)
    pair(epochs, 0, b"a")
    newer = pair(epochs, 0, b"b")
    epochs.hello(WorkerHello(0, 7, HERE, b"a" * 16))  # the older one says it again
    assert epochs.form(0.0) == []
    other = pair(epochs, 1, b"c")
    assert [hello.incarnation for hello in epochs.form(0.0)] == [newer, other]


def test_the_old_ones_go_first_but_not_for_ever() -> None:
    """Here one is killed; elsewhere nothing can be done, and files are locked there, not here."""
    epochs = Membership(1, HERE, 1)
    old = pair(epochs, 0, b"a", "elsewhere")
    epochs.form(0.0)
    epochs.lose(0, 10.0)
    pair(epochs, 0, b"b")
    assert epochs.form(10.0 + OLD_WAIT_S - 0.1) == []
    assert epochs.to_kill(15.0) == []
    assert len(epochs.form(10.0 + OLD_WAIT_S)) == 1
    epochs.unsubscribed(rank_topic(0, old), 30.0)  # does not concern the new epoch
    epochs.check_loss(inf)
    assert epochs.is_formed


def test_a_failure_before_an_epoch_is_shown() -> None:
    epochs = Membership(2, HERE, 1)
    pair(epochs, 0, b"a")
    epochs.failed(WorkerFailed(0, "no such model", b"a" * 16), 0.0)
    pair(epochs, 1, b"b")
    assert epochs.form(0.0) == []
    assert "no such model" in epochs.describe({})
    assert "rank 1 there" in epochs.describe({})


def lost_pair() -> tuple[Membership, bytes, bytes]:
    """An epoch of two ranks; the incarnations of its members."""
    epochs = Membership(2, HERE, 1)
    members = pair(epochs, 0, b"a"), pair(epochs, 1, b"b")
    assert len(epochs.form(0.0)) == 2
    return epochs, *members


def test_a_rank_that_failed_is_named_before_one_that_is_gone() -> None:
    """Whatever is heard of first: the failure, or that connections closed, its own among them."""
    for closed_first in ((0,), (1,), (0, 1), (1, 0)):
        epochs, *incarnations = lost_pair()
        for rank in closed_first:
            epochs.unsubscribed(rank_topic(rank, incarnations[rank]), 7.0)
        epochs.check_loss(7.0)
        assert epochs.is_ending
        with pytest.raises(GroupLostError, match="worker rank 1 failed: out of memory"):
            epochs.failed(WorkerFailed(1, "out of memory", incarnations[1]), 7.1)
        epochs.lose(2, 7.1)
        epochs.check_loss(inf)
        assert not epochs.is_ending


def leaving(rank: int, incarnation: bytes) -> WorkerFailed:
    return WorkerFailed(rank, "another rank is gone", incarnation, is_consequence=True)


def test_a_rank_that_leaves_because_of_another_one_is_named_last() -> None:
    epochs, first, second = lost_pair()
    epochs.failed(leaving(0, first), 7.0)
    epochs.check_loss(7.1)
    with pytest.raises(GroupLostError, match="worker rank 1 failed: out of memory"):
        epochs.failed(WorkerFailed(1, "out of memory", second), 7.1)
    # The rank that closed its connection without a word is the lost one, not the rank that has noticed it.
    for order in ("gone first", "report first"):
        epochs, first, second = lost_pair()
        if order == "gone first":
            epochs.unsubscribed(rank_topic(1, second), 7.0)
        epochs.failed(leaving(0, first), 7.0)
        epochs.unsubscribed(rank_topic(0, first), 7.05)
        if order == "report first":
            epochs.unsubscribed(rank_topic(1, second), 7.1)
        with pytest.raises(GroupLostError, match="worker rank 1 is gone"):
            epochs.check_loss(7.0 + REASON_WITHIN_S)
    # The network between two ranks is cut: both say so, and that is all there is to say.
    epochs, first, second = lost_pair()
    epochs.failed(leaving(1, second), 7.0)
    epochs.failed(leaving(0, first), 7.1)
    epochs.unsubscribed(rank_topic(1, second), 7.1)
    epochs.check_loss(7.0 + REASON_WITHIN_S - 0.01)
    with pytest.raises(GroupLostError, match="worker rank 1 failed: another rank is gone"):
        epochs.check_loss(7.0 + REASON_WITHIN_S)


def test_a_step_hangs_after_its_time_during_which_the_service_ran() -> None:
    loss = WorkerLoss(step_timeout_s=3.0, resume_seconds_max=60.0)

    def looked(step: int, now: float, predicted_step_s: float = 0.0) -> str:
        loss.look(step, now)
        return loss.why_hanging(predicted_step_s)

    assert [looked(0, 0.0), looked(4, 1.0), looked(4, 2.0)] == ["", "", ""]
    assert looked(4, 100.0) == "", "this process was stopped, not the workers"
    assert looked(4, 101.9) == ""
    assert looked(4, 102.0) == "the workers have not answered step 4 for 3 s"
    assert loss.why_hanging(0.1) == loss.why_hanging(0.15) != ""
    assert loss.why_hanging(0.151) == "", "a long step was predicted"
    assert [looked(5, 103.0), looked(5, 105.9)] == ["", ""], "the next step begins anew"
    assert looked(5, 106.0) != ""
    assert [looked(0, 107.0), looked(0, 111.0), looked(0, 115.0)] == ["", "", ""]
