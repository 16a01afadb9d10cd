"""Groups without workers that say which chunks they have, offer them, and fetch those of others when asked to.

They speak the real messages over ZeroMQ, in the event loop of their caller.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from trunkline.controller.messages import EventsCall, Handed, OffersCall, Ping, Prefetch, RouterRequest, Submit
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.membership.member import Member
from trunkline.router.messages import (
    PROTOCOL,
    EventsReply,
    KvEvents,
    OfferedPath,
    Offers,
    Prefetched,
    RouterMessage,
    State,
    TierState,
)
from trunkline.router.routing.handover import path_names
from trunkline.router.routing.names import KvIdentity

CHUNK = 4
IDENTITY = KvIdentity(b"f" * 16, "float32", CHUNK)
HOST, DISK = 1 << 1, 1 << 2
PAGE = 7
"""Paths of a page."""


def path(number: int, chunks: int, *, shared: int = 0, uses: int = 0) -> OfferedPath:
    """A conversation: `shared` chunks that all have, then its own."""
    tokens = [0] * CHUNK * shared + [number] * CHUNK * (chunks - shared)
    return OfferedPath(b"s", pack_int32(tokens), uses, float(number))


_DECODER = msgspec.msgpack.Decoder[RouterRequest](RouterRequest)


@dataclass
class Heard:
    """What routers have asked of a group."""

    asked: list[tuple[bytes, OffersCall]] = field(default_factory=list)
    """Questions for offers, with the routers' ids."""
    prefetches: list[Prefetch] = field(default_factory=list)
    handed: list[bytes] = field(default_factory=list)
    """Ids of the routers that have said that all is handed over."""
    submits: list[Submit] = field(default_factory=list)
    pulls: int = 0
    """Number of paths that it fetches now."""
    pulls_max: int = 0


class _Wire:
    """A group's sockets, and the tasks that serve them."""

    def __init__(self) -> None:
        self.stream = os.urandom(8)
        self.seq = 0
        self.numbers: dict[bytes, int] = {}
        self.context: zmq.asyncio.Context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.events = self.context.socket(zmq.PUB)
        self.tasks: set[asyncio.Task[None]] = set()


