"""A server in simulated time with the real `Directory`: who finds the KV of their session again, and where.

Discrete events, one group. A turn of a session is a job; jobs wait in one FCFS queue for one of `slots` places. A
job that starts finds its history's chunks in host memory, has the rest fetched from disk, and computes what is
gone; it holds its place for prefill and decode. Then its new chunks are saved to host memory, and the directory
does the rest: moves are carried out one after the other, reads and writes each, at the disk's speed.

Everything that decides anything is the directory's. A chunk here is larger than the engine's 64 tokens so that
thousands of sessions take minutes: it changes how much of a tail is rounded up, nothing else.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from session_model import Conversation

from trunkline.kvstore.chunks import ChunkName, TieredChunk
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.next_use import TurnEnd
from trunkline.kvstore.tier_moves import Move, MoveStatus
from trunkline.kvstore.tier_policy import DirectoryConfig, EvictionPolicy

NAMELESS: Final = ChunkName(b"")


class Overflow(Enum):
    """What becomes of cached KV when the oldest half of a context is cut off (CachedAttention §3.4)."""

    NONE = auto()
    """Contexts are never cut."""
    SHIFT = auto()
    """What is kept stays valid: positions are decoupled."""
    INVALIDATE = auto()
    """All of it is void: positions are embedded in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The server and its tiers. The speeds are those of LLaMA-13B in the paper, where it gives them."""

    host_tokens: float = math.inf
    disk_tokens: float = math.inf
    policy: EvictionPolicy | None = EvictionPolicy.LOOK_AHEAD
    """None: nothing is kept, all history is computed again."""
    overflow: Overflow = Overflow.NONE
    window: int = 0
    """Tokens that the model can see."""
    ttl_s: float = 0.0
    """0: none."""
    chunk_tokens: int = 256
    slots: int = 24
    prefill_tokens_per_s: float = 8000.0
    decode_s_per_token: float = 0.020
    kv_bytes_per_token: float = 0.78e6
    disk_read_bytes_per_s: float = 5e9
    disk_write_bytes_per_s: float = 3e9
    warmup_turns: int = 0
    """First turns that are not counted."""

    def slots_of(self, tokens: float, most: int) -> int:
        return most if math.isinf(tokens) else int(tokens / self.chunk_tokens)


@dataclass(slots=True)
class Figures:
    """What was seen after the warm-up."""

    turns: int = 0
    first_turns: int = 0
    hits: int = 0
    """Turns whose history was found whole in host memory or on disk …"""
    host_hits: int = 0
    """… all of it in host memory when they started."""
    history_tokens: int = 0
    found_tokens: int = 0
    found_share: float = 0.0
    """Sum over the turns of the share of their history that was found."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    """Of all rows, each counted."""
    waited_s: float = 0.0
    ended_s: float = 0.0
    live_chunks_max: int = 0
    """Peak footprint of the sessions that have begun and not ended, from the start on."""
    queue_max: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.turns

    @property
    def later_hit_rate(self) -> float:
        """Of turns that had a history."""
        return self.hits / (self.turns - self.first_turns)

    @property
    def host_share(self) -> float:
        return self.host_hits / self.hits if self.hits else math.nan


class Chunk(TieredChunk):
    """A chunk of one session's context."""

    __slots__ = ("is_running", "session", "skipped", "tokens")

    def __init__(self, parent: TieredChunk, session: Session, skipped: int, tokens: int) -> None:
        place = session.dropped + len(session.chunks)
        super().__init__(parent, ChunkName(b"%d/%d" % (session.serial, place)))
        self.session = session
        self.skipped = skipped
        """Its first tokens, which have been cut off."""
        self.tokens = tokens
        """Those that are seen."""
        self.is_running = True

    @property
    def on_device(self) -> bool:
        return self.is_running

    @property
    def token_count(self) -> int:
        return self.tokens


@dataclass(slots=True, eq=False)
class Session:
    """A conversation under way. Its next turn is `turn`."""

    conversation: Conversation
    serial: int
    turn: int = 0
    context: int = 0
    """Tokens of history that the next turn sees."""
    chunks: list[Chunk] = field(default_factory=list)
    """The first ones of the context, as far as they are stored or on the device."""
    live_chunks: int = 0
    dropped: int = 0
    """Chunks that were cut off."""


@dataclass(slots=True, eq=False)
class Job:
    """One turn."""

    serial: int
    session: Session
    arrived_s: float
    history: int = 0
    is_whole: bool = False
    was_in_host: bool = False


