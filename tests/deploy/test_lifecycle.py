"""When the supervisor stops and gives up processes, driven by chosen and by random sequences of events."""

from __future__ import annotations

import random

import pytest
from deploy.lives import KILL, TERM, members, sends, starts, texts
from seeds import seeds

from trunkline.deploy.supervisor.lifecycle import Lifecycle, Phase
from trunkline.deploy.supervisor.members import (
    EXIT_IMPOSSIBLE,
    EXIT_LEFT,
    Action,
    Command,
    CommandError,
    Limits,
    Member,
    Role,
    Say,
    Send,
    Tell,
    describe_exit,
)
from trunkline.worker.service import EXIT_CONFIG as WORKERS_EXIT_CONFIG
from trunkline.worker.service import EXIT_LEFT as WORKERS_EXIT_LEFT

LIMITS = Limits(drain_s=30, margin_s=5, settle_s=5, grace_s=3, orphan_s=1, quick_s=2, reap_s=5)


def serving(groups: int = 1, *, restart: bool = False) -> Lifecycle:
    life = Lifecycle(members(groups), LIMITS, now=0.0, restart=restart)
    life.healthy()
    return life


def end_all(life: Lifecycle, now: float, status: int = 0) -> None:
    """All children that are left end."""
    for name in life.alive:
        life.exited(name, status, now)


def test_a_graceful_stop_goes_router_controllers_workers() -> None:
    life = serving(groups=2)
    assert sends(life.stop_requested(10.0)) == [("router", TERM)]
    assert life.deadline == 45.0
    assert sends(life.exited("router", 0, 12.0)) == [("c0", TERM), ("c1", TERM)]
    assert life.exited("c0", 0, 12.1) == []
    assert life.exited("w0.0", 0, 12.2) == []
    assert life.exited("w0.1", 0, 12.2) == []
    assert sends(life.exited("c1", 0, 12.3)) == [("w1.0", TERM), ("w1.1", TERM)]
    assert life.exited("w1.0", -TERM, 12.4) == []
    assert life.exited("w1.1", 0, 12.4) == []
    assert (life.phase, life.exit_code, life.deadline) == (Phase.STOPPED, 0, float("inf"))


def test_who_does_not_stop_is_killed_and_the_exit_code_says_so() -> None:
    life = serving()
    life.stop_requested(0.0)
    assert life.tick(34.9) == []
    assert sends(life.tick(35.0)) == [("router", KILL)]
    assert sends(life.exited("router", -KILL, 35.1)) == [("c0", TERM)]
    for name in ("w0.0", "w0.1", "c0"):
        life.exited(name, 0, 35.2)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 1)


def test_a_second_request_hurries_and_a_third_kills() -> None:
    life = serving()
    life.stop_requested(0.0)
    assert sends(life.stop_requested(1.0)) == [(m.name, TERM) for m in members()]
    assert sends(life.stop_requested(1.5)) == [(m.name, KILL) for m in members()]
    for member in members():
        life.exited(member.name, -KILL, 1.6)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 0)


@pytest.mark.parametrize("lost", ["w0.0", "w0.1", "c0"])
def test_a_lost_process_leaves_the_router_a_moment_and_its_group_a_shorter_one(lost: str) -> None:
    life = serving(groups=2)
    actions = life.exited(lost, -KILL, 10.0)
    assert texts(actions) == f"{lost} was killed by SIGKILL."
    assert sends(actions) == []
    assert life.phase is Phase.FAILED
    orphans = [name for name in ("w0.0", "w0.1") if name != lost]
    assert sends(life.tick(11.0)) == [(name, KILL) for name in orphans]
    for name in orphans:
        assert life.exited(name, -KILL, 11.1) == []
    stopping = sends(life.tick(13.0))
    assert ("router", TERM) in stopping
    assert ("w1.0", TERM) in stopping
    end_all(life, 13.1)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 1)


