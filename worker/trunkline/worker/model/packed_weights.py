"""Matrices of packed integers and of fp8 (`packed_files`, `float8_files`) in the form of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from trunkline.kernels.float8 import float8
from trunkline.kernels.grouped import GroupedWeight
from trunkline.kernels.mxfp4 import NOT_A_NUMBER, mxfp4
from trunkline.worker.errors import CheckpointError
from trunkline.worker.model.float8_files import Float8Scheme
from trunkline.worker.model.packed_files import PackedMatrix

AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight, whose code is at each place of a word, from its lowest bits on."""


def read_packed(matrix: PackedMatrix, tensor: Callable[[str], Tensor | None], dtype: torch.dtype) -> GroupedWeight:
    """Return a whole matrix of integers; nothing is rounded.

    Args:
        tensor: returns a tensor of the files, None if there is none of that name.
        dtype: type of what the matrix is multiplied with.

    Raises:
        CheckpointError: groups in another order than that of the inputs.
    """
    scheme, name = matrix.scheme, matrix.name
    assert not isinstance(scheme, Float8Scheme)
    found = [tensor(f"{name}.{suffix}") for suffix in scheme.suffixes]
    integers, scale, *zeros = (part for part in found if part is not None)
    scale = scale if scale.dtype in (torch.float16, torch.bfloat16) else scale.float()
    offset: Tensor | None = None
    zero = 1 << (scheme.bits - 1)
    if scheme.method == "int-quantized":
        codes = integers.view(torch.uint8) ^ 128
    elif scheme.method == "pack-quantized":
        codes = _unpacked(integers, scheme.bits)
    else:
        _check_order(tensor(f"{name}.g_idx"), name, scheme.group or integers.shape[0] * 32)
        if scheme.method == "awq":
            order = torch.tensor(AWQ_ORDER).argsort()
            codes = _unpacked(integers, 4).view(-1, 8)[:, order].view(len(integers), -1).T
            points = _unpacked(zeros[0], 4).view(-1, 8)[:, order].view(len(zeros[0]), -1).T
        else:
            codes = _unpacked(integers.T, scheme.bits)
            points = _unpacked(zeros[0], scheme.bits).T
        scale, points = scale.T, points.to(torch.int16) + scheme.zero_added
        if bool((points == points[0, 0]).all()) and int(points[0, 0]) < 256:
            zero = int(points[0, 0])
        else:
            zero, scale = 0, scale.float()
            offset = scale * points
    repeated = codes.shape[1] // matrix.group // scale.shape[1]
    scale = scale.repeat_interleave(repeated, dim=1)
    offset = None if offset is None else offset.repeat_interleave(repeated, dim=1)
    return GroupedWeight(codes.contiguous(), scheme.bits, matrix.group, scale, dtype, offset=offset, zero=zero)


def read_float8(
    name: str,
    scheme: Float8Scheme,
    codes: Tensor,
    scale: Tensor,
    first: tuple[int, int],
    dtype: torch.dtype,
) -> GroupedWeight:
    """Return a part of a matrix of floats of 8 bits; nothing is rounded.

    Args:
        codes: float8_e4m3fn `[out, in]`, the part.
        scale: of the whole matrix, `scheme.scale_shape`.
        first: the part's first output and input in the matrix.
        dtype: type of what the matrix is multiplied with.

    Raises:
        CheckpointError: a weight or a scale that is not a number.
    """
    (rows, columns), (out, width) = scheme.block, codes.shape
    group = scheme.group_of(first[1], width)
    outputs = first[0] + torch.arange(out, device=scale.device)
    inputs = first[1] + torch.arange(0, width, group, device=scale.device)
    own = scale.float()[outputs // rows if rows else outputs * 0][:, inputs // columns if columns else inputs * 0]
    try:
        return replace(float8(codes, own, dtype), float8_inputs=scheme.rounds_inputs)
    except ValueError as error:
        raise CheckpointError(f"{name}.weight: {error}") from error


def read_mxfp4(name: str, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> GroupedWeight:
    """Return a matrix of 4-bit floats in groups with a power of two each; nothing is rounded.

    Args:
        blocks: uint8 `[out, groups, 16]`, of two values the first in the low bits.
        scales: uint8 `[out, groups]`: exponents plus 127.

    Raises:
        CheckpointError: a scale that is not a number.
    """
    if bool((scales == NOT_A_NUMBER).any()):
        raise CheckpointError(f"{name}_scales: a scale is not a number")
    return mxfp4(_unpacked(blocks.flatten(1), 4), scales, dtype)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the codes in words of 32 bits `[rows, n]`, lowest bits first: uint8 `[rows, n * 32 / bits]`."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _check_order(index: Tensor | None, name: str, group: int) -> None:
    if index is None:
        return
    if not torch.equal(index.long(), torch.arange(len(index)) // group):
        raise CheckpointError(f"{name}.g_idx: the inputs of a group do not adjoin; desc_act is not read")
