"""The messages in which a controller describes itself to its routers: its state, where its chunks are, and what
its tree looks like.

- `state_of`: load, health and tiers, in answer to each ping.
- `EventPublisher`: after each turn of the service, the changes of chunks (`trunkline.controller.cache.kv_events`)
  and the load, on a PUB socket. If nothing changes for a while, the load is sent alone, as a heartbeat. The
  controller never waits for a slow router: messages that do not fit its queue are dropped. The router sees the gap
  in their numbers and asks (`EventsCall`).
- `Descriptions`: the tree for the dashboard, made a little in each turn (`tree_view.py`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import zmq

from trunkline.controller.cache.kv_events import KvEventLog
from trunkline.controller.engine.engine import Engine
from trunkline.controller.messages import DescribeTree
from trunkline.controller.service.tree_view import UNITS_PER_TURN, TreeWalk
from trunkline.kvstore.adapters import adapter_of
from trunkline.kvstore.tier import TierKind, TierStats
from trunkline.router.messages import (
    PROTOCOL,
    GroupIdentity,
    KvEvents,
    LoadedAdapter,
    State,
    TierState,
    TreeDescription,
)
from trunkline.runtime.wire_gate import SUBSCRIPTION_BYTES_MAX, Gate
from trunkline.runtime.wire_keys import Role

STREAM_BYTES: Final = 8
IDLE_SECONDS: Final = 1.0
"""Time between two heartbeats while there are no requests."""
BUSY_SECONDS: Final = 0.25
"""Time between two heartbeats while there are requests: the load changes even if no chunk does."""
HIGH_WATER: Final = 1_000
"""Largest number of messages that wait for one router."""
_PROBE_MS: Final = 1000
"""Interval of ZeroMQ's heartbeats. A dead host's TCP connection stays open, and its queue would stay full."""
ASKED_MAX: Final = 64
"""Largest number of questions that wait for the next description. If there are more, routers have forgotten what
they asked: the oldest questions get no answer."""
_NOBODY: Final = GroupIdentity()
_NO_COUNTS: Final[dict[str, Any]] = {
    field.name: 0
    for field in msgspec.structs.fields(State)
    if field.required and field.type is int and field.name != "seq"
}
"""The counts of a `State` before there is an engine."""
_TOTALS: Final = (
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "preemptions",
    "steps",
    "plan_copies",
    "kv_bytes_read",
    "forks",
    "swapped",
    "drafted_tokens",
    "accepted_drafts",
    "replayed_steps",
)
"""The fields of a `State` that are the engine's totals (`Totals`) of the same names."""


