"""The slots of a tier: which are free, whose copies they hold, and in which use they are. Pure.

The memory lies in the workers, the same slot ids on every rank. Each use of a slot has a *generation*: it grows
when the slot is handed out, so that a read can never take an older use's bytes for those it wants
(`trunkline.kvstore.tier.SlotKey`).

Of one plan all saves run before all loads, in no order among themselves. So a host slot that the plan being made
reads or writes already is *busy* in its step and is not handed out for another write in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from trunkline.kvstore.extents import SlotId

OwnerT = TypeVar("OwnerT")


class SlotPool(Generic[OwnerT]):
    """`capacity` slots; each that is in use has an owner."""

    def __init__(self, capacity: int, first_generation: int = 0) -> None:
        """
        Args:
            first_generation: generations handed out are larger than it, so larger than those of earlier runs
                whose slots are still on disk.
        """
        self.capacity = capacity
        self._first_generation = first_generation
        self._free = deque(SlotId(i) for i in range(capacity))
        """Reused in the order in which they came free, so that busy ones are at the end. May hold slots that
        `take` has taken since."""
        self._queued = bytearray(b"\1") * capacity
        """Whether a slot stands in `_free`."""
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
        """Of its present use."""
        return self._generations[slot]

    @property
    def highest_generation(self) -> int:
        """Of all uses so far; the first generation if there was none."""
        return max(self._generations, default=self._first_generation)

    def allocate(self, owner: OwnerT, step: int = 0) -> SlotId | None:
        """A free slot; None: none is free, or all free ones are busy in `step` (0: no plan's)."""
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
        """Say whose this slot is since an earlier run; False if there is no such slot, or it is somebody's."""
        if not 0 <= slot < self.capacity or slot in self._owners:
            return False
        self._owners[slot] = owner
        self._generations[slot] = generation
        return True

    def touch(self, slot: SlotId, step: int) -> None:
        """The plan of `step` reads it."""
        self._busy_step[slot] = step

    def is_busy(self, slot: SlotId, step: int) -> bool:
        """Whether the plan of `step` reads or writes it."""
        return self._busy_step[slot] == step

    def release(self, slot: SlotId) -> None:
        """The copy is given up; the slot is free."""
        del self._owners[slot]
        if not self._queued[slot]:
            self._queued[slot] = 1
            self._free.append(slot)

    def free_slots(self) -> Iterable[SlotId]:
        """The free ids, for checks."""
        return [slot for slot in self._free if slot not in self._owners]
