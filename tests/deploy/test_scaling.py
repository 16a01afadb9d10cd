"""The number of groups changes while the cluster serves: decisions, and what routers are told."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from deploy.lives import KILL, TERM, members, sends, starts, texts, told
from seeds import seeds

from trunkline.deploy.supervisor.fleet import Fleet
from trunkline.deploy.supervisor.members import (
    EXIT_IMPOSSIBLE,
    Action,
    Command,
    CommandError,
    Limits,
    Member,
    Publish,
    Role,
    Send,
    Start,
)

LIMITS = Limits(start_s=100, pause_s=2, drain_s=60, settle_s=60, leave_s=60, reap_s=60)
ROOM = 5
"""Groups that the machine has room for."""


def further(count: int, missing: Sequence[int]) -> list[Member]:
    if count > ROOM:
        raise CommandError(f"there is no room for {count} groups")
    return [member for member in members(count) if member.group in missing]


def ready_fleet(groups: int) -> Fleet:
    found = members(groups)
    fleet = Fleet(found, LIMITS, 0.0, further)
    for member in found:
        if member.role is not Role.WORKER:
            fleet.reported(member.name, "ready", 1.0)
    return fleet


def scale(fleet: Fleet, groups: int, ticket: int = 1, now: float = 10.0) -> list[Action]:
    return fleet.command(Command("scale", groups=groups), ticket, now)


def published(actions: Sequence[Action]) -> list[tuple[int, ...]]:
    return [action.groups for action in actions if isinstance(action, Publish)]


def shown(fleet: Fleet) -> dict[int, str]:
    return {row["group"]: row["state"] for row in fleet.describe(0.0)["groups"]}


def end(fleet: Fleet, group: int, now: float) -> list[Action]:
    """All processes of a group end as they were told."""
    names = [f"c{group}", f"w{group}.0", f"w{group}.1"]
    return [action for name in names for action in fleet.exited(name, -TERM, now)]


def test_new_groups_are_published_one_by_one_when_they_are_ready() -> None:
    fleet = ready_fleet(1)
    actions = scale(fleet, 3)
    assert starts(actions) == ["w1.0", "w1.1", "c1", "w2.0", "w2.1", "c2"]
    assert published(actions) == [(0,)], "nothing has changed for routers"
    assert told(actions) == [(1, "from 1 group to 3 groups", False, True)]
    actions = fleet.reported("c2", "ready", 11.0)
    assert (published(actions), told(actions)) == ([(0, 2)], [])
    actions = fleet.reported("c1", "ready", 12.0)
    assert published(actions) == [(0, 1, 2)]
    assert told(actions) == [(1, "the cluster has 3 groups now", True, True)]
    assert texts(actions) == "Scaling: the cluster has 3 groups now.", "for those who watch the server"
    assert {row["restarts"] for row in fleet.describe(13.0)["processes"]} == {0}


def test_routers_know_that_groups_leave_before_their_processes_are_told() -> None:
    fleet = ready_fleet(3)
    actions = scale(fleet, 1)
    told_routers = next(at for at, action in enumerate(actions) if isinstance(action, Publish))
    told_groups = next(at for at, action in enumerate(actions) if isinstance(action, Send))
    assert told_routers < told_groups
    assert published(actions) == [(0,)]
    assert sends(actions) == [("c1", TERM), ("c2", TERM)]
    assert shown(fleet) == {0: "ready", 1: "draining", 2: "draining"}
    with pytest.raises(CommandError, match="group 2 leaves"):
        fleet.command(Command("undrain", ["2"]), 2, 11.0)
    end(fleet, 2, 12.0)
    assert shown(fleet) == {0: "ready", 1: "draining"}
    actions = end(fleet, 1, 13.0)
    assert told(actions) == [(1, "the cluster has 1 group now", True, True)]
    assert shown(fleet) == {0: "ready"}


def test_a_group_that_is_wanted_again_while_it_leaves_comes_back() -> None:
    fleet = ready_fleet(2)
    scale(fleet, 1)
    actions = scale(fleet, 2, ticket=2, now=11.0)
    assert told(actions)[0] == (1, "changed again, to 2 groups", True, False)
    assert starts(actions) == [], "it still stops"
    assert starts(end(fleet, 1, 12.0)) == ["w1.0", "w1.1", "c1"]
    actions = fleet.reported("c1", "ready", 13.0)
    assert published(actions) == [(0, 1)]
    assert told(actions) == [(2, "the cluster has 2 groups now", True, True)]


def test_a_group_that_can_never_work_is_forgotten_and_named() -> None:
    fleet = ready_fleet(1)
    scale(fleet, 2)
    fleet.exited("w1.0", EXIT_IMPOSSIBLE, 11.0, "no GPU is left")
    actions = [*fleet.exited("w1.1", -TERM, 12.0), *fleet.exited("c1", -TERM, 12.0)]
    assert published(actions) == []
    [(ticket, text, done, ok)] = told(actions)
    assert (ticket, done, ok) == (1, True, False)
    assert "group 1 was given up" in text
    assert "no GPU is left" in text
    assert shown(fleet) == {0: "ready"}
    assert not fleet.is_without_groups
    assert starts(scale(fleet, 2, ticket=2, now=20.0)) == ["w1.0", "w1.1", "c1"], "it may work now"


def test_a_group_that_dies_before_it_is_ready_is_started_again() -> None:
    fleet = ready_fleet(1)
    scale(fleet, 2)
    actions = fleet.exited("c1", -KILL, 11.0)
    assert starts(actions) == ["c1"]
    assert told(fleet.reported("c1", "ready", 14.0)) == [(1, "the cluster has 2 groups now", True, True)]


def test_a_new_group_that_is_drained_before_it_is_ready_ends_the_wait() -> None:
    fleet = ready_fleet(1)
    scale(fleet, 2)
    actions = fleet.command(Command("drain", ["1"]), 2, 11.0)
    assert (1, "group 1 was drained meanwhile", True, False) in told(actions)
    assert told(end(fleet, 1, 12.0)) == [(2, "group 1 is down", True, True)]
    assert shown(fleet) == {0: "ready", 1: "down"}, "a drained group stays, so that it can be started again"
    assert starts(fleet.command(Command("undrain", ["1"]), 3, 13.0)) == ["w1.0", "w1.1", "c1"]
    actions = fleet.reported("c1", "ready", 14.0)
    assert published(actions) == [(0, 1)]
    assert told(actions) == [(3, "group 1 is ready", True, True)]


def test_the_last_groups_that_run_stay() -> None:
    fleet = ready_fleet(3)
    fleet.command(Command("drain", ["0"]), 2, 10.0)
    with pytest.raises(CommandError, match="no group would be left: group 0 is down; `trunkline undrain 0`"):
        scale(fleet, 1)
    assert shown(fleet) == {0: "draining", 1: "ready", 2: "ready"}, "nothing has changed"
    end(fleet, 0, 11.0)
    for name in ("w1.0", "w1.1", "c1"):
        fleet.exited(name, EXIT_IMPOSSIBLE if name == "w1.0" else -TERM, 12.0, "no GPU is left")
    with pytest.raises(CommandError, match="no group would be left: group 0, group 1 are down"):
        scale(fleet, 2)
    assert sends(scale(fleet, 4)) == [], "more groups are not refused"
    fleet.command(Command("undrain", ["0"]), 3, 13.0)
    assert sends(scale(fleet, 1, 4, 14.0)) == [("c2", TERM), ("c3", TERM)], "group 0 starts"


def test_what_is_refused_changes_nothing() -> None:
    fleet = ready_fleet(2)
    with pytest.raises(CommandError, match="no room for 6 groups"):
        scale(fleet, 6)
    fleet.command(Command("restart", ["1"]), 2, 10.0)
    with pytest.raises(CommandError, match="group 1 is being restarted"):
        scale(fleet, 1)
    alone = Fleet(members(1), LIMITS, 0.0)
    with pytest.raises(CommandError, match="cannot be changed here"):
        scale(alone, 1)
    assert set(shown(fleet)) == {0, 1}


def test_the_same_number_again_tells_routers_again() -> None:
    """They may not have been told, because the disk was full."""
    fleet = ready_fleet(2)
    actions = scale(fleet, 2)
    assert published(actions) == [(0, 1)]
    assert told(actions)[-1] == (1, "the cluster has 2 groups now", True, True)


def test_a_stop_answers_who_waits() -> None:
    fleet = ready_fleet(1)
    scale(fleet, 2)
    assert told(fleet.close("the cluster stops")) == [(1, "the cluster stops", True, False)]


@pytest.mark.parametrize("seed", seeds(30))
def test_whatever_happens_routers_know_the_groups_in_the_end(seed: int) -> None:
    """Random changes, deaths and ends; then all that was started becomes ready."""
    rng, now, wanted = random.Random(seed), 10.0, 2
    fleet, running, tickets = ready_fleet(2), {member.name for member in members(2)}, 0
    known: tuple[int, ...] = (0, 1)
    answers: list[int] = []

    def note(actions: Sequence[Action]) -> None:
        nonlocal known
        for action in actions:
            if isinstance(action, Start):
                running.add(action.name)
            elif isinstance(action, Publish):
                known = action.groups
            elif isinstance(action, Send) and action.number in (TERM, KILL):
                told_to_end.add(action.name)
        answers.extend(ticket for ticket, _, done, _ in told(list(actions)) if done)

    told_to_end: set[str] = set()
    for step in range(200):
        now += rng.choice((0.0, 0.5, 1.0))
        note(fleet.tick(now))
        event = rng.random() if step < 150 else 1.0
        if event < 0.2:
            wanted, tickets = rng.randint(1, ROOM), tickets + 1
            note(scale(fleet, wanted, tickets, now))
        elif event < 0.3 and running - {"router"}:
            name = rng.choice(sorted(running - {"router"}))
            running.discard(name)
            told_to_end.discard(name)
            note(fleet.exited(name, -KILL, now))
        else:
            for name in sorted(told_to_end):
                told_to_end.discard(name)
                if name in running:
                    running.discard(name)
                    note(fleet.exited(name, -TERM, now))
            for name in sorted(running):
                if name.startswith("c"):
                    note(fleet.reported(name, "ready", now))
    assert known == tuple(range(wanted))
    assert shown(fleet) == dict.fromkeys(range(wanted), "ready")
    assert running == {member.name for member in members(wanted)}
    assert sorted(answers) == list(range(1, tickets + 1))
