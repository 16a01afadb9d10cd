"""Who kills and freezes processes of a real cluster, and what is to be true when it has recovered."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import psutil
from cluster.crowd import Crowd
from cluster.harness import Cluster, wait_for
from worker.redis_server import RedisServer

from trunkline.deploy.supervisor.control import ControlError, ask
from trunkline.deploy.supervisor.members import Command
from trunkline.deploy.supervisor.run_folder import CONTROL_SOCKET

HEALTHY_SECONDS_MAX = 90.0
ROUTERS_MAX = 10
TROUBLE_PAUSE_S = (0.5, 3.0)


class View:
    """A cluster as its supervisor and its metrics show it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        (self.folder,) = cluster.temporary.glob("trunkline-*")

    def status(self) -> dict[str, Any]:
        """As of `trunkline status --json`."""
        for reply in ask(self.folder / CONTROL_SOCKET, Command("status")):
            if reply.status is not None:
                return reply.status
        raise ControlError("the supervisor did not answer")

    def pid(self, name: str) -> int:
        """Of a process by its name, 0 if there is none now."""
        return next(int(row["pid"] or 0) for row in self.status()["processes"] if row["name"] == name)

    def pids(self, *roles: str) -> dict[str, int]:
        """Of the processes of these roles, by name."""
        return {name: self.pid(name) for name in self.groups(*roles)}

    def restarts(self) -> int:
        """Processes that were started again so far."""
        return sum(int(row["restarts"]) for row in self.status()["processes"])

    def groups(self, *roles: str) -> dict[str, int]:
        """To which group the processes of these roles belong, by name."""
        rows = self.status()["processes"]
        return {row["name"]: int(row["group"]) for row in rows if row["name"].startswith(roles)}

    def is_ready(self, group: int) -> bool:
        """Whether a group is, as its controller has told the supervisor."""
        states = {row["group"]: row["state"] for row in self.status()["groups"]}
        return bool(states[group] == "ready")

    def is_healthy(self) -> bool:
        """Whether all groups are ready, and the router knows."""
        groups = self.status()["groups"]
        return all(group["state"] == "ready" for group in groups) and self.cluster.gauge("ready") == len(groups)

    def wait_replaced(self, name: str, pid: int) -> None:
        """Wait until another process has this name, and the cluster is well again. That a group is not ready
        meanwhile may last for less than the time between two looks."""
        wait_for(lambda: self.pid(name) not in (0, pid) and self.is_healthy(), HEALTHY_SECONDS_MAX)

    def inflight(self) -> dict[int, int]:
        """Requests of the router at each controller."""
        groups = [row["group"] for row in self.status()["groups"]]
        return {group: self.cluster.metric("controller_inflight", controller=str(group)) for group in groups}

    def leaks(self) -> dict[str, int]:
        """What nobody uses any more and is held all the same; empty if all is well. Up to a second old."""
        blocks = ("blocks_total", "blocks_free", "blocks_cached")
        total, free, cached, running, waiting, inflight, texts = self.cluster.gauges(
            *blocks, "requests_running", "requests_waiting", "inflight", "texts_encoding"
        )
        held = {
            "requests running": running,
            "requests waiting": waiting,
            "blocks neither free nor cached": total - free - cached,
            "requests in flight at the router": inflight,
            "texts being encoded": texts,
        }
        return {what: count for what, count in held.items() if count}

    def wait_for_no_leaks(self, seconds: float = 60.0) -> None:
        """Fail, and say what is left, if something is."""
        deadline = time.monotonic() + seconds
        while leaks := self.leaks():
            assert time.monotonic() < deadline, leaks
            time.sleep(0.2)


@dataclass(frozen=True)
class Kill:
    """What one kill met."""

    victim: str
    begun: int
    """Streams of which the client had a part, and not the end."""
    hit: int
    """Of these, at least so many were the victim's group's: the others had no more requests than the rest."""


class Audience:
    """Those whom it may concern: one crowd after the other."""

    def __init__(self) -> None:
        self.crowds: list[Crowd] = []
        self.is_done = False

    @property
    def begun(self) -> int:
        """Streams that have begun and not ended."""
        return sum(len(crowd.between) for crowd in self.crowds)


class Chaos:
    """Kills workers and controllers, one at a time, in an order that follows from a seed, but for those of a group
    that has nothing to do at the moment."""

    def __init__(
        self,
        view: View,
        seed: int,
        kills_max: int,
        hits_min: int = 0,
        pause_s: tuple[float, float] = (0.5, 1.5),
    ) -> None:
        """
        Args:
            kills_max: after so many, of which so many (`hits_min`) have hit a stream, the rest is left in peace.
            pause_s: shortest and longest time from the group's recovery to the next kill.
        """
        self.kills: list[Kill] = []
        self._kills_max = kills_max
        self._hits_min = hits_min
        self._view = view
        self._rng = random.Random(f"chaos {seed}")
        self._pause_s = pause_s

    @property
    def hits(self) -> int:
        """Kills that interrupted somebody."""
        return sum(kill.hit > 0 for kill in self.kills)

    async def reign(self, audience: Audience) -> None:
        """Kill until the audience has its answers, and wait until the cluster is well again."""
        groups = await asyncio.to_thread(self._view.groups, "worker", "controller")
        while not audience.is_done and (len(self.kills) < self._kills_max or self.hits < self._hits_min):
            await asyncio.sleep(self._rng.uniform(*self._pause_s))
            inflight = await asyncio.to_thread(self._view.inflight)
            victims = self._rng.sample(sorted(groups), len(groups))
            busy = [name for name in victims if inflight[groups[name]]]
            if audience.is_done or not audience.begun or not busy:
                continue
            victim, group = busy[0], groups[busy[0]]
            pid = await asyncio.to_thread(self._view.pid, victim)
            begun = audience.begun
            os.kill(pid, signal.SIGKILL)
            others = sum(inflight.values()) - inflight[group]
            self.kills.append(Kill(victim, begun, max(0, min(begun - others, inflight[group]))))
            await asyncio.to_thread(self._view.wait_replaced, victim, pid)


