"""Find the NVIDIA GPUs that this process can see, without torch.

The driver's library answers through ctypes, in milliseconds; to import torch would take seconds. Like every CUDA
program it respects `CUDA_VISIBLE_DEVICES`, so index i here is `cuda:i` of a worker with the same environment.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LIBRARY: Final = "libcuda.so.1"
"""Part of the driver, not of the CUDA toolkit: where it is missing, no CUDA program runs."""
_NO_DEVICE: Final = 100
"""`CUDA_ERROR_NO_DEVICE`: there is none, or `CUDA_VISIBLE_DEVICES` hides all."""
_NAME_BYTES: Final = 256
_TORCH_CUDA: Final = re.compile(r"^cuda\b[^=]*=\s*(.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Gpu:
    """A GPU, as the driver describes it."""

    name: str
    memory_bytes: int
    """In total, used or free."""


@dataclass(frozen=True)
class Gpus:
    """All GPUs that this process can see, in the order of their indices."""

    devices: tuple[Gpu, ...] = ()
    problem: str = ""
    """Why no GPU can be used although a driver is installed; "": there is no such problem."""

    @property
    def count(self) -> int:
        """How many GPUs workers can use."""
        return len(self.devices)


class _DriverError(Exception):
    """A call of the driver failed; the text is the driver's own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def look() -> Gpus:
    """Ask the driver for the GPUs that workers can use. Without a driver there are none."""
    found = ask_driver(LIBRARY)
    if found.devices and not _torch_has_cuda():
        return Gpus(problem="the installed torch is built for CPUs only; install a build of torch for CUDA")
    return found


def ask_driver(library: str) -> Gpus:
    """Ask a driver's library, whatever torch can do.

    Args:
        library: name or path of the shared library.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return Gpus()
    try:
        _call(driver, "cuInit", 0)
        count = ctypes.c_int()
        _call(driver, "cuDeviceGetCount", ctypes.byref(count))
        return Gpus(tuple(_describe(driver, index) for index in range(count.value)))
    except _DriverError as error:
        return Gpus() if error.code == _NO_DEVICE else Gpus(problem=str(error))
    except AttributeError as error:  # a library that lacks a function is not this driver
        return Gpus(problem=f"{library}: {error}")


def _describe(driver: ctypes.CDLL, index: int) -> Gpu:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    _call(driver, "cuDeviceGet", ctypes.byref(device), index)
    _call(driver, "cuDeviceGetName", name, _NAME_BYTES, device)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    return Gpu(name.value.decode(errors="replace"), memory.value)


def _call(driver: ctypes.CDLL, function: str, *arguments: object) -> None:
    """Call a function of the driver.

    Raises:
        _DriverError: It failed; with the number and the text of the driver's error.
    """
    code = int(getattr(driver, function)(*arguments))
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        said = (text.value or b"unknown error").decode(errors="replace")
        raise _DriverError(code, f"CUDA error {code} of {function}: {said}")


def _torch_has_cuda() -> bool:
    """Return whether the installed torch was built for CUDA, by its version file; True if that is not known."""
    found = importlib.util.find_spec("torch")
    for folder in (found and found.submodule_search_locations) or ():
        try:
            match = _TORCH_CUDA.search((Path(folder) / "version.py").read_text())
        except OSError:
            continue
        if match is not None:
            return match[1] != "None"
    return True
