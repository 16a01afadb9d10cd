"""Where the turns of short conversations go, with and without open tails.

    python benchmarks/routing_tails.py [--quick] [--json PATH]

Conversations without a label: six turns, whose new messages have 20 to 60 tokens with the answer before them, so
that a conversation begins well below one chunk of 64 tokens. The routing core is real; time is simulated. A
controller answers in 0.5 to 1.5 s, and tells of full chunks and of its load 5 ms later. Clients think for 4 s.

    chunks    full chunks only: as if routers remembered no tails
    tails     routers remember tails
    named     and conversations have names: the digests of their openings (`Job.opening`)

home: share of the turns behind the first one that go to the controller of the turn before. cached: share of the
prompt tokens of these turns that the controller has (all but the new message, at best).
"""

from __future__ import annotations

import heapq
import itertools
import random
from typing import Any

from report import Report, parse_arguments

from trunkline.kvstore.chunks import pack_int32, root_name
from trunkline.router.routing.core import RouteRequest, RoutingCore
from trunkline.router.routing.names import KvIdentity, whole_chunks
from trunkline.router.routing.tails import Tails

CHUNK = 64
IDENTITY = KvIdentity(b"model", "bfloat16", CHUNK)
ROOT = root_name(IDENTITY.fingerprint, IDENTITY.dtype, CHUNK)
TURNS = 6
DELAY_S = 0.005
SETTINGS = ("chunks", "tails", "named")


class Conversations:
    """People who talk at the same time, each conversation after the other."""

    def __init__(self, setting: str, controllers: int, routers: int, people: int, seed: int) -> None:
        self.setting = setting
        self.rng = random.Random(seed)
        self.cores = [
            RoutingCore(map(str, range(controllers)), replica_seed=seed + router) for router in range(routers)
        ]
        for core in self.cores:
            for slot in range(controllers):
                core.traits.set_identity(slot, IDENTITY)
                core.set_available(slot, True)
            if setting == "chunks":
                core._tails = Tails(bytes_max=0)
        self.running = [0] * controllers
        self.cached: list[set[bytes]] = [set() for _ in range(controllers)]
        """Prefixes of prompts that end with an answer, by controller."""
        self.tickets = itertools.count(1)
        self.events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self.serials = itertools.count()
        self.now = 0.0
        self.turns = self.homes = self.tokens = self.found = 0
        for _ in range(people):
            self.at(self.rng.uniform(0, 5), self.begin)

    def at(self, time: float, call: Any, *arguments: Any) -> None:
        heapq.heappush(self.events, (time, next(self.serials), call, arguments))

    def run(self, seconds: float) -> None:
        while self.events and self.now < seconds:
            self.now, _, call, arguments = heapq.heappop(self.events)
            call(*arguments)

    def begin(self) -> None:
        self.turn([], 1, -1, f"{self.rng.random()}" if self.setting == "named" else "")

    def turn(self, talk: list[int], number: int, home: int, name: str) -> None:
        before = len(talk)
        talk += [self.rng.randrange(30_000) for _ in range(self.rng.randint(8, 30))]
        core = self.rng.choice(self.cores)
        request, ticket = RouteRequest(pack_int32(talk), session=name), next(self.tickets)
        decision = core.route(request, self.now)
        core.sent(ticket, decision, request, self.now)
        to = decision.controller
        if number > 1:
            self.turns += 1
            self.homes += to == home
            self.tokens += len(talk)
            self.found += before * (pack_int32(talk[:before]) in self.cached[to])
        self.running[to] += 1
        self.tell(to)
        self.at(self.now + 0.02, core.started, ticket, self.now)
        self.at(self.now + self.rng.uniform(0.5, 1.5), self.answered, core, ticket, talk, number, to, name)

    def answered(self, core: RoutingCore, ticket: int, talk: list[int], number: int, to: int, name: str) -> None:
        core.ended(ticket, self.now)
        self.running[to] -= 1
        talk += [self.rng.randrange(30_000) for _ in range(self.rng.randint(12, 30))]
        self.cached[to].add(pack_int32(talk))
        self.tell(to, whole_chunks(ROOT, pack_int32(talk), CHUNK))
        think = self.now + 1 + self.rng.expovariate(1 / 3)
        if number < TURNS:
            self.at(think, self.turn, talk, number + 1, to, name)
        else:
            self.at(think, self.begin)

    def tell(self, controller: int, names: list[bytes] | None = None) -> None:
        self.at(self.now + DELAY_S, self.heard, controller, names or [], self.running[controller])

    def heard(self, controller: int, names: list[bytes], running: int) -> None:
        for core in self.cores:
            core.index.apply(controller, b"".join(names), b"\1" * len(names))
            core.loads.report(controller, requests=running, queued_tokens=0, kv_used=0.1, running=running)


def main() -> None:
    """Print the table."""
    arguments = parse_arguments(__doc__)
    report = Report("routing_tails")
    seconds = 60.0 if arguments.quick else 600.0
    for controllers, people in ((2, 12), (8, 48), (8, 160)):
        for routers in (1, 3):
            for setting in SETTINGS:
                talks = Conversations(setting, controllers, routers, people, seed=7)
                talks.run(seconds)
                case = {"setting": setting, "controllers": controllers, "routers": routers, "people": people}
                report.add(case, "home", 100 * talks.homes / talks.turns, "%", talks.turns)
                report.add(case, "cached", 100 * talks.found / talks.tokens, "%", talks.turns)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
