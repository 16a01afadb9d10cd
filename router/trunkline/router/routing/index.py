"""The index of the chunks that each controller has, by tier. It is an exact copy of what controllers publish
(`KvEvents`), and has besides what requests that were just sent are expected to compute. Pure.

One entry per name, however many controllers have it, with four bits per *column* (`name_table.py`). A lookup of a
whole prompt goes through its names once, so its cost does not depend on which controllers have the chunks. Each
controller owns a column. A snapshot is written to a free column while the old one serves. Forgetting a controller
only takes its column away: columns without an owner are wiped little by little, all of them in a shard at each
call, before other controllers get them. So no call takes long, however large the index is.

The index is bounded by bytes. A name that was removed is missing until its controller publishes it again: a match
may find too little, never too much. Names are removed by second chance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import compress
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.chunks import NAME_BYTES
from trunkline.kvstore.tier import TierKind
from trunkline.router.routing.controllers import resized
from trunkline.router.routing.name_table import EXPECTED, SHARDS, TIERS, TOLD, ByteArray, IntArray, row_bytes
from trunkline.router.routing.native_table import new_table

__all__ = ["DEVICE", "DISK", "EXPECTED", "HOST", "TIERS", "TOLD", "ChunkIndex", "Columns", "IntArray", "Match"]

EXPECT_SECONDS: Final = 2.0
"""Time for which expected chunks count after their request has started. By its end the controller has published
them."""
DEVICE, HOST, DISK = range(3)
_EVICTED_AT_ONCE: Final = 64
_GROUPS_MAX: Final = 64


class _Ticket(NamedTuple):
    column: int
    names: list[bytes]


class Match(NamedTuple):
    """What controllers have of a chain of chunks."""

    counts: IntArray
    """`[controllers, 4]`: chunks without a gap from the chain's beginning, by the fastest tier in which they are:
    device, host memory, disk, and chunks that are only expected."""
    rows: ByteArray
    """`[chunks, bytes]`: the bits of the chain's first chunks, up to the first one that no controller has."""

    @property
    def known(self) -> int:
        """Number of the chain's first chunks that some controller has."""
        return len(self.rows)

    def mask(self, at: int) -> int:
        """Return the bits of a chunk."""
        return int.from_bytes(self.rows[at].tobytes(), "little")

    def ends(self, row: NDArray[np.uint64]) -> IntArray:
        """Return which of the known chunks have none of some bits (`Columns.host`), and behind them the number of
        known chunks: where runs of chunks with one of the bits end."""
        lacks = np.empty(len(self.rows) + 1, bool)
        lacks[-1] = True
        np.equal(np.bitwise_or.reduce(self.rows.view(np.uint64) & row, axis=1), 0, out=lacks[:-1])
        return lacks.nonzero()[0]


class Columns(NamedTuple):
    """The columns of some controllers."""

    bits: int
    """The lowest bit of each column."""
    owners: dict[int, int]
    """The controllers, by the place of their columns' lowest bits."""
    host: NDArray[np.uint64]
    """The bit of host memory of each column, as `Match.ends` takes it."""


