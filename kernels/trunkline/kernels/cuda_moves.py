"""Moves of KV on the device and to main memory: the host side of `csrc/cuda/cache_ops.cu`.

Tiers (CachedAttention §3.2): one kernel for each direction reads blocks and writes pinned host memory, or the
reverse, on the current stream. So all blocks and layers of a move are one launch, without a buffer in between.
Host memory that a kernel cannot reach is copied through a buffer on the device, block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels.cuda_library import (
    DTYPE_NUMBERS,
    TIER_BLOCKS,
    CudaLibrary,
    GatherCall,
    JoinCall,
    MoveCall,
    block_bytes,
    check_moved,
    check_pool,
    check_slot_move,
    kv_numbers,
    layer_bytes,
    reaches,
    staged,
)
from trunkline.kernels.library_attention import Attended, join
from trunkline.kernels.ops import KvPool, check_copies
from trunkline.kvstore.chunks import Int32Array


class PoolMoves:
    """The moves of one `CudaKernels`."""

    def __init__(
        self,
        library: CudaLibrary,
        stream: Callable[[], int],
        indices: Callable[[Int32Array, torch.device], Tensor],
    ) -> None:
        """
        Args:
            indices: Brings an array to a device.
        """
        self._library = library
        self._stream = stream
        self._indices = indices

    def copy(self, pool: KvPool, copies: Int32Array) -> None:
        """As `Kernels.copy_blocks`."""
        _, layers, _, kv_heads, chunk_size, _ = pool.data.shape
        check_pool(pool, chunk_size)
        check_copies(pool, copies)
        if not len(copies):
            return
        on_device = self._indices(copies, pool.data.device)
        token_bytes = pool.format.row_bytes
        tiles = layers * 2 * kv_heads
        pointers = (pool.data.data_ptr(), on_device.data_ptr())
        self._library.call("copy_blocks", *pointers, len(copies), tiles, chunk_size, token_bytes, self._stream())

    def gather(self, pool: KvPool, blocks: Int32Array, layers: range, out: Tensor) -> None:
        """As `Kernels.gather_blocks`."""
        check_moved(pool, blocks, layers, out)
        index = self._indices(blocks, pool.data.device)
        on_device = out.device == pool.data.device and out.is_contiguous()
        target = out if on_device else torch.empty(out.shape, dtype=pool.data.dtype, device=pool.data.device)
        call = MoveCall(region_bytes=len(layers) * layer_bytes(pool), regions=len(blocks))
        call.source, call.destination = _layer_address(pool, layers), target.data_ptr()
        call.source_stride_bytes, call.destination_stride_bytes = block_bytes(pool), call.region_bytes
        call.source_index = index.data_ptr()
        self._library.call("move_regions", byref(call), self._stream())
        if not on_device:
            out.copy_(target)

    def scatter(self, pool: KvPool, blocks: Int32Array, layers: range, data: Tensor) -> None:
        """As `Kernels.scatter_blocks`."""
        source = data.to(pool.data.device, pool.data.dtype).contiguous()
        check_moved(pool, blocks, layers, source)
        index = self._indices(blocks, pool.data.device)
        call = MoveCall(region_bytes=len(layers) * layer_bytes(pool), regions=len(blocks))
        call.source, call.destination = source.data_ptr(), _layer_address(pool, layers)
        call.source_stride_bytes, call.destination_stride_bytes = call.region_bytes, block_bytes(pool)
        call.destination_index = index.data_ptr()
        self._library.call("move_regions", byref(call), self._stream())

    def gather_rows(self, pool: KvPool, layer: int, ranges: Tensor, out: Tensor) -> None:
        """Do what `library_attention.gather_rows` does, in one launch."""
        _, layers, _, kv_heads, chunk_size, _ = pool.data.shape
        call = GatherCall(
            pool=pool.data.data_ptr(),
            ranges=ranges.data_ptr(),
            out=out.data_ptr(),
            count=len(ranges),
            tokens=out.shape[2],
            chunk_size=chunk_size,
            layers=layers,
            layer=layer,
            kv_heads=kv_heads,
            head_dim=out.shape[3],
        )
        call.dtype, call.kv_dtype = kv_numbers(pool)
        self._library.call("gather_rows", byref(call), self._stream())

    def join(self, a: Attended, b: Attended, out: Tensor) -> Attended:
        """Do what `library_attention.join` does, in one launch if the vectors are aligned."""
        parts = {"a": a.out, "b": b.out, "out": out}
        if not all(map(_is_quadruple, parts.values())):
            return join(a, b, out)
        rows, heads, head_dim = out.shape
        sums = Attended(out, torch.empty((heads, rows), dtype=torch.float32, device=out.device))
        call = JoinCall(rows=rows, heads=heads, head_dim=head_dim)
        a_lse, b_lse = a.lse.contiguous(), b.lse.contiguous()
        call.a_lse, call.b_lse, call.out_lse = a_lse.data_ptr(), b_lse.data_ptr(), sums.lse.data_ptr()
        for name, x in parts.items():
            setattr(call, name, x.data_ptr())
            setattr(call, f"{name}_row_stride", x.stride(0))
            setattr(call, f"{name}_head_stride", x.stride(1))
            setattr(call, f"{name}_dtype", DTYPE_NUMBERS[x.dtype])
        self._library.call("join_parts", byref(call), self._stream())
        return sums

    def gather_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        """As `Kernels.gather_slots`."""
        if self._moves_slots(pool, blocks, layers, host, slots, to_host=True):
            return
        for start, stop in staged(pool, len(blocks), layers):
            staging = pool.data.new_empty((stop - start, len(layers), *pool.data.shape[2:]))
            self.gather(pool, blocks[start:stop], layers, staging)
            for index, slot in enumerate(slots[start:stop].tolist()):
                host[slot, layers.start : layers.stop].copy_(staging[index], non_blocking=True)

    def scatter_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        """As `Kernels.scatter_slots`."""
        if self._moves_slots(pool, blocks, layers, host, slots, to_host=False):
            return
        for start, stop in staged(pool, len(blocks), layers):
            staging = pool.data.new_empty((stop - start, len(layers), *pool.data.shape[2:]))
            for index, slot in enumerate(slots[start:stop].tolist()):
                staging[index].copy_(host[slot, layers.start : layers.stop], non_blocking=True)
            self.scatter(pool, blocks[start:stop], layers, staging)

    def _moves_slots(
        self,
        pool: KvPool,
        blocks: Int32Array,
        layers: range,
        host: Tensor,
        slots: Int32Array,
        *,
        to_host: bool,
    ) -> bool:
        """Copy between blocks and slots by one kernel, if it can reach the host memory by itself."""
        if not reaches(pool, host):
            return False
        check_slot_move(pool, blocks, layers, host, slots)
        places = self._indices(np.stack((blocks, slots)), pool.data.device)
        size, start = layer_bytes(pool), layers.start * layer_bytes(pool)
        device_side = (pool.data.data_ptr() + start, places[0].data_ptr())
        host_side = (host.data_ptr() + start, places[1].data_ptr())
        (source, source_index), (target, target_index) = (
            (device_side, host_side) if to_host else (host_side, device_side)
        )
        call = MoveCall(
            source=source,
            destination=target,
            source_index=source_index,
            destination_index=target_index,
            region_bytes=len(layers) * size,
            source_stride_bytes=block_bytes(pool),
            destination_stride_bytes=block_bytes(pool),
            regions=len(blocks),
            blocks_max=TIER_BLOCKS,
        )
        self._library.call("move_regions", byref(call), self._stream())
        return True


def _layer_address(pool: KvPool, layers: range) -> int:
    return pool.data.data_ptr() + layers.start * layer_bytes(pool)


def _is_quadruple(x: Tensor) -> bool:
    """Return whether vectors `[rows, heads, head_dim]` can be read by four numbers."""
    units = (x.stride(0), x.stride(1), x.shape[2])
    return x.stride(2) == 1 and not any(n % 4 for n in units) and x.data_ptr() % (4 * x.element_size()) == 0
