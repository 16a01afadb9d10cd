"""Which paths of chunks go to which group when a group leaves or is new, how many at a time, until when. Pure.

    Offers ──► offer ──► next ──► (asleep: on the giver's disk) ──► sent ──► seen ──► done
                          │                                                   └─ no progress ──► given up
                          └── no group takes it ──► given up

A *path* is a root's key and the tokens below it (`OfferedPath`). The caller looks up who has it and sends the
messages; this module keeps the account. Times are seconds of any clock that does not go back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from trunkline.kvstore.chunks import NAME_BYTES, TOKEN_BYTES, ChunkName, chain, root_name
from trunkline.kvstore.root_keys import CUT_ROOT, PROMPT_ROOT, SALT_ROOT, TEXT_ROOT
from trunkline.router.messages import OfferedPath
from trunkline.router.routing.names import KvIdentity, whole_chunks

PER_TARGET_MAX: Final = 4
"""Largest number of paths that one group fetches at a time."""
STALL_SECONDS: Final = 5.0
"""Time in seconds without a new chunk after which a path is given up."""
NOTHING_COMES_SECONDS: Final = 0.5
"""The same, if the group says that it fetches nothing: chunks that it has just got may not have been published."""
ASLEEP_SECONDS: Final = 3.0
"""Time in seconds that chunks on the giver's disk have to come into its host memory. After that, the path goes
with the chunks that have come."""


def path_names(path: OfferedPath, identity: KvIdentity) -> list[bytes]:
    """Return the names of a path's chunks, under which controllers publish them; none if its root's key is of an
    unknown kind or malformed (docs/protocol.md, index of the disk tier)."""
    kind, size = path.root[:1], identity.chunk_size
    if kind == SALT_ROOT:
        root = root_name(identity.fingerprint, identity.dtype, size, path.root[1:])
        return whole_chunks(root, path.tokens, size)
    place = ChunkName(path.root[1 : 1 + NAME_BYTES])
    if len(place) < NAME_BYTES or len(path.tokens) % TOKEN_BYTES or len(path.names) % NAME_BYTES:
        return []
    if kind == TEXT_ROOT:
        return list(chain(place, path.tokens, size))
    if kind not in (CUT_ROOT, PROMPT_ROOT):
        return []
    moved = [path.names[at : at + NAME_BYTES] for at in range(0, len(path.names), NAME_BYTES)]
    rest = path.tokens[len(moved) * size * TOKEN_BYTES :]
    return moved + whole_chunks(moved[-1] if moved else place, rest, size, marker=place)


@dataclass(slots=True, eq=False)
class Handing:
    """A path on its way."""

    path: OfferedPath
    giver: str
    """Name of the group that offers it."""
    names: list[bytes] = field(default_factory=list)
    """Names of the path's chunks, for the caller's look-ups; empty: not computed yet."""
    target: str = ""
    """Name of the group that fetches it; "": not sent yet."""
    had: int = 0
    """Number of the path's first chunks that the target had at first."""
    has: int = 0
    """Number of the path's first chunks that the target has, as was last seen."""
    until: float = 0.0
    """Time at which the path is given up unless something changes."""
    asleep_until: float = 0.0
    """Time at which chunks on the giver's disk are no longer waited for; 0: none were."""


@dataclass(slots=True)
class HandoverCounts:
    """Counts of the paths of a handover, by what became of them."""

    paths: int = 0
    """Paths that are completely at other groups."""
    chunks: int = 0
    """Chunks that other groups have fetched."""
    given_up: int = 0
    """Paths of which chunks are missing at the group that was to have them, or that no group took."""


