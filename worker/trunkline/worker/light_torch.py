"""Import torch without the module that describes what its ops would do with tensors that have no content.

Only tracing and compiling need that (`torch._meta_registrations`). To import it takes a fifth of the time that
torch takes, which is most of a worker's start. `worker/__main__.py` imports this file before everything that uses
torch. A later `import torch._meta_registrations` gets the real module. What torch's generators of random numbers
need of it takes another tenth; only trials on GPUs use them, so it is imported with the GPU (`device.py`).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Final

from trunkline.runtime.light_imports import other_modules

_TRACING: Final = "torch._meta_registrations"


def _import_torch() -> None:
    if "torch" not in sys.modules:
        with other_modules({_TRACING: ModuleType(_TRACING)}):
            importlib.import_module("torch")


def _import_without_gpu(name: str) -> None:
    """Import a module to which torch says meanwhile that there is no GPU, instead of asking the driver: a process
    that has asked it cannot make others by forking that use a GPU."""
    if name not in sys.modules:
        cuda = sys.modules["torch"].cuda
        is_available, cuda.is_available = cuda.is_available, lambda: False
        try:
            importlib.import_module(name)
        finally:
            cuda.is_available = is_available


_import_torch()
_import_without_gpu("tvm_ffi")
