"""Give the chunks in a rank's host memory to ranks of other groups, beside the steps (`exchange`).

One thread answers. It never waits: a chunk whose copy from the device is not finished is answered when it is. It
holds no copies of chunks but those that a socket is sending. A peer that has the keys may still be wrong, so every
question is checked, and one that asks for too much is refused.
"""

from __future__ import annotations

import os
import socket as sockets
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import numpy as np
import structlog
import zmq
from numpy.typing import NDArray

from trunkline.kvstore.chunks import NAME_BYTES
from trunkline.kvstore.shards import HeadShard
from trunkline.runtime.process import RareLog, node_id
from trunkline.runtime.wire_gate import Gate
from trunkline.runtime.wire_keys import Role
from trunkline.worker.tiers.copier import Copier
from trunkline.worker.tiers.exchange import (
    CHUNKS_MAX,
    CREDIT_BYTES,
    QUESTION_BYTES_MAX,
    QUESTIONS_OPEN,
    Ask,
    Found,
    Told,
    checksum,
    names_of,
)

_WAIT_S: Final = 1.0
"""Longest time in seconds for which a question waits for copies from the device; then its chunks are missing."""
_LOOK_MS: Final = 2
_OPEN_MAX: Final = 256
"""Largest number of questions that wait for copies; further ones are not taken from the socket yet."""
_PART_BYTES: Final = 1 << 20
"""Smallest size of a part of an answer, but for the last one. The puller verifies a part while the next ones are
on their way."""
_PARTS_MAX: Final = 8
"""Largest number of parts of an answer, if all of its chunks are there."""
_WAITING_MAX: Final = 4 * QUESTIONS_OPEN * _PARTS_MAX
"""Largest number of parts that wait for one connection. ZeroMQ hears of parts that were read only when half of
this number were: twice the parts of open questions must find room; chunks that are saved later need more."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Open:
    """A question, and those of its chunks that are not answered yet."""

    peer: bytes
    ask: Ask
    names: list[bytes]
    left: list[int]
    until: float


class Exporter:
    """Answers peers' questions for chunks until it is closed."""

    def __init__(
        self, endpoint: str, host: str, copier: Copier, shard: HeadShard, fingerprint: bytes, wire_keys: str
    ) -> None:
        """Listen, and begin to answer.

        Args:
            endpoint: Where to listen; `tcp://ADDRESS:FIRST-LAST` takes the first of these ports that is free,
                `tcp://ADDRESS:*` any free one.
            host: Host under which peers reach the port; "": the address in `endpoint`.
            shard: The KV heads of this rank.
            fingerprint: The group's `exchange_fingerprint`.
            wire_keys: The file of wire keys; "": there are none.

        Raises:
            OSError: It is not possible to listen there.
            WireKeysError: The file of keys cannot be used.
        """
        self._copier = copier
        self._heads = shard.heads
        self._fingerprint = fingerprint
        self._node = node_id()
        self._sums: dict[tuple[int, int, int], tuple[int, bytes]] = {}
        """Checksums by slot and heads, each with the serial number of the slot's use."""
        self._open: deque[_Open] = deque()
        self._decoder = msgspec.msgpack.Decoder(Ask)
        self._rare = RareLog("trunkline.worker")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # an answer for which there is no room is an error, not lost
        self._socket.set(zmq.SNDHWM, _WAITING_MAX)
        self._socket.set(zmq.MAXMSGSIZE, QUESTION_BYTES_MAX)
        self._gate = Gate(self._context, wire_keys, Role.WORKER)
        try:
            self._gate.bind(self._socket, endpoint, Role.WORKER, QUESTION_BYTES_MAX)
        except zmq.ZMQError as error:
            self._gate.close()
            self._socket.close(linger=0)
            self._context.term()
            raise OSError(error.errno, error.strerror, endpoint) from error
        self._gate.open()
        self.endpoint = _reached(self._socket.getsockopt_string(zmq.LAST_ENDPOINT), host)
        """Where peers reach this exporter."""
        self._wake, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://closing")
        self._wake.connect("inproc://closing")
        self._thread = threading.Thread(target=self._serve, name="exporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more questions."""
        self._wake.send(b"")
        self._thread.join()
        self._gate.close()
        for socket in (self._wake, self._woken, self._socket):
            socket.close(linger=0)
        self._context.term()

    # --- the thread

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._socket, self._woken):
            poller.register(socket, zmq.POLLIN)
        while not self._woken.poll(0):
            if len(self._open) < _OPEN_MAX:
                poller.poll(_LOOK_MS if self._open else None)
            else:
                self._woken.poll(_LOOK_MS)
            for _ in range(_OPEN_MAX - len(self._open)):  # no more: what is refused does not count as open
                if not self._socket.poll(0):
                    break
                self._take(self._socket.recv_multipart(), time.monotonic())
            for _ in range(len(self._open)):
                question = self._open.popleft()
                if not self._answer(question, time.monotonic()):
                    self._open.append(question)

    def _take(self, frames: list[bytes], now: float) -> None:
        """Check a question, and keep it to be answered."""
        try:
            ask = self._decoder.decode(frames[-1])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._rare.warning("a peer asks what makes no sense", now, error=str(error))
            return
        if problem := self._problem_of(ask) if len(frames) == 2 else "a question has one frame":
            self._rare.warning("a peer's question is refused", now, reason=problem)
            with suppress(zmq.ZMQError):  # the puller gives up by itself
                self._send(frames[0], Told(ask.id, [], refusal=problem), [])
            return
        names = names_of(ask.names)
        self._open.append(_Open(frames[0], ask, names, list(range(len(names))), now + _WAIT_S))

    def _problem_of(self, ask: Ask) -> str:
        if ask.fingerprint != self._fingerprint:
            return "this group's KV is of another model, precision or form"
        if not self._heads.start <= ask.first < ask.stop <= self._heads.stop:
            return f"this rank has the KV heads {self._heads.start} to {self._heads.stop - 1}, not those"
        count, rest = divmod(len(ask.names), NAME_BYTES)
        if rest or not 1 <= count <= CHUNKS_MAX:
            return f"a question is for 1 to {CHUNKS_MAX} chunks"
        size = self._copier.host.format.with_heads(ask.stop - ask.first).chunk_bytes
        if not self._is_near(ask) and count > 1 and count * size > CREDIT_BYTES:
            return f"a question is for {CREDIT_BYTES} bytes at most"
        return ""

    def _is_near(self, ask: Ask) -> bool:
        return bool(self._node) and ask.node == self._node

    def _answer(self, question: _Open, now: float) -> bool:
        """Answer what can be answered, part by part; return whether nothing more will be."""
        ask, host = question.ask, self._copier.host
        pid = os.getpid() if self._is_near(ask) else 0
        size = host.format.with_heads(ask.stop - ask.first).chunk_bytes
        count = max(_PART_BYTES // size, -(-len(question.names) // _PARTS_MAX), 1)
        unsaved, part, payloads = list[int](), list[Found](), list[memoryview]()
        for place, index in enumerate(question.left):
            chunk = self._find(question.names[index], ask)
            if chunk is None and now < question.until:
                unsaved.append(index)
            else:
                digest, slot = chunk or (b"", -1)
                part.append(Found(index, digest, host.address(slot) if pid and digest else 0))
                payloads += [self._payload(slot, ask)] if digest and not pid else []
            rest = question.left[place + 1 :]
            if part and (len(part) >= count or not rest):
                try:
                    self._send(question.peer, Told(ask.id, part, pid), payloads)
                except zmq.ZMQError as error:
                    others = sum(other.peer == question.peer for other in self._open)
                    if isinstance(error, zmq.Again) and now < question.until and others < QUESTIONS_OPEN:
                        question.left = [*unsaved, *(found.index for found in part), *rest]
                        return False
                    self._rare.warning("an answer to a peer is dropped", now, error=str(error))
                    return True
                part, payloads = [], []
        question.left = unsaved
        return not unsaved

    def _find(self, name: bytes, ask: Ask) -> tuple[bytes, int] | None:
        """Return checksum and slot of a chunk; no checksum if there is no such chunk; None if it is being copied
        from the device."""
        host = self._copier.host
        use = host.names.find(name)
        if use is None:
            return b"", -1
        if not self._copier.is_saved(use.slot):
            return None
        key = (use.slot, ask.first, ask.stop)
        serial, digest = self._sums.get(key, (-1, b""))
        if serial != use.serial:
            digest = checksum(self._fingerprint, name, ask.first, self._rows(use.slot, ask))
            if len(self._sums) > 2 * host.capacity_slots:
                self._sums.clear()
            self._sums[key] = (use.serial, digest)
        # If the slot has got other content since, the checksum may be that of a mixture.
        return (digest, use.slot) if host.names.holds(use, name) else (b"", -1)

    def _rows(self, slot: int, ask: Ask) -> NDArray[np.uint8]:
        first = self._heads.start
        return self._copier.host.rows(slot)[:, ask.first - first : ask.stop - first]

    def _payload(self, slot: int, ask: Ask) -> memoryview:
        """Return the wanted bytes; those of whole parts are not copied."""
        return np.ascontiguousarray(self._rows(slot, ask)).reshape(-1).data

    def _send(self, peer: bytes, told: Told, payloads: list[memoryview]) -> None:
        """Send a part of an answer.

        Raises:
            zmq.Again: The connection has no room for it; nothing was sent.
            zmq.ZMQError: The peer is gone.
        """
        self._socket.send_multipart([peer, msgspec.msgpack.encode(told)], zmq.NOBLOCK | _more(payloads))
        for index, payload in enumerate(payloads):
            self._socket.send(payload, zmq.NOBLOCK | _more(payloads[index + 1 :]), copy=False)


def own_address(endpoint: str) -> str:
    """Return the address of this host from which it reaches an endpoint; "" if there is none.

    Args:
        endpoint: `tcp://HOST:PORT`; for others there is none.
    """
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or not parts.hostname:
        return ""
    try:
        with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as route:
            route.connect((parts.hostname, parts.port or 0))  # sends nothing
            return str(route.getsockname()[0])
    except OSError:
        return ""


def _more(frames: list[Any]) -> int:
    return zmq.SNDMORE if frames else 0


def _reached(endpoint: str, host: str) -> str:
    """Return the endpoint under which peers reach a socket."""
    if not host or not endpoint.startswith("tcp://"):
        return endpoint
    return f"tcp://{host}:{urlsplit(endpoint).port}"
