"""Products of floats of 8 bits on a GPU's matrix units, through torch: fp8 weights as they are stored.

The units multiply e4m3 with e4m3, so inputs are rounded to it, too, with a factor of their own:

      scale of the weight      factor of the inputs       torch's recipe           where
      one an output            one a row                  RowWise                  8.9, 9.0 and newer
      one for 128 inputs       one for 128 inputs         BlockWise1x128           9.x

One scale for a whole matrix is an equal one for each output, and a block of 128 × 128 with a scale is 128 groups
of 128 inputs: that is how `GroupedWeight` has them. The factor is the largest magnitude over 448, the largest
number of e4m3, so nothing is cut off. Nothing waits for the device, and shapes follow from those of the arguments,
so a graph can hold it. Inputs are rounded by what the owner of `ScaledProducts` gives, on GPUs in one launch.

This is done only where the checkpoint is meant for it (`GroupedWeight.float8_inputs`), and only for shapes for
which a trial with the layer's own weight gave the right numbers. Inputs of other layers are not rounded, and the
log says which and why.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from trunkline.kernels.grouped import GroupedWeight, linear_grouped
from trunkline.kernels.native import NativeLibraryError
from trunkline.kernels.quantisation import QuantisedWeight, stored_weight

VARIABLE: Final = "TRUNKLINE_CUDA_FP8"
"""Environment variable for comparisons: with `FLOATS` no inputs of fp8 weights are rounded."""
FLOATS: Final = "floats"
LARGEST: Final = 448.0
"""The largest number of e4m3."""
LEAST_FACTOR: Final = 2.0**-100
"""Inputs that are all smaller than this times 448 lose precision, and become zeros in the end."""
GROUP: Final = 128
"""Inputs that share a scale and a factor, if those of a row do not."""
ROW_CAPABILITY: Final = (8, 9)
GROUP_CAPABILITY: Final = 9
"""Major number of the compute capability: others have no such products in torch 2.13."""
_ALIGNED: Final = 16
"""What the numbers of outputs and inputs must be a multiple of."""
_ALIGNED_ROWS: Final = 4
"""What the number of rows is brought to a multiple of, where factors lie one row beside the other: their columns
then begin at 16 bytes, as the units read them."""
_TRIAL_ROWS: Final = (1, 17, 130)
_TRIAL_ERROR: Final = 0.01
"""Largest norm of the error, relative to that of the result: a result in bfloat16 is off by 0.002."""

log = structlog.get_logger()


class Float8Rows(NamedTuple):
    """Rows as floats of 8 bits: `x ≈ codes * factor`."""

    codes: Tensor
    """float8_e4m3fn `[rows, in]`."""
    factor: Tensor
    """float32 `[rows, groups]`, row by row beside each other if there are several groups."""


Rounding = Callable[[Tensor, int, int], Float8Rows]
"""Rounds rows as `float8_rows` does."""


class _Key(NamedTuple):
    """The kind of weights that share the result of a trial."""

    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    group: int
    float8_inputs: bool


class ScaledProducts:
    """Which fp8 weights a device multiplies as they are, and their products. Trials are remembered."""

    def __init__(self, rounding: Rounding | None = None) -> None:
        """
        Args:
            rounding: Rounds inputs, to the same bits as `float8_rows`; None: that.
        """
        self._rounding = rounding or float8_rows
        self._problems: dict[_Key, str] = {}

    def stored(
        self, weight: Tensor | GroupedWeight, quantisation: str
    ) -> Tensor | QuantisedWeight | GroupedWeight:
        """Return a weight as layers keep it; `float8_inputs` says whether `linear` multiplies it as it is.
        Waits for the device if its shape is new.

        Raises:
            ValueError: The weight cannot be quantised, or is already.
            NativeLibraryError: The environment variable has another value.
        """
        if not isinstance(weight, GroupedWeight) or not weight.floats or quantisation:
            return stored_weight(weight, quantisation)
        ready = replace(weight, scale=_beside(weight.scale))
        return replace(weight, float8_inputs=False) if self._problem(ready) else ready

    def _problem(self, weight: GroupedWeight) -> str:
        if not weight.float8_inputs:
            return self._told(weight, "the checkpoint does not say that inputs are to be rounded to fp8, too")
        return self._told(weight, why_not(weight, capability_of(weight.codes.device)) or None)

    def _told(self, weight: GroupedWeight, reason: str | None) -> str:
        """Return what is wrong with products of weights like this one, found by a trial if no reason is given; the
        first time, log it."""
        key = _Key(weight.codes.device, weight.dtype, weight.shape, weight.group, weight.float8_inputs)
        if key in self._problems:
            return self._problems[key]
        problem = self._problems[key] = trial_problem(weight, self._rounding) if reason is None else reason
        facts = {"outputs": weight.shape[0], "inputs": weight.shape[1], "group": weight.group}
        if problem:
            log.warning("products of fp8 weights take longer, as inputs are not rounded", reason=problem, **facts)
        else:
            log.info("fp8 weights are multiplied as they are, with inputs rounded to fp8", **facts)
        return problem

    @staticmethod
    def takes(x: Tensor, weight: QuantisedWeight | GroupedWeight, out_dtype: torch.dtype) -> bool:
        """Return whether `linear` computes this layer. It does not if results are to be of a wider type than `x`:
        they must be exact."""
        rounds = isinstance(weight, GroupedWeight) and weight.float8_inputs and weight.dtype == x.dtype
        return rounds and out_dtype == x.dtype

    def linear(self, x: Tensor, weight: QuantisedWeight | GroupedWeight, bias: Tensor | None) -> Tensor:
        """Return the layer of `x` `[tokens, in]`, in its type, with inputs rounded to fp8, if `takes` says so."""
        assert isinstance(weight, GroupedWeight)
        return linear_float8(x, weight, bias, self._rounding)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return a GPU's compute capability; None: it is none."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def why_not(weight: GroupedWeight, capability: tuple[int, int] | None) -> str:
    """Return why a weight cannot be multiplied as it is; empty if a trial is worth it.

    Args:
        capability: The GPU's compute capability; None: there is no GPU, and torch's product for CPUs runs.

    Raises:
        NativeLibraryError: The environment variable has another value than `FLOATS`.
    """
    (out, width), asked = weight.shape, os.environ.get(VARIABLE, "")
    if asked not in ("", FLOATS):
        raise NativeLibraryError(f"{VARIABLE} is {asked!r}; allowed: {FLOATS}", f"correct or unset {VARIABLE}")
    if asked:
        return f"{VARIABLE} is {asked}"
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return f"the model is in {weight.dtype}, whose results are to be those of the stored numbers"
    if out % _ALIGNED or width % _ALIGNED:
        return f"outputs and inputs are no multiples of {_ALIGNED}"
    if weight.group not in (width, GROUP):
        return f"scales are for {weight.group} inputs; products have one for each output or for {GROUP} inputs"
    if capability is not None and capability < ROW_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}; products need 8.9"
    if weight.group != width and (capability is None or capability[0] != GROUP_CAPABILITY):
        return f"scales are for {GROUP} inputs, for which only GPUs of compute capability 9.x have products"
    return ""


def trial_problem(weight: GroupedWeight, rounding: Rounding) -> str:
    """Return what is wrong with products of such a weight, empty if nothing is: a few random rows are multiplied,
    and compared with the same rounded rows times the weight in float64. Waits for the device."""
    generator = torch.Generator().manual_seed(0)
    device = weight.codes.device
    for rows in _TRIAL_ROWS:
        x = torch.randn(rows, weight.shape[1], generator=generator).to(device, weight.dtype)
        try:
            out = linear_float8(x, weight, None, rounding).double()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            first_line = str(error).split("\n")[0]
            return f"torch's product of {rows} rows fails: {first_line[:300]}"
        expected = linear_grouped(widened(float8_rows(x, weight.group)), weight, None)
        error_norm, norm = float((out - expected).norm()), float(expected.norm())
        if not error_norm <= _TRIAL_ERROR * norm:
            return f"torch's product of {rows} rows is wrong by {error_norm:.3g} of {norm:.3g}"
    return ""


def linear_float8(x: Tensor, weight: GroupedWeight, bias: Tensor | None, rounding: Rounding) -> Tensor:
    """Return `x · wᵀ + bias` of `x` `[tokens, in]` in its type, `x` rounded to floats of 8 bits; sums are those of
    the matrix units.

    Args:
        weight: one that `ScaledProducts.stored` has returned.
    """
    tokens, by_row = len(x), weight.group == weight.shape[1]
    rows = rounding(x, weight.group, tokens if by_row else tokens + -tokens % _ALIGNED_ROWS)
    recipe = ScalingType.RowWise if by_row else ScalingType.BlockWise1x128
    out = F.scaled_mm(
        rows.codes,
        weight.codes.view(torch.float8_e4m3fn).T,
        rows.factor,
        recipe,
        weight.scale.T if by_row else weight.scale,
        recipe,
        output_dtype=x.dtype,
    )[:tokens]
    return out if bias is None else out.add_(bias)


def float8_rows(x: Tensor, group: int, padded: int = 0) -> Float8Rows:
    """Round rows `[rows, in]`, `group` inputs with a factor. A group with infinity or NaN makes results NaN.

    Args:
        padded: Number of rows of the result: behind those of `x` come zeros.
    """
    if padded > len(x):
        x = F.pad(x, (0, 0, 0, padded - len(x)))
    parts = x.float().view(len(x), x.shape[1] // group, group)
    factor = (parts.abs().amax(dim=-1) * (1.0 / LARGEST)).clamp_min_(LEAST_FACTOR)
    # The factor is rounded, so the largest may come out above 448, which has no code.
    codes = (parts / factor[..., None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Float8Rows(codes.view(x.shape), _beside(factor))


def _beside(scale: Tensor) -> Tensor:
    """Return scales `[rows, groups]` in the order that torch wants: those of a group beside each other."""
    return scale if scale.shape[1] == 1 else scale.T.contiguous().T


def widened(rows: Float8Rows) -> Tensor:
    """Return the numbers of rounded rows, float64 `[rows, in]`."""
    codes, factor = rows.codes.double(), rows.factor.double()
    return (codes.view(*factor.shape, codes.shape[1] // factor.shape[1]) * factor[..., None]).view(codes.shape)
