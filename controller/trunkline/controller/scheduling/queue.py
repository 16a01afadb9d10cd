"""The groups that wait, in the order in which they may start, and how much there is to compute of them. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from trunkline.controller.sequences.sequence import SequenceGroup


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
