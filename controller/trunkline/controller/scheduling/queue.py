"""The queue of waiting groups, the order in which they may start, and how much they have to compute. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from trunkline.controller.scheduling.quarantine import Quarantine
from trunkline.controller.sequences.sequence import Phase, SequenceGroup


def tokens_to_compute(group: SequenceGroup) -> int:
    """Return how many tokens must be computed for a group if none of them is cached.

    Dropped parts and texts of modules do not count; tokens that its samples share count once.
    """
    if not group.members:
        return 0
    tokens = group.members[0].tokens.count
    if len(group.members) > 1:
        tokens = group.prompt_len + sum(member.tokens.count - group.prompt_len for member in group.members)
    if group.modules is not None:
        return max(0, tokens - group.modules.entries * group.modules.chunk_size)
    return max(0, tokens - group.holes)


class RequestQueue:
    """Waiting groups by priority, preempted before new ones, then arrival (`SequenceGroup.key`).

    Keys are unique and do not change while a group is in the queue.
    """

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []
        self._tokens: dict[SequenceGroup, int] = {}
        self.tokens = 0
        """Tokens to be computed for all of them, as far as is known."""

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Iterate over a copy: the queue may change meanwhile."""
        return iter(self._groups.copy())

    def add(self, group: SequenceGroup) -> None:
        assert not group.queued
        group.queued = True
        insort(self._groups, group, key=_key)
        self._tokens[group] = tokens = tokens_to_compute(group)
        self.tokens += tokens

    def found(self, group: SequenceGroup, tokens: int) -> None:
        """Note that so many tokens of a group are cached; nothing happens if it is not in the queue."""
        known = self._tokens.get(group)
        if known is not None and group.prompt_scored:  # a scored prompt is computed whole in any case
            self._tokens[group] = rest = max(1, known - tokens)
            self.tokens += rest - known

    def tokens_of(self, group: SequenceGroup) -> int:
        """Return how many tokens must be computed for a group in the queue."""
        return self._tokens[group]

    def remove(self, group: SequenceGroup) -> None:
        assert group.queued
        index = bisect_left(self._groups, group.key, key=_key)
        assert self._groups[index] is group, "a group's key changed while it was in the queue"
        del self._groups[index]
        self.tokens -= self._tokens.pop(group)
        group.queued = False


def _key(group: SequenceGroup) -> tuple[int, bool, int, int]:
    return group.key


class AdmissionOrder:
    """Which waiting group may enter the batch next."""

    def __init__(self, queue: RequestQueue, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._queue = queue
        self._entering: dict[int, SequenceGroup] = {}
        """Resumed groups of which some sequences are in the batch and others still wait."""
        self._blocked: tuple[int, int, int] | None = None
        """(request, available blocks, running sequences) of the last admission that failed for lack of blocks."""

    def candidates(self, available: int, running: int, *, going: bool) -> list[SequenceGroup]:
        """Return the groups that may start now, in order; none while the first one still lacks blocks.

        Resumed sequences hold blocks and compute nothing until their whole group is in the batch. So a group that
        has begun to enter goes before all others, and alone: two such groups could wait for each other's blocks.

        Args:
            going: whether running sequences make progress.
        """
        waiting = list(self._queue)
        for entering in self._entering.values():
            waiting.remove(entering)
            waiting.insert(0, entering)
        if not waiting or (going and self._blocked == (waiting[0].id, available, running)):
            return []
        return waiting

    def blocked(self, group: SequenceGroup, available: int, running: int) -> None:
        """Note that a group lacks blocks; it will as long as these numbers do not change."""
        self._blocked = (group.id, available, running)

    def unblock(self) -> None:
        """Try again with the next plan, because a sequence has entered the batch."""
        self._blocked = None

    def is_entering(self, group: SequenceGroup) -> bool:
        """Return whether some sequences of a group are in the batch while others still wait."""
        return group.id in self._entering

    def entering(self) -> dict[int, SequenceGroup]:
        """Return all such groups by request."""
        return self._entering

    def left(self, group: SequenceGroup) -> None:
        """Note that a whole group has left the batch."""
        self._entering.pop(group.id, None)
        self.quarantine.left(group.id)

    def note(self, group: SequenceGroup) -> None:
        """Update a group of which a sequence has entered the batch or ended."""
        is_in = group.in_batch
        (self.quarantine.came if is_in else self.quarantine.left)(group.id)
        waits = any(member.phase is Phase.WAITING for member in group.members)
        if group.queued and not waits:
            self._queue.remove(group)
        if waits and is_in:
            self._entering[group.id] = group
        else:
            self._entering.pop(group.id, None)
