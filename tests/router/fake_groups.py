"""Groups without workers that say which chunks they have, offer them, and fetch those of others when asked to.

They speak the real messages over ZeroMQ, in the event loop of their caller.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
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
        self.asked: list[tuple[bytes, OffersCall]] = []
        """Who has asked for offers."""
        self.prefetches: list[Prefetch] = []
        self.handed: list[bytes] = []
        """Who has said that all is handed over."""
        self.submits: list[Submit] = []
        self.pulls = 0
        """Paths that it fetches now."""
        self.pulls_max = 0
        self.pull_seconds = 0.005
        """Time that a chunk takes."""
        self.fails = False
        """Whether nothing that it fetches arrives."""
        self._stream = os.urandom(8)
        self._seq = 0
        self._numbers: dict[bytes, int] = {}
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._events = self._context.socket(zmq.PUB)
        self._decoder = msgspec.msgpack.Decoder(RouterRequest)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> FakeGroup:
        self._socket.bind(self.member.address)
        self._events.bind(self.member.events)
        self._spawn(self._serve())
        self._spawn(self._beat())
        return self

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        self._context.destroy(linger=0)

    def put(self, paths: Iterable[OfferedPath], tier: int = HOST) -> None:
        """Have paths, and offer them; routers learn of the chunks by the next heartbeat."""
        self._seq += 1
        for each in paths:
            self.paths.append(each)
            self.chunks |= dict.fromkeys(path_names(each, IDENTITY), tier)

    def has(self, each: OfferedPath) -> bool:
        return self.chunks.keys() >= set(path_names(each, IDENTITY))

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)

    async def _serve(self) -> None:
        while True:
            router, frame = await self._socket.recv_multipart()
            await self._answer(router, self._decoder.decode(frame))

    async def _beat(self) -> None:
        while True:
            await self._publish({})
            await asyncio.sleep(0.2)

    async def _publish(self, changed: dict[bytes, int]) -> None:
        self.chunks |= changed
        self._seq += bool(changed)
        event = KvEvents(self._stream, self._seq, b"".join(changed), bytes(changed.values()), self.requests)
        await self._events.send(msgspec.msgpack.encode(event))

    async def _say(self, router: bytes, message: RouterMessage) -> None:
        number = self._numbers[router] = self._numbers.get(router, -1) + 1
        await self._socket.send_multipart(
            [router, msgspec.msgpack.encode(msgspec.structs.replace(message, seq=number))]
        )

    async def _answer(self, router: bytes, message: RouterRequest) -> None:
        match message:
            case Ping():
                await self._say(router, self.state())
            case EventsCall():
                names, tiers = b"".join(self.chunks), bytes(self.chunks.values())
                reply = EventsReply(0, message.ticket, self._stream, self._seq, True, names, tiers, False)
                await self._say(router, reply)
            case OffersCall():
                self.asked.append((router, message))
                at = message.page * PAGE
                page = self.paths[at : at + PAGE]
                await self._say(router, Offers(0, message.ticket, page, at + PAGE < len(self.paths)))
            case Prefetch():
                self.prefetches.append(message)
                missing = [n for n in self._names(message) if not self.chunks.get(n, 0) & HOST]
                await self._say(router, Prefetched(0, message.ticket, 0, len(missing) * CHUNK))
                self._spawn(self._pull(message))
            case Handed():
                self.handed.append(router)
            case Submit():
                self.submits.append(message)
            case _:
                raise AssertionError(message)

    @staticmethod
    def _names(message: Prefetch) -> list[bytes]:
        return path_names(OfferedPath(message.root, message.tokens), IDENTITY)

    async def _pull(self, message: Prefetch) -> None:
        """Fetch what holders have in host memory, chunk after chunk, or what is on its own disk."""
        self.pulls += 1
        self.pulls_max = max(self.pulls, self.pulls_max)
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
        self.pulls -= 1

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
