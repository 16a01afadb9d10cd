"""Weights of 4, 6 and 8 bits in groups: the one form that all such files are read into, and its plain arithmetic.

A row of the weight is cut into groups of inputs; each group has a scale and, in some kinds, an offset:

      w = scale * (value(code) - zero) - offset            in float32; codes are integers of 4, 6 or 8 bits

`value` is the code itself, for 4 bits an entry of a table of 16 integers, or for 8 bits a float (`float8`). Scales
and offsets are stored in a floating-point type, one for each group; or, where files have two levels, as such a
number for several groups times an int8 of the group. All of that is exact: nothing is rounded when numbers of a
file are brought into this form.

      file                  bits   group   scale                    zero   offset
      Q8_0                     8      32   float16                   128
      Q4_0                     4      32   float16                     8
      Q4_K                     4      32   float16, times 6 bits       0   float16, times 6 bits
      Q6_K                     6      16   float16, times int8        32
      AWQ, GPTQ                4     128   float32                     0   float32, the scale times its zero point
      int8 per output          8      in   float32                   128
      fp8 (e4m3)               8     128   float32

A layer over such a weight is computed in one of two ways, which the weight says (`int8_inputs`):

      exact          y = x · wᵀ + bias, sums in at least float32
      int8 inputs    the same of x rounded to int8 in groups of 32 inputs: x ≈ factor * integers, the factor the
                     largest magnitude of the group over 127. Products are of integers, their sums exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS: Final = 1024
"""Number of rows of a weight that are converted at a time."""
INPUT_GROUP: Final = 32
"""Number of inputs that share a factor where inputs are rounded to int8."""
LEAST_INPUT: Final = 2.0**-100
"""A group of inputs none of which is larger counts as zeros: the inverse of its factor would be infinite."""
GROUP_QUANTUM: Final = 16
"""Groups have a multiple of so many inputs."""
SCALE_TYPES: Final = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight `[out, in]` as codes and scales.

    Raises:
        ValueError: Parts that do not fit each other.
    """

    codes: Tensor
    """uint8 `[out, in]`, below 16 if there are 4 bits, below 64 if there are 6."""
    bits: int
    """4, 6 or 8."""
    group: int
    """Number of inputs of a group, a multiple of 16."""
    scale: Tensor
    """`[out, n]`, of one of `SCALE_TYPES`; with `sub_scale`, n divides the number of groups, else it is that."""
    dtype: torch.dtype
    """The type of what the weight is multiplied with, and of the weight where it is needed as a whole."""
    sub_scale: Tensor | None = None
    """int8 `[out, groups]`; multiplies the scale. None: one level of scales."""
    offset: Tensor | None = None
    """Like `scale`. None: there is none."""
    sub_offset: Tensor | None = None
    """int8 `[out, groups]`; multiplies the offset; given if `sub_scale` and `offset` are."""
    zero: int = 0
    """Subtracted from all values, between 0 and 255."""
    table: tuple[int, ...] = ()
    """The values of the 16 codes of 4 bits, between 0 and 255; empty: they are the codes."""
    int8_inputs: bool = False
    """Whether layers over this weight round their inputs to int8."""
    floats: bool = False
    """Whether codes of 8 bits are floats (e4m3) that are numbers, not integers."""
    float8_inputs: bool = False
    """Whether layers over such floats may round their inputs to fp8, too (`scaled_products`)."""

    def __post_init__(self) -> None:
        if self.codes.dim() != 2 or self.codes.dtype != torch.uint8 or self.bits not in (4, 6, 8):
            raise ValueError(f"codes of {self.bits} bits are {self.codes.dtype} {list(self.codes.shape)}")
        rows, width = self.codes.shape
        if self.group <= 0 or self.group % GROUP_QUANTUM or width % self.group:
            raise ValueError(
                f"{width} inputs in groups of {self.group}: groups are multiples of {GROUP_QUANTUM}, rows are "
                "whole groups"
            )
        groups = width // self.group
        supers = self.scale.shape[-1]
        if self.scale.dtype not in SCALE_TYPES or self.scale.shape != (rows, supers) or supers == 0:
            raise ValueError(f"scales are {self.scale.dtype} {list(self.scale.shape)} of {rows} rows")
        if groups % supers or (self.sub_scale is None and supers != groups):
            raise ValueError(f"{supers} scales a row do not fit {groups} groups")
        offset = self.offset
        if offset is not None and (offset.dtype, offset.shape) != (self.scale.dtype, self.scale.shape):
            raise ValueError("offsets are not of the type and shape of the scales")
        if (self.sub_offset is None) != (offset is None or self.sub_scale is None):
            raise ValueError("two levels of scales go with two levels of offsets")
        for part in (self.sub_scale, self.sub_offset):
            if part is not None and (part.dtype, part.shape) != (torch.int8, (rows, groups)):
                raise ValueError(
                    f"the second level is {part.dtype} {list(part.shape)} of {rows} × {groups} groups"
                )
        if not 0 <= self.zero <= 255 or len(self.table) not in (0, 16) or (self.table and self.bits != 4):
            raise ValueError(f"zero {self.zero} and a table of {len(self.table)} with {self.bits} bits")
        if any(not 0 <= value <= 255 for value in self.table):
            raise ValueError("the values of a table are between 0 and 255")
        if (self.floats and not self._fits_floats) or (self.float8_inputs and not self.floats):
            raise ValueError(
                "codes that are floats have 8 bits, one float32 scale for each group, no zero and no offset, and "
                "exact products"
            )

    @property
    def _fits_floats(self) -> bool:
        plain = self.sub_scale is None and self.offset is None and not self.zero and not self.int8_inputs
        return plain and self.bits == 8 and self.scale.dtype == torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the form as it is here, where each code takes a byte."""
        parts = (self.codes, self.scale, self.sub_scale, self.offset, self.sub_offset)
        return sum(part.nbytes for part in parts if part is not None)

    def rows(self, chosen: slice | Tensor) -> GroupedWeight:
        """Return some outputs, in the given order."""
        return self._with(*(None if part is None else part[chosen] for part in self.parts))

    def padded(self, rows: int) -> GroupedWeight:
        """Return `rows` outputs: its own and, behind them, zeros."""
        missing = (0, 0, 0, rows - len(self.codes))
        return self._with(*(None if part is None else F.pad(part, missing) for part in self.parts))

    def columns(self, chosen: slice) -> GroupedWeight:
        """Return some adjoining inputs.

        Raises:
            ValueError: They are no whole groups.
        """
        first, stop, step = chosen.indices(self.codes.shape[1])
        if step != 1 or first % self.group or stop % self.group or stop <= first:
            raise ValueError(
                f"inputs {first} to {stop} of a weight in groups of {self.group}: a rank takes whole groups; "
                "use fewer ranks"
            )
        codes, scale, sub_scale, offset, sub_offset = self.parts
        groups = slice(first // self.group, stop // self.group)
        per_scale = self.codes.shape[1] // self.group // scale.shape[1]
        if groups.start % per_scale or groups.stop % per_scale:  # then each group gets the scale of its own
            scale = scale.repeat_interleave(per_scale, dim=1)
            offset = None if offset is None else offset.repeat_interleave(per_scale, dim=1)
            per_scale = 1
        scales = slice(groups.start // per_scale, groups.stop // per_scale)
        return self._with(
            codes[:, first:stop],
            scale[:, scales],
            None if sub_scale is None else sub_scale[:, groups],
            None if offset is None else offset[:, scales],
            None if sub_offset is None else sub_offset[:, groups],
        )

    def group_scales(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
        """Return scale and offset of each group, `[out, groups]`."""
        groups = self.codes.shape[1] // self.group
        scale, offset = _levels(self.scale, self.sub_scale, groups, dtype), self.offset
        return scale, None if offset is None else _levels(offset, self.sub_offset, groups, dtype)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight, `[out, in]`; computed in float32, in float64 if `dtype` is."""
        out = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        wide = torch.promote_types(dtype, torch.float32)
        for start in range(0, len(out), ROWS):
            part = self.rows(slice(start, start + ROWS))
            scale, offset = part.group_scales(wide)
            weight = part.values(wide).view(*scale.shape, self.group).mul_(scale[..., None])
            if offset is not None:
                weight.sub_(offset[..., None])
            out[start : start + ROWS] = weight.flatten(1)
        return out

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return `value(code) - zero`, `[out, in]`."""
        if self.floats:
            return self.codes.view(torch.float8_e4m3fn).to(dtype)
        if not self.table:
            return self.codes.to(dtype).sub_(self.zero)
        table = torch.tensor(self.table, device=self.codes.device).sub_(self.zero).to(dtype)
        return table[self.codes.long()]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Codes, scales, their second level, offsets, their second level."""
        return self.codes, self.scale, self.sub_scale, self.offset, self.sub_offset

    def _with(self, *parts: Tensor | None) -> GroupedWeight:
        codes, scale, sub_scale, offset, sub_offset = parts
        assert codes is not None
        assert scale is not None
        return replace(self, codes=codes, scale=scale, sub_scale=sub_scale, offset=offset, sub_offset=sub_offset)


