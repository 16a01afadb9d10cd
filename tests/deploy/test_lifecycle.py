"""The supervisor's decisions, driven by chosen and by random sequences of events."""

from __future__ import annotations

import random
import signal

import pytest

from trunkline.deploy.supervisor.control_commands import Command, CommandError
from trunkline.deploy.supervisor.lifecycle import Lifecycle, Phase
from trunkline.deploy.supervisor.members import Action, Limits, Member, Role, Say, Send, Start, Tell, describe_exit

LIMITS = Limits(drain_s=30, margin_s=5, settle_s=5, grace_s=3, orphan_s=1, quick_s=2, reap_s=5)
TERM, KILL = signal.SIGTERM, signal.SIGKILL


def members(groups: int = 1, tp: int = 2) -> list[Member]:
    found = [Member("router", Role.ROUTER, -1)]
    for group in range(groups):
        found.append(Member(f"c{group}", Role.CONTROLLER, group))
        found += [Member(f"w{group}.{rank}", Role.WORKER, group) for rank in range(tp)]
    return found


def serving(groups: int = 1, *, restart: bool = False) -> Lifecycle:
    life = Lifecycle(members(groups), LIMITS, now=0.0, restart=restart)
    assert life.healthy(1.0) == []
    return life


def sends(actions: list[Action]) -> list[tuple[str, signal.Signals]]:
    return [(action.name, action.number) for action in actions if isinstance(action, Send)]


def starts(actions: list[Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, Start)]


def texts(actions: list[Action]) -> str:
    return " ".join(action.text for action in actions if isinstance(action, Say))


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
    for name in life.alive:
        life.exited(name, 0, 13.1)
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


def test_a_lost_router_stops_everything_at_once() -> None:
    life = serving()
    assert sends(life.exited("router", 1, 10.0)) == [("c0", TERM), ("w0.0", TERM), ("w0.1", TERM)]
    assert life.deadline == 12.0


def test_a_failed_start_stops_everything_and_names_the_child() -> None:
    life = Lifecycle(members(), LIMITS, now=0.0)
    actions = life.exited("w0.1", 1, 3.0)
    assert actions[0] == Say("w0.1 exited with code 1.", "error", about="w0.1")
    assert len(sends(actions)) == 3
    for name in life.alive:
        life.exited(name, -TERM, 3.1)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 1)


def test_a_start_that_never_ends_is_given_up() -> None:
    life = Lifecycle(members(), Limits(start_s=100), now=5.0)
    assert life.tick(104.9) == []
    assert len(sends(life.tick(105.0))) == 4
    assert life.exit_code == 1


def test_a_stop_during_the_start_is_clean() -> None:
    life = Lifecycle(members(), LIMITS, now=0.0)
    assert len(sends(life.stop_requested(1.0))) == 4
    for name in life.alive:
        life.exited(name, -TERM, 1.1)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 0)


def test_a_death_while_draining_cuts_the_drain_short() -> None:
    life = serving()
    life.stop_requested(0.0)
    assert "w0.0" in texts(life.exited("w0.0", -KILL, 5.0))
    assert life.deadline == 8.0
    assert life.exit_code == 1


def test_after_the_drain_a_worker_that_stumbles_is_worth_a_warning_only() -> None:
    life = serving()
    life.stop_requested(0.0)
    life.exited("router", 0, 1.0)
    actions = life.exited("w0.1", 1, 1.1)
    assert texts(actions) == "w0.1 exited with code 1 while stopping."
    life.exited("c0", 0, 1.2)
    life.exited("w0.0", 0, 1.3)
    assert (life.phase, life.exit_code) == (Phase.STOPPED, 0)


def test_a_router_that_drains_badly_is_a_failure() -> None:
    life = serving()
    life.stop_requested(0.0)
    assert "router exited with code 1." in texts(life.exited("router", 1, 1.0))
    assert life.exit_code == 1


def test_what_survives_sigkill_does_not_keep_us() -> None:
    life = serving()
    life.exited("router", 0, 0.0)
    life.tick(2.0)
    assert "survive" in texts(life.tick(7.0))
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


def crash(life: Lifecycle, name: str, now: float, times: int) -> float:
    """Let it die as often as it is started; the time of its last death."""
    for _ in range(times):
        while name not in life.alive:
            assert life.deadline - now <= 30.0
            now = life.deadline
            life.tick(now)
        life.exited(name, 1, now)
    return now


def test_what_dies_is_started_again_for_ever() -> None:
    life = serving(groups=1, restart=True)
    now = crash(life, "c0", 10.0, times=100)
    now = crash(life, "router", now, times=100)
    assert life.phase is Phase.SERVING
    rows = {row["name"]: row["state"] for row in life.status(now)["processes"]}
    assert rows["router"] == "starts in 30 s"


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


def test_routers_that_can_never_work_end_the_cluster() -> None:
    life = serving(restart=True)
    life.exited("router", 2, 10.0, "router: policy is 'x'")
    assert (life.phase, life.exit_code) == (Phase.STOPPING, 2)


@pytest.mark.parametrize("name", ["w0.0", "c0", "router"])
def test_a_start_that_can_never_work_ends_with_its_exit_code(name: str) -> None:
    life = Lifecycle(members(), LIMITS, now=0.0)
    assert texts(life.exited(name, 2, 1.0, "no such GPU")) == f"{name} exited with code 2: no such GPU."
    assert (life.phase, life.exit_code) == (Phase.STOPPING, 2)


def test_a_worker_that_left_is_not_blamed_for_what_another_one_says() -> None:
    """Ranks notice each other's end before the supervisor does."""
    life = Lifecycle(members(), LIMITS, now=0.0)
    assert life.exited("w0.1", 3, 1.0, "rank 0 is gone") == []
    assert life.healthy(1.1) == []  # another group's token changes nothing
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
    for name in life.alive:
        life.exited(name, 0, 12.1)
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
    for name in life.alive:
        life.exited(name, 0, 12.1)
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


@pytest.mark.parametrize("seed", range(300))
def test_every_life_ends(seed: int) -> None:
    """Whatever happens, once a stop or a failure began, the end comes in bounded time and nobody is forgotten."""
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
            actions = life.healthy(now)
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
            if not isinstance(action, Send) or action.name not in life.alive:
                continue
            if action.number == KILL or action.name not in stubborn:
                dying[action.name] = -action.number
        if began is None and life.phase not in (Phase.STARTING, Phase.SERVING):
            began = now
        if life.phase is Phase.STOPPED:
            break
        assert now <= life.deadline
    # Whoever is signalled dies now; only those that ignore SIGTERM keep a stop waiting, and not for long.
    if life.phase not in (Phase.STARTING, Phase.SERVING):
        for _ in range(100):
            for name, status in dying.items():
                life.exited(name, status, now)
            dying = {}
            if life.phase is Phase.STOPPED:
                break
            now = life.deadline
            for action in life.tick(now):
                if isinstance(action, Send):
                    dying[action.name] = -action.number
        assert began is not None
        assert life.phase is Phase.STOPPED
        assert now - began <= LIMITS.grace_s + LIMITS.drain_s + LIMITS.margin_s + 2 * LIMITS.settle_s + 100
        assert not failed or life.exit_code in (1, 2)
