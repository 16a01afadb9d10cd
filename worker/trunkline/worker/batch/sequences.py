"""The sequences in the batch as a worker knows them, kept up to date by step plans, and where their tokens lie.

A sequence's *index space* is the concatenation of its extents: first what it reads of other computations' KV, then
its own tokens. Only the last extent grows. In a plain sequence, and behind cuts (CachedAttention §3.4), a token's
index is the position at which it acts. A prompt with modules (Prompt Cache §3.4) has its own tokens at scattered
positions, between and behind those of the modules:

      extents     module A │ module B │ own, closed │ own, open
      indices     0 … 9    │ 10 … 29  │ 30 … 33     │ 34, 35, …
      positions   0 … 9    │ 20 … 39  │ 10 … 13     │ 40, 41, …

New tokens are computed in the *frame* of the open extent: a query and its key are rotated at `base_position` plus
the token's place in its extent, and the shifts of other extents count relative to the open one's. So own extents
have the open one's shift, and truncation, which shifts all that it keeps alike, stays on the fast path. Own tokens
are computed in the order of their indices, so that is also the order of their positions. The pool always holds a
key as it was computed: rotated at the position that it had then.

Invariant: extents act at different positions, the open one behind all others. So a decoding row may see every
token that its layout names; within a prefill the kernels hide the keys that act later than the query.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import fields
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from trunkline.kernels.plan import Segments
from trunkline.kvstore.chunks import NO_BLOCK, OPEN_COUNT, PLAIN_LAYOUT, Extent, Int32Array, unpack_int32
from trunkline.kvstore.windows import all_chunks_behind
from trunkline.worker.errors import PlanError
from trunkline.worker.messages import BeamPosition, Fork, Join, Sampling, StepPlan

PENDING: Final = -1
"""A token that the device is still to draw, as the host counts it."""


class BatchSequence:
    """A sequence in the batch, from its `Join` or `Fork` until it leaves."""

    __slots__ = (
        "adapter",
        "beam_position",
        "blocks",
        "first",
        "id",
        "known",
        "layout",
        "pooled",
        "prompt_len",
        "rewritten",
        "sampling",
        "tokens",
    )

    def __init__(self, join: Join) -> None:
        self.id = join.sequence
        self.tokens = array("i", unpack_int32(join.tokens).tobytes())
        """Token ids from index `first` on, those that were sampled here included."""
        self.first = join.first
        self.known = join.first + len(self.tokens)
        """Tokens known so far, sampled ones included: the last one has index `known - 1`."""
        self.prompt_len = join.prompt_len
        self.blocks = array("i", unpack_int32(join.blocks).tobytes())
        """The block table: the block of each entry."""
        self.sampling: Sampling = join.sampling
        self.beam_position: BeamPosition | None = join.beam_position
        """The sequence's place in a beam search; None for a sequence that is drawn from by itself."""
        self.adapter = join.adapter
        """Key of the adapter that the sequence uses; empty: the base model."""
        self.layout = _read_layout(join)
        self.rewritten = False
        """Whether an entry of the block table was replaced since the last batch."""
        self.pooled = 0
        """Number of the prompt's tokens that were computed to be pooled (`Sampling.pools_all`)."""
        if not self.tokens or join.first < 0:
            raise PlanError(f"sequence {self.id} joins with {len(self.tokens)} tokens from {join.first} on")
        if self.known <= self.layout.open_start:
            raise PlanError(
                f"sequence {self.id} joins with {self.known} tokens; its open extent begins at index "
                f"{self.layout.open_start}, and at least the last token must lie in it"
            )

    @classmethod
    def forked(cls, fork: Fork, parent: BatchSequence) -> BatchSequence:
        """Return a sequence with the parent's tokens and parameters, but its own seed, beam position and block
        table.

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
        join = Join(
            fork.child,
            tokens,
            parent.first,
            parent.prompt_len,
            fork.blocks,
            sampling,
            beam_position=fork.beam_position,
            adapter=parent.adapter,
        )
        child = cls(join)
        child.layout = parent.layout
        return child

    @property
    def output_index(self) -> int:
        """Index of the next output token, on which its noise depends."""
        return self.known - self.prompt_len

    def append(self, token: int) -> None:
        """Append a sampled token, or `PENDING`, in whose place `resolve` puts it later."""
        self.tokens.append(token)
        self.known += 1

    def extend(self, tokens: Int32Array) -> None:
        """Append sampled tokens."""
        self.tokens.frombytes(tokens.tobytes())
        self.known += len(tokens)

    def resolve(self, index: int, token: int) -> None:
        """Put a token that has become known in its place: at this index of the sequence."""
        self.tokens[index - self.first] = token

    def continue_with(self, token: int) -> None:
        """Let a beam go on with `token`, perhaps behind other tokens than its own so far.

        Those are forgotten: a beam of the batch only ever needs its last token, and copying the others from beam
        to beam would cost more with each step.
        """
        self.tokens = array("i", (token,))
        self.first = self.known
        self.known += 1

    def token_slice(self, start: int, stop: int) -> Int32Array:
        """Return the token ids at indices `[start, stop)`.

        Raises:
            PlanError: not all of them are known.
        """
        if not self.first <= start < stop <= self.known:
            raise PlanError(
                f"sequence {self.id}: indices [{start}, {stop}) asked for; [{self.first}, {self.known}) known"
            )
        return np.array(self.tokens[start - self.first : stop - self.first], dtype=np.int32)

    def set_block(self, index: int, block: int) -> None:
        """Set or append an entry of the block table.

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

    def slots(self, start: int, stop: int, chunk_size: int) -> Int32Array:
        """Return where the KV of new tokens with indices `[start, stop)` goes: `block * chunk_size + offset`.

        Raises:
            PlanError: the block table is too short, or some of them can only be read.
        """
        try:
            entries, offsets = self.layout.cells(start, stop, chunk_size)
        except PlanError as error:
            raise PlanError(f"sequence {self.id}: {error}") from error
        if entries.max() >= len(self.blocks):
            raise PlanError(
                f"sequence {self.id} needs block-table entry {entries.max()} for indices [{start}, {stop}); "
                f"it has {len(self.blocks)}"
            )
        blocks = np.frombuffer(self.blocks, dtype=np.int32)[entries]
        if blocks.min() < 0:
            raise PlanError(
                f"sequence {self.id} computes indices [{start}, {stop}), not all of which have a block"
            )
        slots: Int32Array = blocks * np.int32(chunk_size) + offsets
        return slots