class Simulation:
    """Run it once with `run`."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.looks_ahead = setting.policy is not None and setting.policy.looks_ahead
        most = 1 << 15  # of an unlimited tier
        keeps = setting.policy is not None
        self.directory: Directory[Chunk] = Directory(
            DirectoryConfig(
                host_slots=setting.slots_of(setting.host_tokens, most) if keeps else 0,
                disk_slots=setting.slots_of(setting.disk_tokens, most) if keeps else 0,
                policy=setting.policy or EvictionPolicy.LOOK_AHEAD,
            )
        )
        self.figures = Figures()
        self._root = TieredChunk(None, NAMELESS)
        self._now = 0.0
        self._events: list[tuple[float, int, object]] = []
        self._serials = itertools.count(1)
        self._queue: deque[Job] = deque()
        self._loading: list[Job] = []
        self._free_slots = setting.slots
        self._started = 0
        self._disk_free_s = [0.0, 0.0]
        """When the disk has read, and written, all that was ordered."""
        self._step = 0
        self._live_chunks = 0

    def run(self, conversations: Sequence[Conversation]) -> Figures:
        """Until all sessions have ended."""
        for serial, conversation in enumerate(conversations):
            self._at(conversation.arrival_s, Session(conversation, serial))
        while self._events:
            self._now, _, what = heapq.heappop(self._events)
            if isinstance(what, Session):
                self._arrive(what)
            elif isinstance(what, Job):
                self._finish(what)
            elif isinstance(what, Move):
                self.directory.done(what.id, MoveStatus.DONE, self._now)
            self._start_jobs()
            self._order_moves()
            self._start_loaded()
            self._forget_lost()
        assert not self._queue, "jobs wait for ever"
        assert not self._loading, "jobs wait for ever"
        self.figures.ended_s = self._now
        return self.figures

    def _at(self, time: float, what: object) -> None:
        heapq.heappush(self._events, (time, next(self._serials), what))

    def _arrive(self, session: Session) -> None:
        job = Job(next(self._serials), session, self._now)
        self._cut(session)
        self._queue.append(job)
        self.figures.queue_max = max(self.figures.queue_max, len(self._queue))
        if self.looks_ahead:
            self.directory.want(job.serial, (1.0, job.serial), session.chunks)

    def _cut(self, session: Session) -> None:
        """Cut the oldest half of the context off if the turn does not fit."""
        window, conversation = self.setting.window, session.conversation
        if self.setting.overflow is Overflow.NONE or not session.turn:
            return
        new = conversation.user_tokens[session.turn] + conversation.answer_tokens[session.turn]
        if session.context + new <= window:
            return
        kept = min(session.context, window // 2)
        if self.setting.overflow is Overflow.INVALIDATE:
            for chunk in reversed(session.chunks):
                self.directory.forget(chunk)
            session.chunks = []
        else:
            tokens = sum(chunk.tokens for chunk in session.chunks)
            dropped: list[Chunk] = []
            while session.chunks and tokens - session.chunks[0].tokens >= kept:
                tokens -= session.chunks[0].tokens
                dropped.append(session.chunks.pop(0))
            session.dropped += len(dropped)
            if dropped and session.chunks:
                session.chunks[0].parent = self._root
                self.directory.moved(session.chunks[0], dropped[-1])
            for chunk in reversed(dropped):
                self.directory.forget(chunk)
            if tokens > kept:
                session.chunks[0].tokens -= tokens - kept
                session.chunks[0].skipped += tokens - kept
        session.context = kept

    def _start_jobs(self) -> None:
        looks_ahead = self.looks_ahead
        while self._free_slots and self._queue and (looks_ahead or not self._loading):
            job = self._queue.popleft()  # without looking ahead the directory fetches for one job at a time
            session = job.session
            self._free_slots -= 1
            self._started += 1
            job.history = session.context
            job.is_whole = sum(chunk.tokens for chunk in session.chunks) >= session.context
            job.was_in_host = all(chunk.host_ready for chunk in session.chunks)
            if not job.was_in_host:
                self.directory.want(job.serial, (0.0, job.serial), session.chunks)
                self._order_moves()
                if any(self.directory.is_coming(chunk) for chunk in session.chunks):
                    self._loading.append(job)
                    continue
            self._start(job)

    def _start_loaded(self) -> None:
        """Start what has waited for the disk."""
        waiting, self._loading = self._loading, []
        for job in waiting:
            if any(self.directory.is_coming(chunk) for chunk in job.session.chunks):
                self._loading.append(job)
            else:
                self._start(job)

    def _start(self, job: Job) -> None:
        session = job.session
        usable = list(itertools.takewhile(lambda chunk: chunk.host_ready, session.chunks))
        job.is_whole = job.is_whole and len(usable) == len(session.chunks)
        self.directory.used(usable, self._now)
        for chunk in usable:
            self.directory.load(chunk, self._step)
            chunk.is_running = True
        for chunk in reversed(session.chunks[len(usable) :]):
            self.directory.forget(chunk)
        session.chunks = usable
        self.directory.unwant(job.serial)
        found = min(sum(chunk.tokens for chunk in usable), job.history)
        conversation, turn = session.conversation, session.turn
        prefill = job.history - found + conversation.user_tokens[turn]
        prefill_s = prefill / self.setting.prefill_tokens_per_s
        decode_s = conversation.answer_tokens[turn] * self.setting.decode_s_per_token
        self._count(job, found, prefill_s, decode_s)
        self._at(self._now + prefill_s + decode_s, job)

    def _count(self, job: Job, found: int, prefill_s: float, decode_s: float) -> None:
        if self._started <= self.setting.warmup_turns:
            return
        figures = self.figures
        figures.turns += 1
        figures.prefill_s += prefill_s
        figures.decode_s += decode_s
        figures.waited_s += self._now - job.arrived_s
        if not job.session.turn:
            figures.first_turns += 1
            return
        figures.history_tokens += job.history
        figures.found_tokens += found
        figures.found_share += found / job.history
        figures.hits += job.is_whole
        figures.host_hits += job.is_whole and job.was_in_host

    def _finish(self, job: Job) -> None:
        session, conversation = job.session, job.session.conversation
        self._free_slots += 1
        session.context += conversation.user_tokens[session.turn] + conversation.answer_tokens[session.turn]
        if self.setting.overflow is not Overflow.NONE:
            session.context = min(session.context, self.setting.window)
        self._footprint(session)
        if self.setting.policy is not None:
            self._keep(job)
        think_s = conversation.think_s[session.turn]
        session.turn += 1
        if session.turn < len(conversation.user_tokens):
            self._at(self._now + think_s, session)
        else:
            self._live_chunks -= session.live_chunks

    def _footprint(self, session: Session) -> None:
        chunks = -(-session.context // self.setting.chunk_tokens)
        self._live_chunks += chunks - session.live_chunks
        session.live_chunks = chunks
        self.figures.live_chunks_max = max(self.figures.live_chunks_max, self._live_chunks)

    def _keep(self, job: Job) -> None:
        """Save what the turn has added and leave the device."""
        session, size, directory = job.session, self.setting.chunk_tokens, self.directory
        missing = session.context - sum(chunk.tokens for chunk in session.chunks)
        skipped = 0
        tail = session.chunks[-1] if session.chunks else None
        if missing > 0 and tail is not None and tail.skipped + tail.tokens < size:
            session.chunks.pop()  # it grows: a larger chunk takes its place
            skipped = tail.skipped
            missing += tail.tokens
            directory.forget(tail)
        while missing > 0:
            parent = session.chunks[-1] if session.chunks else self._root
            tokens = min(missing, size - skipped)
            session.chunks.append(Chunk(parent, session, skipped, tokens))
            missing -= tokens
            skipped = 0
        directory.used(session.chunks, self._now)
        if self.setting.policy is EvictionPolicy.PREDICTED:
            self._predict(job)
        for at, chunk in enumerate(session.chunks):
            self._step += 1
            stored = (
                chunk.is_stored
                or directory.save(chunk, self._step)
                or directory.save(chunk, self._step, forced=True)
            )
            if not stored:
                for lost in reversed(session.chunks[at:]):
                    directory.forget(lost)
                del session.chunks[at:]
                break
        for chunk in session.chunks:
            chunk.is_running = False
            directory.left_device(chunk)
        if self.setting.ttl_s:
            directory.keep(session.chunks, self._now + self.setting.ttl_s)
            directory.expire(self._now)

    def _predict(self, job: Job) -> None:
        session = job.session
        answer = session.conversation.answer_tokens[session.turn]
        prompt = job.history + session.conversation.user_tokens[session.turn]
        full = min(prompt // self.setting.chunk_tokens, len(session.chunks))
        end = TurnEnd(arrived=job.arrived_s, prompt_chunks=full, prompt_tokens=prompt, output_tokens=answer)
        self.directory.next_use.ended(session.chunks, end, self._now)

    def _order_moves(self) -> None:
        setting = self.setting
        size = setting.chunk_tokens * setting.kv_bytes_per_token
        for move in self.directory.moves(self._now):
            speed = setting.disk_write_bytes_per_s if move.is_write else setting.disk_read_bytes_per_s
            self._disk_free_s[move.is_write] = max(self._now, self._disk_free_s[move.is_write]) + size / speed
            self._at(self._disk_free_s[move.is_write], move)

    def _forget_lost(self) -> None:
        for chunk in self.directory.lost():
            if chunk.is_running or chunk.is_forgotten:
                continue
            chunks = chunk.session.chunks
            if chunk in chunks:
                for gone in reversed(chunks[chunks.index(chunk) :]):
                    self.directory.forget(gone)
                    chunks.remove(gone)
