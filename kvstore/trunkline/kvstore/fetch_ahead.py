"""Fetching ahead: which chunks to bring into host memory before the session that needs them is back. Pure.

Between two turns of a session its KV sinks to disk, or to the remote tier, if others are expected sooner. As time
goes by, its turn's wait falls (`trunkline.kvstore.next_use`): the tool that it runs is about to end, or the time
that the client named is near. Then it is fetched, the beginning of its path first, if that takes the place only of
chunks that are expected much later:

      host memory   ██ in use  ██ back in 20 s  ██ back in 900 s ◄──┐ change places
      disk                                      ██ back in 200 s ───┘

What fetching takes counts as time gone by. Waiting requests come first: nothing is fetched ahead while one of them
lacks a chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, Generic, cast

from trunkline.kvstore.chunks import NO_SLOT, ChunkT, TieredChunk
from trunkline.kvstore.next_use import Turn, wait_of

AHEAD_TURNS_MAX: Final = 64
"""Largest number of turns that are fetched for; beyond that the one that was noted first is forgotten."""
AHEAD_FACTOR: Final = 3.0
"""How many times as long as a chunk that is fetched ahead another one must wait to make room for it. With 2 there
are 1.5 to 4 times as many reads for hardly more that is near in time; with 8 nearly nothing is fetched."""
AHEAD_PAUSE_S: Final = 1.0
"""Seconds until it is tried again if there was no room."""


class FetchAhead(Generic[ChunkT]):
    """The turns whose sessions are expected soon, and the chunks to be fetched for them."""

    def __init__(self) -> None:
        self._turns: dict[Turn, float] = {}
        """Turns to fetch for, with the waits that they had when they were noted."""
        self._turn: Turn | None = None
        """The turn that is fetched for now."""
        self._far: deque[ChunkT] = deque()
        """Its chunks that are to be fetched, the beginning of the path first."""
        self._worth_s = 0.0
        """The wait that the chunk which makes room must exceed."""
        self._again_at = 0.0

    def add(self, turns: Iterable[Turn]) -> None:
        """Note turns whose waits have become shorter."""
        for turn in turns:
            self._turns.pop(turn, None)
            self._turns[turn] = turn.wait
            if len(self._turns) > AHEAD_TURNS_MAX:
                del self._turns[next(iter(self._turns))]

    def next(self, now: float) -> ChunkT | None:
        """Return the chunk to be fetched next; None: there is none now."""
        if now < self._again_at:
            return None
        while True:
            while self._turn is not None and self._far:
                chunk = self._far[0]
                is_late = self._turn.wait > self._turns.get(self._turn, 0.0)
                if is_late or not (_is_near(chunk) or _can_be_read(chunk)):
                    break  # it is back or late, or the rest of its path is of no use
                if not _is_near(chunk):
                    return chunk
                self._far.popleft()
            if self._turn is not None:
                self._turns.pop(self._turn, None)
            if not self._begin():
                return None

    def takes(self, read_s: float) -> None:
        """Note how long it takes to fetch all that is lacking of the path, in seconds."""
        if self._turn is not None:
            self._worth_s = max(self._turn.wait, AHEAD_FACTOR * (self._turn.wait - read_s))

    @property
    def lacking_count(self) -> int:
        """Number of chunks that the turn lacks which is fetched for now, at most."""
        return len(self._far)

    def displaces(self, chunk: TieredChunk) -> bool:
        """Return whether a chunk of host memory may make room for the one to be fetched next."""
        return not chunk.wants and wait_of(chunk) > self._worth_s

    def pause(self, now: float) -> None:
        """Note that there is no room: try again later."""
        self._turn = None
        self._far.clear()
        self._again_at = now + AHEAD_PAUSE_S

    def _begin(self) -> bool:
        """Choose the turn that is expected first; return whether there is one."""
        self._far.clear()
        self._turn = min(self._turns, key=lambda turn: turn.wait, default=None)
        if self._turn is None:
            return False
        chunk = self._turn.leaf
        while chunk is not None and chunk.parent is not None and not chunk.is_forgotten:
            if not _is_near(chunk):
                self._far.appendleft(cast(ChunkT, chunk))
            chunk = chunk.parent
        return True


def _is_near(chunk: TieredChunk) -> bool:
    """Return whether a chunk is on the device, in host memory or on its way there."""
    return chunk.on_device or chunk.host != NO_SLOT


def _can_be_read(chunk: TieredChunk) -> bool:
    return chunk.disk_ready or chunk.remote
