"""A worker's mirror of the sequences in the controller's batch, kept up to date by the deltas of step plans.

Positions: a sequence's tokens are numbered by the positions at which they act. New tokens are computed in the
open extent, in its frame: the position used for rotation is `position - shift`, and every other extent's
shift is taken relative to the open one's. So truncation, which shifts all that it keeps alike, stays on the
fast path, and what is stored is always "the rotation of the position at which it was computed".
"""

from __future__ import annotations

from array import array

import msgspec
import numpy as np

from trunkline.kernels.plan import Segments
from trunkline.kvstore.layout import OPEN_COUNT, PLAIN_LAYOUT, Extent, Int32Array, unpack_int32
from trunkline.worker.errors import PlanError
from trunkline.worker.messages import BeamSeat, Fork, Join, Sampling, StepPlan


class Sequence:
    """One stay of a sequence in the batch."""

    __slots__ = (
        "blocks",
        "first",
        "id",
        "known",
        "layout",
        "prompt_len",
        "rewritten",
        "sampling",
        "seat",
        "tokens",
    )

    def __init__(self, join: Join) -> None:
        self.id = join.sequence
        self.tokens = array("i", unpack_int32(join.tokens).tobytes())
        self.first = join.first
        self.known = join.first + len(self.tokens)
        """Tokens known so far, sampled ones included: the last one stands at position `known - 1`."""
        self.prompt_len = join.prompt_len
        self.blocks = array("i", unpack_int32(join.blocks).tobytes())
        self.sampling: Sampling = join.sampling
        self.seat: BeamSeat | None = join.seat
        """Its place in a beam search, None for a sequence that is drawn from by itself."""
        self.layout = _read_layout(join)
        self.rewritten = False
        """Whether an entry of the block table was replaced since the last batch."""
        if not self.tokens or join.first < 0:
            raise PlanError(f"sequence {self.id} joins with {len(self.tokens)} tokens from {join.first} on")

    @classmethod
    def forked(cls, fork: Fork, parent: Sequence) -> Sequence:
        """A sequence with the parent's tokens and parameters, but a seed, a seat and a block table of its own.

        Raises:
            PlanError: output of the parent is known already, so it does not fork at the end of its prompt.
        """
        if parent.known != parent.prompt_len:
            raise PlanError(
                f"sequence {fork.child} forks from sequence {parent.id}, which knows {parent.known} tokens; "
                f"its prompt has {parent.prompt_len}"
            )
        sampling = msgspec.structs.replace(parent.sampling, seed=fork.seed)
        tokens = parent.tokens.tobytes()
        join = Join(fork.child, tokens, parent.first, parent.prompt_len, fork.blocks, sampling, seat=fork.seat)
        child = cls(join)
        child.layout = parent.layout
        return child

    @property
    def is_plain(self) -> bool:
        return self.layout == PLAIN_LAYOUT

    @property
    def output_index(self) -> int:
        """Index of the next output token: what its noise depends on."""
        return self.known - self.prompt_len

    def append(self, token: int) -> None:
        """A token was sampled."""
        self.tokens.append(token)
        self.known += 1

    def continue_with(self, token: int) -> None:
        """A beam goes on with `token`, perhaps behind other tokens than its own so far.

        Those are forgotten: a beam of the batch only ever needs its last token, and copying the others from beam
        to beam would cost more with each step.
        """
        self.tokens = array("i", (token,))
        self.first = self.known
        self.known += 1

    def token_slice(self, start: int, stop: int) -> Int32Array:
        """Token ids at positions `[start, stop)`.

        Raises:
            PlanError: not all of them are known.
        """
        if not self.first <= start < stop <= self.known:
            raise PlanError(
                f"sequence {self.id}: positions [{start}, {stop}) asked for; [{self.first}, {self.known}) known"
            )
        return np.array(self.tokens[start - self.first : stop - self.first], dtype=np.int32)

    def set_block(self, index: int, block: int) -> None:
        """An entry of the block table was set or appended.

        Raises:
            PlanError: it would leave a hole.
        """
        if index == len(self.blocks):
            self.blocks.append(block)
        elif 0 <= index < len(self.blocks):
            self.blocks[index] = block
            self.rewritten = True
        else:
            raise PlanError(f"sequence {self.id}: block-table entry {index} set; there are {len(self.blocks)}")

    def frame_position(self, position: int) -> int:
        """The position at which a new token's query and key are rotated."""
        return position - self.layout[-1].shift

    def slots(self, start: int, stop: int, chunk_size: int) -> Int32Array:
        """Where the KV of new tokens at positions `[start, stop)` goes: `block * chunk_size + offset`.

        Raises:
            PlanError: the block table is too short.
        """
        extent = self.layout[-1]
        begin = self.frame_position(start) - extent.base_position
        if begin < 0:
            raise PlanError(f"sequence {self.id}: position {start} is not in its open extent")
        offsets = np.arange(begin, begin + stop - start, dtype=np.int32) + extent.first_token
        entries = extent.table_start + offsets // chunk_size
        if entries[-1] >= len(self.blocks):
            raise PlanError(
                f"sequence {self.id}: position {stop - 1} needs block-table entry {entries[-1]}; "
                f"there are {len(self.blocks)}"
            )
        blocks = np.frombuffer(self.blocks, dtype=np.int32)[entries]
        slots: Int32Array = blocks * np.int32(chunk_size) + offsets % chunk_size
        return slots

    def segments(self, row: int, length: int, chunk_size: int) -> Segments:
        """Everything that a query at position `length - 1` reads, in order.

        Raises:
            PlanError: the block table is too short.
        """
        parts = [self._extent_segments(extent, length, chunk_size) for extent in self.layout]
        table = np.concatenate([part for part in parts if part.shape[1]], axis=1)
        index, first, count, base, shift = table
        if index[-1] >= len(self.blocks):
            raise PlanError(f"sequence {self.id}: its layout reaches beyond its {len(self.blocks)} blocks")
        blocks = np.array(self.blocks, dtype=np.int32)[index]
        return Segments(np.full(len(index), row, dtype=np.int32), index, blocks, first, count, base, shift)

    def _extent_segments(self, extent: Extent, length: int, chunk_size: int) -> Int32Array:
        """int32 `[5, n]`: table index, first, count, base, shift relative to the open extent."""
        count = extent.token_count
        if count == OPEN_COUNT:
            count = self.frame_position(length) - extent.base_position
        begin, end = extent.first_token, extent.first_token + count
        entries = np.arange(begin // chunk_size, -(-end // chunk_size), dtype=np.int32)
        lower = np.maximum(entries * chunk_size, begin)
        upper = np.minimum((entries + 1) * chunk_size, end)
        return np.stack(
            [
                extent.table_start + entries,
                lower - entries * chunk_size,
                upper - lower,
                extent.base_position + lower - begin,
                np.full(len(entries), extent.shift - self.layout[-1].shift, dtype=np.int32),
            ]
        ).astype(np.int32)


class SequenceTable:
    """All sequences that this worker knows."""

    def __init__(self, pool_blocks: int) -> None:
        self._pool_blocks = pool_blocks
        self._by_id: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, sequence: int) -> Sequence:
        try:
            return self._by_id[sequence]
        except KeyError:
            raise PlanError(f"the plan names sequence {sequence}, which has not joined") from None

    def apply(self, plan: StepPlan) -> None:
        """Leaves, joins and block-table entries of a plan (forks come later, see `fork`).

        Raises:
            PlanError: an unknown or already known sequence, or a block outside the pool.
        """
        for sequence in unpack_int32(plan.leaves).tolist():
            if self._by_id.pop(sequence, None) is None:
                raise PlanError(f"the plan lets sequence {sequence} leave, which has not joined")
        for join in plan.joins:
            self._add(Sequence(join))
        entries = unpack_int32(plan.blocks, columns=3)
        self._check_blocks(entries[:, 2])
        for sequence, index, block in entries.tolist():
            self[sequence].set_block(index, block)

    def fork(self, fork: Fork) -> Sequence:
        """The new sequence that comes out of one whose prompt ends in this step.

        Raises:
            PlanError: as `apply` and `Sequence.forked`.
        """
        child = Sequence.forked(fork, self[fork.parent])
        self._add(child)
        return child

    def _add(self, sequence: Sequence) -> None:
        if sequence.id in self._by_id:
            raise PlanError(f"sequence {sequence.id} joins, but is here already")
        self._check_blocks(np.array(sequence.blocks, dtype=np.int32))
        self._by_id[sequence.id] = sequence

    def _check_blocks(self, blocks: Int32Array) -> None:
        if len(blocks) and not (blocks.min() >= 0 and blocks.max() < self._pool_blocks):
            raise PlanError(f"blocks {blocks.min()} to {blocks.max()} named; the pool has {self._pool_blocks}")


