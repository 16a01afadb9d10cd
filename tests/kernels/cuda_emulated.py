"""The CUDA kernels without a GPU, and with one: what the tests of `trunkline.kernels.cuda` run them on.

Emulated: the device code itself, compiled by the C++ compiler against an emulation of the few hardware operations
it uses (`cuda_emulation/`), behind the same C interface, on tensors in host memory. It finds wrong indices, wrong
fragments, missing barriers and waits, reads of what nobody wrote; it knows nothing of speed. Compiled with
sanitizers it also finds what is read or written outside of any tensor.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from watched import unwatched

from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.cuda_build import HEADERS, SOURCES
from trunkline.kernels.cuda_library import CudaLibrary
from trunkline.kernels.cuda_work import WORKSPACE_BYTES
from trunkline.kernels.library_attention import LibraryPrefill
from trunkline.kernels.ops import Kernels, KvPool, PackedLinear

EMULATION: Final = Path(__file__).parent / "cuda_emulation"
CACHE: Final = Path(__file__).parents[2] / ".cache" / "cuda_emulation"
CXX: Final = shutil.which("g++") or shutil.which("c++")
VARIABLE: Final = "TRUNKLINE_EMULATION_SANITIZED"
"""Environment variable of `make check-emulation`: not empty, the emulated kernels are compiled with sanitizers."""
# Stacks of emulated threads are switched by jumps, which the checks of local variables do not follow.
SANITIZERS: Final = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "--param", "asan-stack=0", "-g1"),
)
CHECKS: Final = SANITIZERS if os.environ.get(VARIABLE) else ()
COMPILING_S_MAX: Final = 1800
"""No test's timeout ends a compiler (`unwatched`), and a loaded machine needs minutes instead of seconds."""
FLAGS: Final = ("-std=c++20", "-O2", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", *CHECKS)

H200: Final = (3, 232448, 233472)
"""Processors (few, so that thread blocks do several units), shared memory per block and per processor."""
A100: Final = (2, 166912, 167936)
ADA: Final = (1, 101376, 102400)


def build_emulated(sources: Path = SOURCES) -> Path:
    """The kernels as a library for this CPU, built once per content of their sources."""
    digest = hashlib.blake2b(repr(FLAGS).encode(), digest_size=10)
    for folder in (sources, HEADERS, EMULATION):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest.update(path.name.encode() + path.read_bytes())
    library = CACHE / f"{digest.hexdigest()}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with unwatched(), (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes that test, one compiles
        if not library.exists():
            _build(sources, library)
    return library


def _build(sources: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        objects = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for source in [EMULATION / "emulation.cpp", *sorted(sources.glob("*.cu"))]:
                target = Path(scratch) / f"{source.stem}.o"
                command = [*FLAGS, "-I", str(EMULATION), "-x", "c++", "-c", str(source), "-o", str(target)]
                objects.append((str(target), pool.submit(_compile, command)))
        for _, done in objects:
            done.result()
        made = Path(scratch) / "library.so"
        _compile(["-shared", *CHECKS, "-o", str(made), *(target for target, _ in objects)])
        os.replace(made, library)


def _compile(arguments: list[str]) -> None:
    # Not the sanitizers' libraries, which may be loaded here.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([CXX or "c++", *arguments], check=True, env=environment, timeout=COMPILING_S_MAX)


@functools.cache
def emulated_library() -> CudaLibrary:
    return CudaLibrary(build_emulated())


def configure(device: tuple[int, int, int], seed: int) -> None:
    """Give the emulated device other limits, and its warps another order."""
    ctypes.CDLL(str(emulated_library().path)).emulation_configure(*device, seed)


def make_emulated(
    *,
    invariant: bool = False,
    share: bool = True,
    prefill: LibraryPrefill | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> CudaKernels:
    return CudaKernels(
        emulated_library(),
        lambda: 0,
        invariant=invariant,
        share=share,
        prefill=prefill,
        workspace_bytes=workspace_bytes,
    )


class OnGpu:
    """The kernels on a real GPU for tests that keep their tensors in host memory: every call copies in and out."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.name = kernels.name

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._kernels, name)
        if not callable(target):
            return target

        @functools.wraps(target)
        def call(*arguments: Any, **options: Any) -> Any:
            moved = [_to_gpu(argument) for argument in arguments]
            result = target(*moved, **{key: _to_gpu(value) for key, value in options.items()})
            for ours, theirs in zip(arguments, moved, strict=True):
                _copy_back(ours, theirs)
            return _to_host(result)

        return call


def _to_gpu(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.cuda()
    if isinstance(x, KvPool):
        return KvPool(x.data.cuda(), x.packed.cuda(), x.format)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_to_gpu(part) for part in x))
    return x


def _copy_back(ours: Any, theirs: Any) -> None:
    if isinstance(ours, Tensor):
        ours.copy_(theirs)
    elif isinstance(ours, KvPool):
        ours.data.copy_(theirs.data)


def _to_host(x: Any) -> Any:
    if isinstance(x, PackedLinear):
        return x
    return x.cpu() if isinstance(x, Tensor) else x


def make_gpu(*, invariant: bool = False, share: bool = True) -> Kernels:
    made: Any = OnGpu(CudaKernels(invariant=invariant, share=share))
    return made  # type: ignore[no-any-return]


def gpu_missing() -> str:
    """Why there is nothing to run on; empty if there is."""
    return "" if torch.cuda.is_available() else "torch finds no CUDA device; the device code ran emulated only"
