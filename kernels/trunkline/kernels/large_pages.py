"""Large pages for memory that is read from end to end (the KV pool, packed weights), and pages ahead of writes.

A stream of reads crosses a small page every tenth of a microsecond, and prefetching stops at each. Most systems
give large pages only on request. A page gets its memory at the first write to it, which waits until the system has
cleared it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Final

from torch import Tensor

LARGE_PAGE_BYTES: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
"""Linux's number for the advice to use large pages (`madvise`)."""
_MADV_POPULATE_WRITE: Final = 23
"""Linux's number for giving pages their memory now, ready to be written; since 5.14."""
_MADV_COLLAPSE: Final = 25
"""Linux's number for putting memory that is written already on large pages, now; since 6.1."""


def advise_large_pages(tensor: Tensor) -> bool:
    """Ask for large pages under a tensor in host memory, before it is first written.

    Returns:
        Whether the system took the hint; nothing depends on it but speed.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return False
    return _advise(tensor, mmap.PAGESIZE, _MADV_HUGEPAGE)


def collect_large_pages(tensor: Tensor) -> bool:
    """Put the whole large pages of a tensor in host memory, after it was written, on large pages.

    Where memory was in many pieces when it was written, the hint before may have had no effect; to collect large
    pages the system moves what is in the way.

    Returns:
        Whether all of it is on large pages.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return False
    return _advise(tensor, LARGE_PAGE_BYTES, _MADV_COLLAPSE)


def take_pages(tensor: Tensor) -> bool:
    """Have the system give the whole pages of a tensor in host memory now, as a write to each would; what the
    tensor holds stays as it is.

    Returns:
        Whether the system did so for all of them; nothing depends on it but speed.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return False
    return _advise(tensor, mmap.PAGESIZE, _MADV_POPULATE_WRITE)


def _advise(tensor: Tensor, page: int, advice: int) -> bool:
    """Give advice about the whole pages of a tensor; return whether the system took it for all of them."""
    start, length = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    first = -(-start // page) * page
    whole = (start + length - first) // page * page
    if whole <= 0:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(madvise(first, whole, advice)) == 0