def plain_segments(sequences: list[Sequence], positions: Int32Array, chunk_size: int) -> Segments:
    """`Sequence.segments` of many plain sequences at once, rows numbered in order (no loop over blocks).

    Raises:
        PlanError: a block table is too short.
    """
    used = positions // chunk_size + 1
    for sequence, entries in zip(sequences, used.tolist(), strict=True):
        if entries > len(sequence.blocks):
            raise PlanError(f"sequence {sequence.id} needs {entries} blocks; its table has {len(sequence.blocks)}")
    row = np.repeat(np.arange(len(sequences), dtype=np.int32), used)
    stops = np.cumsum(used)
    index = (np.arange(len(row)) - np.repeat(stops - used, used)).astype(np.int32)
    tables = [
        np.frombuffer(sequence.blocks, dtype=np.int32)[:entries]
        for sequence, entries in zip(sequences, used.tolist(), strict=True)
    ]
    count = np.full(len(row), chunk_size, dtype=np.int32)
    count[stops - 1] = positions % chunk_size + 1
    zeros = np.zeros(len(row), dtype=np.int32)
    return Segments(row, index, np.concatenate(tables), zeros, count, index * np.int32(chunk_size), zeros)


def join_segments(parts: list[Segments]) -> Segments:
    """Segments of several rows as one list."""
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Segments(*(np.concatenate(column) for column in columns))


def _read_layout(join: Join) -> tuple[Extent, ...]:
    if not join.extents:
        return PLAIN_LAYOUT
    layout = tuple(Extent(*row) for row in unpack_int32(join.extents, columns=5).tolist())
    if layout[-1].token_count != OPEN_COUNT or any(extent.token_count <= 0 for extent in layout[:-1]):
        raise PlanError(f"sequence {join.sequence}: exactly the last extent of a layout must be open")
    return layout