@pytest.mark.parametrize("is_stuck", [False, True])
def test_after_a_failure_a_router_that_drains_is_told_twice_before_it_is_killed(is_stuck: bool) -> None:
    """Streams that wait for a group that does not come back get their error, not a reset connection."""
    life = serving()
    life.exited("c0", 1, 10.0)
    for name in ("w0.0", "w0.1"):
        life.exited(name, 1, 10.1)
    life.tick(11.0)
    assert sends(life.tick(13.0)) == [("router", TERM)]
    assert sends(life.tick(14.9)) == []
    assert sends(life.tick(15.0)) == [("router", TERM)]
    if is_stuck:
        assert sends(life.tick(17.0)) == [("router", KILL)]
    assert texts(life.exited("router", -KILL if is_stuck else 1, 17.1)) == ""
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 1)


def test_limits_are_checked() -> None:
    Limits(drain_s=0).validate()
    with pytest.raises(ValueError, match="grace_s must be positive"):
        Limits(grace_s=0).validate()


def test_exit_statuses_read_well() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-40) == "was killed by signal 40"


def test_with_restarts_a_lost_process_is_started_again_and_the_cluster_serves_on() -> None:
    life = serving(restart=True)
    actions = life.exited("w0.1", -KILL, 10.0)
    assert starts(actions) == ["w0.1"]
    assert texts(actions) == "w0.1 was killed by SIGKILL; it is started again."
    assert (life.phase, "w0.1" in life.alive) == (Phase.SERVING, True)
    assert starts(life.exited("router", 1, 11.0)) == ["router"]


def test_a_group_that_can_never_work_ends_the_cluster_if_it_was_the_last() -> None:
    life = serving(groups=2, restart=True)
    now = 10.0
    for group in ("0", "1"):
        assert life.phase is Phase.SERVING
        said = texts(life.exited(f"w{group}.0", 2, now, "gpu is 7, but torch sees 1"))
        assert said == (
            f"w{group}.0 exited with code 2: gpu is 7, but torch sees 1; that cannot work, so its group "
            f"(group {group}) is given up."
        )
        now += 1.0
        for name in (f"w{group}.1", f"c{group}"):
            life.exited(name, -TERM, now)
    assert [row["why"] for row in life.status(now)["groups"]] == [
        f"w{group}.0 exited with code 2: gpu is 7, but torch sees 1" for group in (0, 1)
    ]
    assert life.phase is Phase.FAILED  # the router answers a little longer
    now += LIMITS.grace_s
    assert sends(life.tick(now))[-1] == ("router", TERM)
    life.exited("router", 0, now)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 2)


def test_a_worker_that_left_is_not_blamed_for_what_another_one_says() -> None:
    """Ranks notice each other's end before the supervisor does."""
    life = Lifecycle(members(), LIMITS, now=0.0)
    assert life.exited("w0.1", 3, 1.0, "rank 0 is gone") == []
    life.healthy()  # another group's token changes nothing
    assert life.phase is Phase.STARTING
    assert texts(life.exited("w0.0", 2, 1.5, "Duplicate GPU detected")) == (
        "w0.0 exited with code 2: Duplicate GPU detected."
    )
    assert (life.phase, life.exit_code) == (Phase.STOPPING, 2)
    life = Lifecycle(members(), LIMITS, now=0.0)
    life.exited("w0.1", 3, 1.0, "rank 0 is gone")
    assert life.deadline == 2.0
    assert texts(life.tick(2.0)) == "w0.1 exited with code 3: rank 0 is gone."
    assert (life.phase, life.exit_code) == (Phase.STOPPING, 1)


def test_a_stop_during_a_restart_is_clean() -> None:
    """A worker is dead, its group leaves by itself: neither is anybody started nor is anything to blame."""
    life = serving(groups=2, restart=True)
    life.exited("w0.0", -KILL, 10.0)
    life.exited("w0.0", -KILL, 10.1)  # again: it waits for a second now
    assert sends(life.stop_requested(10.2)) == [("router", TERM)]
    assert life.exited("w0.1", 1, 10.3) == []
    assert life.tick(11.5) == []
    assert "w0.0" not in life.alive
    life.exited("router", 0, 12.0)
    end_all(life, 12.1)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 0)


