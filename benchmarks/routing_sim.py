"""Routers and controllers in simulated time, with the real `RoutingCore`: discrete events.

Each router has a core of its own and knows what controllers tell (`KvEvents` with their load, some time after it
happened) and what it sent itself. The rule `oracle` is the prefix-aware one with a single core for all routers
that learns of everything at the moment it happens.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field, replace
from random import Random
from statistics import fmean as mean
from statistics import pstdev
from typing import Any, Final

from routing_server import DEVICE, Gpu, Job, Server
from routing_workloads import CHUNK, Session, Workload

from trunkline.router.routing.core import NoControllerError, RoutingCore, RoutingSettings
from trunkline.router.routing.names import KvIdentity
from trunkline.router.routing.request import RouteRequest

ORACLE: Final = "oracle"
_BUSY_HEARTBEAT_S: Final = 0.25
_IDENTITY: Final = KvIdentity(fingerprint=b"model", dtype="bfloat16", chunk_size=CHUNK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is the same in all runs of a scenario."""

    routers: int = 1
    controllers: int = 8
    delay_s: float = 0.005
    """Until routers know what controllers have done: a batch of events and a turn of the loop."""
    events: bool = True
    """False: a router knows its own requests only, and takes what they have computed to be still there."""
    dies: tuple[float, ...] = ()
    """Shares of the duration after which a controller dies: first the last one, then the one before it, …"""
    down_s: float = 30.0
    """How long it is away."""
    detect_s: float = 0.2
    """Until routers notice: what they sent in the meantime is lost, too."""
    host: bool = True
    """False: whatever the workload says, there is no host tier."""
    peers: bool = False
    """Controllers pull from each other what they lack. Then they save chunks to host memory as they fill."""
    joins: int = 0
    """Controllers that are away for the first half."""
    gpu: Gpu = field(default_factory=Gpu)
    settings: RoutingSettings = field(default_factory=RoutingSettings)


@dataclass(slots=True)
class Figures:
    """Of the requests that came after the warm-up."""

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    pulled_tokens: int = 0
    """Those of them that came from other controllers."""
    turns: int = 0
    """Requests of a session whose last one went to a controller that still serves."""
    moves: int = 0
    """Those that went to another one."""
    errors: int = 0
    """Requests for which there was no controller."""
    sheds: int = 0
    """Requests that all controllers refused."""
    redispatched: int = 0
    load_cv: list[float] = field(default_factory=list)
    """Once a second: standard deviation of the controllers' requests, divided by their mean."""

    def quantile(self, share: float) -> float:
        """Of the time to the first token."""
        times = sorted(self.ttft_s)
        return times[min(len(times) - 1, int(share * len(times)))]

    def metrics(self) -> dict[str, float]:
        """What tables show."""
        return {
            "hits": 100 * self.hit_tokens / self.prompt_tokens,
            "pulled": 100 * self.pulled_tokens / self.prompt_tokens,
            "mean": sum(self.ttft_s) / len(self.ttft_s),
            "p50": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "load_cv": sum(self.load_cv) / max(1, len(self.load_cv)),
            "moves": 100 * self.moves / max(1, self.turns),
            "errors": self.errors,
            "sheds": self.sheds,
        }


@dataclass(slots=True, eq=False)
class Request:
    """A turn under way."""

    session: Session
    turn: int
    arrived: float
    counted: bool
    router: int
    controller: int = -1
    generated: int = 0
    """Tokens that it has brought at controllers that are gone."""
    has_begun: bool = False
    """Its first token is out."""


class _Place:
    """A controller as the driver sees it."""

    def __init__(self, gpu: Gpu, is_up: bool, exports: bool) -> None:
        self.server = Server(gpu, exports=exports)
        self.is_up = is_up
        self.life = 0
        """How often it has died."""
        self.version = 0
        """Of the end of its step: an older one does not count."""
        self.is_stepping = False
        self.told_at = 0.0
        self.lost: list[Job] = []
        """What was sent there since it died."""


