"""The compiled library: how it is found and loaded, and its instruction-set levels.

CMake builds it when the package is installed (CMakeLists.txt). Without a compiler the package is installed without
it, and the reference kernels serve. The CUDA kernels use its planner of decode work as well (`plan`).
"""

from __future__ import annotations

import functools
import os
import weakref
from pathlib import Path
from typing import Any, Final

import tvm_ffi

import trunkline.kernels

ISA_LEVELS: Final = ("portable", "avx2", "avx512", "avx512bf16", "amx")
"""Names of the instruction-set levels, in the order of the library's numbers (`csrc/cpu/cpu_level.h`)."""
ISA_VARIABLE: Final = "TRUNKLINE_CPU_ISA"
"""Environment variable that forces a lower instruction-set level, for tests and for comparisons."""


LIBRARY_VARIABLE: Final = "TRUNKLINE_NATIVE_LIBRARY"
"""Environment variable with the path of another build of the library (sanitizers, development)."""


INTERFACE_VERSION: Final = 8
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
    """Return the instruction-set levels that are compiled and run on this machine, best first; none without the
    library."""
    module = library()
    if module is None:
        return ()
    return tuple(name for level, name in reversed(list(enumerate(ISA_LEVELS))) if module.cpu_runs(level))


def chosen_level(isa: str | None) -> int:
    """Return the number of the instruction-set level to use: the named one, else the environment's, else the best.

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