def test_a_drained_group_is_no_news_when_the_cluster_stops() -> None:
    life = serving(groups=2, restart=True)
    actions = life.command(Command("drain", ["0"]), 7, 10.0)
    assert sends(actions) == [("c0", TERM)]
    actions = life.stop_requested(11.0)
    assert Tell(7, "the cluster stops", done=True, ok=False) in actions
    assert life.exited("c0", 0, 11.5) == []
    assert life.exited("w0.0", 0, 11.6) == []
    assert life.exited("w0.1", 1, 11.6) == []
    life.exited("router", 0, 12.0)
    end_all(life, 12.1)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 0)


def test_commands_wait_until_the_cluster_serves() -> None:
    life = Lifecycle(members(), LIMITS, now=0.0)
    with pytest.raises(CommandError, match="the cluster is starting"):
        life.command(Command("drain", ["0"]), 1, 1.0)
    assert life.status(1.0)["phase"] == "starting"


def test_without_restarts_a_command_still_may_stop_what_it_names() -> None:
    life = serving(groups=2)
    life.command(Command("drain", ["0"]), 1, 2.0)
    for name in ("c0", "w0.0", "w0.1"):
        life.exited(name, 0, 3.0)
    assert "c1" in life.alive
    assert texts(life.exited("w1.0", 1, 4.0)) == "w1.0 exited with code 1."
    assert life.phase is Phase.FAILED


def test_a_lost_router_stops_everything_at_once() -> None:
    life = serving()
    assert sends(life.exited("router", 1, 10.0)) == [("c0", TERM), ("w0.0", TERM), ("w0.1", TERM)]
    assert life.deadline == 12.0
    life = serving(restart=True)
    life.exited("router", 2, 10.0, "router: policy is 'x'")
    assert (life.phase, life.exit_code) == (Phase.STOPPING, 2)


@pytest.mark.parametrize(("code", "exit_code"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("name", ["w0.0", "c0", "router"])
def test_a_failed_start_stops_everything_and_names_the_child(name: str, code: int, exit_code: int) -> None:
    life = Lifecycle(members(), LIMITS, now=0.0)
    actions = life.exited(name, code, 1.0, "no such GPU")
    assert actions[0] == Say(f"{name} exited with code {code}: no such GPU.", "error", about=name)
    assert len(sends(actions)) == 3
    assert (life.phase, life.exit_code) == (Phase.STOPPING, exit_code)
    end_all(life, 3.1)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, exit_code)


def test_a_start_ends_by_its_limit_or_by_a_stop() -> None:
    life = Lifecycle(members(), Limits(start_s=100), now=5.0)
    assert life.tick(104.9) == []
    assert len(sends(life.tick(105.0))) == 4
    assert life.exit_code == 1
    life = Lifecycle(members(), LIMITS, now=0.0)
    assert len(sends(life.stop_requested(1.0))) == 4
    end_all(life, 1.1, -TERM)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 0)


def test_deaths_during_a_stop() -> None:
    life = serving()
    life.stop_requested(0.0)
    assert "w0.0" in texts(life.exited("w0.0", -KILL, 5.0)), "it cuts the drain short"
    assert (life.deadline, life.exit_code) == (8.0, 1)
    life = serving()
    life.stop_requested(0.0)
    life.exited("router", 0, 1.0)
    assert texts(life.exited("w0.1", 1, 1.1)) == "w0.1 exited with code 1 while stopping.", "only a warning"
    end_all(life, 1.2)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 0)
    life = serving()
    life.stop_requested(0.0)
    assert "router exited with code 1." in texts(life.exited("router", 1, 1.0))
    assert life.exit_code == 1


def test_what_survives_sigkill_does_not_keep_the_supervisor() -> None:
    life = serving()
    life.exited("router", 0, 0.0)
    life.tick(2.0)
    assert "survive" in texts(life.tick(7.0))
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 1)


# -- parts of a cluster on several hosts


def life_of(*found: Member) -> Lifecycle:
    life = Lifecycle(found, LIMITS, 0.0)
    life.healthy()
    return life