class Simulation:
    """Run it once with `run`."""

    def __init__(self, workload: Workload, rule: str, setting: Setting, seed: int) -> None:
        self.workload = workload
        self.setting = setting
        self.figures = Figures()
        self._is_oracle = rule == ORACLE
        policy = "prefix" if self._is_oracle else rule
        self._delay = 0.0 if self._is_oracle else setting.delay_s
        away = range(setting.controllers - setting.joins, setting.controllers)
        self._gpu = replace(setting.gpu, host_chunks=workload.host_chunks if setting.host else 0)
        self.places = [_Place(self._gpu, index not in away, setting.peers) for index in range(setting.controllers)]
        self._cores = [
            _core(setting, policy, seed * 100 + router, away)
            for router in range(1 if self._is_oracle else setting.routers)
        ]
        self._rng = Random(f"routers {seed}")
        self._tickets = itertools.count(1)
        self._serials = itertools.count()
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._now = 0.0
        self._last: dict[str, tuple[int, int]] = {}
        """By session: where its last request went, and in which life of that controller."""

    def run(self) -> Figures:
        """Until all has been answered."""
        for session in self.workload.sessions:
            turns = range(1) if session.is_closed else range(len(session.turns))
            for turn in turns:
                self._at(session.turns[turn].at, self._arrive, session, turn)
        for index, share in enumerate(self.setting.dies):
            place = self.setting.controllers - 1 - index
            self._at(share * self.workload.seconds, self._die, place)
        for place in range(self.setting.controllers - self.setting.joins, self.setting.controllers):
            self._at(self.workload.seconds / 2, self._come, place)
        self._at(self.workload.warmup, self._sample)
        events = self._events
        while events:
            self._now, _, call, arguments = heapq.heappop(events)
            call(*arguments)
        assert not any(place.server.requests for place in self.places), "requests wait for ever"
        return self.figures

    def _at(self, time: float, call: Any, *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._serials), call, arguments))

    # Requests

    def _arrive(self, session: Session, turn: int) -> None:
        counted = self.workload.warmup <= self._now < self.workload.seconds
        router = self._rng.randrange(len(self._cores))
        request = Request(session, turn, self._now, counted, router)
        if counted:
            self.figures.prompt_tokens += session.turns[turn].prompt
        self._dispatch(request, frozenset())

    def _dispatch(self, request: Request, exclude: frozenset[int]) -> None:
        core, turn = self._cores[request.router], request.session.turns[request.turn]
        prompt = turn.prompt + request.generated
        names = turn.names[: prompt // CHUNK]
        ask = RouteRequest(b"", session=request.session.key, exclude=exclude, names=names, token_count=prompt)
        if self._is_oracle:
            self._tell_loads(core)
        try:
            decision = core.route(ask, self._now)
        except NoControllerError:
            self.figures.errors += request.counted
            self._answered(request)
            return
        ticket, to = next(self._tickets), decision.controller
        core.sent(ticket, decision, ask, self._now)
        job = Job(ticket, prompt, turn.output - request.generated, turn.names, request)
        job.givers = [
            (self.places[int(holder.member)].server, holder.start, holder.stop) for holder in decision.holders
        ]
        request.controller = to
        place = self.places[to]
        if not place.is_up:
            place.lost.append(job)
            return
        if not place.server.submit(job):
            core.ended(ticket, self._now)
            if len(exclude) + 1 < len(self.places):
                self._dispatch(request, exclude | {to})
            else:
                self.figures.sheds += request.counted
                self._answered(request)
            return
        self._note_move(request, to)
        if not place.is_stepping:
            self._step(to)
        else:
            end = place.server.interrupted(self._now)
            if end < math.inf:
                place.version += 1
                self._at(end, self._step_over, to, place.version)

    def _note_move(self, request: Request, to: int) -> None:
        key = request.session.key
        if not key:
            return
        was, life = self._last.get(key, (-1, 0))
        if request.counted and was >= 0 and self.places[was].life == life:
            self.figures.turns += 1
            self.figures.moves += was != to
        self._last[key] = (to, self.places[to].life)

    def _answered(self, request: Request) -> None:
        session, following = request.session, request.turn + 1
        if session.is_closed and following < len(session.turns):
            at = self._now + session.turns[following].at
            if at < self.workload.seconds:
                self._at(at, self._arrive, session, following)

    # Steps

    def _step(self, index: int) -> None:
        place = self.places[index]
        end = place.server.begin(self._now)
        place.is_stepping = end < math.inf
        if place.is_stepping:
            place.version += 1
            self._at(end, self._step_over, index, place.version)
        if place.server.changed or self._now >= place.told_at + _BUSY_HEARTBEAT_S or not place.is_stepping:
            self._publish(index)

    def _step_over(self, index: int, version: int) -> None:
        place = self.places[index]
        if version != place.version:
            return
        started, ended = place.server.end(self._now)
        for job in started:
            request: Request = job.owner
            self._cores[request.router].started(job.ticket, self._now)
            if not self.setting.events and not self._is_oracle:
                names = job.names[: job.prompt_chunks]
                self._cores[request.router].index.apply(index, b"".join(names), bytes([DEVICE]) * len(names))
            if not request.has_begun:
                request.has_begun = True
                if request.counted:
                    self.figures.ttft_s.append(self._now - request.arrived)
                    self.figures.hit_tokens += job.cached
                    self.figures.pulled_tokens += job.pulled
        for job in ended:
            self._cores[job.owner.router].ended(job.ticket, self._now)
            self._answered(job.owner)
        self._step(index)

    def _sample(self) -> None:
        loads = [place.server.requests for place in self.places if place.is_up]
        if sum(loads):
            self.figures.load_cv.append(pstdev(loads) / mean(loads))
        if self._now + 1 < self.workload.seconds:
            self._at(self._now + 1, self._sample)

    # What controllers tell

    def _publish(self, index: int) -> None:
        place = self.places[index]
        place.told_at = self._now
        server, changed = place.server, place.server.changed
        if not self.setting.events and not self._is_oracle:
            changed.clear()
            return
        names, tiers = b"".join(changed), bytes(changed.values())
        changed.clear()
        load = (server.requests, server.queued_tokens, server.kv_used, len(server.rows))
        if self._delay:
            self._at(self._now + self._delay, self._hear, index, place.life, names, tiers, load)
        else:
            self._hear(index, place.life, names, tiers, load)

    def _hear(self, index: int, life: int, names: bytes, tiers: bytes, load: tuple[int, int, float, int]) -> None:
        if life != self.places[index].life:
            return
        requests, queued, kv_used, running = load
        for core in self._cores:
            if names:
                core.index.apply(index, names, tiers)
            core.loads.report(
                index,
                requests=requests,
                queued_tokens=queued,
                kv_used=kv_used,
                running=running,
            )

    def _tell_loads(self, core: RoutingCore) -> None:
        for index, place in enumerate(self.places):
            server = place.server
            core.loads.report(
                index,
                requests=server.requests,
                queued_tokens=server.queued_tokens,
                kv_used=server.kv_used,
                running=len(server.rows),
            )

    # Controllers that come and go

    def _die(self, index: int) -> None:
        place = self.places[index]
        for job in place.server.jobs():
            job.owner.generated += place.server.generated(job)
            place.lost.append(job)
        place.is_up = place.is_stepping = False
        place.life += 1
        place.version += 1
        place.server.exports = False
        place.server = Server(self._gpu, exports=self.setting.peers)
        self._at(self._now + self.setting.detect_s, self._noticed, index)
        self._at(self._now + self.setting.down_s, self._come, index)

    def _noticed(self, index: int) -> None:
        place = self.places[index]
        for core in self._cores:
            core.set_available(index, False)
            core.index.forget(index)
        lost, place.lost = place.lost, []
        for job in lost:
            self._cores[job.owner.router].ended(job.ticket, self._now, failed=True)
        for job in lost:
            self.figures.redispatched += 1
            self._dispatch(job.owner, frozenset({index}))

    def _come(self, index: int) -> None:
        self.places[index].is_up = True
        for core in self._cores:
            core.set_available(index, True)


def _core(setting: Setting, policy: str, seed: int, away: range) -> RoutingCore:
    core = RoutingCore(map(str, range(setting.controllers)), policy, settings=setting.settings, replica_seed=seed)
    gpu = setting.gpu
    for index in range(setting.controllers):
        core.traits.set_identity(index, _IDENTITY)
        core.traits.set_costs(index, gpu.prefill_mean_us, [0.0, gpu.load_us, 0.0, 0.0, gpu.pull_us])
        if setting.peers:
            core.traits.set_exports(index, [f"inproc://{index}"])
        core.set_available(index, index not in away)
    return core