def _levels(scale: Tensor, sub: Tensor | None, groups: int, dtype: torch.dtype) -> Tensor:
    wide = scale.to(dtype)
    return wide if sub is None else wide.repeat_interleave(groups // scale.shape[1], dim=1) * sub.to(dtype)


def stack(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Return matrices below each other as one. Kinds that differ are brought, exactly, to the smallest group, and
    to 6 bits, or to 8 where those do not hold all values; to scales on two levels if all have such for as many
    inputs, else to float32.

    Raises:
        ValueError: Matrices of different widths or types, or of groups that do not divide each other.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if len({(w.shape[1], w.dtype, w.int8_inputs, w.float8_inputs) for w in weights}) != 1:
        raise ValueError(
            "matrices of different widths or types, or of exact and rounded inputs, cannot be stacked"
        )
    if len({_kind(weight) for weight in weights}) > 1:
        group = min(weight.group for weight in weights)
        scales = {(weight.sub_scale is None, weight.scale.dtype, weight.scale.shape[1]) for weight in weights}
        levels = len(scales) == 1 and weights[0].sub_scale is not None
        bits = 6 if all(_has_six_bits(weight) for weight in weights) else 8
        weights = [_widened(weight, bits, group, levels) for weight in weights]
        first = weights[0]
    parts = zip(*(weight.parts for weight in weights), strict=True)
    return first._with(
        *(None if part[0] is None else torch.cat([p for p in part if p is not None]) for part in parts)
    )


def _kind(weight: GroupedWeight) -> tuple[object, ...]:
    levels = (weight.sub_scale is None, weight.offset is None, weight.scale.shape[1], weight.scale.dtype)
    return (weight.bits, weight.group, weight.zero, weight.table, weight.floats, *levels)


def _has_six_bits(weight: GroupedWeight) -> bool:
    """Return whether all values less their zero fit 6 bits about 32, whatever the codes are."""
    values = weight.table or (0, (1 << weight.bits) - 1)
    return not weight.floats and min(values) - weight.zero >= -32 and max(values) - weight.zero < 32


def _widened(weight: GroupedWeight, bits: int, group: int, levels: bool) -> GroupedWeight:
    """Return the same numbers with 6 or 8 bits about the middle, groups of `group` and offsets; with its two
    levels of scales, or one of float32."""
    zero = 1 << (bits - 1)
    if weight.group % group:
        raise ValueError(f"groups of {weight.group} and {group} inputs cannot be stacked")
    if weight.floats:
        raise ValueError("codes that are floats cannot be stacked with others")
    codes = weight.values(torch.int16) + zero
    if codes.numel() and int(codes.max()) > 255:
        raise ValueError(f"values of 8 bits about zero {weight.zero} cannot be stacked with others")
    wide = codes.to(torch.uint8)

    def of_groups(scale: Tensor, offset: Tensor | None) -> tuple[Tensor, Tensor]:
        offset = torch.zeros_like(scale) if offset is None else offset
        repeats = weight.group // group
        return scale.repeat_interleave(repeats, dim=1), offset.repeat_interleave(repeats, dim=1)

    rounds = weight.int8_inputs
    if levels and weight.sub_scale is not None:
        first = torch.zeros_like(weight.scale) if weight.offset is None else weight.offset
        sub, sub_offset = of_groups(weight.sub_scale, weight.sub_offset)
        return GroupedWeight(
            wide, bits, group, weight.scale, weight.dtype, sub, first, sub_offset, zero, int8_inputs=rounds
        )
    scale, offset = of_groups(*weight.group_scales())
    return GroupedWeight(wide, bits, group, scale, weight.dtype, offset=offset, zero=zero, int8_inputs=rounds)


def rounded_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` `[tokens, in]` as integers `[tokens, in]` and the factor of each `INPUT_GROUP` inputs `[tokens,
    ceil(in / INPUT_GROUP)]`, both in float32. A group with infinity or NaN has the factor NaN."""
    x = x.float()
    padded = F.pad(x, (0, -x.shape[1] % INPUT_GROUP)).view(len(x), -(-x.shape[1] // INPUT_GROUP), INPUT_GROUP)
    largest = padded.abs().amax(dim=-1)
    counts = largest > LEAST_INPUT
    # Of a number, torch would take the inverse first and round twice.
    inverse = torch.where(counts, torch.full_like(largest, 127.0) / largest, 0.0)
    integers = (padded * inverse[..., None]).round_().nan_to_num_(0.0).flatten(1)[:, : x.shape[1]]
    factor = torch.where(counts, largest * (1.0 / 127.0), 0.0)
    return integers, torch.where(largest.isfinite(), factor, torch.nan)


def linear_grouped(x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> Tensor:
    """Return `x · wᵀ + bias` of `x` `[tokens, in]`, in float64 if `x` is, else in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=wide, device=x.device)
    if weight.int8_inputs:
        integers, factor = rounded_inputs(x)
        spread = factor.repeat_interleave(INPUT_GROUP, dim=1)[:, : x.shape[1]]
        x = integers * spread
    x = x.to(wide)
    for start in range(0, out.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        out[:, rows] = F.linear(x, weight.rows(rows).dequantise(wide))
    return out if bias is None else out.add_(bias)