def test_a_rank_that_can_never_work_ends_its_part() -> None:
    assert (EXIT_LEFT, EXIT_IMPOSSIBLE) == (WORKERS_EXIT_LEFT, WORKERS_EXIT_CONFIG)
    life = life_of(Member("worker-1", Role.WORKER, 0))
    assert starts(life.exited("worker-1", EXIT_LEFT, 0.0)) == ["worker-1"]
    assert life.phase is Phase.SERVING
    life.exited("worker-1", EXIT_IMPOSSIBLE, 1.0)
    assert (life.phase, life.exit_code) == (Phase.FAILED, 2)


def test_workers_without_a_controller_are_ready_when_all_are() -> None:
    life = life_of(Member("worker-2", Role.WORKER, 0), Member("worker-3", Role.WORKER, 0))

    def state() -> str:
        return str(life.status(1.0)["groups"][0]["state"])

    life.reported("worker-2", "ready", 1.0)
    assert state() == "starting"
    life.reported("worker-3", "ready", 1.0)
    assert state() == "ready"
    life.exited("worker-2", EXIT_LEFT, 1.0)
    assert state() == "starting"


def test_a_group_without_routers_here_gets_the_time_to_drain() -> None:
    life = life_of(Member("controller", Role.CONTROLLER, 0), Member("worker-0", Role.WORKER, 0))
    assert sends(life.stop_requested(1.0)) == [("controller", TERM)]
    assert life.deadline == 1.0 + LIMITS.drain_s + LIMITS.margin_s
    assert sends(life.exited("controller", 0, 20.0)) == [("worker-0", TERM)]
    end_all(life, 20.0)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 0)


def test_a_router_alone_serves_without_groups() -> None:
    life = life_of(Member("router", Role.ROUTER, -1))
    assert starts(life.exited("router", 1, 1.0)) == ["router"]
    assert life.phase is Phase.SERVING


# -- any sequence of events


def check_a_life(seed: int) -> None:
    """Once a stop or a failure began, the end comes in bounded time, and no process is forgotten."""
    rng = random.Random(seed)
    now = 0.0
    life = Lifecycle(members(groups=rng.randint(1, 3), tp=rng.randint(1, 4)), LIMITS, now, restart=False)
    stubborn = {name for name in life.alive if rng.random() < 0.2}
    dying: dict[str, int] = {}
    began: float | None = None
    failed = False
    for _ in range(400):
        event = rng.random()
        actions: list[Action] = []
        if event < 0.1:
            life.healthy()
        elif event < 0.13:
            actions = life.stop_requested(now)
        elif event < 0.16 and life.alive:
            name = rng.choice(life.alive)
            failed = failed or life.phase in (Phase.STARTING, Phase.SERVING)
            actions = life.exited(name, rng.choice([1, 2, 3, -9, -11]), now)
        elif event < 0.5 and dying:
            name = rng.choice(list(dying))
            actions = life.exited(name, dying.pop(name), now)
        else:
            now = min(now + rng.random(), max(now, life.deadline))
            actions = life.tick(now)
        for action in actions:
            match action:
                case Send(name, number) if name in life.alive and (number == KILL or name not in stubborn):
                    dying[name] = -number
        if began is None and life.phase not in (Phase.STARTING, Phase.SERVING):
            began = now
        if life.phase is Phase.STOPPED:
            break
        assert now <= life.deadline
    # What is signalled dies now; only children that ignore SIGTERM keep a stop waiting, and not for long.
    if life.phase not in (Phase.STARTING, Phase.SERVING):
        for _ in range(100):
            for name, status in dying.items():
                life.exited(name, status, now)
            dying = {}
            if life.phase is Phase.STOPPED:
                break
            now = life.deadline
            dying = {action.name: -action.number for action in life.tick(now) if isinstance(action, Send)}
        assert began is not None
        assert life.phase is Phase.STOPPED
        assert now - began <= LIMITS.grace_s + LIMITS.drain_s + LIMITS.margin_s + 2 * LIMITS.settle_s + 100
        assert not failed or life.exit_code in (1, 2)


@pytest.mark.parametrize("seed", seeds(100))
def test_every_life_ends(seed: int) -> None:
    check_a_life(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds(1000))
def test_every_life_ends_for_many_seeds(seed: int) -> None:
    check_a_life(seed)
