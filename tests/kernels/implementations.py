"""Every implementation of the ops that this machine can run: what the conformance tests are parametrised over."""

from __future__ import annotations

from typing import Final

import torch
from kernels.cuda_emulated import CXX, H200, configure, make_emulated, make_gpu

from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.native import isa_levels
from trunkline.kernels.ops import Kernels
from trunkline.kernels.reference import ReferenceKernels

REFERENCE: Final = "reference"
NATIVE: Final = isa_levels()
"""Instruction-set levels of the compiled CPU kernels, widest first. All of them run in one process."""
CPU: Final = (REFERENCE, *NATIVE)
EMULATED: Final = "cuda-emulated"
GPU: Final = "cuda"
CUDA: Final = ((EMULATED,) if CXX else ()) + ((GPU,) if torch.cuda.is_available() else ())
"""The CUDA kernels: emulated where there is a C++ compiler, and on the GPU where there is one."""
SANITIZED: Final = frozenset({NATIVE[0], NATIVE[-1]} if NATIVE else ())
"""The levels that run under sanitizers: all levels are one source, so the widest and the narrowest are enough."""
HALF_TYPES: Final = (torch.bfloat16, torch.float16)
DTYPES: Final = (torch.float32, *HALF_TYPES)
"""What every implementation computes; the reference takes float64 too."""


def make_kernels(name: str, threads: int = 1, invariant: bool = False, share: bool = True) -> Kernels:
    """Return new kernels of one implementation. `threads` counts for CPU kernels only."""
    if name == REFERENCE:
        return ReferenceKernels()
    if name == GPU:
        return make_gpu(invariant=invariant, share=share)
    if name == EMULATED:
        configure(H200, 0)
        return make_emulated(invariant=invariant, share=share)
    return CpuKernels(isa=name, threads=threads, invariant=invariant, share=share)