class FakeGroup:
    """One group. Its endpoint for KV is its name."""

    peers: dict[str, FakeGroup]

    def __init__(self, name: str, folder: Path, peers: dict[str, FakeGroup]) -> None:
        self.name = name
        self.peers = peers
        peers[name] = self
        self.member = Member(name, f"ipc://{folder}/{name}.r", f"ipc://{folder}/{name}.e")
        self.status = "ready"
        self.requests = 0
        self.prompt_tokens = 0
        self.host_slots = 1000
        self.exports = True
        self.chunks: dict[bytes, int] = {}
        """Tiers of each chunk, by name."""
        self.paths: list[OfferedPath] = []
        """What it offers."""
        self.heard = Heard()
        self.pull_seconds = 0.005
        """Time that a chunk takes."""
        self.fails = False
        """Whether nothing that it fetches arrives."""
        self._wire = _Wire()

    def start(self) -> FakeGroup:
        self._wire.socket.bind(self.member.address)
        self._wire.events.bind(self.member.events)
        self._spawn(self._serve())
        self._spawn(self._beat())
        return self

    async def stop(self) -> None:
        tasks = list(self._wire.tasks)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        self._wire.context.destroy(linger=0)

    def put(self, paths: Iterable[OfferedPath], tier: int = HOST) -> None:
        """Have paths, and offer them; routers learn of the chunks by the next heartbeat."""
        self._wire.seq += 1
        for each in paths:
            self.paths.append(each)
            self.chunks |= dict.fromkeys(path_names(each, IDENTITY), tier)

    def has(self, each: OfferedPath) -> bool:
        return self.chunks.keys() >= set(path_names(each, IDENTITY))

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._wire.tasks.add(task)

    async def _serve(self) -> None:
        while True:
            router, frame = await self._wire.socket.recv_multipart()
            await self._answer(router, _DECODER.decode(frame))

    async def _beat(self) -> None:
        while True:
            await self._publish({})
            await asyncio.sleep(0.2)

    async def _publish(self, changed: dict[bytes, int]) -> None:
        self.chunks |= changed
        self._wire.seq += bool(changed)
        event = KvEvents(
            self._wire.stream, self._wire.seq, b"".join(changed), bytes(changed.values()), self.requests
        )
        await self._wire.events.send(msgspec.msgpack.encode(event))

    async def _say(self, router: bytes, message: RouterMessage) -> None:
        number = self._wire.numbers[router] = self._wire.numbers.get(router, -1) + 1
        await self._wire.socket.send_multipart(
            [router, msgspec.msgpack.encode(msgspec.structs.replace(message, seq=number))]
        )

    async def _answer(self, router: bytes, message: RouterRequest) -> None:
        match message:
            case Ping():
                await self._say(router, self.state())
            case EventsCall():
                names, tiers = b"".join(self.chunks), bytes(self.chunks.values())
                reply = EventsReply(
                    0, message.ticket, self._wire.stream, self._wire.seq, True, names, tiers, False
                )
                await self._say(router, reply)
            case OffersCall():
                self.heard.asked.append((router, message))
                at = message.page * PAGE
                page = self.paths[at : at + PAGE]
                await self._say(router, Offers(0, message.ticket, page, at + PAGE < len(self.paths)))
            case Prefetch():
                self.heard.prefetches.append(message)
                missing = [n for n in self._names(message) if not self.chunks.get(n, 0) & HOST]
                await self._say(router, Prefetched(0, message.ticket, 0, len(missing) * CHUNK))
                self._spawn(self._pull(message))
            case Handed():
                self.heard.handed.append(router)
            case Submit():
                self.heard.submits.append(message)
            case _:
                raise AssertionError(message)

    @staticmethod
    def _names(message: Prefetch) -> list[bytes]:
        return path_names(OfferedPath(message.root, message.tokens), IDENTITY)

    async def _pull(self, message: Prefetch) -> None:
        """Fetch what holders have in host memory, chunk after chunk, or what is on its own disk."""
        self.heard.pulls += 1
        self.heard.pulls_max = max(self.heard.pulls, self.heard.pulls_max)
        holder_of = {
            index: self.peers[holder.endpoints[0]]
            for holder in message.holders
            for index in range(holder.start, holder.stop)
        }
        for index, name in enumerate(self._names(message)):
            await asyncio.sleep(self.pull_seconds)
            if self.chunks.get(name, 0) & HOST or self.fails:
                continue
            holder = holder_of.get(index)
            if self.chunks.get(name, 0) & DISK or (holder is not None and holder.chunks.get(name, 0) & HOST):
                await self._publish({name: HOST})
            else:
                break  # a miss: what is behind it is of no use
        self.heard.pulls -= 1

    def state(self) -> State:
        used = len(self.chunks)
        counts: dict[str, Any] = dict.fromkeys(
            "cached_tokens output_tokens preemptions steps plan_copies kv_bytes_read".split(), 0
        )
        return State(
            seq=0,
            status=self.status,
            detail="",
            running=self.requests,
            waiting=0,
            prompt_tokens=self.prompt_tokens,
            blocks_total=100,
            blocks_free=100 - min(100, used),
            blocks_cached=min(100, used),
            evicted_blocks=0,
            max_context=2048,
            **counts,
            host_slots=self.host_slots,
            tiers=[TierState("host", self.host_slots, used, 0, 0, 0, 0, 0)],
            fingerprint=IDENTITY.fingerprint,
            dtype=IDENTITY.dtype,
            chunk_size=CHUNK,
            requests=self.requests,
            protocol=PROTOCOL,
            exports=[self.name] if self.exports else [],
        )
