"""Large pages for memory that is read from end to end: the KV pool and packed weights.

A stream of reads crosses a small page every tenth of a microsecond, and prefetching stops at each. Most systems
give large pages only on request.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Final

from torch import Tensor

_MADV_HUGEPAGE: Final = 14
"""Linux's number for the advice to use large pages (`madvise`)."""


def advise_large_pages(tensor: Tensor) -> bool:
    """Ask for large pages under a tensor in host memory, before it is first written.

    Returns:
        Whether the system took the hint; nothing depends on it but speed.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return False
    start, length = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (start + length - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole <= 0:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(madvise(first, whole, _MADV_HUGEPAGE)) == 0
