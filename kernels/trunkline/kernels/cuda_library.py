"""The C interface of the CUDA kernels (`csrc/cuda/api.h`) in Python, and the checks of arguments before a call.

Invariants: the structures here are those of the header (their sizes are compared when a library is loaded); a call
that is refused has written nothing and enqueued nothing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from trunkline.kernels.cuda_build import CudaBuildError, library_path
from trunkline.kernels.ops import AttentionSpec, KvPool
from trunkline.kernels.plan import WritePlan
from trunkline.kvstore.chunks import Int32Array

DTYPE_NUMBERS: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
KV_NUMBERS: Final = {"int8": 3, "fp8": 4}
"""Types of 8 bits in which KV may be kept; rows end with their scale (`trunkline.kernels.quantised_kv`)."""
ACTIVATION_NUMBERS: Final = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class CudaError(Exception):
    """A kernel could not be started."""


_Fields = list[tuple[str, Any]]


def _fields(kind: Any, names: str) -> _Fields:
    return [(name, kind) for name in names.split()]


class AttentionCall(ctypes.Structure):
    """The arguments of one layer's attention over a work plan."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "q out pool work steps partial_acc partial_stats alibi_slopes inverse_frequencies"),
        *_fields(c_int64, "q_row_stride out_row_stride"),
        *_fields(c_int32, "dtype kv_dtype head_dim heads kv_heads chunk_size layers layer rotary_half window"),
        *_fields(c_int32, "causal rows tile_rows stages narrow_stages grid shared_bytes plan_is_there"),
        *_fields(c_float, "scale soft_cap"),
    ]


class AttentionShape(ctypes.Structure):
    """The numbers by which attention is launched on a device."""

    _fields_: ClassVar[_Fields] = _fields(
        c_int32, "tile_rows tile_tokens stages narrow_rows narrow_stages shared_bytes grid is_matrix"
    )


class WriteCall(ctypes.Structure):
    """The arguments of the fused KV write."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "qkv pool slots cos sin q_weight k_weight"),
        *_fields(c_int32, "dtype kv_dtype angle_dtype tokens heads kv_heads head_dim chunk_size layers layer"),
        *_fields(c_int32, "rotary_half"),
        ("eps", c_float),
    ]


class MoveCall(ctypes.Structure):
    """The arguments of copies of equal regions between strided arrays."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "source destination source_index destination_index"),
        *_fields(c_int64, "region_bytes source_stride_bytes destination_stride_bytes"),
        *_fields(c_int32, "regions blocks_max"),
    ]


class NormCall(ctypes.Structure):
    """The arguments of an RMS norm, with or without the addition of a residual."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "x residual weight out"),
        *_fields(c_int32, "dtype rows width"),
        ("eps", c_float),
    ]


class DrawCall(ctypes.Structure):
    """The arguments of drawing a token from each row of logits."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "logits seeds output_index top_k temperature top_p log_min_p out scratch"),
        ("row_stride", c_int64),
        *_fields(c_int32, "rows vocab_size limited"),
    ]


class EditCall(ctypes.Structure):
    """The arguments of a change of logits in place: biases, masks, or penalties."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "logits rows tokens values words indptr counts"),
        ("row_stride", c_int64),
        *_fields(c_int32, "n vocab_size"),
    ]


class StepRowsCall(ctypes.Structure):
    """The arguments of the first and the last node of a decode step in a graph."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "work steps table ids positions slots seeds output_index top_k factors drawn tokens"),
        *_fields(c_int32, "rows places chunk_size"),
    ]


class Float8Call(ctypes.Structure):
    """The arguments of rounding rows to floats of 8 bits."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "x codes factor"),
        *_fields(c_int32, "dtype rows padded width group"),
    ]


class GroupedCall(ctypes.Structure):
    """The arguments of products of sorted rows with one of several matrices each."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "x weights scale stops out"),
        *_fields(c_int32, "dtype out_dtype weight_type rows width outputs matrices group"),
    ]


