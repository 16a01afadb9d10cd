"""Who may start now: the queue's order, and what is special of groups that come in piece by piece."""

from __future__ import annotations

from trunkline.controller.scheduling.quarantine import Suspects
from trunkline.controller.scheduling.queue import RequestQueue
from trunkline.controller.sequences.sequence import Phase, SequenceGroup


class Entries:
    """Groups between the queue and the batch."""

    def __init__(self, queue: RequestQueue) -> None:
        self.suspects = Suspects()
        """Who is not to run beside whom. The engine's, which outlive this."""
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
        self.suspects.left(group.id)

    def note(self, group: SequenceGroup) -> None:
        """A sequence of the group has come in or has ended: whether others of it wait may be different now."""
        is_in = any(member.stay for member in group.members)
        (self.suspects.came if is_in else self.suspects.left)(group.id)
        waits = any(member.phase is Phase.WAITING for member in group.members)
        if group.queued and not waits:
            self._queue.remove(group)
        if waits and is_in:
            self._entering[group.id] = group
        else:
            self._entering.pop(group.id, None)
