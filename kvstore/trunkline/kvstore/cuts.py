"""Rules for truncated contexts: which parts of a history a sequence sees, and its layout over blocks
(CachedAttention §3.4).

A cut drops ranges of a history: the oldest half of an overflowing context, or the tokens of a discard list. KV
stays where it is, as it was computed; only the parts of it that are read change. Tokens are counted in three ways:

      history  0 1 2 3 4 5 6 7 8 9 …        as the client knows it; the positions at which keys are rotated
      dropped      [2 . . . . 7)
      acting   0 1           2 3 4 …        as the sequence sees it: distances between what is left
      table    |0 1 2 3|     |8 …           as blocks are: whole chunks (of 4 here) with anything left in them

The ranges between dropped ones are *kept*; the last of them is open. Chunks that are dropped whole are in no
table. Tokens in a table that are not seen are *holes*; all of them lie before the last kept range.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np

from trunkline.kvstore.chunks import NAME_BYTES, OPEN_COUNT, ChunkName, Extent, Int32Array, chunk_name, pack_int32
from trunkline.kvstore.chunks import chain as chain_of

DROPS_MAX: Final = 1024
"""Largest number of ranges that one sequence may drop. Each kept range has a root of its own, whose key names all
ranges dropped before it: 8 MB for so many, growing with the square. Each is looked up whenever the prompt is
matched, in which time the group plans nothing else: about 20 µs a range and request."""

PACKED_RANGE_BYTES: Final = 16
"""Size of a dropped range as it is hashed and kept: two little-endian int64."""


class ChunkRun(NamedTuple):
    """Consecutive chunks of a history that are in the table, and how many dropped ranges lie before them."""

    start: int
    """Index in the history of the run's first chunk."""
    stop: int
    """Index in the history behind the run's last chunk; -1: the run is open."""
    drops: int
    """Number of dropped ranges that lie before the run; 0: it is the beginning of the history."""


class ContextCut:
    """The dropped ranges of one sequence, for chunks of one size. Immutable."""

    __slots__ = (
        "_extents",
        "chunk_size",
        "closed_end",
        "drops",
        "first_open",
        "holes",
        "packed",
        "segments",
        "table_start",
    )

    def __init__(self, drops: tuple[tuple[int, int], ...], chunk_size: int) -> None:
        """
        Args:
            drops: Valid ranges, for which `problem_of_drops` returns "".
        """
        self.drops = drops
        self.chunk_size = chunk_size
        self.packed = pack_drops(drops)
        """The dropped ranges, packed."""
        self.segments = _segments(drops, chunk_size)
        dropped = sum(stop - start for start, stop in drops)
        last = self.segments[-1]
        self.table_start = sum(segment.stop - segment.start for segment in self.segments[:-1])
        """Number of table entries before the last segment."""
        self.first_open = self.table_start * chunk_size + drops[-1][1] % chunk_size
        """Index in the table of the first token behind the last dropped range."""
        skipped = last.start - self.table_start
        self.holes = dropped - skipped * chunk_size
        """Number of tokens in the table that are not seen: the difference between counting in the table and
        acting."""
        self._extents = _extents(drops, self.segments, chunk_size)
        closed = self._extents[:-1]
        self.closed_end = (
            closed[-1].table_start * chunk_size + closed[-1].first_token + closed[-1].token_count if closed else 0
        )
        """Index in the table behind the last token that is seen before the last dropped range; 0 if none is. The
        cut can be used only if the KV of all entries before this index is cached, because new tokens can be
        computed behind the last dropped range only."""

    def table_tokens(self, history: Int32Array) -> Int32Array:
        """Return the tokens of the chunks that are in the table, holes included."""
        size = self.chunk_size
        parts = [
            history[segment.start * size : segment.stop * size if segment.stop >= 0 else len(history)]
            for segment in self.segments
        ]
        return np.concatenate(parts)

    def seen(self, table_tokens: Int32Array) -> Int32Array:
        """Return the tokens that are seen, from the tokens of the table."""
        mask = np.ones(len(table_tokens), bool)
        for extent in self.extents()[:-1]:
            begin = extent.table_start * self.chunk_size + extent.first_token
            mask[begin : begin + extent.token_count] = False
        last = self.extents()[-1]
        mask[last.table_start * self.chunk_size + last.first_token :] = False
        return table_tokens[~mask]

    def extents(self) -> tuple[Extent, ...]:
        """Return the layout: one extent for each kept range, with the shift to where it acts."""
        return self._extents

    def root_names(self, root: ChunkName, chain: Sequence[ChunkName]) -> list[ChunkName]:
        """Return the names of the roots below which the chunks of each run are.

        Args:
            root: The root name of the whole history.
            chain: What the method `chain` returns.
        """
        names = []
        for run in self.segments:
            after = chain[run.start - 1] if run.start else root
            names.append(cut_name(after, self.packed[: run.drops * PACKED_RANGE_BYTES]) if run.drops else root)
        return names

    def chain(self, root: ChunkName, history: Int32Array) -> list[ChunkName]:
        """Return the names of all whole chunks before the last run, seen or not, as if nothing had been dropped.

        Args:
            root: The root name of the whole history.
        """
        before = history[: self.segments[-1].start * self.chunk_size]
        return chain_of(root, pack_int32(before), self.chunk_size)


