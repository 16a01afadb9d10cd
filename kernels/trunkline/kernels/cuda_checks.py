"""Checks of the CUDA kernels' arguments, on the host before anything is enqueued.

Invariant: a call that is refused has written nothing and enqueued nothing.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from trunkline.kernels.cuda_library import DTYPE_NUMBERS
from trunkline.kernels.ops import AttentionSpec, KvPool
from trunkline.kernels.plan import WritePlan
from trunkline.kvstore.chunks import Int32Array

ALIGNMENT: Final = 16
"""Alignment in bytes of all data that kernels read in 16-byte units."""


def check_pool(pool: KvPool, chunk_size: int) -> None:
    """Check the pool's memory, and that a plan is for its block size."""
    data = pool.data
    if data.dtype not in DTYPE_NUMBERS:
        raise ValueError(f"KV of type {data.dtype}; the CUDA kernels take float32, float16, bfloat16")
    if not data.is_contiguous() or data.data_ptr() % ALIGNMENT:
        raise ValueError(f"the KV pool must be contiguous and aligned to {ALIGNMENT} bytes")
    if chunk_size != pool.chunk_size:
        raise ValueError(
            f"the plan is for blocks of {chunk_size} tokens, the pool has blocks of {pool.chunk_size}"
        )


def check_heads(pool: KvPool, layer: int, spec: AttentionSpec) -> None:
    shape = pool.data.shape
    if shape[3] != spec.kv_heads or shape[5] != spec.head_dim:
        raise ValueError(f"a pool of shape {tuple(shape)} does not fit {spec.kv_heads} x {spec.head_dim}")
    if not 0 <= layer < shape[1]:
        raise ValueError(f"layer {layer}: the pool has {shape[1]}")


def check_items(pool: KvPool, last_block: int) -> None:
    if last_block >= pool.blocks:
        raise ValueError(f"the plan reads block {last_block}: the pool has {pool.blocks} blocks")


def check_queries(name: str, x: Tensor, pool: KvPool, spec: AttentionSpec, needs: tuple[int, bool]) -> None:
    """Check queries or results of attention; `needs`: rows, and whether they must be aligned."""
    rows, aligned = needs
    if x.dtype != pool.data.dtype:
        raise ValueError(f"{name} is {x.dtype}, but the KV pool is {pool.data.dtype}")
    if x.shape[1:] != (spec.heads, spec.head_dim) or x.stride()[1:] != (spec.head_dim, 1):
        raise ValueError(f"{name} of shape {tuple(x.shape)}, strides {x.stride()}: heads must be dense")
    if x.shape[0] < rows:
        raise ValueError(f"{name} has {x.shape[0]} rows, the plan {rows}")
    if aligned and (x.data_ptr() % ALIGNMENT or x.stride(0) * x.element_size() % ALIGNMENT):
        raise ValueError(f"rows of {name} must be aligned to {ALIGNMENT} bytes")


def check_shifts(has_shifts: bool, spec: AttentionSpec) -> None:
    if has_shifts and spec.inverse_frequencies is None and spec.alibi_slopes is None:
        raise ValueError("a shift needs rotary positions or ALiBi; this layer's attention has neither")


def check_slots(plan: WritePlan, pool: KvPool) -> None:
    slots, end = plan.slots, pool.blocks * pool.chunk_size
    if slots.dtype != "int32" or slots.ndim != 1:
        raise ValueError(f"slots must be int32 [tokens], not {slots.dtype} {list(slots.shape)}")
    if len(slots) and not (int(slots.min()) >= -1 and int(slots.max()) < end):
        raise ValueError(f"slots {int(slots.min())} to {int(slots.max())}: the pool has {end}")


def check_written(plan: WritePlan, qkv: Tensor, pool: KvPool, spec: AttentionSpec) -> None:
    """Check queries, keys and values of new tokens."""
    if qkv.dtype != pool.data.dtype or not qkv.is_contiguous():
        raise ValueError(f"qkv must be contiguous and {pool.data.dtype} like the pool, not {qkv.dtype}")
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    if qkv[0:1].numel() != (width if len(qkv) else 0):
        raise ValueError(f"qkv of shape {tuple(qkv.shape)}: a token has {width} elements")
    if len(plan.slots) != len(qkv):
        raise ValueError(f"{len(plan.slots)} slots for {len(qkv)} tokens")


def check_copies(pool: KvPool, copies: Int32Array) -> None:
    blocks, chunk_size = pool.blocks, pool.chunk_size
    for source, destination, first, count in copies.tolist():
        if not (0 <= source < blocks and 0 <= destination < blocks):
            raise ValueError(f"copy of block {source} to {destination}: the pool has {blocks} blocks")
        if not (first >= 0 and count > 0 and first + count <= chunk_size):
            raise ValueError(f"copy of tokens [{first}, {first + count}): a block has {chunk_size}")


def check_moved(pool: KvPool, blocks: Int32Array, layers: range, moved: Tensor) -> None:
    """Check a gather or a scatter of some layers of some blocks."""
    check_pool(pool, pool.chunk_size)
    if len(blocks) and not (int(blocks.min()) >= 0 and int(blocks.max()) < pool.blocks):
        raise ValueError(f"blocks {int(blocks.min())} to {int(blocks.max())}: the pool has {pool.blocks} blocks")
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= pool.data.shape[1]:
        raise ValueError(f"layers {layers}: the pool has {pool.data.shape[1]}, moved in order")
    expected = (len(blocks), len(layers), *pool.data.shape[2:])
    if tuple(moved.shape) != expected or moved.dtype != pool.data.dtype:
        raise ValueError(
            f"layers of blocks are {pool.data.dtype} {expected}, not {moved.dtype} {tuple(moved.shape)}"
        )
