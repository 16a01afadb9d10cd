"""The decoding rows of a group as arrays, so that a step costs the same Python for 32 rows as for 256.

A sequence gets a *slot* here with its last prefill step and keeps it until it ends or is preempted. A
`RowSet` is the frozen list of slots that one step decodes; steps share it while nothing joins or leaves.
Results come back one or two steps after planning; by then a slot may belong to somebody else, so a result
counts only if the slot still has the stay it had when the step was planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkline.controller.sequence import Sequence
from trunkline.controller.sharing import shared_runs, tree_order
from trunkline.kvstore.layout import NO_BLOCK, BlockId, Int32Array

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

STOP_IDS_INLINE: Final = 8
"""Stop tokens per row that are compared as arrays; rows with more are looked up one by one."""


@dataclass(frozen=True, slots=True)
class RowSet:
    """Slots that a step decodes, in tree order, with what was true of them then."""

    slots: NDArray[np.intp]
    stays: Int64Array
    requests: Int64Array

    def __len__(self) -> int:
        return len(self.slots)


NO_ROWS: Final = RowSet(np.empty(0, np.intp), np.empty(0, np.int64), np.empty(0, np.int64))


class DecodeRows:
    """Slots of `capacity` sequences. Lengths count tokens.

    For a slot: `known` tokens have arrived here, KV of `planned` tokens exists or is planned; the next
    step computes position `planned`. `known` lags behind by the steps in flight.
    """

    def __init__(self, capacity: int, chunk_size: int, max_blocks: int) -> None:
        self.chunk_size = chunk_size
        self.sequences: list[Sequence | None] = [None] * capacity
        self.stays: Int64Array = np.zeros(capacity, np.int64)
        self.requests: Int64Array = np.zeros(capacity, np.int64)
        self.known: Int64Array = np.zeros(capacity, np.int64)
        self.planned: Int64Array = np.zeros(capacity, np.int64)
        self.limit: Int64Array = np.zeros(capacity, np.int64)
        self.tables: Int32Array = np.full((capacity, max_blocks), NO_BLOCK, np.int32)
        self.block_counts: Int32Array = np.zeros(capacity, np.int32)
        self._stop_ids: Int32Array = np.full((capacity, STOP_IDS_INLINE), -1, np.int32)
        self._many_stops: dict[int, frozenset[int]] = {}
        self._recent: Int32Array = np.zeros((capacity, 2 * chunk_size), np.int32)
        """Ring of the latest tokens by position; flushed to the sequence when a chunk fills."""
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def add(self, sequence: Sequence) -> int:
        """Give a sequence whose last prefill chunk is being planned a slot."""
        slot = self._free.pop()
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.stays[slot] = sequence.stay
        self.requests[slot] = sequence.request
        self.known[slot] = self.planned[slot] = sequence.tokens.count
        self.limit[slot] = sequence.limit
        table = sequence.block_table()
        self.tables[slot, : len(table)] = table
        self.block_counts[slot] = len(table)
        inline = len(sequence.stop_ids) <= STOP_IDS_INLINE
        if inline:
            self._stop_ids[slot, : len(sequence.stop_ids)] = sequence.stop_ids
        else:
            self._many_stops[slot] = frozenset(sequence.stop_ids)
        return slot

    def remove(self, sequence: Sequence) -> None:
        """Take the slot back after the sequence's known tokens were flushed to it."""
        slot = sequence.slot
        self.flush(slot)
        self.sequences[slot] = None
        self.stays[slot] = 0
        self.tables[slot, : self.block_counts[slot]] = NO_BLOCK
        self.block_counts[slot] = 0
        self._stop_ids[slot] = -1
        self._many_stops.pop(slot, None)
        sequence.slot = -1
        self._free.append(slot)

    def set_block(self, slot: int, index: int, block: BlockId) -> None:
        """Set or append a block-table entry."""
        self.tables[slot, index] = block
        self.block_counts[slot] = max(int(self.block_counts[slot]), index + 1)

    def flush(self, slot: int) -> None:
        """Move tokens that have arrived from the ring to the sequence."""
        sequence = self.sequences[slot]
        assert sequence is not None
        first, stop = sequence.tokens.count, int(self.known[slot])
        if first < stop:
            columns = np.arange(first, stop) % self._recent.shape[1]
            sequence.tokens.extend(self._recent[slot, columns])

    def active_slots(self) -> NDArray[np.intp]:
        """Slots that have at least one more token to compute, as of the steps planned so far."""
        return np.flatnonzero((self.stays > 0) & (self.planned + 1 < self.limit))

    def arrange(self, slots: NDArray[np.intp]) -> tuple[RowSet, Int32Array]:
        """The row set of these slots in tree order, and its shared runs (`sharing.shared_runs`)."""
        if not len(slots):
            return NO_ROWS, np.empty((0, 4), np.int32)
        width = int(self.block_counts[slots].max())
        tables = self.tables[slots, :width]
        order = tree_order(tables)
        ordered = slots[order]
        runs = shared_runs(tables[order], self.block_counts[ordered])
        return RowSet(ordered, self.stays[ordered], self.requests[ordered]), runs

    def accept(self, rows: RowSet, tokens: Int32Array) -> tuple[BoolArray, NDArray[np.intp], BoolArray]:
        """Take in the tokens sampled for a row set.

        Returns:
            valid `[rows]`: the row still has its stay, so that its token counts;
            slots `[valid rows]`; stopped `[valid rows]`: the token is one of the row's stop tokens.
        """
        valid = self.stays[rows.slots] == rows.stays
        slots = rows.slots
        if not valid.all():
            slots, tokens = slots[valid], tokens[valid]
        self._recent[slots, self.known[slots] % self._recent.shape[1]] = tokens
        self.known[slots] += 1
        stopped = (self._stop_ids[slots] == tokens[:, None]).any(axis=1)
        for slot in self._many_stops:
            for index in np.flatnonzero(slots == slot):
                stopped[index] = int(tokens[index]) in self._many_stops[slot]
        return valid, slots, stopped