class HandoverPlan:
    """The paths of one group that leaves, or for one that is new. Pure."""

    def __init__(self, room: Mapping[str, int], *, per_target_max: int = PER_TARGET_MAX) -> None:
        """
        Args:
            room: names of the groups that may get paths, and how many chunks each of them may get.
        """
        self.handed = HandoverCounts()
        self._room = dict(room)
        self._given = dict.fromkeys(room, 0)
        """Number of paths that each group has got."""
        self._per_target_max = per_target_max
        self._queue: deque[Handing] = deque()
        self._flying: list[Handing] = []
        self._known: set[bytes] = set()
        """Digests of all paths that were ever offered."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self._queue or self._flying)

    @property
    def waiting(self) -> int:
        """Number of paths that are not sent yet."""
        return len(self._queue)

    @property
    def flying(self) -> Collection[Handing]:
        """The paths that were taken by `next` and are not over."""
        return tuple(self._flying)

    def offer(self, paths: Iterable[OfferedPath], giver: str) -> None:
        """Add paths, the most urgent first, behind those that wait. A path that was offered before is left out."""
        for path in paths:
            digest = blake2b(path.tokens, digest_size=16, key=blake2b(path.root, digest_size=16).digest()).digest()
            if digest not in self._known:
                self._known.add(digest)
                self._queue.append(Handing(path, giver))

    @property
    def open_targets(self) -> list[str]:
        """Names of the groups that can take another path now."""
        busy = [handing.target for handing in self._flying]
        return [name for name, room in self._room.items() if room > 0 and busy.count(name) < self._per_target_max]

    def next(self) -> Handing | None:
        """Return the path that is next to be sent, if a group can take it now. Until `sent` or `give_up` it counts
        as on its way. If no group will ever take one, all that wait are given up."""
        if not any(room > 0 for room in self._room.values()):
            self.handed.given_up += len(self._queue)
            self._queue.clear()
        waiting = sum(not handing.target for handing in self._flying)
        if not self._queue or len(self.open_targets) == 0 or waiting >= self._per_target_max:
            return None
        handing = self._queue.popleft()
        self._flying.append(handing)
        return handing

    def choose(self, costs: Mapping[str, float]) -> str:
        """Return which group gets a path: the one with the lowest cost, where each path that a group has got
        already makes the next one dearer, because its conversation will be a part of the group's load.

        Args:
            costs: by the name of each group that can take it, at least one.
        """
        return min(costs, key=lambda name: (costs[name] * (1 + self._given.get(name, 0)), name))

    def asleep(self, handing: Handing, now: float) -> bool:
        """Return whether to wait for chunks that the giver has on disk only; the first call begins the wait."""
        if not handing.asleep_until:
            handing.asleep_until = now + ASLEEP_SECONDS
        return now < handing.asleep_until

    def sent(self, handing: Handing, target: str, has: int, count: int, now: float) -> None:
        """Note that a group was asked to fetch a path.

        Args:
            has: how many of the path's first chunks it has.
            count: how many chunks the path has.
        """
        handing.target = target
        handing.had = handing.has = has
        handing.until = now + STALL_SECONDS
        self._given[target] += 1
        self._room[target] -= count - has

    def answered(self, handing: Handing, coming: bool, now: float) -> None:
        """Note the group's answer: whether it fetches chunks of the path."""
        if not coming:
            handing.until = min(handing.until, now + NOTHING_COMES_SECONDS)

    def seen(self, handing: Handing, has: int, count: int, now: float) -> None:
        """Note how many of a path's first chunks the group has now. The path is over when it has all of them, or
        when none has come for too long."""
        if has > handing.has:
            handing.has, handing.until = has, max(handing.until, now + STALL_SECONDS)
        if has >= count:
            self.handed.paths += 1
            self._end(handing)
        elif now >= handing.until:
            self.give_up(handing)

    def give_up(self, handing: Handing) -> None:
        """Note that a path is not handed over, or not completely."""
        self.handed.given_up += 1
        self._end(handing)

    def left(self, name: str) -> None:
        """Note that a group takes no more paths, because it is gone. Those on their way to it go elsewhere."""
        self._room.pop(name, None)
        for handing in [each for each in self._flying if each.target == name]:
            self._flying.remove(handing)
            self._queue.appendleft(Handing(handing.path, handing.giver))

    def stop(self) -> None:
        """Give up all that is not done: the time is over, or the group that offered the paths is gone."""
        for handing in list(self._flying):
            self.give_up(handing)
        self.handed.given_up += len(self._queue)
        self._queue.clear()

    def _end(self, handing: Handing) -> None:
        self._flying.remove(handing)
        self.handed.chunks += max(0, handing.has - handing.had)
