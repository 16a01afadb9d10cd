"""The sequences that decode, as arrays, so that a step costs the same Python for 32 rows as for 256.

A sequence gets a *slot*, an index in the arrays of `DecodeRows`, with its last prefill step, and keeps it until it
ends or is preempted. A *row* is a place in a step: a `RowSet` is the frozen list of the slots that one step
decodes, in the order of its rows; steps share it while no sequence joins or leaves. Results come back one or two
steps after planning. By then a slot may belong to another sequence, so a result counts only if the slot still has
the `batch_seq_id` that it had when the step was planned.

Rows are in tree order, with runs (`trunkline.controller.sequences.tree_order`). Both are computed only when rows
join, leave or change a shared block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkline.controller.sequences.draft_source import DraftSource
from trunkline.controller.sequences.sequence import Sequence
from trunkline.controller.sequences.stop_tokens import StopTokens
from trunkline.controller.sequences.tree_order import shared_runs, text_runs, tree_order
from trunkline.kvstore.chunks import NO_BLOCK, BlockId, Int32Array, all_of, any_of, blocks_for

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

BEAM: Final = -1
"""Value of `RowSet.samples` for a beam."""


@dataclass(frozen=True, slots=True)
class RowSet:
    """The sequences that a step decodes, and their state when it was planned. All arrays are `[rows]`, in tree
    order."""

    slots: NDArray[np.intp]
    """The slot of each row's sequence in `DecodeRows`."""
    batch_seq_ids: Int64Array
    requests: Int64Array
    samples: Int64Array
    """Index of the sample within its request; `BEAM` for a beam, whose tokens are not output yet."""

    def __len__(self) -> int:
        return len(self.slots)


_NONE: Final = np.empty(0, np.int64)
NO_ROWS: Final = RowSet(np.empty(0, np.intp), _NONE, _NONE, _NONE)


