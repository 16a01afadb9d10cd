"""Choose an implementation of the ops by name: CPU, CUDA or the PyTorch reference."""

from __future__ import annotations

import os
from typing import Final

import structlog
import torch

from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.cpu_program import CpuProgram
from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.cuda_build import CudaBuildError
from trunkline.kernels.library_attention import OWN, VARIABLE, prefill_of_environment, trial_problem
from trunkline.kernels.native import REINSTALL, NativeLibraryError, library
from trunkline.kernels.op_by_op import Collective, OpByOp, StepRunner
from trunkline.kernels.ops import Kernels, KvPool
from trunkline.kernels.program import Program
from trunkline.kernels.reference import ReferenceKernels

KERNEL_NAMES: Final = ("auto", "cpu", "cuda", "reference")
"""The names that `load_kernels` takes; "auto" is the fastest for the device."""

log = structlog.get_logger()


class KernelsUnavailableError(Exception):
    """The kernels asked for do not exist or cannot run here."""


def load_kernels(name: str, device: str, threads: int = 1, *, invariant: bool = False) -> Kernels:
    """Return the ops for a device.

    Args:
        name: one of `KERNEL_NAMES`. On a CPU "auto" falls back to the reference, with one warning, where the
            compiled kernels were not installed; on a GPU the reference runs only when it is asked for.
        device: "cpu" or "cuda".
        threads: Compute threads, for kernels that have threads of their own.
        invariant: Whether a row's results are to be the same bits whatever else is in the batch, where kernels can
            do that: those of the CPU.

    Raises:
        KernelsUnavailableError: an unknown name, kernels of another device, kernels that were asked for by name
            but not built, or ones that were built and cannot be used. (The slow ones must not pass for them.)
    """
    if name not in KERNEL_NAMES:
        raise KernelsUnavailableError(f"no kernels {name!r}; there are: {', '.join(KERNEL_NAMES)}")
    if name == "reference":
        return ReferenceKernels()
    if name not in ("auto", device):
        raise KernelsUnavailableError(f"kernels {name!r} do not run on device {device!r}")
    try:
        if device == "cuda":
            return cuda_kernels(torch.device("cuda"))
        if library() is not None:
            return CpuKernels(threads=threads, invariant=invariant)
        reason, remedy = "the compiled CPU kernels are not installed", REINSTALL
    except NativeLibraryError as error:
        raise KernelsUnavailableError(f"{error}; {error.remedy}, or use --kernels reference") from error
    except CudaBuildError as error:
        raise KernelsUnavailableError(
            f"the CUDA kernels cannot be used: {error}. For tests, --kernels reference runs slow ones in PyTorch"
        ) from error
    if name != "auto":
        raise KernelsUnavailableError(f"{reason}; {remedy}, or use --kernels reference")
    log.warning("slow reference kernels are used", reason=reason, remedy=remedy)
    return ReferenceKernels()


def cuda_kernels(device: torch.device) -> CudaKernels:
    """Return the ops for a GPU, which give large prompts to a library if a trial finds that it works there.

    Raises:
        CudaBuildError: As `CudaKernels`.
        NativeLibraryError: The environment asks for a library that there is not, or that does not work.
    """
    prefill = prefill_of_environment()
    kernels = CudaKernels(prefill=prefill)  # says first if there is no GPU at all
    problem = "" if prefill is None else trial_problem(prefill.library, device)
    if not problem:
        return kernels
    if asked := os.environ.get(VARIABLE):
        raise NativeLibraryError(f"{VARIABLE} is {asked!r}, but {problem}", f"unset {VARIABLE} or set it to {OWN}")
    log.warning("large prompts are computed by our own kernel, which takes longer", reason=problem)
    return CudaKernels()


def load_program(program: Program, kernels: Kernels, pool: KvPool, group: Collective) -> StepRunner:
    """Return what runs a program whose weights were packed for these kernels."""
    if isinstance(kernels, CpuKernels):
        return CpuProgram(program, kernels, pool, group)
    return OpByOp(program, kernels, pool, group)
