"""The compiled library: finding and loading it, the levels it has, and the planner that CPU and CUDA share.

Built by CMake when the package is installed (CMakeLists.txt); without a compiler the package installs without
it, and the reference kernels serve.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import tvm_ffi
from torch import Tensor
from torch.utils.dlpack import from_dlpack

import trunkline.kernels
from trunkline.kernels.plan import DecodePlan

ISA_LEVELS: Final = ("portable", "avx2", "avx512", "avx512bf16")
"""By the number that the library uses (`csrc/cpu/cpu_level.h`)."""
ISA_VARIABLE: Final = "TRUNKLINE_CPU_ISA"
"""Environment variable that forces a lower level, for tests and for comparisons."""


LIBRARY_VARIABLE: Final = "TRUNKLINE_NATIVE_LIBRARY"
"""Environment variable with the path of another build of the library (sanitizers, development)."""


class NativeLibraryError(Exception):
    """The compiled library is missing or unusable, or a level was asked for that does not run here."""


@functools.cache
def library() -> Any:
    """The loaded library (a `tvm_ffi.Module`), None if it was not built.

    Raises:
        NativeLibraryError: it is there but cannot be loaded.
    """
    path = _library_path()
    if path is None:
        return None
    try:
        return tvm_ffi.load_module(str(path))
    except (OSError, RuntimeError) as error:
        raise NativeLibraryError(f"{path} cannot be loaded: {error}") from error


def _library_path() -> Path | None:
    """Beside this file in a wheel; in an editable install, where the installer put the compiled part."""
    forced = os.environ.get(LIBRARY_VARIABLE)
    if forced:
        return Path(forced)
    folders = [Path(__file__).parent, *(Path(folder) for folder in trunkline.kernels.__path__)]
    candidates = (folder / "_native.so" for folder in folders)
    return next((path for path in candidates if path.exists()), None)


def isa_levels() -> tuple[str, ...]:
    """The levels that run on this machine, best first; none without the library."""
    module = library()
    return () if module is None else ISA_LEVELS[module.cpu_level() :: -1]


def chosen_level(isa: str | None) -> int:
    """The number of the level to use: the one named, else the environment's, else the best.

    Raises:
        NativeLibraryError: no library, or a level that does not exist or does not run here.
    """
    levels = isa_levels()
    if not levels:
        raise NativeLibraryError("the compiled CPU kernels are not installed")
    wanted = isa or os.environ.get(ISA_VARIABLE) or levels[0]
    if wanted not in levels:
        raise NativeLibraryError(f"CPU level {wanted!r} does not run here; there are: {', '.join(levels)}")
    return ISA_LEVELS.index(wanted)


@dataclass(frozen=True)
class WorkOptions:
    """As `WorkOptions` in `csrc/common/work_plan.h`, which documents the fields."""

    kv_heads: int
    group: int
    kv_token_bytes: int
    partial_bytes: int
    tile_rows: int = 0
    workers: int = 1
    pieces_per_worker: int = 4
    piece_tokens_min: int = 64
    invariant_tokens: int = 0
    share: bool = True
    vectors_per_read: int = 16


def plan_decode_work(plan: DecodePlan, options: WorkOptions) -> Tensor:
    """Cut a decode plan into pieces of work (`csrc/common/work_plan.h`).

    Returns:
        int32 words, the buffer that `WorkView` reads.

    Raises:
        ValueError: items that contradict each other.
        NativeLibraryError: the library is not installed.
    """
    module = library()
    if module is None:
        raise NativeLibraryError("the compiled CPU kernels, which hold the planner, are not installed")
    arrays = (plan.block, plan.first, plan.count, plan.base, plan.row_indptr, plan.rows, plan.shifts)
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in (*arrays, plan.tail_item, plan.query_position)]
    values = [int(getattr(options, name)) for name in WorkOptions.__dataclass_fields__]
    words: Tensor = from_dlpack(module.plan_work(*tensors, plan.shared_items, values))
    return words
