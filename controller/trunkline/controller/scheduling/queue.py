"""The groups that wait, in the order in which they may start, and how much there is to compute of them. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from trunkline.controller.scheduling.quarantine import Quarantine
from trunkline.controller.sequences.sequence import Phase, SequenceGroup


def tokens_to_compute(group: SequenceGroup) -> int:
    """Tokens that a group which comes into the queue has to have computed, if nothing is found of them. What is
    dropped and texts of modules do not count; what its samples share counts once."""
    if not group.members:
        return 0
    tokens = group.members[0].tokens.count
    if len(group.members) > 1:
        tokens = group.prompt_len + sum(member.tokens.count - group.prompt_len for member in group.members)
    if group.modules is not None:
        return max(0, tokens - group.modules.entries * group.modules.chunk_size)
    return max(0, tokens - group.holes)


class RequestQueue:
    """Sorted by `SequenceGroup.key`: priority, the preempted before the new, arrival. Keys are unique and do not
    change while a group is in the queue."""

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []
        self._tokens: dict[SequenceGroup, int] = {}
        self.tokens = 0
        """To be computed of all of them, as far as is known."""

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Over the groups as they are now; the queue may change meanwhile."""
        return iter(self._groups.copy())

    def add(self, group: SequenceGroup) -> None:
        assert not group.queued
        group.queued = True
        insort(self._groups, group, key=_key)
        self._tokens[group] = tokens = tokens_to_compute(group)
        self.tokens += tokens

    def found(self, group: SequenceGroup, tokens: int) -> None:
        """KV of so many of its tokens is in some tier. A group that is not here is fine."""
        known = self._tokens.get(group)
        if known is not None and group.prompt_scored:  # else all of it is computed all the same
            self._tokens[group] = rest = max(1, known - tokens)
            self.tokens += rest - known

    def tokens_of(self, group: SequenceGroup) -> int:
        """To be computed of one of them."""
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
    """Groups between the queue and the batch."""

    def __init__(self, queue: RequestQueue, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._queue = queue
        self._entering: dict[int, SequenceGroup] = {}
        """Groups that come back after a preemption, some sequences of them already, while others still wait."""
        self._blocked: tuple[int, int, int] | None = None
        """(request, blocks available, sequences that run) of the last admission that failed for lack of blocks."""

    def candidates(self, available: int, running: int, *, going: bool) -> list[SequenceGroup]:
        """Who may start now, in order; nobody while the first of them still lacks blocks.

        Sequences that have come back hold blocks and compute nothing before all of their group are in the batch.
        So a group that has begun to come in goes before all others, and alone: two of them, or one and a prompt of
        better priority, could each hold what the other waits for.

        Args:
            going: whether anything may change by itself.
        """
        waiting = list(self._queue)
        for entering in self._entering.values():
            waiting.remove(entering)
            waiting.insert(0, entering)
        if not waiting or (going and self._blocked == (waiting[0].id, available, running)):
            return []
        return waiting

    def blocked(self, group: SequenceGroup, available: int, running: int) -> None:
        """It lacks blocks, and will as long as these numbers are the same."""
        self._blocked = (group.id, available, running)

    def unblock(self) -> None:
        """Somebody has come in; should it be who was blocked: it needs other blocks now."""
        self._blocked = None

    def is_entering(self, group: SequenceGroup) -> bool:
        """Whether some of its sequences are in, and others still wait."""
        return group.id in self._entering

    def entering(self) -> dict[int, SequenceGroup]:
        """All of these, by request."""
        return self._entering

    def left(self, group: SequenceGroup) -> None:
        """It has left the batch whole."""
        self._entering.pop(group.id, None)
        self.quarantine.left(group.id)

    def note(self, group: SequenceGroup) -> None:
        """A sequence of the group has come in or has ended: whether others of it wait may be different now."""
        is_in = group.in_batch
        (self.quarantine.came if is_in else self.quarantine.left)(group.id)
        waits = any(member.phase is Phase.WAITING for member in group.members)
        if group.queued and not waits:
            self._queue.remove(group)
        if waits and is_in:
            self._entering[group.id] = group
        else:
            self._entering.pop(group.id, None)