class SequenceTable:
    """All sequences that this worker knows."""

    def __init__(self, pool_blocks: int, window: int = 0) -> None:
        """
        Args:
            window: `ModelConfig.window`; with one, joins may leave out blocks that are behind it or come later.
        """
        self._pool_blocks = pool_blocks
        self._least_joined = NO_BLOCK if window else 0
        self._by_id: dict[int, BatchSequence] = {}
        self.adapted = 0
        """Number of sequences that use an adapter."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, sequence: int) -> BatchSequence:
        try:
            return self._by_id[sequence]
        except KeyError:
            raise PlanError(f"the plan names sequence {sequence}, which has not joined") from None

    def apply(self, plan: StepPlan) -> None:
        """Carry out the leaves, joins and block-table entries of a plan (forks come later, see `fork`).

        Raises:
            PlanError: an unknown or already known sequence, or a block outside the pool.
        """
        for sequence in unpack_int32(plan.leaves).tolist() if plan.leaves else ():
            gone = self._by_id.pop(sequence, None)
            if gone is None:
                raise PlanError(f"the plan lets sequence {sequence} leave, which has not joined")
            self.adapted -= bool(gone.adapter)
        for join in plan.joins:
            self._add(BatchSequence(join))
        if not plan.blocks:
            return  # as in most steps
        entries = unpack_int32(plan.blocks, columns=3)
        self._check_blocks(entries[:, 2].tolist(), 0)
        for sequence, index, block in entries.tolist():
            self[sequence].set_block(index, block)

    def fork(self, fork: Fork) -> BatchSequence:
        """Add and return a new sequence that comes out of one whose prompt ends in this step.

        Raises:
            PlanError: as `apply` and `BatchSequence.forked`.
        """
        child = BatchSequence.forked(fork, self[fork.parent])
        self._add(child)
        return child

    def _add(self, sequence: BatchSequence) -> None:
        if sequence.id in self._by_id:
            raise PlanError(f"sequence {sequence.id} joins, but is here already")
        self._check_blocks(sequence.blocks, self._least_joined)
        self._by_id[sequence.id] = sequence
        self.adapted += bool(sequence.adapter)

    def _check_blocks(self, blocks: Sequence[int], least: int) -> None:
        if blocks and not (min(blocks) >= least and max(blocks) < self._pool_blocks):
            raise PlanError(f"blocks {min(blocks)} to {max(blocks)} named; the pool has {self._pool_blocks}")


def entries_behind(sequences: list[BatchSequence], positions: Int32Array, window: int, size: int) -> Int32Array:
    """Return how many entries at the beginning of each block table no query from `positions` on sees.

    Args:
        positions: of each sequence, `[sequences]`.
        window: `ModelConfig.window`. What is behind it is left out of plain sequences only; in others the kernels
            hide it.
        size: tokens per chunk.
    """
    behind = all_chunks_behind(positions, window, size)
    if window and behind.any():
        behind[[index for index, sequence in enumerate(sequences) if not sequence.layout.is_plain]] = 0
    return behind


def segments_of(
    sequences: list[BatchSequence], lengths: Int32Array, chunk_size: int, behind: Int32Array | None = None
) -> Segments:
    """Return the segments that sequences read, rows in order: of each sequence the tokens with indices below its
    length.

    Args:
        behind: number of entries at the beginning of each block table that are left out (`entries_behind`); None:
            0 of each.

    Raises:
        PlanError: a block table is too short, or an entry that is read has no block.
    """
    if all(sequence.layout.is_plain for sequence in sequences):
        segments = _plain_segments(sequences, lengths - 1, chunk_size)
    else:
        segments = _laid_out_segments(sequences, lengths, chunk_size)
    if behind is not None and behind.any():
        seen = segments.table_index >= behind[segments.row]
        segments = Segments(*(getattr(segments, column.name)[seen] for column in fields(Segments)))
    if len(segments.block) and segments.block.min() < 0:
        at = int(segments.block.argmin())
        sequence = sequences[segments.row[at]]
        raise PlanError(
            f"sequence {sequence.id} reads block-table entry {segments.table_index[at]}: it has no block"
        )
    return segments


def _plain_segments(sequences: list[BatchSequence], positions: Int32Array, chunk_size: int) -> Segments:
    """Return what `segments_of` does, for plain sequences up to these positions (no loop over blocks)."""
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


def _laid_out_segments(sequences: list[BatchSequence], lengths: Int32Array, chunk_size: int) -> Segments:
    """Return what `segments_of` does, for sequences with any layouts (no loop over extents or blocks)."""
    spans = [sequence.layout.spans for sequence in sequences]
    row = np.repeat(np.arange(len(sequences), dtype=np.int32), [part.shape[1] for part in spans])
    table_start, first, base, shift, count, start = np.concatenate(spans, axis=1)
    count = np.clip(lengths[row] - start, 0, count)
    end, opening = first + count, first // chunk_size
    used = np.where(count > 0, -(-end // chunk_size) - opening, 0)
    # From here on one element per block: `extent` is its extent, `number` its place among the extent's entries.
    extent = np.repeat(np.arange(len(row)), used)
    number = np.arange(len(extent)) - np.repeat(np.cumsum(used) - used, used) + opening[extent]
    begin = number * chunk_size
    lower, upper = np.maximum(begin, first[extent]), np.minimum(begin + chunk_size, end[extent])
    row, index = row[extent], table_start[extent] + number
    sizes = np.array([len(sequence.blocks) for sequence in sequences])
    beyond = np.flatnonzero(index >= sizes[row])
    if len(beyond):
        sequence, entry = sequences[row[beyond[0]]], index[beyond[0]]
        raise PlanError(f"sequence {sequence.id} needs block-table entry {entry}; it has {len(sequence.blocks)}")
    tables = np.concatenate([np.frombuffer(sequence.blocks, dtype=np.int32) for sequence in sequences])
    block = tables[(np.cumsum(sizes) - sizes)[row] + index]
    columns = (index, block, lower - begin, upper - lower, base[extent] + (lower - first[extent]), shift[extent])
    return Segments(row, *(column.astype(np.int32) for column in columns))


def _read_layout(join: Join) -> ContextLayout:
    if not join.extents:
        return PLAIN
    try:
        return ContextLayout(tuple(Extent(*row) for row in unpack_int32(join.extents, columns=5).tolist()))
    except PlanError as error:
        raise PlanError(f"sequence {join.sequence}: {error}") from error


_UNBOUNDED: Final = np.iinfo(np.int32).max
"""Token count of an extent that grows."""

_Numbers = NDArray[np.int64] | int
"""Numbers of extents: one number for each token, or one number for all of them."""


class ContextLayout:
    """The extents of one sequence. Does not change; forks share it."""

    __slots__ = ("_frames", "_own_start", "_starts", "is_plain", "open_start", "opening", "spans")

    def __init__(self, extents: tuple[Extent, ...]) -> None:
        """
        Raises:
            PlanError: extents that are empty or negative, act at the same positions, or do not end with the one
                that grows and acts last.
        """
        _check_extents(extents)
        shift = extents[-1].shift
        counts = [extent.token_count for extent in extents[:-1]]
        starts = np.cumsum([0, *counts], dtype=np.int32)
        self._starts = starts
        """Index of each extent's first token, int32 `[extents]`."""
        self._frames = np.array([extent.base_position for extent in extents], dtype=np.int32)
        """Position at which each extent's first token was rotated, int32 `[extents]`."""
        rows = [(e.table_start, e.first_token, e.base_position, e.shift - shift) for e in extents]
        self.spans = np.array(
            [(*row, count, start) for row, count, start in zip(rows, [*counts, _UNBOUNDED], starts, strict=True)],
            dtype=np.int32,
        ).T
        """The extents as columns, int32 `[6, extents]`: table entry, first token, base position, relative shift,
        count, first index."""
        self._own_start = int(starts[_first_own(extents)])
        """Index from which on tokens may be computed, in the order of their indices."""
        self.open_start = int(starts[-1])
        """Index of the first token of the open extent."""
        last = extents[-1]
        self.opening = (last.table_start, last.first_token, last.base_position, self.open_start)
        """Of the open extent: its table entry, first token, base position, and index of its first token."""
        self.is_plain = extents == PLAIN_LAYOUT

    def frame_positions(self, start: int, stop: int) -> Int32Array:
        """Return the positions at which the queries and keys of new tokens with indices `[start, stop)` are
        rotated.

        Raises:
            PlanError: some of them can only be read.
        """
        number, offset = self._cells(start, stop)
        positions: Int32Array = self._frames[number] + offset
        return positions

    def cells(self, start: int, stop: int, chunk_size: int) -> tuple[Int32Array, Int32Array]:
        """Return entries of the block table, and offsets in their blocks, of new tokens with indices `[start,
        stop)`.

        Raises:
            PlanError: as `frame_positions`.
        """
        number, offset = self._cells(start, stop)
        token = self.spans[1][number] + offset
        return self.spans[0][number] + token // chunk_size, token % chunk_size

    def _cells(self, start: int, stop: int) -> tuple[_Numbers, Int32Array]:
        """Return which extents tokens lie in, and their places there."""
        if start < self._own_start:
            raise PlanError(
                f"tokens with indices [{start}, {stop}) are to be computed; those before index {self._own_start} "
                f"can only be read: what is computed has the open extent's shift and ascending positions"
            )
        if start >= self.open_start:
            return -1, np.arange(start - self.open_start, stop - self.open_start, dtype=np.int32)
        index = np.arange(start, stop, dtype=np.int32)
        number = self._starts.searchsorted(index, side="right") - 1
        return number, index - self._starts[number]


