"""The stop tokens of decoding rows, compared with what all of them drew at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.chunks import Int32Array, any_of

STOP_IDS_INLINE: Final = 8
"""Largest number of a row's stop tokens that are compared as arrays; rows with more are checked one by one."""


class StopTokens:
    """The stop tokens of each row of `DecodeRows`."""

    def __init__(self, capacity: int) -> None:
        self._inline: Int32Array = np.empty((0, capacity), np.int32)
        """`[n, capacity]`: one array for each of the first stop tokens; n: the most of a row so far; -1: none."""
        self._many: dict[int, frozenset[int]] = {}

    def set(self, slot: int, ids: Sequence[int]) -> None:
        """Give a row that has none its stop tokens."""
        if len(ids) <= STOP_IDS_INLINE:
            if (more := len(ids) - len(self._inline)) > 0:
                self._inline = np.pad(self._inline, ((0, more), (0, 0)), constant_values=-1)
            self._inline[: len(ids), slot] = ids
        else:
            self._many[slot] = frozenset(ids)

    def clear(self, slot: int) -> None:
        """Forget a row's stop tokens."""
        self._inline[:, slot] = -1
        self._many.pop(slot, None)

    def of(self, slots: NDArray[np.intp]) -> frozenset[int]:
        """Return all stop tokens of these rows."""
        inline = self._inline[:, slots]
        many = [self._many[slot] for slot in slots.tolist() if slot in self._many] if self._many else []
        return frozenset(inline[inline >= 0].tolist()).union(*many)

    def hit(self, slots: NDArray[np.intp], tokens: Int32Array) -> NDArray[np.bool_]:
        """Return `[rows]`: whether the token that each of these rows drew is one of its stop tokens."""
        if not len(self._inline):
            stopped = np.zeros(len(slots), np.bool_)
        else:
            stopped = any_of(self._inline.take(slots, axis=1) == tokens, axis=0)
        for slot, ids in self._many.items():
            for index in np.flatnonzero(slots == slot):
                stopped[index] = int(tokens[index]) in ids
        return stopped