def state_of(
    engine: Engine | None,
    status: str = "",
    detail: str = "",
    block_bytes: int = 0,
    group: GroupIdentity = _NOBODY,
    exports: Sequence[str] = (),
    role: str = "both",
    adapters: Sequence[LoadedAdapter] = (),
) -> State:
    """Return the state of a controller; without an engine, all counts are zero.

    Args:
        block_bytes: Bytes of a chunk on all ranks together.
        exports: Where the ranks export chunks; counts only if the engine has peers, and workers.
    """
    if engine is None:
        counts: dict[str, Any] = {**_NO_COUNTS, "block_bytes": block_bytes}
        return State(0, status, detail, **counts, protocol=PROTOCOL, group=group, role=role)
    scheduler, kv, config, counters = engine.scheduler, engine.scheduler.kv, engine.config, engine.counters
    tree = kv.tree
    requests, queued_tokens = load_of(engine)
    return State(
        seq=0,
        status=status,
        detail=detail,
        block_bytes=block_bytes,
        protocol=PROTOCOL,
        group=group,
        running=scheduler.running_count,
        waiting=scheduler.waiting_count,
        blocks_total=config.num_blocks,
        blocks_free=kv.pool.free_count,
        blocks_cached=tree.evictable,
        **{name: getattr(counters, name) for name in _TOTALS},
        evicted_blocks=counters.tiers[TierKind.DEVICE].evictions,
        max_context=config.longest_plain,
        blocks_logical=sum(len(s.path) + len(s.private) for s in scheduler.running()),
        blocks_saved=counters.tiers[TierKind.DEVICE].reads,
        blocks_loaded=counters.tiers[TierKind.DEVICE].writes,
        host_slots=config.host_slots,
        host_slots_free=host.slots - host.used if (host := tree.tiers.stats().get(TierKind.HOST)) else 0,
        max_rows=config.max_rows,
        tiers=_tiers(engine),
        misses=dict(counters.misses),
        positions_shift=config.positions_shift,
        texts_encoded=counters.encoded_texts,
        text_tokens_encoded=counters.encoded_tokens,
        texts_encoding=len(scheduler.encoding.jobs),
        chunks_pinned=scheduler.encoding.calls.pinned_count,
        epoch=engine.epoch,
        fingerprint=config.model_fingerprint,
        dtype=config.dtype,
        chunk_size=config.chunk_size,
        prefill_us=scheduler.costs.token_us if scheduler.costs.has_prefilled else 0.0,
        load_us=_load_us(engine),
        requests=requests,
        queued_tokens=queued_tokens,
        exports=list(exports) if config.peers and not engine.is_away else [],
        role=role,
        adapters=list(adapters),
        pulls_given_up=dict(counters.pulls_given_up),
    )


def adapters_in_use(engine: Engine | None) -> set[bytes]:
    """Return the keys of the adapters that requests and open calls use; those of the base model have the empty
    one."""
    if engine is None:
        return set()
    encoding = engine.scheduler.encoding
    groups = (*engine.requests().values(), *encoding.jobs.groups())
    salts = (*(group.request.submit.salt for group in groups), *encoding.calls.salts().values())
    return {adapter_of(salt) for salt in salts}


def load_of(engine: Engine) -> tuple[int, int]:
    """Return the number of open requests, and of the prompt tokens that have still to be computed for them.

    The tokens are an estimate: those that other requests compute for a waiting request are counted, too."""
    scheduler = engine.scheduler
    begun = sum(sequence.prefill_stop - sequence.computed for sequence in scheduler.prefilling)
    return len(engine.requests()), scheduler.queue.tokens + begun


def _load_us(engine: Engine) -> list[float]:
    """Return the time per token that loading a chunk takes, by `TierKind`; 0 if it is not known."""
    scheduler, size = engine.scheduler, engine.config.chunk_size
    move_us = scheduler.costs.move_us
    times = {TierKind.HOST: move_us}
    for tier, stats in scheduler.kv.tree.tiers.stats().items():
        if tier is not TierKind.PEER or stats.read_us:  # of pulls nothing is known before the first one
            times[tier] = stats.read_us + move_us  # it comes by way of host memory
    return [times.get(tier, 0.0) / size for tier in TierKind]


def _tiers(engine: Engine) -> list[TierState]:
    blocks, kv = engine.config.num_blocks, engine.scheduler.kv
    device = TierStats(blocks, blocks - kv.pool.free_count, engine.counters.tiers[TierKind.DEVICE])
    return [
        TierState(
            name=kind.name.lower(),
            slots=stats.slots,
            used=stats.used,
            hit_tokens=engine.counters.tier_tokens[kind],
            writes=stats.totals.writes,
            reads=stats.totals.reads,
            evictions=stats.totals.evictions,
            failures=stats.totals.failures,
            problem=stats.problem,
        )
        for kind, stats in {TierKind.DEVICE: device, **kv.tree.tiers.stats()}.items()
    ]