class ChunkIndex:
    """The index of the chunks that each controller has. Names have 16 bytes. Times are seconds of any clock that
    does not go back."""

    def __init__(self, controllers: int, bytes_max: int = 256 << 20) -> None:
        """
        Args:
            controllers: how many there are.
            bytes_max: about how much memory the index may take.

        Raises:
            ValueError: `bytes_max` is less than one name takes.
        """
        self._width = row_bytes(1 + controllers)
        self._table = new_table(self._width)
        self._names = _Bound(self._table.bytes_each(), bytes_max)
        self._columns = np.arange(1, controllers + 1)
        """Number of the column of each controller; 0: the index does not know the controller."""
        self._shadows: dict[int, int] = {}
        """By controller: number of the column to which an unfinished snapshot of its chunks is written."""
        self._clean: list[int] = []
        """Wiped columns without an owner, the lowest last."""
        self._dirty: dict[int, int] = {}
        """By number of a column that is being wiped: how many shards have still to be wiped."""
        self._wiping = 0
        """The next shard to wipe."""
        self._groups: dict[bytes, Columns] = {}
        """The columns of some controllers, as `columns` is asked for them."""
        self._tickets: dict[int, _Ticket] = {}
        """Names that each ticket expects."""
        self._shared: list[dict[bytes, int]] = [{} for _ in range(1 + controllers)]
        """By column: names that several tickets expect at its controller, with the number of these tickets."""
        self._settled: deque[tuple[float, int]] = deque()
        """Pairs (time at which the expectation ends, ticket) of requests that have started, in order of time."""

    @property
    def size(self) -> int:
        """Number of names in the index."""
        return self._names.count

    @property
    def estimated_bytes(self) -> int:
        """Estimate of the memory that the names take, without expectations."""
        return self._names.count * self._names.bytes_each

    @property
    def held_bytes(self) -> int:
        """Memory that the names take by the table's own account."""
        return self._table.held_bytes()

    @property
    def evicted(self) -> int:
        """Number of names that were removed for lack of room since the start."""
        return self._names.evicted

    # Controllers that come and go

    def __contains__(self, controller: int) -> bool:
        """Return whether the index knows a controller."""
        return controller < len(self._columns) and bool(self._columns[controller])

    def grow(self, controllers: int) -> None:
        """Make room for so many controllers; the index does not know the new ones yet."""
        self._columns = resized(self._columns, controllers)
        self._groups.clear()

    def add(self, controller: int) -> None:
        """Know a controller from now on, without any chunks."""
        self._columns[controller] = self._take_column()
        self._groups.clear()

    def remove(self, controller: int) -> None:
        """Forget a controller with all its chunks and expectations. What is said of it from now on is ignored."""
        self._release(controller, 0)

    # Events and snapshots of controllers

    def apply(self, controller: int, names: bytes, tiers: bytes) -> None:
        """Apply an event of a controller: the tiers in which chunks are now.

        Args:
            names: 16 bytes per chunk.
            tiers: one byte per chunk with a bit for each tier in which it is now; 0: in none. Bits of other tiers
                (the remote one) are ignored.

        Raises:
            ValueError: the numbers of names and tiers differ.
        """
        self._wipe()
        column = int(self._columns[controller])
        if not column:
            return
        self._write(column, names, tiers)
        shadow = self._shadows.get(controller)
        if shadow is not None:
            self._write(shadow, names, tiers)

    def on_device(self, controller: int, names: Sequence[bytes]) -> None:
        """Note that a controller has chunks on its device now."""
        if names:
            self.apply(controller, b"".join(names), bytes([1 << TierKind.DEVICE]) * len(names))

    def begin_snapshot(self, controller: int) -> None:
        """Begin a snapshot of all chunks of a controller. Until `end_snapshot` the index serves what it knew
        before, and `apply` writes to both."""
        self._drop_shadow(controller)
        if controller in self:
            self._shadows[controller] = self._take_column()

    def add_snapshot(self, controller: int, names: bytes, tiers: bytes) -> None:
        """Add chunks to a snapshot. Arguments are those of `apply`.

        Raises:
            ValueError: the numbers of names and tiers differ, or no snapshot has begun.
        """
        if controller not in self._shadows:
            raise ValueError(f"no snapshot of controller {controller} has begun")
        self._write(self._shadows[controller], names, tiers)

    def end_snapshot(self, controller: int) -> None:
        """Replace all that is known of a controller by its snapshot.

        Raises:
            ValueError: no snapshot has begun.
        """
        if controller not in self._shadows:
            raise ValueError(f"no snapshot of controller {controller} has begun")
        old, new = int(self._columns[controller]), self._shadows.pop(controller)
        self._columns[controller] = new
        self._groups.clear()
        self._shared[old], self._shared[new] = {}, self._shared[old]
        for ticket, entry in self._tickets.items():
            if entry.column == old:
                self._tickets[ticket] = entry._replace(column=new)
                self._expect(new, entry.names, though_told=True)
        self._dirty[old] = SHARDS
        self._make_room()

    def forget(self, controller: int) -> None:
        """Forget all chunks and expectations of a controller that has ended or was started again."""
        if controller in self:
            self._release(controller, self._take_column())

    def _release(self, controller: int, new: int) -> None:
        """Give a controller another column, or none (0)."""
        self._drop_shadow(controller)
        old = int(self._columns[controller])
        self._columns[controller] = new
        self._groups.clear()
        self._shared[old] = {}
        self._tickets = {ticket: entry for ticket, entry in self._tickets.items() if entry.column != old}
        self._dirty[old] = SHARDS

    # Expectations

    def expect(self, ticket: int, controller: int, names: Sequence[bytes], now: float) -> None:
        """Expect that a controller computes the chunks of a request that was sent to it, except those that the
        controller has.

        If one of the chunks that it has is evicted before the request starts, the index does not find this chunk
        until it was computed again.

        Args:
            ticket: of the request, for `settle` and `drop`. The expectation of a ticket that is in use is
                replaced.
        """
        self.drop(ticket)
        self._expire(now)
        column = int(self._columns[controller])
        if not column:
            return
        found = self._expect(column, names)
        if 2 in found:
            shared = self._shared[column]
            for at, state in enumerate(found):
                if state == 2:
                    shared[names[at]] = shared.get(names[at], 1) + 1
        noted = list(names) if 0 not in found else list(compress(names, found))
        if noted:
            self._tickets[ticket] = _Ticket(column, noted)
        self._make_room()

    def settle(self, ticket: int, now: float) -> None:
        """End the expectation of a started request in `EXPECT_SECONDS`; by then its chunks are published."""
        if ticket in self._tickets:
            self._settled.append((now + EXPECT_SECONDS, ticket))
        self._expire(now)

    def drop(self, ticket: int) -> None:
        """Drop the expectation of a request that failed or was aborted before it started."""
        entry = self._tickets.pop(ticket, None)
        if entry is None:
            return
        shared, names = self._shared[entry.column], entry.names
        if shared:
            names = []
            for name in entry.names:
                if name not in shared:
                    names.append(name)
                elif (others := shared.pop(name) - 1) > 1:
                    shared[name] = others
        self._names.count -= self._table.unexpect(entry.column, b"".join(names))

    @property
    def expecting(self) -> int:
        """Number of requests whose chunks are expected."""
        return len(self._tickets)

    # Looking up

    def match(self, names: Sequence[bytes], now: float) -> IntArray:
        """Return how many first chunks of a chain each controller has (`Match.counts`)."""
        return self.look_up(names, now).counts

    def look_up(self, names: Sequence[bytes], now: float) -> Match:
        """Return what controllers have of a chain. Other methods take the answer until the index changes."""
        self._expire(now)
        self._wipe()
        counts, rows = self._table.look_up(b"".join(names))
        return Match(counts.take(self._columns, axis=0), rows)

    def columns(self, controllers: IntArray) -> Columns:
        """Return the columns of some controllers, until one of the columns changes."""
        key = controllers.tobytes()
        known = self._groups.get(key)
        if known is None:
            places = zip(self._columns[controllers].tolist(), controllers.tolist(), strict=True)
            owners = {TIERS * column: controller for column, controller in places if column}
            bits = sum(1 << shift for shift in owners)
            host = np.frombuffer((bits << HOST).to_bytes(self._width, "little"), np.uint64)
            known = Columns(bits, owners, host)
            if len(self._groups) >= _GROUPS_MAX:
                self._groups.clear()
            self._groups[key] = known
        return known

    def shift(self, controller: int) -> int:
        """Return the place of a controller's lowest bit in the bits of a `Match`."""
        return TIERS * int(self._columns[controller])

    # Inside

    def _write(self, column: int, names: bytes, tiers: bytes) -> None:
        if len(names) != NAME_BYTES * len(tiers):
            raise ValueError(f"{len(tiers)} tiers for {len(names)} bytes of names; names have {NAME_BYTES} each")
        room = self._names.names_max - self._names.count
        at_once = len(tiers) if len(tiers) <= room else _EVICTED_AT_ONCE
        for at in range(0, len(tiers), max(1, at_once)):
            some = names[at * NAME_BYTES : (at + at_once) * NAME_BYTES]
            self._names.count += self._table.write(column, some, tiers[at : at + at_once])
            self._make_room()

    def _expect(self, column: int, names: Sequence[bytes], *, though_told: bool = False) -> bytearray:
        """Expect names in a column. Return what `NameTable.expect` has found."""
        found = bytearray(len(names))
        self._names.count += self._table.expect(column, b"".join(names), found, though_told=though_told)
        return found

    def _expire(self, now: float) -> None:
        settled = self._settled
        while settled and settled[0][0] <= now:
            self.drop(settled.popleft()[1])

    def _drop_shadow(self, controller: int) -> None:
        shadow = self._shadows.pop(controller, None)
        if shadow is not None:
            self._dirty[shadow] = SHARDS

    def _take_column(self) -> int:
        # Each controller may have two columns, one of them for a snapshot; all others wait to be wiped.
        while not self._clean and len(self._shared) > 8 + 3 * len(self._columns):
            self._wipe()
        if self._clean:
            return self._clean.pop()
        self._shared.append({})
        self._set_width()
        self._make_room()
        return len(self._shared) - 1

    def _wipe(self) -> None:
        """Clear the bits of the columns without owners in one more shard."""
        if not self._dirty:
            return
        bits = sum(0xF << TIERS * column for column in self._dirty)
        self._names.count -= self._table.wipe(self._wiping, bits)
        self._wiping = (self._wiping + 1) % SHARDS
        for column, left in list(self._dirty.items()):
            if left > 1:
                self._dirty[column] = left - 1
            else:
                del self._dirty[column]
                self._clean.append(column)
        self._clean.sort(reverse=True)
        while self._clean and self._clean[0] == len(self._shared) - 1:
            del self._clean[0], self._shared[-1]
        self._set_width()

    def _set_width(self) -> None:
        width = row_bytes(len(self._shared))
        if width != self._width:
            self._width = width
            self._groups.clear()
            self._table.set_width(width)
            self._names.set_bytes_each(self._table.bytes_each())

    def _make_room(self) -> None:
        """Remove names by second chance, shard by shard, the oldest first."""
        bound = self._names
        while bound.count > bound.names_max:
            size = self._table.shard_size(bound.hand)
            removed = self._table.evict(bound.hand, max(1, size // 16)) if size else 0
            bound.hand = (bound.hand + 1) % SHARDS
            bound.count -= removed
            bound.evicted += removed


class _Bound:
    """The bound of the index: how many names it holds, how many it may hold, and how many were evicted."""

    __slots__ = ("bytes_each", "bytes_max", "count", "evicted", "hand", "names_max")

    def __init__(self, bytes_each: int, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.set_bytes_each(bytes_each)
        if not self.names_max:
            raise ValueError(f"an index of {bytes_max} bytes holds nothing: a name takes {self.bytes_each}")
        self.count = 0
        self.evicted = 0
        self.hand = 0
        """The shard from which names are evicted next."""

    def set_bytes_each(self, bytes_each: int) -> None:
        """Set the number of bytes that a name takes from now on."""
        self.bytes_each = bytes_each
        self.names_max = self.bytes_max // bytes_each
