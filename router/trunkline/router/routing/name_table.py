"""The table under the index of chunks: names with the bits of columns, in Python. Pure.

One dictionary entry per name: an integer with four bits per *column*.

      name ─► … |column 2: expected disk host device|column 1: expected disk host device|column 0: used|

The table is divided into shards by the names' first bytes, so that each is quick to grow and to wipe. Names in a
shard are in the order in which they came, for their removal by second chance: bit 0 of column 0 notes that a name
was looked for. `native_table.NativeTable` is the same, compiled.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.chunks import NAME_BYTES

IntArray = NDArray[np.int64]
ByteArray = NDArray[np.uint8]

EXPECTED: Final = 3
TIERS: Final = 4
"""Number of bits of a column. The first three are what controllers publish (`1 << TierKind`)."""
TOLD: Final = 0b0111
"""The tiers of what a controller has told that it has."""
_EXPECTED_BIT: Final = 1 << EXPECTED
_USED: Final = 1
"""Mark of a name that was looked for: bit 0 of column 0, which no controller owns."""
SHARDS: Final = 256
"""Number of shards."""
_NAME_OVERHEAD_BYTES: Final = 64 + 56
"""Memory that a name takes: the object, and its place in a dictionary that is half full."""
_ROW_UNIT: Final = 8

_HAS: Final = np.array([(0xF if x & 0xF else 0) | (0xF0 if x & 0xF0 else 0) for x in range(256)], np.uint8)
"""For each byte, which has the bits of two columns: all bits of each column in which any bit is set."""
_FASTEST: Final = np.array([(x & 0xF & -(x & 0xF)) | ((x >> 4) & -(x >> 4)) << 4 for x in range(256)], np.uint8)
"""For each byte, which has the bits of two columns: the lowest set bit of each column."""
_COUNTED_AT_ONCE: Final = 255
"""Largest number of rows whose bits can be added up in a byte."""


class Known(NamedTuple):
    """The part of a chain of names that a table has."""

    counts: IntArray
    """`[columns, 4]`: names without a gap from the chain's beginning, by the lowest bit of each. Column 0 and
    columns that do not exist have none. Valid until the next lookup."""
    rows: ByteArray
    """`[names, width]`: the bits of the first names, up to the first one that is not here, little-endian, without
    those of column 0."""


def row_bytes(columns: int) -> int:
    """Return the number of bytes that hold the bits of so many columns: a multiple of 8."""
    return -(-columns * TIERS // (8 * _ROW_UNIT)) * _ROW_UNIT


class NameTable(Protocol):
    """A table of names. `names` have 16 bytes each."""

    def bytes_each(self) -> int:
        """Estimate how much memory a name takes."""
        ...

    def set_width(self, width: int) -> None:
        """Set how many bytes the bits of a name may have from now on. Bits that no longer fit are not set."""
        ...

    def shard_size(self, shard: int) -> int:
        """Return how many names a shard has."""
        ...

    def held_bytes(self) -> int:
        """Return how much memory the table takes by its own account."""
        ...

    def look_up(self, names: bytes) -> Known:
        """Return what the table has of a chain, and note that these names were looked for."""
        ...

    def write(self, column: int, names: bytes, tiers: bytes) -> int:
        """Set the bits `TOLD` of names in a column, and remove names that have no bits left. Return how many names
        more there are than before."""
        ...

    def expect(self, column: int, names: bytes, found: bytearray, *, though_told: bool = False) -> int:
        """Set the bit `EXPECTED` of those names that have none of the bits `TOLD` in a column.

        Args:
            found: is written: for each name 0: it has one of these bits; 1: it is expected now; 2: it was already.
            though_told: whether to set it for all names.

        Returns:
            How many names more there are than before.
        """
        ...

    def unexpect(self, column: int, names: bytes) -> int:
        """Take the bit `EXPECTED` from names. Return how many names were removed, as they had no other bit."""
        ...

    def wipe(self, shard: int, bits: int) -> int:
        """Take bits from all names of a shard. Return how many names were removed."""
        ...

    def evict(self, shard: int, share: int) -> int:
        """Remove those of the first `share` names of a shard that were not looked for since they came to its end,
        and move the others to its end. Return how many were removed."""
        ...


class DictTable:
    """A `NameTable` in Python."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]

    def bytes_each(self) -> int:
        digits = -(-8 * self._width // 30)
        return _NAME_OVERHEAD_BYTES + -(-(24 + 4 * digits) // 16) * 16

    def set_width(self, width: int) -> None:
        self._width = width

    def shard_size(self, shard: int) -> int:
        return len(self._shards[shard])

    def held_bytes(self) -> int:
        return sum(
            shard.__sizeof__() + sum(name.__sizeof__() + mask.__sizeof__() for name, mask in shard.items())
            for shard in self._shards
        )

    def look_up(self, names: bytes) -> Known:
        shards = self._shards
        known: list[bytes] = []
        for at in range(0, len(names), NAME_BYTES):
            name = names[at : at + NAME_BYTES]
            shard = shards[name[0]]
            mask = shard.get(name)
            if not mask:
                break
            if not mask & _USED:
                shard[name] = mask | _USED
            known.append((mask & -(1 << TIERS)).to_bytes(self._width, "little"))
        masks = np.frombuffer(b"".join(known), np.uint8).reshape(len(known), self._width)
        prefix = np.bitwise_and.accumulate(_HAS.take(masks), axis=0)
        bits = np.unpackbits(_FASTEST.take(masks & prefix), axis=1, bitorder="little")
        counts = np.zeros(bits.shape[1], np.int64)
        for start in range(0, len(bits), _COUNTED_AT_ONCE):
            counts += np.add.reduce(bits[start : start + _COUNTED_AT_ONCE], axis=0, dtype=np.uint8)
        return Known(counts.reshape(-1, TIERS), masks)

    def write(self, column: int, names: bytes, tiers: bytes) -> int:
        shift = TIERS * column
        keep = ~(TOLD << shift)
        shards, added = self._shards, 0
        for at, where in enumerate(tiers):
            name = names[at * NAME_BYTES : (at + 1) * NAME_BYTES]
            shard = shards[name[0]]
            before = shard.get(name, 0)
            mask = before & keep | (where & TOLD) << shift
            if mask > _USED:
                shard[name] = mask
                added += not before
            elif before:
                del shard[name]
                added -= 1
        return added

    def expect(self, column: int, names: bytes, found: bytearray, *, though_told: bool = False) -> int:
        told, bit = TOLD << TIERS * column, _EXPECTED_BIT << TIERS * column
        shards, added = self._shards, 0
        for number, at in enumerate(range(0, len(names), NAME_BYTES)):
            name = names[at : at + NAME_BYTES]
            shard = shards[name[0]]
            mask = shard.get(name, 0)
            found[number] = 0 if mask & told and not though_told else 2 if mask & bit else 1
            if found[number] == 1:
                shard[name] = mask | bit
                added += not mask
        return added

    def unexpect(self, column: int, names: bytes) -> int:
        shards, removed = self._shards, 0
        keep = ~(_EXPECTED_BIT << TIERS * column)
        for at in range(0, len(names), NAME_BYTES):
            name = names[at : at + NAME_BYTES]
            shard = shards[name[0]]
            mask = shard.get(name)
            if mask is None:
                continue  # it was evicted
            mask &= keep
            if mask > _USED:
                shard[name] = mask
            else:
                del shard[name]
                removed += 1
        return removed

    def wipe(self, shard: int, bits: int) -> int:
        wiped, removed = self._shards[shard], 0
        for name, mask in [(name, mask) for name, mask in wiped.items() if mask & bits]:
            rest = mask & ~bits
            if rest > _USED:
                wiped[name] = rest
            else:
                del wiped[name]
                removed += 1
        return removed

    def evict(self, shard: int, share: int) -> int:
        names, removed = self._shards[shard], 0
        for name, mask in list(islice(names.items(), share)):
            del names[name]
            if mask & _USED:
                names[name] = mask & ~_USED
            else:
                removed += 1
        return removed