class EventPublisher:
    """Publishes the events of a `KvEventLog` to the routers."""

    def __init__(self, gate: Gate, endpoint: str) -> None:
        """
        Args:
            endpoint: Address to bind; "" if no events are to be published.
        """
        self.log = KvEventLog(os.urandom(STREAM_BYTES))
        self._encoder = msgspec.msgpack.Encoder()
        self._next_beat = 0.0
        self._epoch = 0
        self._socket: zmq.Socket[bytes] | None = None
        if endpoint:
            self._socket = gate.context.socket(zmq.PUB)
            self._socket.set(zmq.SNDHWM, HIGH_WATER)
            if endpoint.startswith("tcp:"):
                self._socket.set(zmq.HEARTBEAT_IVL, _PROBE_MS)
                self._socket.set(zmq.HEARTBEAT_TIMEOUT, 10 * _PROBE_MS)
            gate.bind(self._socket, endpoint, Role.ROUTER, SUBSCRIPTION_BYTES_MAX)

    def turn(self, engine: Engine | None, now: float) -> None:
        """Publish what this turn has changed; without an engine, that this controller has no chunks."""
        if self._socket is None or (engine is not None and engine.holds_starts):  # routers hear all of it together
            return
        batches = []
        if engine is not None:
            is_known = engine.epoch == self._epoch and self.log.has_followed(engine.scheduler.kv.tree)
            if is_known and now < self._next_beat:
                return
            # Not every chunk of workers that were lost may have been noted as changed.
            regrouped = engine.epoch != self._epoch
            self._epoch = engine.epoch
            batches = self.log.follow(engine.scheduler.kv.tree, look_again=regrouped)
        if not batches and now < self._next_beat:
            return
        self.log.forget_old(now)
        requests, queued_tokens = load_of(engine) if engine is not None else (0, 0)
        for batch in batches:
            self._send(KvEvents(self.log.stream, *batch, requests, queued_tokens))
        if not batches:
            self._send(KvEvents(self.log.stream, self.log.seq, requests=requests, queued_tokens=queued_tokens))
        self._next_beat = now + (BUSY_SECONDS if requests else IDLE_SECONDS)

    def _send(self, message: KvEvents) -> None:
        assert self._socket is not None
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)  # a PUB socket drops, and never blocks

    @property
    def next_deadline(self) -> float:
        """Return when the next heartbeat is due; may be infinite."""
        return self._next_beat if self._socket is not None else float("inf")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)


class Descriptions:
    """The routers that have asked for a description of the tree, and the walk that makes it."""

    def __init__(self) -> None:
        self._asked: deque[tuple[int, DescribeTree]] = deque(maxlen=ASKED_MAX)
        self._served: list[tuple[int, DescribeTree]] = []
        self._walk: TreeWalk | None = None

    def ask(self, router: int, call: DescribeTree) -> None:
        """Note that the router with this index asks for a description."""
        self._asked.append((router, call))

    @property
    def is_busy(self) -> bool:
        """Return whether a walk is under way, so that `turn` should be called again at once."""
        return bool(self._asked or self._served)

    def turn(self, engine: Engine | None, now: float) -> list[tuple[int, TreeDescription]]:
        """Do a share of the work, once in each turn of the loop; return the descriptions that are complete.

        Returns:
            the index of each router that asked, and the answer to it.
        """
        if not self.is_busy:
            return []
        tree = None if engine is None else engine.scheduler.kv.tree
        if self._walk is None or self._walk.tree is not tree:  # new workers have a new tree
            self._served += self._asked
            self._asked.clear()
            self._walk = None if engine is None else self._begin(engine, now)
        walk = self._walk
        if walk is None or walk.advance(UNITS_PER_TURN):
            served, self._served, self._walk = self._served, [], None
            if walk is None:  # there are no workers yet
                return [(router, TreeDescription(seq=0, ticket=call.ticket)) for router, call in served]
            return [(router, walk.description(call.ticket)) for router, call in served]
        return []

    def _begin(self, engine: Engine, now: float) -> TreeWalk:
        scheduler = engine.scheduler
        return TreeWalk(
            scheduler.kv.tree,
            scheduler.running(),
            nodes_max=max(call.nodes_max for _, call in self._served),
            head_tokens=max(call.head_tokens for _, call in self._served),
            now=now,
        )