def _check_extents(extents: tuple[Extent, ...]) -> None:
    if not extents or extents[-1].token_count != OPEN_COUNT or any(e.token_count <= 0 for e in extents[:-1]):
        counts = [extent.token_count for extent in extents]
        raise PlanError(
            f"exactly the last extent of a layout must be open ({OPEN_COUNT} tokens), the others not empty; "
            f"the token counts are {counts}"
        )
    for extent in extents:
        acts_at = extent.base_position + extent.shift
        if min(extent.table_start, extent.first_token, extent.base_position, acts_at) < 0:
            raise PlanError(f"{extent} has a negative place or position")
    if len(extents) == 1:
        return
    places = sorted((e.base_position + e.shift, e.token_count) for e in extents[:-1])
    places.append((extents[-1].base_position + extents[-1].shift, 0))
    for (position, count), (following, _) in itertools.pairwise(places):
        if position + count > following:
            raise PlanError(
                f"extents must act at different positions, the open one behind all others; one acts at "
                f"[{position}, {position + count}), another from {following} on"
            )


def _first_own(extents: tuple[Extent, ...]) -> int:
    """Return the number of the first extent from which on all have the open one's shift and ascending
    positions."""
    number = len(extents) - 1
    while number:
        before, after = extents[number - 1], extents[number]
        if before.shift != after.shift or before.base_position > after.base_position:
            break
        number -= 1
    return number


PLAIN: Final = ContextLayout(PLAIN_LAYOUT)
"""The layout of an ordinary sequence."""
