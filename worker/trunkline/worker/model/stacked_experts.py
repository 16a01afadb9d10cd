"""Checkpoints that have all experts of a layer in one tensor: gpt-oss, Llama 4. No torch.

      X.experts.gate_up_proj           [experts, in, out]         X.experts.gate_up_proj_bias     [experts, out]
      X.experts.gate_up_proj_blocks    uint8 [experts, out, groups, 16]: MXFP4, 32 values of 4 bits each
      X.experts.gate_up_proj_scales    uint8 [experts, out, groups]: the powers of two that multiply them
      and the same of down_proj

`members` gives each expert's part a name of its own, `X.experts.3.gate_up_proj.weight` or `.bias`, like those in
files that store experts one by one. So only the reader of the bytes has to know of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from trunkline.worker.errors import CheckpointError

MXFP4_GROUP: Final = 32
"""Number of values that share a scale."""
_STACKED: Final = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks)")


class MemberKind(StrEnum):
    """How an expert's part lies in the tensor of all."""

    MATRIX = "[in, out]"
    VECTOR = "[out]"
    MXFP4 = "[out, groups, 16], and [out, groups] in another tensor"


class Member(NamedTuple):
    """An expert's part of a tensor of all experts."""

    source: str
    """Name of the tensor; of `MXFP4` without its ending."""
    expert: int
    kind: MemberKind


def members(
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
) -> Iterator[tuple[str, str, Member, tuple[int, ...]]]:
    """Yield the parts of all such tensors: names of tensor and part, place and shape (`[out, in]` or `[out]`).

    Args:
        tensors: shape and type of each tensor of the files.

    Raises:
        CheckpointError: tensors that do not fit each other.
    """
    for name, (shape, _) in tensors.items():
        found = _STACKED.fullmatch(name)
        if found is None:
            continue
        owner, matrix, ending = found.groups()
        kind = {"": MemberKind.MATRIX, "_bias": MemberKind.VECTOR, "_blocks": MemberKind.MXFP4}[ending]
        own = _shape(name, kind, shape, tensors)
        part = "bias" if kind is MemberKind.VECTOR else "weight"
        source = name.removesuffix("_blocks")
        for index in range(shape[0]):
            yield name, f"{owner}.{index}.{matrix}.{part}", Member(source, index, kind), own


def _shape(
    name: str, kind: MemberKind, shape: tuple[int, ...], tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> tuple[int, ...]:
    """Return the shape of one expert's part."""
    dimensions = {MemberKind.MATRIX: 3, MemberKind.VECTOR: 2, MemberKind.MXFP4: 4}[kind]
    if len(shape) != dimensions:
        raise CheckpointError(f"{name} has shape {list(shape)}; expected are {dimensions} dimensions")
    if kind is MemberKind.MATRIX:
        return shape[2], shape[1]
    if kind is MemberKind.VECTOR:
        return shape[1:]
    scales = name.removesuffix("_blocks") + "_scales"
    if shape[3] != MXFP4_GROUP // 2 or tensors[name][1] != "U8":
        raise CheckpointError(f"{name} is {tensors[name][1]} {list(shape)}; MXFP4 has U8 blocks of 16 bytes")
    if tensors.get(scales) != (shape[:3], "U8"):
        given = tensors.get(scales)
        text = "missing" if given is None else f"{given[1]} {list(given[0])}"
        raise CheckpointError(f"{scales} is {text}; beside {name} it is U8 {list(shape[:3])}")
    return shape[1], shape[2] * MXFP4_GROUP
