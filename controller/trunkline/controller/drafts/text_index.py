"""Find where a text went on after the tokens that a sequence ends with: an index of runs of tokens. Pure.

    tokens   … a b c d e│f g h …     ring of the text's latest tokens
                       └e┘ ──► table[hash] = place of f
                     └d e┘ ──► table[hash] = place of f
               └a b c d e┘ ──► table[hash] = place of f

One hash table for each length of `RUNS` says where the latest such run ended. Entries overwrite each other, also
those of other runs with the same hash: a find compares the tokens, so it is never wrong, but now and then it
misses a run. So an entry is 4 bytes, adding a long prompt takes 15 µs per 1,000 tokens, and memory is bounded by
the capacity. Hashes are polynomials modulo 2⁶⁴, which `RunHashes` rolls on token by token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.chunks import Int32Array
from trunkline.kvstore.native_names import library

RUNS: Final = (5, 2, 1)
"""Lengths of the runs that are indexed, in tokens, the longest first."""
MATCH_MAX: Final = 32
"""Number of tokens after which a match counts as long enough: it is not measured further back."""
TAIL_MAX: Final = 256
"""Largest number of latest tokens that `RunHashes` keeps."""
MOVED_FIRST: Final = 128
"""Number of tokens that an index which grows indexes again in the first step: 0.4 ms, most of it for memory."""
NO_TOKEN: Final = -1
"""Stands between texts in one index, and for a token that is not there."""
_BASE: Final = 0x100000001B3
_MIX: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_LEAVING: Final = tuple(pow(_BASE, run, 1 << 64) for run in RUNS)
_POSITION_MAX: Final = 1 << 31
"""Positions are int32: an index that has taken so many tokens begins again."""
_RUNS: Final = np.array(RUNS, np.int32).tobytes()
"""`RUNS` as the library takes them."""

IndexRuns = Callable[[int, int, bytes, int, int, int, bytes, int], None]
"""`trunkline_index_runs` in `csrc/names/runs.cc`, which takes the ring and the tables by their addresses."""


class RunHashes:
    """The hashes of the runs at the end of a growing text."""

    __slots__ = ("_sums", "tail")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tail: list[int] = [NO_TOKEN] * RUNS[0] + list(tokens[-TAIL_MAX:])
        """The latest tokens: half of `TAIL_MAX` at least, if there are so many."""
        self._sums = [_sum(self.tail[-run:]) for run in RUNS]

    def copy(self) -> RunHashes:
        """Return a copy, with as many latest tokens as matches are measured back."""
        copied = RunHashes.__new__(RunHashes)
        copied.tail, copied._sums = self.tail[-MATCH_MAX:], self._sums.copy()
        return copied

    def push(self, token: int) -> None:
        """Append a token."""
        tail = self.tail
        for i, run in enumerate(RUNS):
            self._sums[i] = (self._sums[i] * _BASE + token - tail[-run] * _LEAVING[i]) & _MASK
        if len(tail) >= TAIL_MAX:
            del tail[: TAIL_MAX // 2]
        tail.append(token)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append some tokens."""
        self.tail += tokens
        if len(self.tail) > TAIL_MAX:
            del self.tail[: -TAIL_MAX // 2]
        self._sums = [_sum(self.tail[-run:]) for run in RUNS]

    def mixed(self) -> list[int]:
        """Return a hash of 64 bits per length of `RUNS`."""
        return [total * _MIX & _MASK for total in self._sums]


class TextIndex:
    """The latest tokens of a text, or of several one behind the other, and where each run of them was last."""

    __slots__ = ("_addresses", "_larger", "_mask", "_moved", "_shift", "_tables", "_tokens", "_views", "count")

    def __init__(self, capacity: int) -> None:
        """
        Args:
            capacity: number of tokens that are kept at least.
        """
        self.count = 0
        """Number of tokens appended so far; positions count from the first of them."""
        self._larger: TextIndex | None = None
        """What takes this one's place when it has all of its tokens; None: it does not grow."""
        self._moved = 0
        """Number of tokens that were indexed again."""
        bits = max(8, (capacity - 1).bit_length())
        self._mask = (1 << bits) - 1
        self._shift = 64 - bits - 1
        self._tokens: Int32Array = np.full(1 << bits, NO_TOKEN, np.int32)
        self._tables: Int32Array = np.zeros((len(RUNS), 2 << bits), np.int32)
        arrays: list[Int32Array] = [self._tokens, *self._tables]
        self._views = [array.data for array in arrays]  # faster for single numbers
        self._addresses = self._tokens.ctypes.data, self._tables.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        larger = self._larger.nbytes if self._larger is not None else 0
        return larger + self._tokens.nbytes + self._tables.nbytes

    @staticmethod
    def bytes_for(capacity: int) -> int:
        """Return the bytes of memory that an index of this capacity takes."""
        return (4 + 8 * len(RUNS)) << max(8, (capacity - 1).bit_length())

    def extend(self, tokens: Int32Array) -> None:
        """Append `tokens` `[n]`, and index the runs that end in them."""
        if self.count + len(tokens) >= _POSITION_MAX:
            self.clear()
        self.count += len(tokens)
        tokens = tokens[max(0, len(tokens) - self._mask - 1) :]
        first = self.count - len(tokens)
        if _index_runs is not None:
            ring, tables = self._addresses
            _index_runs(
                ring,
                tables,
                _RUNS,
                len(RUNS),
                self._mask.bit_length(),
                first,
                tokens.astype(np.int32, copy=False).tobytes(),
                len(tokens),
            )
            return
        self._tokens[np.arange(first, self.count) & self._mask] = tokens
        for run, table in zip(RUNS, self._tables, strict=True):
            start = max(first - run + 1, 0, self.count - self._mask - 1)
            if start + run > self.count:
                continue
            text = self._tokens[np.arange(start, self.count) & self._mask].astype(np.uint64)
            table[_hashes(text, run) >> np.uint64(self._shift)] = np.arange(start + run, self.count + 1)

    def grow(self, capacity: int) -> None:
        """Begin to make room for `capacity` tokens at least, if it has less: `grow_some` goes on."""
        bits = max(8, (capacity - 1).bit_length())
        if self._larger is None and 1 << bits > self._mask + 1:
            self._larger = TextIndex(1 << bits)
            self._larger.count = max(0, self.count - self._mask - 1)
            self._moved = 0

    def grow_some(self, most: int) -> int:
        """Index up to `most` tokens again, in the larger tables, which take the place of these once they have all;
        return how many. Positions stay. What is appended meanwhile overwrites the oldest tokens that were not
        indexed again. The first calls do less: the system gives memory when it is first touched."""
        larger = self._larger
        if larger is None:
            return 0
        oldest = max(0, self.count - self._mask - 1)
        if larger.count < oldest:  # what was overwritten meanwhile is a gap
            gap = np.arange(max(larger.count, oldest - larger._mask - 1), oldest) & larger._mask
            larger._tokens[gap] = NO_TOKEN
            larger.count = oldest
        start, stop = larger.count, min(larger.count + min(most, max(self._moved, MOVED_FIRST)), self.count)
        larger.extend(self._tokens[np.arange(start, stop) & self._mask])
        self._moved += stop - start
        if stop == self.count:
            self._mask, self._shift = larger._mask, larger._shift
            self._tokens, self._tables = larger._tokens, larger._tables
            self._views, self._addresses = larger._views, larger._addresses
            self._larger = None
        return stop - start

    @property
    def grows(self) -> bool:
        """Whether it is growing: `grow_some` has to be called."""
        return self._larger is not None

    def has_blocks(self, blocks: Int32Array, anchor: int) -> NDArray[np.bool_]:
        """Return of which `blocks` `[m, n]` there is a copy where the longest run before their token `anchor`
        stood last: `[m]`."""
        run = RUNS[0]
        hashes = _hashes(blocks[:, anchor - run : anchor].T.astype(np.uint64), run)[0]
        places = self._tables[0][hashes >> np.uint64(self._shift)]
        starts = places - np.int32(anchor)
        stops = starts + blocks.shape[1]
        found = self._tokens[(starts[:, np.newaxis] + np.arange(blocks.shape[1])) & self._mask]
        is_there = (starts >= max(0, self.count - self._mask - 1)) & (stops <= self.count)
        same: NDArray[np.bool_] = is_there & (found == blocks).all(axis=1)
        return same

    def push(self, token: int, mixed: Sequence[int]) -> None:
        """Append one token; `mixed` are the hashes of the runs that end with it (`RunHashes.mixed`)."""
        if self.count + 1 >= _POSITION_MAX:
            self.clear()
        self._views[0][self.count & self._mask] = token
        self.count += 1
        for i, run in enumerate(RUNS):
            if self.count >= run:
                self._views[i + 1][mixed[i] >> self._shift] = self.count

    def find(self, hashes: RunHashes, mixed: Sequence[int], runs: int = len(RUNS)) -> tuple[list[int], int]:
        """Return where the text went on after the runs with which `hashes` ends, behind the longest first, each
        place once; and how many tokens agree before the first place, at most `MATCH_MAX`. A place may be `count`:
        there the next token will stand. Only the first `runs` lengths of `RUNS` are looked for."""
        found: list[int] = []
        longest = 0
        view, mask, tail = self._views[0], self._mask, hashes.tail
        for i, run in enumerate(RUNS[:runs]):
            place = self._views[i + 1][mixed[i] >> self._shift]
            if not 0 < place <= self.count or view[(place - 1) & mask] != tail[-1] or place in found:
                continue
            agreed = self.agreed(place, tail, MATCH_MAX if not found else run)
            if agreed < run:
                continue
            longest = longest or agreed
            found.append(place)
        return found, longest

    def agreed(self, place: int, tail: Sequence[int], most: int = MATCH_MAX) -> int:
        """Return how many tokens before `place` are the last ones of `tail`, at most `most`."""
        view, mask = self._views[0], self._mask
        most = min(most, len(tail), place, place + mask + 1 - self.count)
        for back in range(1, most + 1):
            token = view[(place - back) & mask]
            if token != tail[-back] or token == NO_TOKEN:
                return back - 1
        return max(most, 0)

    def token(self, place: int) -> int:
        """Return the token at a position; `NO_TOKEN`: it is not there."""
        if place >= self.count or place < self.count - self._mask - 1:
            return NO_TOKEN
        return self._views[0][place & self._mask]

    def tokens(self, place: int, count: int) -> list[int]:
        """Return up to `count` tokens from a position on, as far as one text goes. Where the index ends without
        `NO_TOKEN`, what stands behind the position is taken to repeat."""
        left = self.count - place
        if left <= 0 or left > self._mask + 1:
            return []
        first = place & self._mask
        found: list[int] = self._views[0][first : first + min(count, left)].tolist()
        if len(found) < min(count, left):  # the rest stands at the ring's beginning
            found += self._views[0][: min(count, left) - len(found)].tolist()
        if NO_TOKEN in found:
            return found[: found.index(NO_TOKEN)]
        return (found * (count // left + 1))[:count] if left < count else found

    def clear(self) -> None:
        """Forget everything."""
        self.count, self._larger = 0, None
        self._tables[:] = 0


def _native_indexer() -> IndexRuns | None:
    if library is None:
        return None
    address, data, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64
    index: IndexRuns = library.trunkline_index_runs
    library.trunkline_index_runs.argtypes = (address, address, data, size, size, size, data, size)
    library.trunkline_index_runs.restype = None
    return index


_index_runs: Final = _native_indexer()
"""None: there is no library, and NumPy does it."""


def _sum(run: Sequence[int]) -> int:
    """Return the polynomial of a run, whose products with `_MIX` are the hashes of `_hashes`."""
    total = 0
    for token in run:
        total = (total * _BASE + token) & _MASK
    return total


def _hashes(text: NDArray[np.uint64], run: int) -> NDArray[np.uint64]:
    """Return the hashes `[n - run + 1, …]` of all runs of texts `[n, …]`."""
    count = len(text) - run + 1
    sums = text[:count].copy()
    base = np.uint64(_BASE)
    for i in range(1, run):
        sums *= base
        sums += text[i : count + i]
    sums *= np.uint64(_MIX)
    return sums
