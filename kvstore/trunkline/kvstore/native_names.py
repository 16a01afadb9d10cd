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
"""`trunkline_chain_names` in `csrc/names/names.cc`. Its last argument is the address of the names to write."""
_NEWEST: Final = "trunkline_chain_names"
"""What a library that was built from other sources lacks."""


def _load() -> ctypes.PyDLL | None:
    for folder in trunkline.__path__:  # an editable install has the library elsewhere than the sources
        try:
            # It holds the interpreter's lock: to give it away and take it back costs more than most chains.
            found = ctypes.PyDLL(f"{folder}/kvstore/_names.so")
        except OSError:
            continue
        if hasattr(found, _NEWEST) and found.trunkline_names_run_here():
            return found
    return None


def _name_writer() -> WriteNames | None:
    if library is None:
        return None
    data, size = ctypes.c_char_p, ctypes.c_int64
    write: WriteNames = library.trunkline_chain_names
    library.trunkline_chain_names.argtypes = (data, data, size, data, size, size, ctypes.c_void_p)
    library.trunkline_chain_names.restype = None
    return write


library: Final = _load()
"""The library; None: there is none that runs here. It has the table of `router.routing.native_table` and what
indexes texts for `controller.drafts.text_index`, too."""
write_names: Final = _name_writer()
"""None: there is no library."""
