"""The C interface of the CUDA kernels (`csrc/cuda/api.h`) in Python.

Invariant: the structures here are those of the header. Their sizes are compared when a library is loaded.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from trunkline.kernels.cuda_build import CudaBuildError, library_path

DTYPE_NUMBERS: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ACTIVATION_NUMBERS: Final = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class CudaError(Exception):
    """A kernel could not be started."""


_Fields = list[tuple[str, Any]]


def _fields(kind: Any, names: str) -> _Fields:
    return [(name, kind) for name in names.split()]


class AttentionCall(ctypes.Structure):
    """One layer's attention over a work plan."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "q out pool work steps partial_acc partial_stats alibi_slopes inverse_frequencies"),
        *_fields(c_int64, "q_row_stride out_row_stride"),
        *_fields(c_int32, "dtype head_dim heads kv_heads chunk_size layers layer rotary_half window causal rows"),
        *_fields(c_int32, "tile_rows stages grid shared_bytes"),
        *_fields(c_float, "scale soft_cap"),
    ]


class AttentionShape(ctypes.Structure):
    """How attention is launched on a device."""

    _fields_: ClassVar[_Fields] = _fields(c_int32, "tile_rows tile_tokens stages shared_bytes grid is_matrix")


class WriteCall(ctypes.Structure):
    """The fused KV write."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "qkv pool slots cos sin q_weight k_weight"),
        *_fields(c_int32, "dtype angle_dtype tokens heads kv_heads head_dim chunk_size layers layer rotary_half"),
        ("eps", c_float),
    ]


class MoveCall(ctypes.Structure):
    """Copies of equal regions between strided arrays."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "source destination source_index destination_index"),
        *_fields(c_int64, "region_bytes source_stride_bytes destination_stride_bytes"),
        ("regions", c_int32),
    ]


class NormCall(ctypes.Structure):
    """RMS norm, with or without the addition of a residual."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "x residual weight out"),
        *_fields(c_int32, "dtype rows width"),
        ("eps", c_float),
    ]


_STRUCTURES: Final = (AttentionCall, AttentionShape, WriteCall, MoveCall, NormCall)
_ARGUMENTS: Final[dict[str, list[Any]]] = {
    "trunkline_set_device": [c_int32],
    "trunkline_attention_shape": [c_int32, c_int32, POINTER(AttentionShape)],
    "trunkline_attention": [POINTER(AttentionCall), c_void_p],
    "trunkline_add_steps": [c_void_p, c_int32, c_void_p],
    "trunkline_write_kv": [POINTER(WriteCall), c_void_p],
    "trunkline_copy_blocks": [c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p],
    "trunkline_move_regions": [POINTER(MoveCall), c_void_p],
    "trunkline_rms_norm": [POINTER(NormCall), c_void_p],
    "trunkline_gated_activation": [c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p],
}


class CudaLibrary:
    """A loaded library. `library.call("rms_norm", …)` runs `trunkline_rms_norm`."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CudaBuildError: The library cannot be loaded, or has another interface.
        """
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
            for name, types in _ARGUMENTS.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = types, c_int32
            self._library.trunkline_error_string.argtypes = [c_int32]
            self._library.trunkline_error_string.restype = c_char_p
            sizes = (c_int32 * len(_STRUCTURES))()
            self._library.trunkline_struct_bytes(sizes)
        except (OSError, AttributeError) as error:
            raise CudaBuildError(f"{path} cannot be loaded: {error}") from error
        if list(sizes) != [ctypes.sizeof(structure) for structure in _STRUCTURES]:
            raise CudaBuildError(f"{path} has another interface than this version of trunkline")
        self._functions = {name.removeprefix("trunkline_"): getattr(self._library, name) for name in _ARGUMENTS}

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library.

        Raises:
            CudaError: The function refused its arguments, or a launch failed.
        """
        error = self._functions[name](*arguments)
        if error:
            text = self._library.trunkline_error_string(error).decode()
            raise CudaError(f"{name} failed with CUDA error {error}: {text}")

    def attention_shape(self, dtype: torch.dtype, head_dim: int) -> AttentionShape:
        """Return how attention is launched for a type and head size; constant per device.

        Raises:
            CudaError: No kernel takes the head size (more than 256).
        """
        shape = AttentionShape()
        self.call("attention_shape", DTYPE_NUMBERS[dtype], head_dim, byref(shape))
        return shape


def library_of_device() -> CudaLibrary:
    """Return the library for the current device, after a check that it runs there.

    Raises:
        CudaBuildError: There is no device or no library for it, or the driver does not take the library.
    """
    if not torch.cuda.is_available():
        raise CudaBuildError("torch finds no CUDA device here")
    library = _library_for(torch.cuda.get_device_capability())
    try:
        library.call("set_device", torch.cuda.current_device())
        library.attention_shape(torch.bfloat16, 128)  # the first to load kernels
    except CudaError as error:
        raise CudaBuildError(f"{library.path} does not run here, perhaps for an old driver: {error}") from error
    return library


@functools.cache
def _library_for(capability: tuple[int, int]) -> CudaLibrary:
    return CudaLibrary(library_path(capability))
