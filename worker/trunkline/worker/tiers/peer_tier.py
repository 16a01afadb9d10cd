"""Pull chunks from the host memory of other groups' ranks (`exchange`): the tier `PEER`, which is read-only.

      main thread    moves, PeerAt ──► queue of the peer's link
      link thread    one per peer: asks the ranks that hold this rank's KV heads, fills host slots ──► outcome

Each peer has a thread of its own, so one that is silent or slow keeps nothing else waiting. Whatever a peer
answers, a slot is only said to be filled if its bytes fit the checksum of the chunk that was asked for.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import structlog
import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import parse_monitor_message

from trunkline.controller.reports import MoveOutcome
from trunkline.kvstore.shards import HeadShard, Piece, ShardError
from trunkline.runtime.process import node_id
from trunkline.runtime.wire_keys import Role, WireKeysError
from trunkline.runtime.wire_peer import HANDSHAKE_FAILED, WirePeer
from trunkline.worker.messages import PeerAt, TierMove
from trunkline.worker.tiers.copier import Copier, Ticket
from trunkline.worker.tiers.exchange import Ask, Found, Told, checksum
from trunkline.worker.tiers.process_memory import Ranges, read_memory
from trunkline.worker.tiers.questions import LOOKS_WITHIN_S, Question, Questions
from trunkline.worker.tiers.tier_queue import QueuedMove

DONE: Final = 0
MISS: Final = 1
FAILED: Final = 2

_RANKS_MAX: Final = 1024
_ANSWER_BYTES: Final = 1 << 16
"""Largest size in bytes of an answer without its payload."""
_ANSWERS_MAX: Final = 256
"""Largest number of answers that are taken before a look at the clock and at new moves."""
_LOOK_MS: Final = 2
_TELL_EVERY_S: Final = 0.0005
"""Seconds after which outcomes are told while further moves end."""
_CLOSE_WITHIN_S: Final = 1.0

log = structlog.get_logger()

Done = Callable[[list[MoveOutcome]], None]
"""Takes the outcomes of some moves."""


class _Outcomes:
    """The outcomes of one link's moves. Several are told at once: to wake the thread that takes them costs as much
    as to pull a small chunk."""

    def __init__(self, done: Done) -> None:
        self._done = done
        self._waiting: list[MoveOutcome] = []
        self._since = 0.0

    def add(self, move: TierMove, status: int, elapsed_us: int, detail: str) -> None:
        """Note that a move has ended. It is told by `tell`, or when others end `_TELL_EVERY_S` later."""
        now = time.monotonic()
        if not self._waiting:
            self._since = now
        self._waiting.append(MoveOutcome(move.id, status, elapsed_us, detail))
        if now - self._since >= _TELL_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Tell the outcomes that were not told yet."""
        if waiting := self._waiting:
            self._waiting = []
            self._done(waiting)


@dataclass(slots=True, eq=False)
class _Pull:
    """A chunk on its way into a host slot."""

    move: TierMove
    ticket: Ticket
    missing: int = 0
    """Number of pieces that have not come."""
    status: int = DONE
    detail: str = ""
    began: float = 0.0


