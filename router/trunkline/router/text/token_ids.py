"""The token ids of a prompt as an array that reads like a list. Pure.

A list of 200,000 numbers takes 3 milliseconds to make, and most requests need only its length and its bytes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, overload

import numpy as np

from trunkline.kvstore.chunks import Int32Array, pack_int32
from trunkline.kvstore.native_names import library

_ReadIds = Callable[[bytes, int, int, Any], int]
"""`trunkline_read_ids` in `csrc/names/token_ids.cc`. Its last argument is the address of the array to write."""


def _id_reader() -> _ReadIds | None:
    if library is None:
        return None
    read: _ReadIds = library.trunkline_read_ids
    size = ctypes.c_int64
    library.trunkline_read_ids.argtypes = (ctypes.c_char_p, size, size, ctypes.c_void_p)
    library.trunkline_read_ids.restype = size
    return read


_read_ids: Final = _id_reader()
"""None: the compiled library is missing."""


class TokenIds(Sequence[int]):
    """Token ids that never change. A part of them is a list."""

    __slots__ = ("_packed", "array")

    def __init__(self, array: Int32Array) -> None:
        """`array`: int32 `[n]`, which must not change any more."""
        self.array = array
        """int32 `[n]`."""
        self._packed = b""

    @property
    def packed(self) -> bytes:
        """The ids as `pack_int32` packs them, made once."""
        if not self._packed:
            self._packed = pack_int32(self.array)
        return self._packed

    @classmethod
    def of(cls, first: Int32Array, rest: Sequence[int]) -> TokenIds:
        """Return the ids of an array `[n]`, followed by those of a list."""
        return cls(np.concatenate((first, np.array(rest, np.int32))))

    @classmethod
    def given(cls, ids: Sequence[int]) -> Sequence[int]:
        """Return ids as an array, so that each later pass over them is one in C; the same ids again if one of them
        is no int32."""
        if type(ids) is cls:
            return ids
        try:
            packed = struct.pack(f"<{len(ids)}i", *ids)  # in a fourth of the time of `np.array`
        except struct.error:
            return ids
        return cls._of_packed(packed)

    @classmethod
    def read(cls, text: bytes, begin: int, end: int) -> TokenIds | None:
        """Return the ids of a JSON list whose items stand in `text` from `begin` to `end`; None: they are not all
        whole numbers of 0 to 2^31 - 1, there are none, or the compiled library is missing."""
        if _read_ids is None or begin >= end:
            return None
        ids = bytearray(2 * (end - begin) + 2)
        count = _read_ids(text, begin, end, ctypes.byref(ctypes.c_char.from_buffer(ids)))
        return cls._of_packed(bytes(ids[: 4 * count])) if count > 0 else None

    @classmethod
    def _of_packed(cls, packed: bytes) -> TokenIds:
        made = cls(np.frombuffer(packed, "<i4"))
        made._packed = packed
        return made

    def are_below(self, vocab_size: int) -> bool:
        """Return whether all ids are 0 to `vocab_size` - 1."""
        # As unsigned numbers, negative ones are larger than any vocabulary.
        return not len(self.array) or int(np.maximum.reduce(self.array.view(np.uint32))) < vocab_size

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found: Any = self.array[index].tolist()
        return found  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.array, dtype) if copy else np.asarray(self.array, dtype)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return np.array_equal(self.array, other.array)
        return isinstance(other, list) and self.array.tolist() == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenIds({self.array!r})"
