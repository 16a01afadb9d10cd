"""The dense ops on CPUs: linear layers over prepacked weights and RMS norms, one native call each.

The native side is `csrc/cpu/linear.h` (packed form, invariants) and `csrc/cpu/dense_norm.cc`. Each layer of each
step runs this code, so it only allocates the output and calls.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch import Tensor

from trunkline.kernels.large_pages import advise_large_pages
from trunkline.kernels.native import NativeContext
from trunkline.kernels.ops import Activation, KernelCounters, PackedLinear, Quantisation
from trunkline.kernels.quantisation import quantise

ACTIVATIONS: Final[dict[Activation, int]] = {"silu": 1, "gelu": 2, "gelu_tanh": 3}
"""As `Activation` in `csrc/cpu/linear.h`; 0: not gated."""
DENSE_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As `DenseType` there."""
NONE: Final = torch.empty(0)
"""Stands for an optional tensor that is not given."""

LARGE_PAGE_BYTES: Final = 2 << 20
SLAB_BYTES: Final = 64 << 20
"""Address space of a slab: so large that its memory is fresh, not reused. Unused pages stay unmapped."""


class PackedMemory:
    """Memory for packed layers, one after the other on large pages.

    A layer on small pages is read 10 to 20 % slower, and most layers are smaller than a large page. A slab lives
    as long as any layer in it.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return uint8 `[size]`, aligned to a cache line."""
        rounded = -(-size // 64) * 64
        if rounded > SLAB_BYTES // 4:
            return self._fresh(rounded)[:size]
        if rounded > self._free.numel():
            self._free = self._fresh(SLAB_BYTES)
        taken, self._free = self._free[:size], self._free[rounded:]
        return taken

    def _fresh(self, size: int) -> Tensor:
        pages = -(-size // LARGE_PAGE_BYTES)
        memory = torch.empty((pages + 1) * LARGE_PAGE_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % LARGE_PAGE_BYTES
        memory = memory[start : start + pages * LARGE_PAGE_BYTES]
        advise_large_pages(memory)
        return memory


class PackedWeight:
    """The memory of a packed layer, and the native layer that points into it. It is `PackedLinear.data`."""

    __slots__ = ("__weakref__", "gated", "handle", "memory")

    def __init__(self, memory: Tensor, handle: int, gated: bool) -> None:
        self.memory = memory
        self.handle = handle
        self.gated = gated


class DenseOps:
    """The dense part of `trunkline.kernels.ops.Kernels`.

    Args:
        module: The compiled library.
        context: A context of the library.
        counters: Count every call.
    """

    def __init__(self, module: Any, context: NativeContext, counters: KernelCounters) -> None:
        self._context = context  # kept alive: bound ops outlive the object they were taken from
        self._handle = context.handle
        self._counters = counters
        # Looking a function up costs more than calling it.
        self._rms_norm = module.rms_norm
        self._add_rms_norm = module.add_rms_norm
        self._linear = module.linear
        self._pack = module.linear_pack
        self._packed_bytes = module.linear_packed_bytes
        self._delete = module.linear_delete
        self._memory = PackedMemory()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._counters.called("rms_norm")
        x = x.contiguous()
        out = torch.empty_like(x)
        self._rms_norm(self._handle, x, weight, eps, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._counters.called("add_rms_norm")
        x = x.contiguous()
        out = torch.empty_like(x)
        self._add_rms_norm(self._handle, x, residual, weight, eps, out)
        return out

    def pack_linear(self, weight: Tensor, bias: Tensor | None, quantisation: Quantisation = "") -> PackedLinear:
        return self._packed(weight, bias, 0, quantisation)

    def linear(self, x: Tensor, layer: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        self._counters.called("linear")
        x = x.contiguous()
        out = torch.empty(x.shape[0], layer.out_features, dtype=out_dtype or x.dtype)
        self._linear(self._handle, layer.data.handle, x, out)
        return out

    def pack_gated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation, quantisation: Quantisation = ""
    ) -> PackedLinear:
        return self._packed(weight, bias, ACTIVATIONS[activation], quantisation)

    def gated_linear(self, x: Tensor, layer: PackedLinear) -> Tensor:
        self._counters.called("gated_linear")
        x = x.contiguous()
        out = torch.empty(x.shape[0], layer.out_features, dtype=x.dtype)
        self._linear(self._handle, layer.data.handle, x, out)
        return out

    def _packed(
        self, weight: Tensor, bias: Tensor | None, activation: int, quantisation: Quantisation
    ) -> PackedLinear:
        type_of_x = DENSE_TYPES.get(weight.dtype, -1)  # of others the library says what it takes
        weight, scale = quantise(weight) if quantisation else (weight.detach(), NONE)
        if weight.dim() == 2 and weight.stride(1) != 1:
            weight = weight.contiguous()
        widened = NONE if bias is None else bias.detach().float().contiguous()
        memory = self._memory.take(self._packed_bytes(weight, activation))
        handle = self._pack(self._handle, weight, scale, widened, type_of_x, activation, memory)
        packed = PackedWeight(memory, handle, activation != 0)
        weakref.finalize(packed, self._delete, handle)
        parts = 2 if activation else 1
        size = memory.nbytes + scale.nbytes + widened.nbytes
        return PackedLinear(weight.shape[0] // parts, weight.shape[1], packed, size)