class KeptTable(NamedTuple):
    """The names of the whole chunks of a prompt's block table. Those of chunks that were computed behind the last
    cut depend on how much had been computed before it."""

    names: Sequence[bytes]
    """Names of the table's chunks as if all of them had been computed before the cut."""
    root: bytes
    """Name of the root of the chunks behind the cut."""
    first: int
    """Index in the table of the first chunk behind the cut."""
    tokens: bytes
    """int32 token ids of the chunks from `first` on."""
    chunk_size: int

    @staticmethod
    def of(cut: ContextCut, names: Sequence[bytes], history: bytes, root: bytes) -> KeptTable:
        """Return the table of a history that is cut.

        Args:
            names: Names of the whole chunks of the whole history.
            history: int32 token ids.
            root: The root name of the whole history.
        """
        kept: list[bytes] = []
        for segment in cut.segments:
            kept += names[segment.start : segment.stop if segment.stop >= 0 else len(names)]
        behind = cut.segments[-1].start
        after = ChunkName(names[behind - 1] if behind else root)
        tokens = history[4 * behind * cut.chunk_size :]
        return KeptTable(kept, cut_name(after, cut.packed), cut.table_start, tokens, cut.chunk_size)

    def moved(self, count: int) -> list[bytes]:
        """Return the names of the table's chunks if the first `count` of them were computed before the cut, and
        the others behind it. `count` is at least `first`."""
        names = list(self.names[:count])
        return names + self.behind(names[-1] if count > self.first else self.root, count)

    def behind(self, above: bytes, start: int) -> list[bytes]:
        """Return the names of the table's chunks from `start` on, which is at least `first`, if they were computed
        behind the cut and `above` is the name of the chunk or root above them."""
        names, name, size = list[bytes](), above, 4 * self.chunk_size
        for at in range((start - self.first) * size, len(self.tokens) - size + 1, size):
            name = chunk_name(name, self.root + self.tokens[at : at + size])
            names.append(name)
        return names


def pack_drops(drops: Sequence[tuple[int, int]]) -> bytes:
    """Return dropped ranges as they are hashed and kept."""
    return np.array(drops, dtype="<i8").tobytes()


def cut_name(history: ChunkName, drops: bytes) -> ChunkName:
    """Return the root name of the chunks behind a cut.

    Args:
        history: Name of the history's last chunk before it.
        drops: The dropped ranges, packed.
    """
    digest = blake2b(history, digest_size=NAME_BYTES, person=b"trunkline-cut")
    digest.update(drops)
    return ChunkName(digest.digest())


def drops_within(before: bytes, drops: bytes) -> bool:
    """Return whether all tokens of some dropped ranges are also in others; both are packed and ascending."""
    if drops.startswith(before):
        return True
    if not drops:
        return False
    inner, outer = (np.frombuffer(packed, dtype="<i8").reshape(-1, 2) for packed in (before, drops))
    at = np.searchsorted(outer[:, 0], inner[:, 0], side="right") - 1
    return bool((at >= 0).all() and (inner[:, 1] <= outer[at, 1]).all())


def problem_of_drops(drops: tuple[tuple[int, int], ...], prompt_len: int) -> str:
    """Return why these ranges cannot be dropped from a prompt; "" if they can."""
    if len(drops) > DROPS_MAX:
        return f"{len(drops)} ranges are dropped; at most {DROPS_MAX} are allowed"
    before = -1
    for start, stop in drops:
        if not before < start < stop:
            return f"range [{start}, {stop}) is dropped; ranges must be ascending, apart and not empty"
        before = stop
    if drops and drops[-1][1] >= prompt_len:
        return f"the last dropped token is {drops[-1][1] - 1} of {prompt_len}; the prompt's last must stay"
    return ""


def _segments(drops: tuple[tuple[int, int], ...], chunk_size: int) -> list[ChunkRun]:
    segments: list[ChunkRun] = []
    begin = 0
    for index, (start, stop) in enumerate(drops):
        first_behind = stop // chunk_size
        end = min(-(-start // chunk_size), first_behind)
        if end > begin or not segments:
            segments.append(ChunkRun(begin, max(end, begin), index))
        begin = first_behind
    segments.append(ChunkRun(begin, -1, len(drops)))
    return segments


def _extents(
    drops: tuple[tuple[int, int], ...], segments: Sequence[ChunkRun], chunk_size: int
) -> tuple[Extent, ...]:
    """Return one extent for each kept range that is not empty."""
    extents, dropped, begin = [], 0, 0
    runs = iter(segments)
    run, before = next(runs), 0
    for start, stop in (*drops, (OPEN_COUNT, 0)):
        if start == OPEN_COUNT or start > begin:
            chunk, count = begin // chunk_size, OPEN_COUNT if start == OPEN_COUNT else start - begin
            while 0 <= run.stop <= chunk:
                before += run.stop - run.start
                run = next(runs)
            extents.append(Extent(before + chunk - run.start, begin % chunk_size, count, begin, -dropped))
        dropped += stop - start
        begin = stop
    return tuple(extents)