class GatherCall(ctypes.Structure):
    """The arguments of gathering keys and values of ranges of tokens."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "pool ranges out"),
        *_fields(c_int32, "dtype kv_dtype count tokens chunk_size layers layer kv_heads head_dim"),
    ]


class JoinCall(ctypes.Structure):
    """The arguments of joining attention over two parts of the keys."""

    _fields_: ClassVar[_Fields] = [
        *_fields(c_void_p, "a b out a_lse b_lse out_lse"),
        *_fields(c_int64, "a_row_stride a_head_stride b_row_stride b_head_stride out_row_stride out_head_stride"),
        *_fields(c_int32, "a_dtype b_dtype out_dtype rows heads head_dim"),
    ]


_STRUCTURES: Final = (
    AttentionCall,
    AttentionShape,
    WriteCall,
    MoveCall,
    NormCall,
    DrawCall,
    EditCall,
    StepRowsCall,
    Float8Call,
    GroupedCall,
    GatherCall,
    JoinCall,
)
_ARGUMENTS: Final[dict[str, list[Any]]] = {
    "trunkline_set_device": [c_int32],
    "trunkline_attention_shape": [c_int32, c_int32, c_int32, POINTER(AttentionShape)],
    "trunkline_attention": [POINTER(AttentionCall), c_void_p],
    "trunkline_add_steps": [c_void_p, c_int32, c_void_p],
    "trunkline_patch_words": [c_void_p, c_void_p, c_int32, c_void_p],
    "trunkline_begin_rows": [POINTER(StepRowsCall), c_void_p],
    "trunkline_end_rows": [POINTER(StepRowsCall), c_void_p],
    "trunkline_write_kv": [POINTER(WriteCall), c_void_p],
    "trunkline_copy_blocks": [c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p],
    "trunkline_gather_rows": [POINTER(GatherCall), c_void_p],
    "trunkline_join_parts": [POINTER(JoinCall), c_void_p],
    "trunkline_move_regions": [POINTER(MoveCall), c_void_p],
    "trunkline_rms_norm": [POINTER(NormCall), c_void_p],
    "trunkline_gated_activation": [c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p],
    "trunkline_round_float8": [POINTER(Float8Call), c_void_p],
    "trunkline_grouped_products": [POINTER(GroupedCall), c_void_p],
    "trunkline_draw_scratch_bytes": [c_int32, c_int32, POINTER(c_int64)],
    "trunkline_draw": [POINTER(DrawCall), c_void_p],
    "trunkline_add_biases": [POINTER(EditCall), c_void_p],
    "trunkline_mask_logits": [POINTER(EditCall), c_void_p],
    "trunkline_penalise": [POINTER(EditCall), c_void_p],
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

    def attention_shape(self, dtype: torch.dtype, head_dim: int, kv_dtype: str = "auto") -> AttentionShape:
        """Return how attention is launched for types and a head size; constant per device.

        Args:
            dtype: Of queries and results.
            kv_dtype: In which KV is kept; "auto": `dtype`.

        Raises:
            CudaError: No kernel takes the head size (more than 256).
        """
        shape, number = AttentionShape(), DTYPE_NUMBERS[dtype]
        self.call("attention_shape", number, KV_NUMBERS.get(kv_dtype, number), head_dim, byref(shape))
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


ALIGNMENT: Final = 16
"""Alignment in bytes of all data that kernels read in 16-byte units."""


def kept_type(pool: KvPool) -> str:
    """Return the type of 8 bits in which KV is kept; "auto": that in which it is computed."""
    return pool.format.row[0].dtype if pool.format.is_quantised else "auto"


def kv_numbers(pool: KvPool) -> tuple[int, int]:
    """Return the numbers of the type in which KV is computed, and of that in which it is kept."""
    computed = DTYPE_NUMBERS[pool.computed]
    return computed, KV_NUMBERS.get(kept_type(pool), computed)


def check_pool(pool: KvPool, chunk_size: int) -> None:
    """Check the pool's memory, and that a plan is for its block size."""
    data = pool.data
    if pool.computed not in DTYPE_NUMBERS:
        raise ValueError(f"KV of type {pool.format.computed}; the CUDA kernels take float32, float16, bfloat16")
    if not data.is_contiguous() or data.data_ptr() % ALIGNMENT:
        raise ValueError(f"the KV pool must be contiguous and aligned to {ALIGNMENT} bytes")
    if chunk_size != pool.chunk_size:
        raise ValueError(
            f"the plan is for blocks of {chunk_size} tokens, the pool has blocks of {pool.chunk_size}"
        )


def check_heads(pool: KvPool, layer: int, spec: AttentionSpec) -> None:
    """Check that a pool has such heads in such a layer."""
    shape, form = pool.data.shape, pool.format
    if len(form.bands) != 2 or form.heads != spec.kv_heads or form.row[0].count != spec.head_dim:
        raise ValueError(f"a pool of shape {tuple(shape)} does not fit {spec.kv_heads} x {spec.head_dim}")
    if not 0 <= layer < shape[1]:
        raise ValueError(f"layer {layer}: the pool has {shape[1]}")


def check_rules(spec: AttentionSpec) -> None:
    """Refuse what attention on GPUs does not do."""
    if spec.sinks is not None:
        raise ValueError(
            "attention with sinks is not computed by the CUDA kernels; there are kernels for CPUs only"
        )
    if spec.span:
        raise ValueError(
            "attention within parts of the positions is not computed by the CUDA kernels; there are kernels for "
            "CPUs only"
        )


def check_items(pool: KvPool, last_block: int) -> None:
    """Check that a plan reads blocks of the pool only. `last_block`: the largest that it reads."""
    if last_block >= pool.blocks:
        raise ValueError(f"the plan reads block {last_block}: the pool has {pool.blocks} blocks")


