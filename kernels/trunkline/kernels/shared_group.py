"""Collectives of the ranks of one host through shared memory: the Python side of `csrc/cpu/shared_group.h`.

That header has the protocol. Here: where the file lives, types, errors. Ranks agree on the file by other means
(`trunkline.worker.tensor_parallel` sends its name over gloo), all of them join, and then it is unlinked: a
group that runs has no name, so nothing stays behind when its processes are killed.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Final

import tvm_ffi
from torch import Tensor

from trunkline.kernels.native import NativeLibraryError, chosen_level, library

FOLDER: Final = Path("/dev/shm")
"""Folder of the groups' files: a file system in memory on every Linux. Containers that are to share it need the
same IPC namespace."""

SLOT_BYTES: Final = 256 * 1024
"""Largest number of bytes of a message that go in one round; each rank has two areas of this size. Larger messages
take several rounds, so that they are read while they are still in the second-level cache
(benchmarks/allreduce.py)."""

TIMEOUT_S: Final = 300.0
"""Seconds that a call waits for a rank that lives but does not come: the rank may be loading or compiling."""


@tvm_ffi.error.register_error
class GroupFileError(OSError):
    """A group's file cannot be made, opened or joined: no such folder, no room, another host, a rank taken."""


@tvm_ffi.error.register_error
class PeerGoneError(RuntimeError):
    """Another rank died, left or did not come; the group cannot be used any more."""


@tvm_ffi.error.register_error
class CollectiveMismatchError(RuntimeError):
    """The ranks called different collectives; the group cannot be used any more."""


def _native() -> Any:
    module = library()
    if module is None:
        raise NativeLibraryError("the compiled CPU kernels, which have the shared-memory collectives, are missing")
    return module


def create_file(size: int, *, slot_bytes: int = SLOT_BYTES, folder: Path = FOLDER) -> Path:
    """Make the file of a group of `size` ranks. The caller unlinks it when all ranks have joined or failed to.

    Raises:
        NativeLibraryError: The library is not installed.
        GroupFileError: There is no such folder, or no room in it.
    """
    path = folder / f"trunkline-{secrets.token_hex(16)}"
    _native().shared_group_create(str(path), size, slot_bytes)
    return path


class SharedGroup:
    """A rank of a group. A process may be several ranks, each with its own thread.

    The thread that makes it must live as long as the group: the rank counts as dead when that thread ends.
    Collectives must be called by one thread at a time, in the same order on every rank; tensors must be
    contiguous and in the memory of the CPU. They wait without the interpreter's lock, and raise

    - `PeerGoneError` within about 100 ms after a peer died or left, or later if it lives and does not come,
    - `CollectiveMismatchError` if the ranks' calls differ in kind, type or size,
    - `ValueError` for a tensor of the wrong kind, or once the group is closed.
    """

    def __init__(
        self, path: Path, rank: int, size: int, *, isa: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Join the group. No collective may be called before all ranks have joined.

        Args:
            path: The result of `create_file`.
            isa: Instruction-set level of the sums, one of `native.isa_levels()`; the results do not depend on it.

        Raises:
            NativeLibraryError: The library is not installed.
            GroupFileError: The file cannot be opened, as on another host, or the rank is taken.
            ValueError: It is no file of a group, or of a group of another size.
        """
        module = _native()
        self.handle: int = module.shared_group_join(str(path), rank, size, chosen_level(isa), int(timeout_s * 1e3))
        self.rank = rank
        self.size = size
        # Looked up once: a step has dozens of calls.
        self._all_reduce = _waiting(module.shared_group_all_reduce)
        self._all_gather = _waiting(module.shared_group_all_gather)
        self._gather_columns = _waiting(module.shared_group_gather_columns)
        self._broadcast = _waiting(module.shared_group_broadcast)
        self._close = module.shared_group_close

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over ranks, in place; the same bits on every rank. float32, bfloat16, float16 or
        float64."""
        self._all_reduce(self.handle, tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor on every rank, `[size, *tensor.shape]`."""
        whole = tensor.new_empty(self.size, *tensor.shape)
        self._all_gather(self.handle, tensor, whole)
        return whole

    def gather_columns(self, tensor: Tensor) -> Tensor | None:
        """Return all ranks' columns side by side, `[rows, size * columns]`, on rank 0; None on the others."""
        if self.rank != 0:
            self._gather_columns(self.handle, tensor, tensor)
            return None
        whole = tensor.new_empty(tensor.shape[0], self.size * tensor.shape[1])
        self._gather_columns(self.handle, tensor, whole)
        return whole

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor` with the tensor of rank 0."""
        self._broadcast(self.handle, tensor)

    def close(self) -> None:
        """Leave the group. Calls that wait for this rank, or on it, raise `PeerGoneError`. Any thread may call
        this, also repeatedly."""
        self._close(self.handle)


def _waiting(function: Any) -> Any:
    """Let other threads of the interpreter run during calls of `function`; return it."""
    function.release_gil = True
    return function
