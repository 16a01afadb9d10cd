"""When chunks are used next, as far as it can be foreseen: the turns that ended with them. Pure.

Each chunk knows the turns whose paths it is in, until their sessions come back. A turn has a *wait*
(`trunkline.kvstore.return_times`), and a chunk's wait is the shortest of its turns: of unwanted chunks those that
wait longest are evicted first. Neighbours in a path share one tuple of turns.

      a turn ends ──► it waits; as time goes by without a return, its wait changes at the edges of intervals
      a request that began with the turn's prompt and went further ends ──► its turn takes the place of the old
                      one, which is over; chunks that only the old one used (an edited branch) are evicted first
      the client says that no request follows, or the session goes on at another group ──► over at once

A session is recognised by its prompt: the last full chunk of a turn's prompt is on the path of the next turn, even
if what the model answered comes back in other tokens, and even if all of its KV was evicted meanwhile. No label is
needed. A wrong prediction costs a miss, and never an error.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Generic, cast

from trunkline.kvstore.chunks import ChunkName, ChunkT, TieredChunk
from trunkline.kvstore.return_times import EDGES, Kind, ReturnTimes, interval_of

TURNS_MAX: Final = 1 << 14
"""Largest number of turns that are waited for; beyond that the oldest keeps the wait that it has, or
`RESTORED_S`."""
TURNS_PER_CHUNK: Final = 16
"""Largest number of turns that a chunk knows: those that wait least."""
RECENT_WEIGHT: Final = 0.3
"""Weight of a session's last gap in the mean of its gaps."""
NEW_S: Final = 60.0
"""Wait of a chunk that no turn has ended with yet: it is being computed, or was fetched for a request."""
RESTORED_S: Final = 3600.0
"""Wait of a chunk that an earlier run of the group left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """What is known of a request that ends, and of what its client does next."""

    arrived: float
    """Time at which the request came, in seconds."""
    prompt_chunks: int
    """Number of full chunks of its prompt, the first ones of its path."""
    prompt_tokens: int
    output_tokens: int = 0
    tenant: str = ""
    ended: str = ""
    """How the answer ended: its last tokens, or the name of the tool that it calls; "": not known."""
    expected_s: float = 0.0
    """Seconds until the next request, as the client says; 0: it says nothing."""
    is_last: bool = False
    """Whether the client says that no request follows."""
    request: int = 0
    """Number by which the turn is found later (`NextUse.turn_of`); 0: none."""


class Turn:
    """A request that has ended, until its session's next one ends."""

    __slots__ = (
        "ended_at",
        "expected_s",
        "interval",
        "kind",
        "leaf",
        "mean_gap",
        "name",
        "request",
        "tokens",
        "wait",
    )

    def __init__(self, leaf: TieredChunk | None, wait: float) -> None:
        self.leaf = leaf
        """The deepest chunk of the turn's path that is left; None: no chunk is."""
        self.tokens = 0
        """Number of tokens of prompt and answer."""
        self.request = 0
        """`TurnEnd.request`."""
        self.name: ChunkName | None = None
        """Name of the last full chunk of the prompt; None: it has none."""
        self.ended_at = 0.0
        self.kind: Kind = ()
        self.expected_s = 0.0
        self.mean_gap = 0.0
        """Mean of the base-2 logarithms of the session's gaps in seconds, the last ones counting more."""
        self.interval = 0
        """The interval of the turn's age, as far as it was counted."""
        self.wait = wait
        """Seconds, as `ReturnTimes.wait`; infinity: the turn is over."""


RESTORED: Final = (Turn(None, RESTORED_S),)
"""The turns of a chunk that an earlier run of the group left."""