def check_queries(name: str, x: Tensor, pool: KvPool, spec: AttentionSpec, needs: tuple[int, bool]) -> None:
    """Check queries or results of attention; `needs`: rows, and whether they must be aligned."""
    rows, aligned = needs
    if x.dtype != pool.computed:
        raise ValueError(f"{name} is {x.dtype}, but the KV pool is of {pool.format.name}")
    if x.shape[1:] != (spec.heads, spec.head_dim) or x.stride()[1:] != (spec.head_dim, 1):
        raise ValueError(f"{name} of shape {tuple(x.shape)}, strides {x.stride()}: heads must be dense")
    if x.shape[0] < rows:
        raise ValueError(f"{name} has {x.shape[0]} rows, the plan {rows}")
    if aligned and (x.data_ptr() % ALIGNMENT or x.stride(0) * x.element_size() % ALIGNMENT):
        raise ValueError(f"rows of {name} must be aligned to {ALIGNMENT} bytes")


def check_shifts(has_shifts: bool, spec: AttentionSpec) -> None:
    """Check that KV of a layer can act at other positions if a plan has shifts."""
    if has_shifts and spec.inverse_frequencies is None and spec.alibi_slopes is None:
        raise ValueError("a shift needs rotary positions or ALiBi; this layer's attention has neither")


def check_slots(plan: WritePlan, pool: KvPool) -> None:
    """Check that tokens are written to slots of the pool only."""
    slots, end = plan.slots, pool.blocks * pool.chunk_size
    if slots.dtype != "int32" or slots.ndim != 1:
        raise ValueError(f"slots must be int32 [tokens], not {slots.dtype} {list(slots.shape)}")
    if len(slots) and not (int(slots.min()) >= -1 and int(slots.max()) < end):
        raise ValueError(f"slots {int(slots.min())} to {int(slots.max())}: the pool has {end}")


def check_written(plan: WritePlan, qkv: Tensor, pool: KvPool, spec: AttentionSpec) -> None:
    """Check queries, keys and values of new tokens."""
    if qkv.dtype != pool.computed or not qkv.is_contiguous():
        raise ValueError(f"qkv must be contiguous and {pool.format.computed} like the pool, not {qkv.dtype}")
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    if qkv[0:1].numel() != (width if len(qkv) else 0):
        raise ValueError(f"qkv of shape {tuple(qkv.shape)}: a token has {width} elements")
    if len(plan.slots) != len(qkv):
        raise ValueError(f"{len(plan.slots)} slots for {len(qkv)} tokens")


def check_blocks(pool: KvPool, blocks: Int32Array, layers: range) -> None:
    """Check which layers of which blocks are moved."""
    check_pool(pool, pool.chunk_size)
    if len(blocks) and not (int(blocks.min()) >= 0 and int(blocks.max()) < pool.blocks):
        raise ValueError(f"blocks {int(blocks.min())} to {int(blocks.max())}: the pool has {pool.blocks} blocks")
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= pool.data.shape[1]:
        raise ValueError(f"layers {layers}: the pool has {pool.data.shape[1]}, moved in order")


def check_moved(pool: KvPool, blocks: Int32Array, layers: range, moved: Tensor) -> None:
    """Check a gather or a scatter of some layers of some blocks."""
    check_blocks(pool, blocks, layers)
    expected = (len(blocks), len(layers), *pool.data.shape[2:])
    if tuple(moved.shape) != expected or moved.dtype != pool.data.dtype:
        raise ValueError(
            f"layers of blocks are {pool.data.dtype} {expected}, not {moved.dtype} {tuple(moved.shape)}"
        )


def check_slot_move(pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array) -> None:
    """Check a move of some layers of some blocks to or from slots of host memory."""
    data = pool.data
    check_blocks(pool, blocks, layers)
    if host.dtype != data.dtype or host.shape[1:] != data.shape[1:]:
        raise ValueError(
            f"slots are {data.dtype} {tuple(data.shape[1:])}, not {host.dtype} {tuple(host.shape[1:])}"
        )
    if len(slots) != len(blocks) or (len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < len(host)):
        raise ValueError(f"{len(slots)} slots for {len(blocks)} blocks, of {len(host)} slots")


STAGING_BYTES: Final = 64 << 20
"""Largest number of bytes that are staged at once; a single larger piece is staged whole."""
TIER_BLOCKS: Final = 32
"""Thread blocks that copy between the pool and host memory. They keep 512 KiB under way, several times what a PCIe
or NVLink-C2C link needs, and leave most processors to the computation."""


def reaches(pool: KvPool, host: Tensor) -> bool:
    """Return whether a kernel can read and write this host memory by itself."""
    return host.is_contiguous() and (host.device == pool.data.device or host.is_pinned())


def layer_bytes(pool: KvPool) -> int:
    """Return the bytes of one layer of one block."""
    return pool.format.layer_bytes


def block_bytes(pool: KvPool) -> int:
    """Return the bytes of all layers of one block."""
    return pool.format.chunk_bytes


def staged(pool: KvPool, count: int, layers: range) -> Iterator[tuple[int, int]]:
    """Yield ranges of `count` blocks whose layers are staged at once."""
    size = max(1, STAGING_BYTES // (len(layers) * layer_bytes(pool)))
    yield from ((start, min(start + size, count)) for start in range(0, count, size))
