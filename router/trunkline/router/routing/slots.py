"""Which controller has which *slot*: its number, the index of its values in every array of routing. Pure.

add ──► present ──remove──► away ──grace is over──► gone ──no live ticket──► free ──► next controller
           ▲                 │
           └── same name ────┘ same slot; the index still knows its chunks
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

AWAY_SECONDS: Final = 60.0
"""Time in seconds for which a controller that was removed keeps its slot and its chunks in the index. A restart of
its process or a fault of the membership source is usually over by then."""


class Slots:
    """The slots of controllers. Each controller has a name, which is unique among those that are present or
    away."""

    def __init__(self, away_seconds: float = AWAY_SECONDS) -> None:
        self.names: tuple[str, ...] = ()
        """By slot: the name of the controller; "": it is gone, or there was none yet. Each change makes a new
        tuple, so it may be kept."""
        self._slots: dict[str, int] = {}
        self._away: dict[int, float] = {}
        """By slot of a controller that is away: the time at which it is gone; the earliest first."""
        self._gone: set[int] = set()
        self._free: list[int] = []
        self._away_seconds = away_seconds

    def find(self, name: str) -> int:
        """Return the slot of a controller that is present or away; -1: there is none."""
        return self._slots.get(name, -1)

    def is_present(self, slot: int) -> bool:
        """Return whether a controller has the slot and is not away."""
        return slot < len(self.names) and bool(self.names[slot]) and slot not in self._away

    def is_gone(self, slot: int) -> bool:
        """Return whether the slot waits for `free`."""
        return slot in self._gone

    def present(self) -> list[int]:
        """Return the slots of the controllers that are present, ascending."""
        return [slot for slot, name in enumerate(self.names) if name and slot not in self._away]

    def add(self, name: str) -> int:
        """Give a controller a slot, the same as before if it was away.

        Raises:
            ValueError: a controller with this name is present, or the name is empty.
        """
        slot = self.find(name)
        if not name or (slot >= 0 and slot not in self._away):
            raise ValueError(f"there is a controller {name!r} already" if name else "a controller needs a name")
        if slot >= 0:
            del self._away[slot]
            return slot
        slot = heappop(self._free) if self._free else len(self.names)
        self._slots[name] = slot
        self.names = (*self.names[:slot], name, *self.names[slot + 1 :])
        return slot

    def remove(self, slot: int, now: float) -> None:
        """Note that a controller is away from now on.

        Raises:
            ValueError: the slot's controller is not present.
        """
        if not self.is_present(slot):
            raise ValueError(f"slot {slot} has no controller that is present")
        self._away[slot] = now + self._away_seconds

    def next_gone(self, now: float) -> int:
        """Return the slot of a controller whose time away is over, and take its name away; -1: there is none. Call
        `free` once nothing belongs to the slot any more."""
        slot = next(iter(self._away), -1)
        if slot < 0 or now < self._away[slot]:
            return -1
        del self._away[slot], self._slots[self.names[slot]]
        self.names = (*self.names[:slot], "", *self.names[slot + 1 :])
        self._gone.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Let another controller have the slot of one that is gone."""
        self._gone.remove(slot)
        heappush(self._free, slot)
