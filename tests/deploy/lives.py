"""Words for tests of the supervisor's decisions: members of a cluster, and what a list of actions says."""

from __future__ import annotations

import signal

from trunkline.deploy.supervisor.members import Action, Member, Role, Say, Send, Start, Tell

TERM, KILL, HAND_OVER = signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1


def members(groups: int = 1, tp: int = 2, routers: int = 1) -> list[Member]:
    """Return `router` or `router-0` …, and for each group `c0`, `w0.0`, `w0.1` …"""
    names = ["router"] if routers == 1 else [f"router-{number}" for number in range(routers)]
    found = [Member(name, Role.ROUTER, -1) for name in names]
    for group in range(groups):
        found.append(Member(f"c{group}", Role.CONTROLLER, group))
        found += [Member(f"w{group}.{rank}", Role.WORKER, group) for rank in range(tp)]
    return found


def sends(actions: list[Action]) -> list[tuple[str, signal.Signals]]:
    return [(action.name, action.number) for action in actions if isinstance(action, Send)]


def starts(actions: list[Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, Start)]


def texts(actions: list[Action]) -> str:
    return " ".join(action.text for action in actions if isinstance(action, Say))


def told(actions: list[Action]) -> list[tuple[int, str, bool, bool]]:
    return [(a.ticket, a.text, a.done, a.ok) for a in actions if isinstance(a, Tell)]
