"""Errors of NCCL, gloo and CUDA as this worker's exceptions; their own words are kept.

never works, however often it is tried     WorkerConfigError   exit code 2: the cluster ends
another rank, or the way to it, is gone    PeerLostError       this rank leaves and is started again
a failure of this rank's own               WorkerError         this rank leaves; the controller hears why
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist

from trunkline.kernels.shared_group import CollectiveMismatchError, PeerGoneError
from trunkline.worker.errors import PeerLostError, WorkerConfigError, WorkerError

COLLECTIVE_ERRORS: Final = (PeerGoneError, CollectiveMismatchError)
"""What native code raises that sums over ranks; `of_collective` says what it means here."""
_TEXT_MAX: Final = 600
"""Largest number of characters of a backend's text that is kept: the first ones say what happened, more would be
stack frames."""
_SOURCE: Final = re.compile(r"(?:NCCL error in: )?\[?\S*/\S+\.(?:cpp|cc|cu|cuh|h|hpp):\d+\]?,?\s*")
_STACK: Final = re.compile(
    r"\n(?:Exception raised from|C\+\+ CapturedTraceback|frame #\d|CUDA kernel errors might be asynchronously).*",
    re.DOTALL,
)

_REMEDIES: Final = {
    "Duplicate GPU detected": "two ranks of a group use one GPU, which NCCL refuses; give each rank a GPU of its "
    "own (a smaller --tp, or other CUDA_VISIBLE_DEVICES)",
    "ncclInvalidUsage": "NCCL cannot form this group; NCCL_DEBUG=WARN makes it say more",
    "ncclInvalidArgument": "NCCL cannot form this group; NCCL_DEBUG=WARN makes it say more",
    "no kernel image is available": "torch or the CUDA kernels were built for other GPUs than this one; install "
    "builds for its compute capability",
    "invalid device ordinal": "there is no GPU of this index; check CUDA_VISIBLE_DEVICES",
    "no CUDA-capable device": "no GPU is visible; check CUDA_VISIBLE_DEVICES and the driver",
    "driver version is insufficient": "the driver is older than the CUDA that torch was built for; install a "
    "newer driver or an older torch",
    "compiled with an unsupported toolchain": "the driver is older than the CUDA that compiled the kernels; "
    "install a newer driver",
}
"""Advice for the operator, by words of errors that will come again however often the process is started."""


@contextmanager
def of_peers(backend: str) -> Iterator[None]:
    """Turn errors of a backend into ours; nothing but the backend's call belongs inside."""
    try:
        yield
    except RuntimeError as error:
        translated = of_collective(error, backend)
        if translated is error:
            raise
        raise translated from error


def words_of(error: BaseException) -> str:
    """Return the text of a backend's error in one line, without places in its sources and without stack frames."""
    text = _SOURCE.sub("", _STACK.sub("", str(error)))
    text = " ".join(text.split())
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}…"


def hopeless(error: BaseException) -> WorkerConfigError | None:
    """Return the error as that of a configuration that can never work; None if a new start may succeed."""
    text = str(error)
    for words, remedy in _REMEDIES.items():
        if words in text:
            return WorkerConfigError(f"{remedy}. The error was: {words_of(error)}")
    return None


def of_collective(error: RuntimeError, backend: str) -> Exception:
    """Return the worker's exception for what a collective raised; the error itself if it is about no other rank.

    Args:
        backend: "shared", "gloo" or "nccl".
    """
    if isinstance(error, CollectiveMismatchError):
        return WorkerError(str(error))
    if isinstance(error, PeerGoneError):
        return PeerLostError(str(error))
    is_nccl = isinstance(error, dist.DistError)
    if is_nccl and (found := hopeless(error)) is not None:
        return found
    if is_nccl and "ncclUnhandledCudaError" in str(error):
        return WorkerError(f"CUDA failed inside NCCL on this rank: {words_of(error)}")
    # Gloo has no type of its own for what goes wrong between ranks.
    if is_nccl or backend == "gloo":
        return PeerLostError(
            f"another rank of the group is gone or cannot be reached ({backend}: {words_of(error)})"
        )
    return error


def of_loading(error: RuntimeError) -> WorkerError | None:
    """Return the worker's exception for an error of CUDA or torch while a rank was loading; None for other errors.

    Memory that is missing may be there the next time: another process may just be ending.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return WorkerError(f"the GPU has not enough free memory to load the model: {words_of(error)}")
    return hopeless(error)
