"""The groups that wait, in the order in which they may start. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from trunkline.controller.sequence import SequenceGroup


class RequestQueue:
    """Sorted by `SequenceGroup.key`: priority, the preempted before the new, arrival. Keys are unique and do not
    change while a group is in the queue."""

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Over the groups as they are now; the queue may change meanwhile."""
        return iter(self._groups.copy())

    def add(self, group: SequenceGroup) -> None:
        assert not group.queued
        group.queued = True
        insort(self._groups, group, key=_key)

    def remove(self, group: SequenceGroup) -> None:
        assert group.queued
        index = bisect_left(self._groups, group.key, key=_key)
        assert self._groups[index] is group, "a group's key changed while it was in the queue"
        del self._groups[index]
        group.queued = False


def _key(group: SequenceGroup) -> tuple[int, bool, int, int]:
    return group.key
