"""The slots of a tier: which are free, and how often each has been handed out. Part of the directory; pure.

The memory is the workers'; slot ids are the same on every rank. Each use of a slot has a *generation*, which grows
when the slot is handed out. So a read can never mistake the bytes of an older use for those that it wants
(`trunkline.kvstore.tier.SlotKey`). All saves of a plan run before all its loads, but in no order among themselves.
So a host slot that the plan in the making reads or writes is *busy* in its step, and is not handed out for another
write in that step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from trunkline.kvstore.chunks import SlotId

OwnerT = TypeVar("OwnerT")


class SlotPool(Generic[OwnerT]):
    """The slots of one tier, free or with an owner."""

    def __init__(self, capacity: int, first_generation: int = 0) -> None:
        """
        Args:
            first_generation: All generations handed out are larger, so larger than those of earlier runs whose
                slots are still on disk.
        """
        self.capacity = capacity
        self._first_generation = first_generation
        self._free = deque(SlotId(i) for i in range(capacity))
        """Slots are reused in the order in which they came free, so busy ones are at the end. The queue may hold
        slots that `take` has taken since."""
        self._queued = bytearray(b"\1") * capacity
        """1 for each slot that stands in `_free`."""
        self._owners: dict[SlotId, OwnerT] = {}
        self._generations = [first_generation] * capacity
        self._busy_step = [0] * capacity

    @property
    def free_count(self) -> int:
        return self.capacity - len(self._owners)

    @property
    def used_count(self) -> int:
        return len(self._owners)

    @property
    def owners(self) -> Mapping[SlotId, OwnerT]:
        return MappingProxyType(self._owners)

    def generation(self, slot: SlotId) -> int:
        """Return the generation of a slot's present use."""
        return self._generations[slot]

    @property
    def highest_generation(self) -> int:
        """The highest generation of all uses so far; the first generation if there was none."""
        return max(self._generations, default=self._first_generation)

    def allocate(self, owner: OwnerT, step: int = 0) -> SlotId | None:
        """Return a free slot for `owner`; None if none is free that is not busy in `step` (0: no plan's step)."""
        for _ in range(len(self._free)):
            slot = self._free.popleft()
            if slot in self._owners:
                self._queued[slot] = 0
                continue
            if step and self._busy_step[slot] == step:
                self._free.append(slot)
                continue
            self._queued[slot] = 0
            self._owners[slot] = owner
            self._generations[slot] = max(self._generations[slot], self._first_generation) + 1
            self._busy_step[slot] = step
            return slot
        return None

    def take(self, owner: OwnerT, slot: SlotId, generation: int) -> bool:
        """Give a slot to an owner that had it in an earlier run.

        Returns:
            False if there is no such slot, or if it has an owner.
        """
        if not 0 <= slot < self.capacity or slot in self._owners:
            return False
        self._owners[slot] = owner
        self._generations[slot] = generation
        return True

    def touch(self, slot: SlotId, step: int) -> None:
        """Note that the plan of `step` reads a slot, so that the slot is busy in that step."""
        self._busy_step[slot] = step

    def is_busy(self, slot: SlotId, step: int) -> bool:
        """Return whether the plan of `step` reads or writes a slot."""
        return self._busy_step[slot] == step

    def release(self, slot: SlotId) -> None:
        """Free a slot whose copy is given up."""
        del self._owners[slot]
        if not self._queued[slot]:
            self._queued[slot] = 1
            self._free.append(slot)

    def free_slots(self) -> Iterable[SlotId]:
        """Return the ids of free slots, for checks."""
        return [slot for slot in self._free if slot not in self._owners]
