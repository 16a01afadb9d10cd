"""What choosing a controller costs, without sockets and tokenisation.

    python benchmarks/router_decisions.py [--quick] [--json PATH]

The routing core is real. Each decision is one request's whole life: names of its chunks from its tokens, the
choice, load and expected chunks, its start some decisions later and its end after that. Prompts begin like one of
many that are in the index (their cached part is uniform from nothing to all). Controllers report and tell of
what was computed in between: that is in the time of no decision, but in the decisions per second `with_events`.

Times are CPU times of the thread: what a process that has its core to itself would take.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections import deque
from typing import NamedTuple

import numpy as np
from report import Report, parse_arguments

from trunkline.kvstore.chunks import root_name
from trunkline.router.routing.core import Decision, NoControllerError, RouteRequest, RoutingCore
from trunkline.router.routing.names import KvIdentity, whole_chunks
from trunkline.router.routing.slots import AWAY_SECONDS

CHUNK = 64
IDENTITY = KvIdentity(b"model", "bfloat16", CHUNK)
INFLIGHT_EACH = 32
"""Requests in flight per controller; half of them wait for their first token."""


class Case(NamedTuple):
    """What is measured."""

    controllers: int
    prompt_tokens: int
    indexed: int
    policy: str
    sessions: bool
    gone: int = 0
    """Controllers that have joined and left before: they must leave nothing behind."""
    peers: bool = True
    """Controllers exchange KV, so each decision says who has what the chosen one lacks."""


class Cluster:
    """A core with a full index, and prompts of which it knows parts."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = random.Random(0)
        self.random_bytes = np.random.default_rng(0)
        self.core = RoutingCore((), case.policy)
        self._come_and_go(case.gone)
        for number in range(case.controllers):
            self.core.add(str(number))
        root = root_name(IDENTITY.fingerprint, IDENTITY.dtype, CHUNK)
        self.chunks = case.prompt_tokens // CHUNK
        self.prompts = [self._tokens(case.prompt_tokens) for _ in range(case.indexed // self.chunks)]
        for controller in range(case.controllers):
            self.core.traits.set_identity(controller, IDENTITY)
            if case.peers:
                self.core.traits.set_exports(controller, [f"tcp://10.0.0.{controller}:7000"])
            self.core.set_available(controller, True)
        for prompt in self.prompts:
            names = b"".join(whole_chunks(root, prompt, CHUNK))
            for controller in self.rng.sample(range(case.controllers), min(2, case.controllers)):
                tiers = bytes(self.rng.choice((1, 1, 3, 2, 6, 4)) for _ in range(self.chunks))
                self.core.index.apply(controller, names, tiers)
        self.index_bytes = self.core.index.held_bytes
        self.live: deque[int] = deque()
        self.waiting: deque[int] = deque()
        self.ticket = 0

    def _come_and_go(self, count: int) -> None:
        """Controllers join and leave, a few at a time; each tells of some chunks."""
        for number in range(count):
            now = number - count * 10.0 - AWAY_SECONDS
            slot = self.core.add(f"gone {number}")
            self.core.traits.set_identity(slot, IDENTITY)
            names = self.rng.randbytes(16 * 500)
            self.core.index.apply(slot, names, b"\1" * 500)
            self.core.remove(slot, now)
        while self.core.index.size:  # what is gone is wiped little by little, while others are routed
            with contextlib.suppress(NoControllerError):
                self.core.route(RouteRequest(bytes(4)), 0.0)
            self.core.index.match([], 0.0)

    def _tokens(self, count: int) -> bytes:
        return self.random_bytes.integers(0, 128_000, count, dtype=np.int32).tobytes()

    def request(self) -> RouteRequest:
        """Its first chunks are those of a known prompt, the others new."""
        known = self.rng.randrange(self.chunks + 1) * CHUNK
        tokens = self.rng.choice(self.prompts)[: 4 * known] + self._tokens(self.case.prompt_tokens - known)
        session = f"session {self.rng.randrange(20_000)}" if self.case.sessions else ""
        return RouteRequest(tokens, session=session)

    def decide(self, request: RouteRequest, now: float) -> Decision:
        """One request comes, one starts, one ends."""
        core = self.core
        decision = core.route(request, now)
        core.sent(self.ticket, decision, request, now)
        self.live.append(self.ticket)
        self.waiting.append(self.ticket)
        self.ticket += 1
        if len(self.waiting) > INFLIGHT_EACH // 2 * self.case.controllers:
            core.started(self.waiting.popleft(), now)
        if len(self.live) > INFLIGHT_EACH * self.case.controllers:
            core.ended(self.live.popleft(), now)
        return decision

    def told(self, decision: Decision, now: float) -> None:
        """The controller tells of what it has computed, and how much it has to do."""
        names = b"".join(decision.names)
        self.core.index.apply(decision.controller, names, b"\1" * len(decision.names))
        self.core.loads.report(decision.controller, requests=40, queued_tokens=9000, kv_used=0.5, running=20)


def measure(case: Case, decisions: int, report: Report) -> None:
    """Fill the cluster, then time each decision."""
    cluster = Cluster(case)
    warm = INFLIGHT_EACH * case.controllers + 200
    times: list[float] = []
    mixed = 0.0
    for number in range(warm + decisions):
        request, now = cluster.request(), number / 2000
        begin = time.thread_time()
        decision = cluster.decide(request, now)
        middle = time.thread_time()
        cluster.told(decision, now)
        if number >= warm:
            times.append(middle - begin)
            mixed += time.thread_time() - begin
    p50, p90, p99 = np.percentile(times, (50, 90, 99)).tolist()
    name = case._asdict()
    for metric, value, unit in (
        ("p50", p50 * 1e6, "us"),
        ("p90", p90 * 1e6, "us"),
        ("p99", p99 * 1e6, "us"),
        ("decisions", decisions / sum(times), "1/s"),
        ("with_events", decisions / mixed, "1/s"),
        ("index", cluster.index_bytes / 2**20, "MiB"),
        ("per_name", cluster.index_bytes / max(1, len(cluster.prompts) * cluster.chunks), "bytes"),
    ):
        report.add(name, metric, value, unit, decisions)
    gc.collect()


def main() -> None:
    """Print the table."""
    arguments = parse_arguments(__doc__)
    report = Report("router_decisions")
    indexed = 100_000 if arguments.quick else 500_000
    decisions = 1_000 if arguments.quick else 8_000
    for case in (
        Case(64, 8192, indexed, "prefix", False),
        Case(64, 8192, indexed, "prefix", True),
        Case(64, 8192, indexed, "prefix", True, peers=False),
        Case(64, 2048, indexed, "prefix", True),
        Case(64, 32_768, indexed, "prefix", True),
        Case(8, 8192, indexed, "prefix", True),
        Case(8, 8192, indexed, "prefix", True, gone=1000),
        Case(64, 8192, indexed, "round-robin", False),
        *(Case(count, 2048, indexed, "prefix", True) for count in (10, 100, 1000)),
    ):
        measure(case, decisions, report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