class Trouble:
    """What happens to the groups, one thing after the other, in an order that follows from a seed."""

    def __init__(self, view: View, seed: int, groups: int) -> None:
        self.done: list[str] = []
        self._groups = groups
        self._view = view
        self._rng = random.Random(f"trouble {seed}")

    async def reign(self, count: int) -> None:
        """Do so many things, and return when the cluster is well again."""
        for _ in range(count):
            await asyncio.sleep(self._rng.uniform(*TROUBLE_PAUSE_S))
            what = self._rng.choice(("drain", "worker", "controller", "freeze"))
            group = self._rng.randrange(self._groups)
            self.done.append(f"{what} {group}")
            await asyncio.to_thread(self._do, what, group)
        await asyncio.to_thread(wait_for, self._view.is_healthy, HEALTHY_SECONDS_MAX)

    def _do(self, what: str, group: int) -> None:
        if what == "drain":
            self._view.cluster.command("drain", str(group))
            self._view.cluster.command("undrain", str(group))
            return
        name = f"controller-{group}" if what == "controller" else f"worker-{group}.0"
        wait_for(lambda: self._view.is_ready(group), HEALTHY_SECONDS_MAX)
        pid = self._view.pid(name)
        if what == "freeze":
            seconds = self._rng.uniform(0.5, 4.0)
            frozen([pid], lambda: asyncio.run(asyncio.sleep(seconds)))
        else:
            os.kill(pid, signal.SIGKILL)


class Reaper:
    """Kills processes of every kind in turn, whether the cluster has recovered or not."""

    def __init__(self, view: View, seed: int, pause_s: tuple[float, float], records: RedisServer | None) -> None:
        """
        Args:
            pause_s: shortest and longest time between two kills.
            records: the server of the records, if it is one of the victims.
        """
        self.kills: list[str] = []
        self._view = view
        self._records = records
        self._rng = random.Random(f"reaper {seed}")
        self._pause_s = pause_s

    async def reign(self, rounds: int, is_noticed: Callable[[], bool]) -> None:
        """Kill one of each kind, so many times, then routers until a client has lost its connection; return when
        the cluster is well again."""
        kinds = ["worker", "controller", "router", "grammar trial", *(["records"] if self._records else [])]
        order = [kind for _ in range(rounds) for kind in self._rng.sample(kinds, len(kinds))]
        for kind in chain(order, repeat("router", ROUTERS_MAX)):
            if len(self.kills) >= len(order) and is_noticed():
                break
            await asyncio.sleep(self._rng.uniform(*self._pause_s))
            await asyncio.to_thread(self._kill, kind)
        await asyncio.to_thread(wait_for, self._view.is_healthy, HEALTHY_SECONDS_MAX)

    def _kill(self, kind: str) -> None:
        if kind == "records":
            assert self._records is not None
            self._records.kill()
            self._records.start()
            self.kills.append(kind)
            return
        wait_for(lambda: self._is_killed(kind), HEALTHY_SECONDS_MAX)

    def _is_killed(self, kind: str) -> bool:
        """Kill a process of a kind. False if there is none at the moment, or it ended by itself just now."""
        if not (victims := sorted(self._victims(kind).items())):
            return False
        name, pid = self._rng.choice(victims)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.kills.append(name)
        return True

    def _victims(self, kind: str) -> dict[str, int]:
        if kind != "grammar trial":
            return {name: pid for name, pid in self._view.pids(kind).items() if pid}
        return {
            f"grammar trial of {name}": pid
            for name, worker in self._view.pids("worker").items()
            for pid in _grammar_trials(worker)
        }


def _grammar_trials(worker: int) -> list[int]:
    """The processes in which a worker tries grammars; none if it, or they, have just died."""
    try:
        children = psutil.Process(worker).children()
        return [child.pid for child in children if "trunkline.worker.grammar.trial" in child.cmdline()]
    except psutil.NoSuchProcess:
        return []


def frozen(pids: Sequence[int], while_frozen: Callable[[], None]) -> None:
    """Stop processes, as if they hung, until `while_frozen` returns."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        while_frozen()
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:  # somebody has lost patience with it
                continue


def flush(cluster: Cluster) -> None:
    """Drop all cached KV of the device and of the tiers below that nobody uses."""
    cluster.post("/flush_cache")
