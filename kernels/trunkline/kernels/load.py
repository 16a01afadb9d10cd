"""Choosing an implementation of the ops by name."""

from __future__ import annotations

from typing import Final

from trunkline.kernels.ops import Kernels
from trunkline.kernels.reference import ReferenceKernels

KERNEL_NAMES: Final = ("auto", "reference")
"""What `load_kernels` takes; "auto" is the fastest that runs on the device."""


class KernelsUnavailableError(Exception):
    """The kernels asked for do not exist or cannot run here."""


def load_kernels(name: str, device: str) -> Kernels:
    """The ops for a device ("cpu" or "cuda").

    Raises:
        KernelsUnavailableError: unknown name.
    """
    if name not in KERNEL_NAMES:
        raise KernelsUnavailableError(
            f"no kernels {name!r} for device {device!r}; there are: {', '.join(KERNEL_NAMES)}"
        )
    return ReferenceKernels()