class PeerTier:
    """Carries out the moves from peers. To be used by the thread that takes messages."""

    def __init__(self, copier: Copier, shard: HeadShard, fingerprint: bytes, wire_keys: str, done: Done) -> None:
        """
        Args:
            shard: The KV heads of this rank.
            fingerprint: The group's `exchange_fingerprint`.
            wire_keys: The file of wire keys; "": there are none.
            done: Called from any thread; each move is in one of its lists.
        """
        self._done = done
        self._puller_for = partial(_Puller, copier, shard, fingerprint, wire_keys)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._links: dict[int, _Link] = {}
        self._left: list[_Link] = []
        """Links to places where peers were, whose threads may still run."""

    def at(self, message: PeerAt) -> None:
        """Note where a peer is, or that it is gone. What was ordered from its old place fails."""
        self._leave(message.peer)
        if message.endpoints:
            if self._context is None:
                self._context = zmq.Context()
            puller = self._puller_for(_Outcomes(self._done))
            self._links[message.peer] = _Link(self._context, puller, message.peer, message.endpoints)

    def _leave(self, peer: int) -> None:
        link = self._links.pop(peer, None)
        self._left = [one for one in self._left if one.is_running]
        if link is not None:
            link.leave()
            self._left.append(link)

    def pull(self, moves: Sequence[QueuedMove]) -> None:
        """Begin moves from peers. Does not wait."""
        pulls: dict[int, list[_Pull]] = {}
        for move, ticket in moves:
            if move.peer not in self._links or move.is_write:
                reason = "a peer cannot be written to" if move.is_write else f"no peer {move.peer} is known"
                self._done([MoveOutcome(move.id, FAILED, detail=reason)])
            else:
                pulls.setdefault(move.peer, []).append(_Pull(move, ticket))
        for peer, wanted in pulls.items():
            self._links[peer].put(wanted)

    def close(self) -> None:
        """Begin no more moves; those that have begun may end or not."""
        for peer in list(self._links):
            self._leave(peer)
        for link in self._left:
            link.join(_CLOSE_WITHIN_S / len(self._left))
        if self._context is not None and not any(link.is_running for link in self._left):
            self._context.term()
            self._context = None


@dataclass(slots=True)
class _Puller:
    """What a link and its sources need."""

    copier: Copier
    shard: HeadShard
    fingerprint: bytes
    wire_keys: str
    outcomes: _Outcomes


