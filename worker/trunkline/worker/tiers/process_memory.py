"""Copy memory of another process of this host into this one's (`process_vm_readv`), without asking it.

The kernel allows that among processes of one user. Where the Yama module confines it to ancestors, a process may
let the descendants of another one in, too (`let_family_read`). Containers may forbid it altogether.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_RANGES_MAX: Final = 1024  # IOV_MAX
_PR_SET_PTRACER: Final = 0x59616D61


class Ranges(NamedTuple):
    """Memory ranges of equal length at equal distances, such as some heads in all layers of a chunk."""

    offset: int
    """Bytes from the chunk's begin to the first range."""
    stride: int
    """Bytes from a range to the next one."""
    length: int
    times: int

    @property
    def is_whole(self) -> bool:
        """Whether the ranges leave no gaps."""
        return self.stride == self.length

    def at(self, address: int) -> NDArray[np.uint64]:
        """Return addresses and lengths, as the kernel wants them (`struct iovec`), for a chunk at an address."""
        found = np.empty((self.times, 2), dtype=np.uint64)
        found[:, 0] = address + self.offset + np.arange(self.times) * self.stride
        found[:, 1] = self.length
        return found


def read_memory(pid: int, source: NDArray[np.uint64], into: NDArray[np.uint64]) -> None:
    """Copy ranges of another process's memory into equal ranges of this one's. Other threads run meanwhile.

    Args:
        source: Addresses and lengths there, `[n, 2]`.
        into: Addresses and lengths here, `[n, 2]`; this process may write to all of them.

    Raises:
        PermissionError: The system does not allow it.
        OSError: The process is gone, or does not have such memory.
    """
    call = _LIBC.process_vm_readv
    for start in range(0, len(into), _RANGES_MAX):
        theirs, ours = source[start : start + _RANGES_MAX], into[start : start + _RANGES_MAX]
        got = call(pid, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0)
        if got < 0:
            number = ctypes.get_errno()
            if number == errno.ENOSYS:  # as some sandboxes forbid it
                number = errno.EPERM
            raise OSError(number, f"memory of process {pid} cannot be read: {os.strerror(number)}")
        if got != int(ours[:, 1].sum()):
            raise OSError(errno.EFAULT, f"only {got} bytes of memory of process {pid} could be read")


def let_family_read(ancestor: int) -> None:
    """Allow an ancestor and all its descendants to read this process's memory, where only this is in the way."""
    _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(ancestor), 0, 0, 0)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    call.argtypes = (
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
    )
    return libc


_LIBC: Final = _libc()
