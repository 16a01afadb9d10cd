"""Linear layers on NVIDIA GPUs: cuBLAS and CUTLASS through torch, and kernels of our own around and beside them.

Our kernels compute the activation of gated layers, round inputs to fp8, and multiply sorted rows with one of
several matrices each (`csrc/cuda/grouped_products.cu`): for experts for which torch has no such product, and for
few rows of layers over codes of 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.kernels.cuda_library import (
    ACTIVATION_NUMBERS,
    ALIGNMENT,
    DTYPE_NUMBERS,
    CudaLibrary,
    Float8Call,
    GroupedCall,
)
from trunkline.kernels.experts import has_own_products, stacked
from trunkline.kernels.grouped import GroupedWeight
from trunkline.kernels.ops import (
    Activation,
    ExpertMatrices,
    ExpertStack,
    KernelCounters,
    PackedLinear,
    Quantisation,
    RowAddend,
    Weight,
    add_rows,
)
from trunkline.kernels.quantisation import QuantisedWeight, linear_quantised, stored_bytes
from trunkline.kernels.scaled_products import Float8Rows, ScaledProducts

WEIGHT_NUMBERS: Final = {
    torch.float16: 0,
    torch.bfloat16: 0,
    torch.float8_e4m3fn: 1,
    torch.int8: 2,
}
"""Numbers of the types of weights that our grouped products take."""
OWN_OUTPUTS: Final = 8
"""Our products need a multiple of so many outputs."""
OWN_ROWS_MAX: Final = 64
"""Largest number of rows of a layer over codes that our product computes: one tile. With more, the codes become
floats at each call, for cuBLAS. Whether that is faster already from fewer rows on has not been measured."""


class CudaLayers:
    """The linear layers of `CudaKernels`."""

    def __init__(self, library: CudaLibrary, counters: KernelCounters, stream: Callable[[], int]) -> None:
        """
        Args:
            stream: As `CudaKernels`.
        """
        self._library = library
        self._counters = counters
        self._stream = stream
        self._products = ScaledProducts(self.round_rows)

    def pack(self, weight: Weight, bias: Tensor | None, quantisation: Quantisation) -> PackedLinear:
        """As `Kernels.pack_linear`."""
        stored = self._products.stored(weight, quantisation)
        return PackedLinear(weight.shape[0], weight.shape[1], (stored, bias), stored_bytes(stored, bias))

    def pack_gated(
        self, weight: Weight, bias: Tensor | None, activation: Activation, quantisation: Quantisation
    ) -> PackedLinear:
        """As `Kernels.pack_gated_linear`."""
        stored = self._products.stored(weight, quantisation)
        data = (stored, bias, activation)
        return PackedLinear(weight.shape[0] // 2, weight.shape[1], data, stored_bytes(stored, bias))

    def linear(self, x: Tensor, layer: PackedLinear, out_dtype: torch.dtype | None) -> Tensor:
        """As `Kernels.linear`, without an addend."""
        weight, bias = layer.data
        if not isinstance(weight, Tensor):
            return self._linear_codes(x, weight, bias, out_dtype or x.dtype)
        if out_dtype is None or out_dtype == x.dtype:
            return F.linear(x, weight, bias)
        if not x.is_cuda:
            return F.linear(x.to(out_dtype), weight.to(out_dtype), None if bias is None else bias.to(out_dtype))
        # cuBLAS keeps its float32 sums; a product in the type of x would round them first.
        out = torch.mm(x, weight.t(), out_dtype=out_dtype)
        return out if bias is None else out.add_(bias)

    def gated(self, x: Tensor, layer: PackedLinear, addend: RowAddend | None) -> Tensor:
        """As `Kernels.gated_linear`."""
        weight, bias, activation = layer.data
        if isinstance(weight, Tensor):
            gate_up = F.linear(x, weight, bias)
        elif self._products.takes(x, weight, x.dtype):
            gate_up = self._products.linear(x, weight, bias)
        else:  # so that it is rounded once, after the activation
            gate_up = self._linear_codes(x, weight, bias, torch.float32)
        return self._activate(activation, add_rows(gate_up, addend)).to(x.dtype)

    def _linear_codes(
        self, x: Tensor, weight: QuantisedWeight | GroupedWeight, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        if self._products.takes(x, weight, out_dtype):
            return self._products.linear(x, weight, bias)
        if len(x) > OWN_ROWS_MAX or (matrix := _one_matrix(weight, x.dtype)) is None:
            return linear_quantised(x, weight, bias).to(out_dtype)
        if bias is None:
            return self.multiply_grouped(x, matrix, None, out_dtype)
        # So that it is rounded once, after the bias.
        return self.multiply_grouped(x, matrix, None, torch.float32).add_(bias).to(out_dtype)

    def _activate(self, activation: Activation, gate_up: Tensor) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
        numbers = (DTYPE_NUMBERS[out.dtype], ACTIVATION_NUMBERS[activation], rows, width)
        self._library.call("gated_activation", gate_up.data_ptr(), out.data_ptr(), *numbers, self._stream())
        return out

    def round_rows(self, x: Tensor, group: int, padded: int) -> Float8Rows:
        """Round rows as `scaled_products.float8_rows`, in one launch."""
        self._counters.called("round_float8")
        x, (rows, width) = x.contiguous(), x.shape
        codes = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=x.device)
        factor = torch.empty(width // group, padded, dtype=torch.float32, device=x.device)
        call = Float8Call(
            x=_aligned("rows to be rounded", x),
            codes=codes.data_ptr(),
            factor=factor.data_ptr(),
            dtype=DTYPE_NUMBERS[x.dtype],
            rows=rows,
            padded=padded,
            width=width,
            group=group,
        )
        self._library.call("round_float8", byref(call), self._stream())
        # Torch takes one factor a row as it lies, but several with those of a group beside each other.
        return Float8Rows(codes, factor.view(padded, 1) if width == group else factor.T)

    def stack(
        self, experts: Sequence[tuple[PackedLinear, PackedLinear]], dtype: torch.dtype
    ) -> ExpertStack | None:
        """As `Kernels.stack_experts`."""
        return stacked(experts, dtype, self._activate_group, self.multiply_grouped)

    def _activate_group(self, activation: Activation, gate_up: Tensor) -> Tensor:
        self._counters.called("grouped_experts")
        return self._activate(activation, gate_up)

    def multiply_grouped(
        self,
        x: Tensor,
        matrices: ExpertMatrices,
        stops: Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiply each row with one of several matrices; rows are sorted by matrix.

        Args:
            x: float16 or bfloat16 `[rows, in]`.
            matrices: numbers of the type of `x`, or codes of 8 bits.
            stops: int32 `[matrices]`, ascending: where the rows of each matrix end. None: there is one matrix.
            out_dtype: float32, or None for the type of `x`.

        Returns:
            `[rows, out]`; rows behind the last stop are not written.

        Raises:
            ValueError: The memory of rows or matrices is not dense, or not aligned to 16 bytes.
        """
        self._counters.called("own_grouped_products")
        x, (count, outputs, width) = x.contiguous(), matrices.weight.shape
        out = torch.empty(len(x), outputs, dtype=out_dtype or x.dtype, device=x.device)
        scale = matrices.scale
        call = GroupedCall(
            x=_aligned("sorted rows", x),
            weights=_aligned("matrices", matrices.weight),
            scale=None if scale is None else scale.data_ptr(),
            stops=None if stops is None else stops.data_ptr(),
            out=out.data_ptr(),
            dtype=DTYPE_NUMBERS[x.dtype],
            out_dtype=DTYPE_NUMBERS[out.dtype],
            weight_type=WEIGHT_NUMBERS[matrices.weight.dtype],
            rows=len(x),
            width=width,
            outputs=outputs,
            matrices=count,
            group=width if scale is None else width // scale.shape[2],
        )
        self._library.call("grouped_products", byref(call), self._stream())
        return out


def _one_matrix(weight: QuantisedWeight | GroupedWeight, dtype: torch.dtype) -> ExpertMatrices | None:
    """Return a layer's weight as our product takes it, for inputs of this type; None: it does not."""
    out, width = (weight.values if isinstance(weight, QuantisedWeight) else weight.codes).shape
    if out % OWN_OUTPUTS or not has_own_products(dtype, (width,)):
        return None
    if isinstance(weight, QuantisedWeight):
        return ExpertMatrices(weight.values[None], weight.scale[None, :, None])
    if not weight.floats or not weight.scale.is_contiguous():
        return None
    return ExpertMatrices(weight.codes.view(torch.float8_e4m3fn)[None], weight.scale[None])


def _aligned(name: str, x: Tensor) -> int:
    """Return the address of a dense tensor that kernels read in 16-byte units."""
    if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name} must be contiguous and aligned to {ALIGNMENT} bytes")
    return x.data_ptr()
