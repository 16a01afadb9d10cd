"""Restarts, drains and rolling restarts, driven by chosen and by random sequences of events."""

from __future__ import annotations

import random
from typing import Any

import pytest
from deploy.lives import HAND_OVER, KILL, TERM, members, sends, starts, told
from seeds import seeds

from trunkline.deploy.cli.cluster_cli import print_status
from trunkline.deploy.supervisor.fleet import Fleet
from trunkline.deploy.supervisor.lifecycle import Lifecycle, Phase
from trunkline.deploy.supervisor.members import (
    Action,
    Command,
    CommandError,
    DeathRecord,
    Limits,
    Role,
    Say,
    Send,
    Start,
    Tell,
)
from trunkline.deploy.supervisor.run_folder import Running

LIMITS = Limits(start_s=100, replace_s=20, pause_s=2, drain_s=30, margin_s=5, settle_s=5, leave_s=3)


def ready_fleet(groups: int = 2, routers: int = 2) -> Fleet:
    found = members(groups, 2, routers)
    fleet = Fleet(found, LIMITS, 0.0)
    for member in found:
        if member.role is not Role.WORKER:
            fleet.reported(member.name, "ready", 1.0)
    return fleet


def states(fleet: Fleet) -> list[str]:
    return [group["state"] for group in fleet.describe(0.0)["groups"]]


def test_the_first_restart_is_at_once_then_pauses_grow_to_thirty_seconds() -> None:
    record, now, delays = DeathRecord(), 0.0, []
    for _ in range(200):
        at = record.died(now)
        delays.append(at - now)
        now = at  # it dies at once
    assert delays == [0, 1, 2, 4, 8, 16, *[30] * 194]
    record.works()
    assert record.died(now) == now


def test_what_is_killed_again_and_again_comes_back() -> None:
    """As by a machine that runs out of memory for a while."""
    fleet, now = ready_fleet(), 10.0
    actions = fleet.exited("w0.0", -KILL, now)
    for _ in range(50):
        while "w0.0" not in starts(actions):
            assert fleet.deadline <= now + 30.0
            now = fleet.deadline
            actions = fleet.tick(now)
        actions = fleet.exited("w0.0", -KILL, now)
    assert states(fleet) == ["starting", "ready"]
    assert {row["name"]: row["state"] for row in fleet.describe(now)["processes"]}["w0.0"] == "starts in 30 s"
    assert starts(fleet.tick(now + 30.0)) == ["w0.0"]
    fleet.reported("c0", "ready", now + 31.0)
    assert states(fleet) == ["ready", "ready"]
    assert starts(fleet.exited("w0.0", -KILL, now + 40.0)) == ["w0.0"]  # at once: it has worked


def without_pids(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**row, "pid": None} for row in answer["processes"]]


