"""Which chunk is in which slot of the host pool, as far as its rank was told: peers ask for chunks by name.

The controller says a chunk's name when it orders the save or the move that fills a slot. A name is *put* only when
everything that the content waits for can be seen (`Copier.ticket`), and *dropped* before the first byte changes.
So bytes that were read between `find` and a `holds` that is still true belong to the name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple


class Use(NamedTuple):
    """One use of a slot, by one chunk."""

    slot: int
    serial: int
    """Number of the use; it is never used again, for any slot."""


class SlotNames:
    """Names and slots of one host pool. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[bytes, list[Use]] = {}
        """The slots that hold each chunk: several, if it is in a plain tree and behind a cut."""
        self._names: dict[int, bytes] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._uses)

    def put(self, slot: int, name: bytes) -> None:
        """Note that a slot holds the chunk of this name. Other slots may hold it, too."""
        with self._lock:
            self._drop(slot)
            self._serial += 1
            self._uses.setdefault(name, []).append(Use(slot, self._serial))
            self._names[slot] = name

    def drop(self, slots: Iterable[int]) -> None:
        """Note that the contents of these slots are about to change."""
        if self._names:
            with self._lock:
                for slot in slots:
                    self._drop(slot)

    def find(self, name: bytes) -> Use | None:
        """Return the slot that holds a chunk, of several the one that was filled last; None: none is known to."""
        with self._lock:
            uses = self._uses.get(name)
            return uses[-1] if uses else None

    def holds(self, use: Use, name: bytes) -> bool:
        """Return whether the slot's content is the same as when `find` returned this."""
        with self._lock:
            return use in self._uses.get(name, ())

    def _drop(self, slot: int) -> None:
        name = self._names.pop(slot, None)
        if name is not None:
            uses = [use for use in self._uses[name] if use.slot != slot]
            if uses:
                self._uses[name] = uses
            else:
                del self._uses[name]