class NextUse(Generic[ChunkT]):
    """All turns that are waited for, and what is learnt from those that came back."""

    def __init__(self, offer: Callable[[ChunkT], None], *, has_host: bool = True, has_disk: bool = True) -> None:
        """
        Args:
            offer: Called with a chunk that may be evicted sooner than before, because its wait is longer.
            has_host: Whether there is host memory for chunks.
            has_disk: Whether there is a disk tier.
        """
        self.times = ReturnTimes()
        self._offer = offer
        self._absent = not has_host, not has_disk
        self._away: OrderedDict[Turn, None] = OrderedDict()
        """The turns that are waited for, oldest first."""
        self._by_name: dict[ChunkName, Turn] = {}
        """The turns that are waited for, by name."""
        self._by_request: dict[int, Turn] = {}
        """The turns that are waited for and have a request, by its number."""
        self._due: list[tuple[float, int, Turn]] = []
        """A heap of the times at which turns reach their next interval. Other turns are dropped at the top."""
        self._serial = count()
        self._on_device: dict[ChunkT, None] = {}
        self._nearing: dict[Turn, None] = {}

    def __len__(self) -> int:
        return len(self._away)

    def ended(self, path: Sequence[ChunkT], end: TurnEnd, now: float) -> Turn | None:
        """Note that a request with this path has ended; return its turn, for `told` and `close`.

        None: it is not waited for.
        """
        self.tick(now)
        if not path:
            return None
        turn = Turn(path[-1], math.inf)
        full = min(end.prompt_chunks, len(path))
        turn.name = path[full - 1].name if full else None
        turn.tokens = end.prompt_tokens + end.output_tokens
        turn.ended_at, turn.expected_s, turn.request = now, end.expected_s, end.request
        before = self._returned((chunk.name for chunk in path), end.prompt_tokens, end.arrived)
        turn.mean_gap = max((old.mean_gap for old in before), default=0.0)
        turn.kind = end.tenant, end.ended, end.output_tokens.bit_length(), int(turn.mean_gap)
        _join(path, turn)
        if not end.is_last:
            self._await(turn)
        for other in (turn, *before):
            self._may_go(other)
        return None if end.is_last else turn

    def turn_of(self, request: int) -> Turn | None:
        """Return the turn of a request that has ended; None: it is not waited for any more."""
        return self._by_request.get(request)

    def told(self, turn: Turn, ended: str) -> None:
        """Learn how a turn's answer ended (`TurnEnd.ended`), if that was not known at its end."""
        if turn not in self._away:
            return
        for interval in range(turn.interval + 1):
            self.times.reached(turn.kind, interval, -1.0)
        turn.kind = (turn.kind[0], ended, *turn.kind[2:])
        for interval in range(turn.interval + 1):
            self.times.reached(turn.kind, interval)
        self._predict(turn)
        self._may_go(turn)

    def went_on(self, names: Iterable[ChunkName], prompt_tokens: int, now: float) -> None:
        """Note that a session whose last turn ended here goes on at another group, which has its chunks now: those
        that only it used are evicted first.

        Args:
            names: The last chunks that its new prompt has here.
            prompt_tokens: Number of tokens of the new prompt.
        """
        for turn in self._returned(names, prompt_tokens, now):
            self._may_go(turn)

    def close(self, turn: Turn) -> None:
        """Note that a turn's session does not come back: chunks that only it used are evicted first."""
        self._forget(turn)
        turn.wait = math.inf
        self._may_go(turn)

    def tick(self, now: float) -> None:
        """Let time go by."""
        while self._due and self._due[0][0] <= now:
            _, _, turn = heapq.heappop(self._due)
            if turn in self._away:
                turn.interval += 1
                self.times.reached(turn.kind, turn.interval)
                before = turn.wait
                self._predict(turn)
                self._schedule(turn)
                if turn.wait > before:
                    self._may_go(turn)
                elif turn.wait < before and turn in self._away:
                    self._nearing[turn] = None

    def forget(self, chunk: TieredChunk) -> None:
        """Note that a chunk's owner removes it. Call it before the chunk is taken from its parent."""
        for turn in chunk.turns:
            if turn.leaf is chunk:
                turn.leaf = chunk.parent

    def take_on_device(self) -> list[ChunkT]:
        """Return chunks of the device that may be evicted sooner than when this was called last."""
        found, self._on_device = list(self._on_device), {}
        return found

    def take_nearing(self) -> list[Turn]:
        """Return the turns whose waits have become shorter since the last call."""
        found, self._nearing = list(self._nearing), {}
        return found

    def _returned(self, names: Iterable[ChunkName], prompt_tokens: int, arrived: float) -> list[Turn]:
        """Return the turns that a request with these chunks continues; they are over."""
        back = []
        for name in names:
            old = self._by_name.get(name)
            # Another session's prompt, that only begins alike, is hardly longer than what the turn had.
            if old is not None and prompt_tokens >= old.tokens:
                self._learn(old, arrived)
                self._forget(old)
                old.wait = math.inf
                back.append(old)
        return back

    def _learn(self, turn: Turn, arrived: float) -> None:
        """Count a turn whose session is back since `arrived`."""
        gap = max(0.0, arrived - turn.ended_at)
        interval = interval_of(gap)
        for late in range(interval + 1, turn.interval + 1):  # counted while the request ran that came back
            self.times.reached(turn.kind, late, -1.0)
        for early in range(turn.interval + 1, interval + 1):
            self.times.reached(turn.kind, early)
        self.times.came(turn.kind, interval)
        log_gap = math.log2(1.0 + gap)
        weight = RECENT_WEIGHT if turn.mean_gap else 1.0
        turn.mean_gap += weight * (log_gap - turn.mean_gap)

    def _await(self, turn: Turn) -> None:
        if turn.name is not None:
            self._by_name[turn.name] = (
                turn  # another one with this name is no longer recognised, and only grows old
            )
        if turn.request:
            self._by_request[turn.request] = turn
        self._away[turn] = None
        if len(self._away) > TURNS_MAX:
            oldest = next(iter(self._away))
            self._forget(oldest)
            oldest.wait = max(oldest.wait, RESTORED_S)
        self.times.reached(turn.kind, 0)
        self._predict(turn)
        self._schedule(turn)

    def _predict(self, turn: Turn) -> None:
        left = turn.expected_s - EDGES[turn.interval]
        turn.wait = left if left > 0.0 else self.times.wait(turn.kind, turn.interval)

    def _schedule(self, turn: Turn) -> None:
        if turn.interval + 1 == len(EDGES):
            self._forget(turn)
            return
        at = turn.ended_at + EDGES[turn.interval + 1]
        heapq.heappush(self._due, (at, next(self._serial), turn))
        if len(self._due) > 2 * len(self._away) + 64:
            self._due = [entry for entry in self._due if entry[2] in self._away]
            heapq.heapify(self._due)

    def _forget(self, turn: Turn) -> None:
        self._away.pop(turn, None)
        self._nearing.pop(turn, None)
        if turn.name is not None and self._by_name.get(turn.name) is turn:
            del self._by_name[turn.name]
        if self._by_request.get(turn.request) is turn:
            del self._by_request[turn.request]

    def _may_go(self, turn: Turn) -> None:
        """Offer the deepest chunk that the turn has in each place. Those above follow when it is evicted."""
        chunk, on_device = turn.leaf, False
        on_host, on_disk = self._absent
        while chunk is not None and not (chunk.is_forgotten or (on_host and on_disk and on_device)):
            if (chunk.host_ready and not on_host) or (chunk.disk_ready and not on_disk):
                self._offer(cast(ChunkT, chunk))
            if chunk.on_device and not on_device:
                self._on_device[cast(ChunkT, chunk)] = None
            on_host |= chunk.host_ready
            on_disk |= chunk.disk_ready
            on_device |= chunk.on_device
            chunk = chunk.parent


def wait_of(chunk: TieredChunk) -> float:
    """Return a chunk's wait, in seconds: the shortest of its turns."""
    turns = chunk.turns
    if len(turns) == 1:
        return turns[0].wait
    return min(turn.wait for turn in turns) if turns else NEW_S


def _join(path: Sequence[TieredChunk], turn: Turn) -> None:
    """Add a turn to the chunks of its path, in place of those that are over."""
    before: tuple[Turn, ...] | None = None
    after: tuple[Turn, ...] = ()
    for chunk in path:
        if chunk.turns is not before:
            before = chunk.turns
            others = [other for other in before if other.wait < math.inf and other is not RESTORED[0]]
            if len(others) >= TURNS_PER_CHUNK:
                others = sorted(others, key=lambda other: other.wait)[: TURNS_PER_CHUNK - 1]
            after = (*others, turn)
        chunk.turns = after
