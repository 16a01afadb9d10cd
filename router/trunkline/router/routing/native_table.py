"""The table under the index of chunks, compiled: `csrc/names/table.cc`. Pure.

A lookup of a long prompt waits for memory, once or twice for each name. The compiled form asks for the memory of
several names before it needs the first.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref
from typing import Final

import numpy as np

from trunkline.kvstore.chunks import NAME_BYTES
from trunkline.kvstore.native_names import library
from trunkline.router.routing.name_table import TIERS, DictTable, Known, NameTable

_PLACE_BYTES: Final = 12
"""Memory that a name takes in the hash table."""
_start_of: Final = ctypes.c_char.from_buffer
"""The first byte of some memory: its address by `byref` costs a fifth of what an array's own costs."""
_POINTER, _SIZE, _BYTES = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
_FUNCTIONS: Final = {
    "new": (_POINTER, (ctypes.c_uint64, _SIZE)),
    "delete": (None, (_POINTER,)),
    "set_width": (None, (_POINTER, _SIZE)),
    "held_bytes": (_SIZE, (_POINTER,)),
    "shard_size": (_SIZE, (_POINTER, _SIZE)),
    "look_up": (_SIZE, (_POINTER, _BYTES, _SIZE, _POINTER, _POINTER)),
    "write": (_SIZE, (_POINTER, _SIZE, _BYTES, _BYTES, _SIZE)),
    "expect": (_SIZE, (_POINTER, _SIZE, _BYTES, _SIZE, _SIZE, _POINTER)),
    "unexpect": (_SIZE, (_POINTER, _SIZE, _BYTES, _SIZE)),
    "wipe": (_SIZE, (_POINTER, _SIZE, _BYTES, _SIZE)),
    "evict": (_SIZE, (_POINTER, _SIZE, _SIZE)),
}


class NativeTable:
    """A `NameTable` of the compiled library, which must be there."""

    def __init__(self, width: int) -> None:
        assert library is not None, "the library of names does not run here"
        self._set_width(width)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"trunkline_table_{name}")
            function.restype, function.argtypes = result, arguments
        self._library: ctypes.PyDLL = library
        # The hash of bytes is another one in each process: what it is cannot be known outside.
        self._table = library.trunkline_table_new(hash(b"names of chunks") % 2**64, width)
        weakref.finalize(self, library.trunkline_table_delete, self._table)
        self._look_up = library.trunkline_table_look_up
        self._write = library.trunkline_table_write
        self._expect = library.trunkline_table_expect
        self._unexpect = library.trunkline_table_unexpect

    def _set_width(self, width: int) -> None:
        self._width = width
        self._counts = np.zeros((8 * width // TIERS, TIERS), np.int64)
        self._counts_at: int = self._counts.ctypes.data  # to ask for it takes a microsecond

    def bytes_each(self) -> int:
        return (NAME_BYTES + self._width) * 3 // 2 + _PLACE_BYTES  # a third of a shard may be free

    def set_width(self, width: int) -> None:
        self._set_width(width)
        self._library.trunkline_table_set_width(self._table, width)

    def shard_size(self, shard: int) -> int:
        return int(self._library.trunkline_table_shard_size(self._table, shard))

    def held_bytes(self) -> int:
        return int(self._library.trunkline_table_held_bytes(self._table))

    def look_up(self, names: bytes) -> Known:
        count = len(names) // NAME_BYTES
        rows = np.empty((max(1, count), self._width), np.uint8)
        known = self._look_up(self._table, names, count, byref(_start_of(rows.data)), self._counts_at)
        return Known(self._counts, rows[:known])

    def write(self, column: int, names: bytes, tiers: bytes) -> int:
        return int(self._write(self._table, column, names, tiers, len(tiers)))

    def expect(self, column: int, names: bytes, found: bytearray, *, though_told: bool = False) -> int:
        at = byref(_start_of(found)) if found else None
        return int(self._expect(self._table, column, names, len(found), though_told, at))

    def unexpect(self, column: int, names: bytes) -> int:
        return int(self._unexpect(self._table, column, names, len(names) // NAME_BYTES))

    def wipe(self, shard: int, bits: int) -> int:
        packed = bits.to_bytes(-(-bits.bit_length() // 8), "little")
        return int(self._library.trunkline_table_wipe(self._table, shard, packed, len(packed)))

    def evict(self, shard: int, share: int) -> int:
        return int(self._library.trunkline_table_evict(self._table, shard, share))


def new_table(width: int) -> NameTable:
    """Return a table for names with so many bytes of bits: the compiled one where it runs."""
    return DictTable(width) if library is None else NativeTable(width)
