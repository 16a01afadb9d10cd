"""Every implementation of the ops that runs on this machine: what the conformance tests are parametrised over."""

from __future__ import annotations

from typing import Final

import torch

from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.native import isa_levels
from trunkline.kernels.ops import Kernels
from trunkline.kernels.reference import ReferenceKernels

REFERENCE: Final = "reference"
NATIVE: Final = isa_levels()
"""Instruction-set levels of the compiled CPU kernels, all of which run in one process."""
NAMES: Final = (REFERENCE, *NATIVE)
HALF_TYPES: Final = (torch.bfloat16, torch.float16)
DTYPES: Final = (torch.float32, *HALF_TYPES)
"""What every implementation computes; the reference takes float64 too."""


def make_kernels(name: str, threads: int = 1, invariant: bool = False) -> Kernels:
    if name == REFERENCE:
        return ReferenceKernels()
    return CpuKernels(isa=name, threads=threads, invariant=invariant)
