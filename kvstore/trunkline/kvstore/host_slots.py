"""The slots of a host pool: which are free, whose copies they hold, which may go (PagedAttention §4.5). Pure.

The memory lies in the workers, the same slot ids on every rank. Each use of a slot has a *generation*: it grows
when the slot is handed out, so that a read can never take an older use's bytes for those it wants
(`trunkline.kvstore.tier.SlotKey`).

      free ──allocate──► kept ──offer──► droppable ──► free
                          ▲───────keep──────┘           the least recently used copy goes first

Of one plan all saves run before all loads, in no order among themselves. So a slot that the plan being made
reads or writes already is *busy* in its step and is not handed out for another write in it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from trunkline.kvstore.layout import SlotId

OwnerT = TypeVar("OwnerT")


class HostSlots(Generic[OwnerT]):
    """`capacity` slots; each that is in use has an owner. Steps are the numbers of the plans being made."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.writes = 0
        """Blocks saved since the start."""
        self.reads = 0
        """Blocks loaded since the start."""
        self._free = deque(SlotId(i) for i in range(capacity))
        """Reused in the order in which they came free, so that busy ones are at the end."""
        self._owners: dict[SlotId, OwnerT] = {}
        self._droppable: OrderedDict[SlotId, None] = OrderedDict()
        """Least recently used first."""
        self._generations = [0] * capacity
        self._busy_step = [0] * capacity

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return len(self._owners)

    def owner(self, slot: SlotId) -> OwnerT:
        """Whose copy it holds.

        Raises:
            KeyError: nobody's.
        """
        return self._owners[slot]

    def generation(self, slot: SlotId) -> int:
        """Of its present use; 0 before the first."""
        return self._generations[slot]

    def allocate(self, owner: OwnerT, step: int) -> SlotId | None:
        """A free slot for a copy that the plan of `step` saves, kept until `offer` or `release`; None: all free
        ones are busy, or none is free."""
        for _ in range(len(self._free)):
            slot = self._free.popleft()
            if self._busy_step[slot] == step:
                self._free.append(slot)
                continue
            self._owners[slot] = owner
            self._generations[slot] += 1
            self._busy_step[slot] = step
            self.writes += 1
            return slot
        return None

    def read(self, slot: SlotId, step: int) -> int:
        """The plan of `step` loads the copy, which makes it the latest used.

        Returns:
            the generation to load.
        """
        assert slot in self._owners, "a free slot cannot be read"
        self._busy_step[slot] = step
        self.reads += 1
        if slot in self._droppable:
            self._droppable.move_to_end(slot)
        return self._generations[slot]

    def keep(self, slot: SlotId) -> None:
        """The copy is needed: it must not be dropped."""
        self._droppable.pop(slot, None)

    def offer(self, slot: SlotId) -> None:
        """Nobody needs the copy any more; it stays while there is room and counts as used just now."""
        assert slot in self._owners, "a free slot holds no copy"
        self._droppable[slot] = None
        self._droppable.move_to_end(slot)

    def droppable(self, step: int) -> Iterator[SlotId]:
        """Copies that nobody needs and whose slots the plan of `step` may write, least recently used first.
        Ends when a slot is dropped: take one, then ask again."""
        return (slot for slot in self._droppable if self._busy_step[slot] != step)

    def is_droppable(self, slot: SlotId) -> bool:
        return slot in self._droppable

    def release(self, slot: SlotId) -> None:
        """The copy is given up; the slot is free."""
        del self._owners[slot]
        self._droppable.pop(slot, None)
        self._free.append(slot)

    def free_slots(self) -> frozenset[SlotId]:
        """The free ids, for checks."""
        return frozenset(self._free)