class DecodeRows:
    """The decoding sequences as arrays, by slot, with room for `capacity` of them. Lengths count tokens.

    Of each sequence, `known` tokens have arrived, and KV of `planned` tokens exists or is planned: the next step
    computes position `planned`. `known` lags behind by the steps in flight. KV of drafts is not counted; that of
    accepted ones is when the result arrives.
    """

    def __init__(self, capacity: int, chunk_size: int, max_blocks: int) -> None:
        self.drafts: DraftSource | None = None
        """The source of drafts, which is told of every sequence that is no beam; None: there are no drafts."""
        self.sequences: list[Sequence | None] = [None] * capacity
        self.batch_seq_ids: Int64Array = np.zeros(capacity, np.int64)
        self.requests: Int64Array = np.zeros(capacity, np.int64)
        self.samples: Int64Array = np.zeros(capacity, np.int64)
        self.known: Int64Array = np.zeros(capacity, np.int64)
        self.planned: Int64Array = np.zeros(capacity, np.int64)
        self.limit: Int64Array = np.zeros(capacity, np.int64)
        self.fills_at: Int64Array = np.zeros(capacity, np.int64)
        """Length up to which each row's next chunk reaches that has not entered the tree: it is full when more
        tokens are known."""
        self.tables: Int32Array = np.full((capacity, max_blocks), NO_BLOCK, np.int32)
        self.block_counts: Int32Array = np.zeros(capacity, np.int32)
        self.text_blocks: Int32Array = np.zeros(capacity, np.int32)
        """Number of entries at the beginning of each table that belong to texts of modules. Other rows may have
        the same texts at other entries."""
        self.stops = StopTokens(capacity)
        self._recent: Int32Array = np.zeros((capacity, 2 * chunk_size), "<i4")
        """Ring buffers of the latest tokens by position. Their tokens move to the sequence when a chunk fills."""
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def chunk_size(self) -> int:
        return int(self._recent.shape[1]) // 2

    @property
    def free_count(self) -> int:
        return len(self._free)

    def add(self, sequence: Sequence) -> int:
        """Give a slot to a sequence whose prompt this plan completes, or which has resumed with all but its last
        token computed (`Sequence.prefill_stop`)."""
        self.enter(sequence)
        self.fill(sequence)
        return sequence.slot

    def enter(self, sequence: Sequence) -> None:
        """Give a slot to a sequence; before the next plan, `fill` has to follow."""
        slot = sequence.slot = self._free.pop()
        self.sequences[slot] = sequence

    def fill(self, sequence: Sequence) -> None:
        """Enter what the arrays say of a sequence that has got its slot."""
        slot = sequence.slot
        self.batch_seq_ids[slot] = sequence.batch_seq_id
        self.requests[slot] = sequence.request_id
        self.samples[slot] = sequence.sample if sequence.beam_position is None else BEAM
        self.known[slot] = sequence.tokens.count
        self.planned[slot] = sequence.prefill_stop
        self.fills_at[slot] = blocks_for(sequence.tokens.count, self.chunk_size) * self.chunk_size
        self.limit[slot] = sequence.group.limit
        table = sequence.block_table()
        self.tables[slot, : len(table)] = table
        self.block_counts[slot] = len(table)
        self.text_blocks[slot] = sequence.stem.base if sequence.group.modules is not None else 0
        # A beam search handles stop tokens itself.
        stop_ids = sequence.group.request.submit.stop_token_ids if sequence.beam_position is None else ()
        self.stops.set(slot, stop_ids)
        if self.drafts is not None and sequence.beam_position is None:
            self.drafts.add(sequence)

    def read_alike(self, leader: Sequence, others: list[Sequence], blocks: int) -> None:
        """Plan the first `blocks` table entries of some beams as one run. Only the workers know in time which of
        them are equal, so from here on these entries are a hint, not the beams' tables."""
        for sequence in others:
            self.tables[sequence.slot, :blocks] = self.tables[leader.slot, :blocks]

    def remove(self, sequence: Sequence) -> None:
        """Move the known tokens of a sequence from the arrays to the sequence, and free its slot."""
        slot = sequence.slot
        self.flush(slot)
        if self.drafts is not None and sequence.beam_position is None:
            self.drafts.remove(sequence)
        self.sequences[slot] = None
        self.batch_seq_ids[slot] = 0
        self.tables[slot, : self.block_counts[slot]] = NO_BLOCK
        self.block_counts[slot] = self.text_blocks[slot] = 0
        self.stops.clear(slot)
        sequence.slot = -1
        self._free.append(slot)

    def set_block(self, slot: int, index: int, block: BlockId) -> None:
        """Set or append a block-table entry."""
        self.tables[slot, index] = block
        self.block_counts[slot] = max(int(self.block_counts[slot]), index + 1)

    def set_behind(self, sequence: Sequence) -> None:
        """Forget the block-table entries of a row that are behind its window now, unless they keep blocks."""
        if not sequence.stem.keeps_blocks:
            self.tables[sequence.slot, : sequence.stem.behind] = NO_BLOCK

    def flush(self, slot: int) -> None:
        """Move tokens that have arrived from the ring buffer to the sequence."""
        sequence = self.sequences[slot]
        assert sequence is not None
        first, stop = sequence.tokens.count, int(self.known[slot])
        recent = self._recent[slot]
        while first < stop:  # once, or twice if the ring's end is between them
            at = first % len(recent)
            run = recent[at : at + stop - first]
            sequence.tokens.extend(run)
            first += len(run)

    def take_filled(self, slot: int) -> tuple[Sequence, bytes]:
        """Move the tokens of the chunk that a row has filled, at most a chunk ago, from the ring buffer to the
        sequence. Return the sequence, and the chunk's tokens as in `Node.key`."""
        sequence, size = self.sequences[slot], self.chunk_size
        assert sequence is not None
        tokens, stop = sequence.tokens, int(self.fills_at[slot])
        self.fills_at[slot] = stop + size
        start = stop // size % 2 * size
        chunk = self._recent[slot, size - start : 2 * size - start]
        missing = stop - tokens.count
        if missing > 0:
            tokens.extend(chunk[size - missing :])
        # A chunk that began before the row decoded is not whole in the ring buffer.
        return sequence, chunk.tobytes() if missing == size else tokens.to_bytes(stop - size, stop)

    def count_planned(self, rows: RowSet) -> bool:
        """Note that a plan computes a token of each of these rows; return whether one of them has its last."""
        planned = self.planned[rows.slots] + 1
        self.planned[rows.slots] = planned
        return bool(any_of(planned + 1 >= self.limit[rows.slots]))

    def active_slots(self) -> NDArray[np.intp]:
        """Return the slots of the sequences that have a token to compute after the steps planned so far."""
        return ((self.batch_seq_ids > 0) & (self.planned + 1 < self.limit)).nonzero()[0]

    def calm_steps(self, slots: NDArray[np.intp], slack: int) -> tuple[int, int]:
        """Return how many further plans of these rows need no block and are no row's last, and how many further
        results end no row by its length, and let no chunk enter the tree later than `slack` tokens after it is
        full."""
        known, planned, limit, size = self.known[slots], self.planned[slots], self.limit[slots], self.chunk_size
        room = self.block_counts[slots] * np.int64(size) - planned
        plans = int(np.minimum(room, limit - planned - 2).min())
        return plans, int((np.minimum(self.fills_at[slots] + slack, limit - 1) - known).min())

    def accept_calm(self, slots: NDArray[np.intp], tokens: Int32Array, plans: int) -> None:
        """Store what steps drew for these rows, and count plans, no more of either than `calm_steps` has allowed.

        Args:
            tokens: `[results, rows]`, none of them a stop token.
        """
        known = self.known[slots]
        positions = known + np.arange(len(tokens))[:, None]
        self._recent[slots, positions % self._recent.shape[1]] = tokens
        self.known[slots] = known + len(tokens)
        self.planned[slots] += plans

    def arrange(self, slots: NDArray[np.intp]) -> tuple[RowSet, Int32Array]:
        """Return the row set of these slots in tree order, and its runs (`shared_runs`, `text_runs`)."""
        if not len(slots):
            return NO_ROWS, np.empty((0, 4), np.int32)
        width = int(self.block_counts[slots].max())
        tables = self.tables[slots, :width]
        order, depth = tree_order(tables)
        ordered = slots[order]
        runs = shared_runs(tables[order, :depth], self.block_counts[ordered])
        texts = text_runs(self.text_blocks[ordered])
        return self.row_set(ordered), np.concatenate([runs, texts]) if len(texts) else runs

    def row_set(self, slots: NDArray[np.intp]) -> RowSet:
        """Return a row set of these slots, in this order, with their present state."""
        return RowSet(slots, self.batch_seq_ids[slots], self.requests[slots], self.samples[slots])

    def accept(
        self, rows: RowSet, tokens: Int32Array, *, drafted: int = 0
    ) -> tuple[BoolArray, NDArray[np.intp], BoolArray]:
        """Store the tokens sampled for a row set.

        Args:
            tokens: `[rows]`, or `[positions, rows]` that are `uneventful`.
            drafted: at how many positions tokens were drawn behind accepted drafts, whose KV counts from now on.

        Returns:
            valid `[rows]`: whether the row is still the same sequence, so that its tokens count;
            slots `[valid rows]`; stopped `[valid rows]`: the last token is one of the row's stop tokens.
        """
        valid = self.batch_seq_ids[rows.slots] == rows.batch_seq_ids
        slots = rows.slots
        if not all_of(valid):
            slots, tokens = slots[valid], tokens[..., valid]
        if drafted:
            self.planned[slots] += drafted
        known, count, last = self.known[slots], 1, tokens
        at = known
        if tokens.ndim > 1:
            count, last = len(tokens), tokens[-1]
            at = known + np.arange(count)[:, None]
        self._recent[slots, at % self._recent.shape[1]] = tokens
        self.known[slots] = known + count
        return valid, slots, self.stops.hit(slots, last)

    def uneventful(self, rows: RowSet, tokens: Int32Array, slack: int) -> int:
        """Return how many of these positions may be accepted together, one at least: no row ends before the last
        of them, or has filled its chunk by more than `slack` tokens.

        Args:
            tokens: `[positions, rows]`
        """
        slots = rows.slots
        left = np.minimum(self.limit[slots], self.fills_at[slots] + slack + 1) - self.known[slots]
        count = max(1, min(len(tokens), int(left.min())))
        if count > 1 and (stops := self.stops.of(slots)):
            stopping = (position for position in range(count) if not stops.isdisjoint(tokens[position].tolist()))
            count = next(stopping, count - 1) + 1
        return count
