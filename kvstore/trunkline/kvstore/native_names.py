"""The compiled form of `trunkline.kvstore.chunks.chain`: how its library is found and called.

CMake builds the library when the package is installed (CMakeLists.txt). It has a C interface and nothing else in
it, so that a router loads it in less than a millisecond. Where it is missing, or the machine lacks what it was
compiled for, `chain` hashes in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import trunkline

WriteNames = Callable[[bytes, bytes, int, bytes, int, int, int], None]
"""`trunkline_write_names` in `csrc/names/names.cc`. Its last argument is the address of the names to write."""


def _load() -> WriteNames | None:
    for folder in trunkline.__path__:  # an editable install has the library elsewhere than the sources
        try:
            # It holds the interpreter's lock: to give it away and take it back costs more than most chains.
            library = ctypes.PyDLL(f"{folder}/kvstore/_names.so")
            runs_here, write = library.trunkline_names_run_here, library.trunkline_write_names
        except (OSError, AttributeError):
            continue
        if runs_here():
            data, size = ctypes.c_char_p, ctypes.c_int64
            write.argtypes = (data, data, size, data, size, size, ctypes.c_void_p)
            write.restype = None
            return write
    return None


write_names: Final = _load()
"""None: there is no library that runs here."""