class _Link:
    """The way to one peer: a thread, and a socket for each of its ranks that has heads of this rank."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], puller: _Puller, peer: int, endpoints: Sequence[str]
    ) -> None:
        self._context = context
        self._puller = puller
        self._outcomes = puller.outcomes
        self._endpoints = endpoints
        self._sources: list[_Source] = []
        self._arrivals: queue.SimpleQueue[list[_Pull] | None] = queue.SimpleQueue()
        self._unready: list[_Pull] = []
        """Pulls into slots from which, or into which, copies are still under way."""
        self._problem = ""
        self._wake, self._woken = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        address = f"inproc://peer-{os.urandom(8).hex()}"
        self._woken.bind(address)
        self._wake.connect(address)
        self._thread = threading.Thread(target=self._serve, name=f"peer-{peer}", daemon=True)
        self._thread.start()

    def put(self, pulls: list[_Pull]) -> None:
        """Add moves."""
        self._arrivals.put(pulls)
        self._rouse()

    def leave(self) -> None:
        """End the thread; moves that are not done fail."""
        self._arrivals.put(None)
        self._rouse()
        self._wake.close(linger=100)

    def _rouse(self) -> None:
        with suppress(zmq.Again):  # a busy thread may have seen the arrival, and have ended, before this
            self._wake.send(b"", zmq.NOBLOCK)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self, within_s: float) -> None:
        self._thread.join(within_s)

    # --- the thread

    def _serve(self) -> None:
        try:
            self._connect()
        except (ShardError, WireKeysError, zmq.ZMQError, ValueError) as error:
            self._problem = f"the peer cannot be asked: {error}"
            log.warning("a peer cannot be asked for KV", reason=str(error))
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        for source in self._sources:
            poller.register(source.socket, zmq.POLLIN)
            poller.register(source.monitor, zmq.POLLIN)
        is_open = True
        while is_open:
            poller.poll(self._patience_ms())
            is_open = self._take_arrivals()
            self._start()
            for source in self._sources:
                try:
                    source.serve()
                except Exception as error:  # whatever a peer says, its moves are answered
                    log.error("pulling from a peer failed", error=str(error), exc_info=True)
                    source.fail(f"{type(error).__name__}: {error}")
            self._outcomes.tell()
        for source in self._sources:
            source.close("the peer has gone")
        for pull in self._unready:
            self._outcomes.add(pull.move, FAILED, 0, "the peer has gone")
        self._outcomes.tell()
        self._woken.close(linger=0)

    def _connect(self) -> None:
        if len(self._endpoints) > _RANKS_MAX:
            raise ShardError(f"{len(self._endpoints)} ranks; {_RANKS_MAX} are the most")
        for piece in self._puller.shard.pieces(len(self._endpoints)):
            source = _Source(self._context, self._puller, piece, self._endpoints[piece.rank], len(self._endpoints))
            self._sources.append(source)

    def _patience_ms(self) -> int | None:
        """Return how long the thread may sleep; None: until something comes."""
        if self._unready:
            return _LOOK_MS
        nearest = min((source.questions.deadline() for source in self._sources), default=float("inf"))
        if nearest == float("inf"):
            return None
        left = min(nearest - time.monotonic(), LOOKS_WITHIN_S / 2)
        return max(0, int(left * 1000) + 1)

    def _take_arrivals(self) -> bool:
        """Take what has come; return False if the link is to end."""
        while self._woken.poll(0):
            self._woken.recv()
        while True:
            try:
                pulls = self._arrivals.get_nowait()
            except queue.Empty:
                return True
            if pulls is None:
                return False
            self._unready += pulls

    def _start(self) -> None:
        """Ask for the chunks whose slots are free."""
        puller, now = self._puller, time.monotonic()
        unready = []
        for pull in self._unready:
            problem = self._problem
            if any(source.questions.is_away(now) for source in self._sources):
                problem = "the peer has just failed"
            try:
                if problem or puller.copier.is_done(pull.ticket):
                    self._start_one(pull, problem, now)
                else:
                    unready.append(pull)
            except Exception as error:  # noqa: BLE001 (whatever it is, the move is answered)
                self._outcomes.add(pull.move, FAILED, 0, f"{type(error).__name__}: {error}")
        self._unready = unready

    def _start_one(self, pull: _Pull, problem: str, now: float) -> None:
        if problem:
            self._outcomes.add(pull.move, FAILED, 0, problem)
            return
        self._puller.copier.host.discard(pull.move.host_slot)  # type: ignore[arg-type]
        pull.began, pull.missing = now, len(self._sources)
        for source in self._sources:
            source.questions.add(pull, now)


class _Source:
    """One rank of a peer, and the piece of this rank's heads that comes from it."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], puller: _Puller, piece: Piece, endpoint: str, tp: int
    ) -> None:
        part = puller.copier.host.format
        self._puller = puller
        self._piece = piece
        self._endpoint = endpoint
        head_bytes = part.head_bytes
        length, count = len(piece.source) * head_bytes, part.stretches
        their_heads = len(HeadShard(puller.shard.kv_heads, piece.rank, tp).heads)
        self._there = Ranges(piece.source.start * head_bytes, their_heads * head_bytes, length, count)
        self._here = Ranges(piece.target.start * head_bytes, part.heads * head_bytes, length, count)
        if self._there.is_whole and self._here.is_whole:
            self._there = self._here = Ranges(0, 0, length * count, 1)
        self._first_head = puller.shard.heads.start + piece.target.start
        self._node = node_id()
        """Where the rank's memory is read in place, if it is there, too; "": it is not."""
        self.questions: Questions[_Pull] = Questions(length * count)
        self._decoder = msgspec.msgpack.Decoder(Told)
        self._wire = WirePeer(puller.wire_keys, Role.WORKER, server=Role.WORKER)
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.IMMEDIATE, 1)
        self.socket.set(zmq.MAXMSGSIZE, length * count + _ANSWER_BYTES)  # encrypted frames are longer
        self.monitor = self.socket.get_monitor_socket(
            HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        try:
            self._wire.connect(self.socket, endpoint)
        except BaseException:
            self.close("")
            raise

    def serve(self) -> None:
        """Take events and answers, ask what may be asked, and notice when the peer is silent."""
        while self.monitor.poll(0):
            self._take_event()
        for _ in range(_ANSWERS_MAX):
            if not self.socket.poll(0):
                break
            self._take_answer(self.socket.recv_multipart(copy=False))
        now = time.monotonic()
        self.questions.look(now)
        if now >= self.questions.deadline():
            self.fail(f"no answer from {self._endpoint}")
        elif self.socket.poll(0, zmq.POLLOUT):
            while (question := self.questions.next(now)) is not None:
                self._ask(question)

    def close(self, reason: str) -> None:
        """Fail what is left, and close the sockets."""
        self.fail(reason)
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)

    def _ask(self, question: Question[_Pull]) -> None:
        names = b"".join(pull.move.name for pull in question.parts)
        first = self._first_head
        stop = first + len(self._piece.target)
        ask = Ask(question.id, self._puller.fingerprint, first, stop, names, self._node)
        try:
            self.socket.send(msgspec.msgpack.encode(ask), zmq.NOBLOCK)
        except zmq.Again:
            self.fail(f"{self._endpoint} takes no questions")

    def _take_event(self) -> None:
        event: Any = parse_monitor_message(self.monitor.recv_multipart())
        if event["event"] & HANDSHAKE_FAILED:
            self.fail(self._wire.explain(event))
            self._wire.advance()
            self._wire.again(self.socket, self._endpoint)
        elif event["event"] == zmq.EVENT_DISCONNECTED and self.questions.asked:
            self.fail(f"the connection to {self._endpoint} is lost")

    # --- answers

    def _take_answer(self, frames: Sequence[zmq.Frame]) -> None:
        try:
            told = self._decoder.decode(frames[0].buffer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.fail(f"{self._endpoint} answers what makes no sense: {error}")
            return
        if told.refusal:
            self.fail(f"{self._endpoint} refuses: {told.refusal}")
            return
        if told.pid and self._node:
            self.questions.needs_payload = False  # until the first answer it was not known
        payloads = iter(frames[1:])
        for found in told.found:
            frame = None
            if found.checksum and not told.pid:
                frame = next(payloads, None)
            pull = self.questions.take(told.id, found.index, time.monotonic())
            if pull is not None:
                self._take_chunk(pull, told.pid, found, frame)

    def _take_chunk(self, pull: _Pull, pid: int, found: Found, frame: zmq.Frame | None) -> None:
        """Fill a piece of a slot, if the whole chunk can still come."""
        if pull.status != DONE:
            self._arrived(pull, pull.status, pull.detail)
            return
        if not found.checksum:
            self._arrived(pull, MISS, "")
            return
        try:
            rows = self._filled(pull.move.host_slot, pid, found.address, frame)
        except PermissionError as error:
            if self._node:
                log.info("KV of a peer on this host comes by socket", reason=str(error))
            self._node, self.questions.needs_payload = "", True
            self.questions.again(pull)
        except OSError as error:
            self._arrived(pull, FAILED, str(error))
        else:
            told = checksum(self._puller.fingerprint, pull.move.name, self._first_head, rows)
            is_right = told == found.checksum
            self._arrived(pull, DONE if is_right else MISS, "" if is_right else "the checksum does not fit")

    def _filled(self, slot: int, pid: int, address: int, frame: zmq.Frame | None) -> NDArray[np.uint8]:
        """Fill a slot's heads with the bytes of an answer; return them.

        Raises:
            OSError: There are none.
        """
        host, target = self._puller.copier.host, self._piece.target
        rows = host.rows(slot)[:, target.start : target.stop]
        if pid:
            if not 0 < pid < 1 << 31 or not 0 < address < 1 << 47:
                raise OSError(errno.EINVAL, f"{self._endpoint} answers with address {address} of process {pid}")
            read_memory(pid, self._there.at(address), self._here.at(host.address(slot)))
            return rows
        if frame is None or len(frame) != rows.size:
            raise OSError(errno.EBADMSG, f"{self._endpoint} answers without the bytes")
        rows[:] = np.frombuffer(frame.buffer, dtype=np.uint8).reshape(rows.shape)
        return rows

    def _arrived(self, pull: _Pull, status: int, detail: str) -> None:
        """Note that a piece came or will not come. With the last one the move is over."""
        if pull.status == DONE:
            pull.status, pull.detail = status, detail
        pull.missing -= 1
        if pull.missing:
            return
        if pull.status == DONE:
            move = pull.move
            self._puller.copier.host.set_generation(move.host_slot, move.host_generation, move.name)
        elapsed_us = int((time.monotonic() - pull.began) * 1e6)
        self._puller.outcomes.add(pull.move, pull.status, elapsed_us, pull.detail)

    def fail(self, reason: str) -> None:
        """Give up everything that is wanted from this rank."""
        for pull in self.questions.fail(time.monotonic()):
            self._arrived(pull, FAILED, reason)
