"""The compiled library: how it is found and loaded, its instruction-set levels, and the planner of decode work.

CMake builds it when the package is installed (CMakeLists.txt). Without a compiler the package is installed without
it, and the reference kernels serve. The CUDA kernels use the planner as well.
"""

from __future__ import annotations

import functools
import operator
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import tvm_ffi
from torch import Tensor

import trunkline.kernels
from trunkline.kernels.plan import DecodePlan

ISA_LEVELS: Final = ("portable", "avx2", "avx512", "avx512bf16")
"""Names of the levels, in the order of the library's numbers (`csrc/cpu/cpu_level.h`)."""
ISA_VARIABLE: Final = "TRUNKLINE_CPU_ISA"
"""Environment variable that forces a lower level, for tests and for comparisons."""


LIBRARY_VARIABLE: Final = "TRUNKLINE_NATIVE_LIBRARY"
"""Environment variable with the path of another build of the library (sanitizers, development)."""


INTERFACE_VERSION: Final = 3
"""The version that a library of these sources reports (`interface_version` in `csrc/cpu/module.cc`)."""

REINSTALL: Final = "reinstall trunkline where a C++20 compiler is"


class NativeLibraryError(Exception):
    """The compiled library is missing or unusable, or lacks what was asked for.

    Attributes:
        remedy: What the user can do: an imperative without a full stop.
    """

    def __init__(self, message: str, remedy: str = REINSTALL) -> None:
        super().__init__(message)
        self.remedy = remedy


@functools.cache
def library() -> Any:
    """Return the loaded library (a `tvm_ffi.Module`); None if it was not built.

    Raises:
        NativeLibraryError: The library exists, or the environment names it, but it cannot be used.
    """
    path = _library_path()
    if path is None:
        return None
    forced = os.environ.get(LIBRARY_VARIABLE)
    remedy = f"correct or unset {LIBRARY_VARIABLE}" if forced else REINSTALL
    if not path.exists():
        raise NativeLibraryError(f"{path} does not exist", remedy)
    try:
        module = tvm_ffi.load_module(str(path))
    except (OSError, RuntimeError) as error:
        raise NativeLibraryError(f"{path} cannot be loaded: {error}", remedy) from error
    try:
        version = module.interface_version()
    except AttributeError:
        version = 0
    if version != INTERFACE_VERSION:
        raise NativeLibraryError(f"{path} was built from other sources", remedy)
    return module


def _library_path() -> Path | None:
    """Return the path of the library, which an editable install has elsewhere; None if it does not exist."""
    forced = os.environ.get(LIBRARY_VARIABLE)
    if forced:
        return Path(forced)
    folders = [Path(__file__).parent, *(Path(folder) for folder in trunkline.kernels.__path__)]
    candidates = (folder / "_native.so" for folder in folders)
    return next((path for path in candidates if path.exists()), None)


def isa_levels() -> tuple[str, ...]:
    """Return the levels that run on this machine, best first; none without the library."""
    module = library()
    return () if module is None else ISA_LEVELS[module.cpu_level() :: -1]


def chosen_level(isa: str | None) -> int:
    """Return the number of the level to use: the one named, else the environment's, else the best.

    Raises:
        NativeLibraryError: There is no library, or the level does not exist or does not run here.
    """
    levels = isa_levels()
    if not levels:
        raise NativeLibraryError("the compiled CPU kernels are not installed")
    wanted = isa or os.environ.get(ISA_VARIABLE) or levels[0]
    if wanted not in levels:
        remedy = "choose one of these" if isa else f"correct or unset {ISA_VARIABLE}"
        raise NativeLibraryError(f"CPU level {wanted!r} does not run here; there are: {', '.join(levels)}", remedy)
    return ISA_LEVELS.index(wanted)


class NativeContext:
    """A `CpuContext` of the library: a level, threads, scratch memory.

    Code that calls the library with `handle` must hold this object: without references the context is deleted.
    """

    def __init__(self, isa: str | None, threads: int) -> None:
        """
        Args:
            isa: As for `chosen_level`.
            threads: Threads that share the work of each op, the caller's included.

        Raises:
            NativeLibraryError: There is no library, the level does not run here, or threads cannot be started.
            ValueError: Fewer than one thread, or more than 1024.
        """
        self.level = chosen_level(isa)
        module = library()
        try:
            self.handle: int = module.cpu_context_new(self.level, threads)
        except RuntimeError as error:
            raise NativeLibraryError(str(error), "use fewer threads") from error
        weakref.finalize(self, module.cpu_context_delete, self.handle)


@dataclass(frozen=True)
class WorkOptions:
    """How a decode plan is cut into pieces; `WorkOptions` in `csrc/common/work_plan.h` documents the fields."""

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


_option_values = operator.attrgetter(*WorkOptions.__dataclass_fields__)


def plan_decode_work(plan: DecodePlan, options: WorkOptions) -> Tensor:
    """Cut a decode plan into pieces of work (`csrc/common/work_plan.h`).

    Returns:
        int32 words, the buffer that `WorkView` reads.

    Raises:
        ValueError: Items contradict each other.
        NativeLibraryError: The library is not installed.
    """
    module = library()
    if module is None:
        raise NativeLibraryError("the compiled CPU kernels, which hold the planner, are not installed")
    items, entries, rows = len(plan.block), len(plan.rows), len(plan.query_position)
    if not len(plan.first) == len(plan.count) == len(plan.base) == len(plan.row_indptr) - 1 == items:
        raise ValueError("block, first, count and base must be equally long, row_indptr longer by one")
    if not len(plan.shifts) == entries == plan.row_indptr[-1]:
        raise ValueError("rows and shifts must be as long as row_indptr says")
    if len(plan.tail_item) != rows:
        raise ValueError("tail_item and query_position must be equally long")
    # All arrays in one tensor: passing a tensor costs as much as planning a row.
    arrays = (plan.block, plan.first, plan.count, plan.base, plan.row_indptr, plan.rows, plan.shifts)
    words = torch.from_numpy(np.concatenate((*arrays, plan.tail_item, plan.query_position), dtype=np.int32))
    sizes = [items, entries, rows, plan.shared_items]
    made = module.plan_work(words, [*sizes, *map(int, _option_values(options))])
    return torch.from_numpy(np.from_dlpack(made))