def test_a_group_that_can_never_work_is_lost_and_the_others_serve_on(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = ready_fleet()
    fleet.command(Command("restart", ["0"]), 9, 10.0)
    for name in ("c0", "w0.0", "w0.1"):
        fleet.exited(name, 0, 11.0)
    actions = fleet.exited("w0.1", 2, 12.0, "no kernel image is available")
    assert sends(actions) == [("w0.0", TERM), ("c0", TERM)]
    fleet.exited("w0.0", 0, 12.1)
    actions = fleet.exited("c0", 0, 12.1)
    reason = "was given up: w0.1 exited with code 2: no kernel image is available"
    assert told(actions) == [(9, f"group 0 {reason}", True, False)]
    assert states(fleet) == ["lost", "ready"]
    assert not fleet.is_without_groups
    answer = {**fleet.describe(13.0), "phase": "serving"}
    print_status(Running(8000, "http://127.0.0.1:8000", "demo", 1), {**answer, "processes": without_pids(answer)})
    said = capsys.readouterr().out
    assert "lost" in said
    assert "Given up: w0.1 exited with code 2: no kernel image is available." in said
    actions = fleet.command(Command("undrain", ["0"]), 10, 20.0)
    assert starts(actions) == ["w0.0", "w0.1", "c0"]
    assert [group["why"] for group in fleet.describe(20.0)["groups"]] == ["", ""]


def test_the_survivors_of_a_group_leave_by_themselves_and_are_started_again() -> None:
    fleet = ready_fleet()
    assert starts(fleet.exited("w0.0", -KILL, 10.0)) == ["w0.0"]
    assert states(fleet) == ["starting", "ready"]
    assert starts(fleet.exited("w0.1", 0, 10.7)) == ["w0.1"]
    fleet.reported("c0", "starting", 10.8)
    fleet.reported("c0", "ready", 15.0)
    assert states(fleet) == ["ready", "ready"]
    rows = {row["name"]: row for row in fleet.describe(20.0)["processes"]}
    assert (rows["w0.0"]["restarts"], rows["c0"]["restarts"], rows["w0.1"]["up_s"]) == (1, 0, 9.3)


def test_a_worker_that_outlives_its_controller_is_killed() -> None:
    fleet = ready_fleet()
    assert starts(fleet.exited("c0", -KILL, 10.0)) == ["c0"]
    assert starts(fleet.exited("w0.0", 1, 10.5)) == ["w0.0"]
    assert fleet.deadline == 13.0
    assert sends(fleet.tick(13.0)) == [("w0.1", KILL)]  # frozen
    assert starts(fleet.exited("w0.1", -KILL, 13.1)) == ["w0.1"]
    assert fleet.tick(20.0) == []


def test_a_drain_ends_a_group_in_order_and_keeps_it_down() -> None:
    fleet = ready_fleet()
    actions = fleet.command(Command("drain", ["c0"]), 1, 10.0)
    assert sends(actions) == [("c0", TERM)]
    assert states(fleet) == ["draining", "ready"]
    assert fleet.exited("w0.0", 0, 12.0) == []
    assert sends(fleet.exited("c0", 0, 12.0)) == [("w0.1", TERM)]
    assert told(fleet.exited("w0.1", 0, 12.5)) == [(1, "group 0 is down", True, True)]
    assert fleet.tick(1000.0) == []
    assert told(fleet.command(Command("drain", ["0"]), 2, 1000.0))[-1] == (2, "group 0 is down", True, True)
    actions = fleet.command(Command("undrain", ["0"]), 3, 1001.0)
    assert starts(actions) == ["w0.0", "w0.1", "c0"]
    assert told(fleet.reported("c0", "ready", 1005.0)) == [(3, "group 0 is ready", True, True)]


def test_a_drain_is_bounded() -> None:
    fleet = ready_fleet()
    fleet.command(Command("drain", ["0"]), 1, 10.0)
    assert fleet.deadline == 45.0
    assert sends(fleet.tick(45.0)) == [("c0", KILL)]
    assert sends(fleet.exited("c0", -KILL, 45.1)) == [("w0.0", TERM), ("w0.1", TERM)]
    assert sends(fleet.tick(50.1)) == [("w0.0", KILL), ("w0.1", KILL)]
    assert any(isinstance(action, Say) and "survive" in action.text for action in fleet.tick(55.1))
    assert states(fleet) == ["lost", "ready"]


def test_an_undrain_during_a_drain_turns_it_round() -> None:
    fleet = ready_fleet()
    fleet.command(Command("drain", ["0"]), 1, 10.0)
    actions = fleet.command(Command("undrain", ["0"]), 2, 11.0)
    assert (1, "group 0 was started again", True, False) in told(actions)
    fleet.exited("c0", 0, 12.0)
    fleet.exited("w0.0", 0, 12.0)
    assert starts(fleet.exited("w0.1", 0, 12.0)) == ["w0.0", "w0.1", "c0"]


def test_a_rolling_restart_goes_router_by_router_then_group_by_group() -> None:
    fleet = ready_fleet()
    actions = fleet.command(Command("restart"), 9, 10.0)
    assert starts(actions) == ["router-0/2"]
    assert sends(fleet.reported("router-0/2", "ready", 11.0)) == [("router-0", HAND_OVER)]
    assert starts(fleet.tick(14.0)) == []  # it finishes its streams
    fleet.exited("router-0", 0, 18.0)
    assert starts(fleet.tick(20.0)) == ["router-1/2"]
    fleet.reported("router-1/2", "ready", 21.0)
    fleet.exited("router-1", 0, 22.0)
    assert sends(fleet.tick(24.0)) == [("c0", TERM)]
    for name in ("c0", "w0.0"):
        assert starts(fleet.exited(name, 0, 25.0)) == []
    assert starts(fleet.exited("w0.1", 0, 25.0)) == ["w0.0", "w0.1", "c0"]
    assert states(fleet) == ["starting", "ready"]
    assert sends(fleet.reported("c0", "ready", 29.0)) == []  # the routers must see it first
    assert fleet.deadline == 31.0
    assert sends(fleet.tick(31.0)) == [("c1", TERM)]
    for name in ("c1", "w1.0", "w1.1"):
        actions = fleet.exited(name, 0, 32.0)
    assert len(starts(actions)) == 3
    assert told(fleet.reported("c1", "ready", 34.0))[-1] == (9, "restarted", True, True)
    assert fleet.deadline == float("inf")
    assert starts(fleet.exited("router-0/2", -KILL, 40.0)) == ["router-0/2"]


def test_a_group_that_does_not_come_back_ends_a_rolling_restart() -> None:
    fleet = ready_fleet(groups=3)
    fleet.command(Command("restart", ["0", "1", "2"]), 9, 10.0)
    for name in ("c0", "w0.0", "w0.1"):
        fleet.exited(name, 0, 11.0)
    end = told(fleet.tick(fleet.deadline))
    assert len(end) == 1
    assert end[0][1].startswith("group 0 was not ready after")
    assert end[0][1].endswith("left as they are: group 1, group 2")
    assert end[0][2:] == (True, False)
    assert states(fleet) == ["starting", "ready", "ready"]


def test_a_replacement_that_fails_leaves_the_old_router_in_its_place() -> None:
    fleet = ready_fleet()
    fleet.command(Command("restart", ["router-1"]), 9, 10.0)
    assert fleet.expects("router-1/2")
    end = told(fleet.exited("router-1/2", 1, 11.0))
    assert end == [(9, "router-1 could not be replaced: its replacement exited with code 1", True, False)]
    fleet.command(Command("restart", ["routers"]), 10, 12.0)
    assert sends(fleet.tick(32.0)) == [("router-0/2", KILL)]


def test_a_router_that_dies_while_it_is_replaced_is_not_started_twice() -> None:
    fleet = ready_fleet()
    fleet.command(Command("restart", ["router-0"]), 9, 10.0)
    assert starts(fleet.exited("router-0", -KILL, 10.5)) == []
    assert told(fleet.reported("router-0/2", "ready", 12.0))[-1] == (9, "restarted", True, True)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (Command("drain", ["7"]), "there is no group '7'; there are 0, 1"),
        (Command("undrain", ["routers"]), "there is no group 'routers'"),
        (Command("restart", ["0", "router-9"]), "there is no group 'router-9'"),
    ],
)
def test_what_is_not_there_is_refused(command: Command, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        ready_fleet().command(command, 1, 0.0)


def test_what_is_under_way_is_not_begun_again() -> None:
    fleet = ready_fleet()
    fleet.command(Command("restart"), 1, 0.0)
    with pytest.raises(CommandError, match="group 1 is being restarted already"):
        fleet.command(Command("restart", ["1"]), 2, 0.0)
    fleet.command(Command("drain", ["1"]), 3, 0.0)
    fleet = ready_fleet()
    fleet.command(Command("drain", ["1"]), 3, 0.0)
    with pytest.raises(CommandError, match="group 1 is drained"):
        fleet.command(Command("restart", ["1"]), 4, 0.0)


class Walk:
    """A cluster whose processes do what they like, and an oracle that counts."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.members = members(rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 3))
        self.now = 0.0
        self.life = Lifecycle(self.members, LIMITS, 0.0)
        self.alive = {member.name for member in self.members}
        self.dying: dict[str, int] = {}
        self.deaths: dict[str, list[float]] = {m.name: [] for m in self.members if m.group >= 0}
        """Of members of groups: times of deaths that were not asked for, since the group last worked or was
        stopped."""
        self.open: set[int] = set()
        self.tickets = 0
        self.life.healthy()

    def group_of(self, name: str) -> int:
        return next((m.group for m in self.members if m.name == name), -1)

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(name, member):
                    assert self.life.phase is Phase.SERVING
                    assert name not in self.alive, "started although it runs"
                    assert member in self.members
                    self.alive.add(name)
                    times = self.deaths.get(name, [])
                    pause_s = min(30.0, 2.0 ** (len(times) - 2)) if len(times) > 1 else 0.0
                    assert not times or self.now >= times[-1] + pause_s - 1e-6, "too early"
                case Send(name, number):
                    if name in self.alive and (number == KILL or self.rng.random() < 0.8):
                        self.dying[name] = 0 if number == HAND_OVER else -number
                case Tell(_, text, False, _) if text.endswith(": restarting") and text.startswith("group "):
                    self.forget_deaths(int(text.removeprefix("group ").split(":")[0]))
                case Tell(ticket, _, True, _):
                    assert ticket in self.open, "answered twice"
                    self.open.discard(ticket)
                case _:
                    pass

    def step(self) -> None:
        rng, life = self.rng, self.life
        event = rng.random()
        if event < 0.15 and self.dying:
            name = rng.choice(sorted(self.dying))
            self.die(name, self.dying.pop(name))
        elif event < 0.25 and self.alive:
            name = rng.choice(sorted(self.alive))
            self.dying.pop(name, None)
            self.die(name, rng.choice([0, 1, 1, 2, 3, -9, -11]))
        elif event < 0.5 and self.alive:
            name = rng.choice(sorted(self.alive))
            status = rng.choice(["ready", "ready", "starting", "draining"])
            if status == "ready" and name.startswith("c"):
                self.forget_deaths(self.group_of(name))
            self.do(life.reported(name, status, self.now))
        elif event < 0.6:
            self.command()
        else:
            self.now = min(self.now + rng.expovariate(0.5), max(self.now, life.deadline))
            self.do(life.tick(self.now))
        assert set(life.alive) == self.alive
        for group in life.status(self.now)["groups"]:
            if group["state"] not in ("ready", "starting"):
                self.forget_deaths(group["group"])

    def forget_deaths(self, group: int) -> None:
        for name, times in self.deaths.items():
            if self.group_of(name) == group:
                times.clear()

    def die(self, name: str, status: int) -> None:
        self.alive.discard(name)
        states = {group["group"]: group["state"] for group in self.life.status(self.now)["groups"]}
        if states.get(self.group_of(name)) in ("ready", "starting"):
            self.deaths[name].append(self.now)
        self.do(self.life.exited(name, status, self.now))

    def command(self) -> None:
        kind = self.rng.choice(["drain", "undrain", "restart", "restart"])
        names = [str(group) for group in range(3)]
        units = [self.rng.choice(names)]
        if kind == "restart":
            units = self.rng.choice([[], ["routers"], units])
        self.tickets += 1
        self.open.add(self.tickets)
        before = self.life.status(self.now)
        try:
            self.do(self.life.command(Command(kind, units), self.tickets, self.now))
        except CommandError:
            self.open.discard(self.tickets)
            assert self.life.status(self.now) == before, "a refused command changed something"


def check_a_walk(seed: int) -> None:
    """No process is started twice, too often or during a stop; drained groups stay down; each command gets one
    answer; and a stop always ends."""
    walk = Walk(seed)
    for _ in range(250):
        if walk.life.phase is not Phase.SERVING:
            break
        walk.step()
        status = walk.life.status(walk.now)
        for group in status["groups"]:
            if group["state"] == "down":
                assert not [n for n in walk.alive if walk.group_of(n) == group["group"] and n[0] in "cw"]
    began = walk.now
    walk.do(walk.life.stop_requested(walk.now) if walk.life.phase is Phase.SERVING else [])
    for _ in range(200):
        for name, code in list(walk.dying.items()):
            del walk.dying[name]
            if name in walk.alive:
                walk.die(name, code)
        if walk.life.phase is Phase.STOPPED:
            break
        walk.now = max(walk.now, walk.life.deadline)
        walk.do(walk.life.tick(walk.now))
    assert walk.life.phase is Phase.STOPPED
    assert walk.alive == set()
    assert walk.open == set()
    assert walk.now - began < 100


@pytest.mark.parametrize("seed", seeds(40))
def test_random_lives(seed: int) -> None:
    check_a_walk(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds(500))
def test_random_lives_for_many_seeds(seed: int) -> None:
    check_a_walk(seed)


@pytest.mark.parametrize("seed", seeds(10))
def test_a_fleet_left_alone_ends_all_that_was_begun(seed: int) -> None:
    """Rounds and drains end, with processes that obey at once and groups that get ready."""
    rng = random.Random(seed)
    fleet = ready_fleet(groups=rng.randint(1, 3), routers=rng.randint(1, 2))
    pending = fleet.command(Command("restart"), 1, 0.0)
    now, done = 0.0, False
    while pending or not done:
        if not pending:
            assert fleet.deadline < float("inf")
            now = max(now, fleet.deadline)
            pending = fleet.tick(now)
        following: list[Action] = []
        for action in pending:
            now += rng.random() * 0.1
            match action:
                case Send(name, number):
                    following += fleet.exited(name, 0 if number == HAND_OVER else -number, now)
                case Start(name, member) if member.role is not Role.WORKER:
                    following += fleet.reported(name, "ready", now)
                case Tell(_, _, is_done, ok):
                    assert ok
                    done = done or is_done
        pending = following
    assert set(states(fleet)) == {"ready"}
