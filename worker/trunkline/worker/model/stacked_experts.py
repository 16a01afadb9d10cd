"""Checkpoints with all experts of a layer in one tensor: gpt-oss, Llama 4, Mistral 4, Granite, Gemma 4. No torch.

      X.experts.gate_up_proj           [experts, in, out]         X.experts.gate_up_proj_bias     [experts, out]
      X.experts.gate_up_proj           [experts, out, in] in other families
      X.input_linear.weight            [experts, out, in]         Granite's; its other matrix is output_linear
      X.experts.gate_up_proj_blocks    uint8 [experts, out, groups, 16]: MXFP4, 32 values of 4 bits each
      X.experts.gate_up_proj_scales    uint8 [experts, out, groups]: the powers of two that multiply them
      and the same of down_proj

`members` gives each expert's part a name of its own, `X.experts.3.gate_up_proj.weight` or `.bias`, like those in
files that store experts one by one; Granite's are `X.experts.3.input_linear.weight`. So only the reader of the
bytes has to know of it. Shapes tell which way a matrix lies: gate and up have twice the outputs that the inputs of
down are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from trunkline.worker.errors import CheckpointError

MXFP4_GROUP: Final = 32
"""Number of values that share a scale."""
_STACKED: Final = re.compile(
    r"(.*\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks)"
    r"|(.*\.block_sparse_moe)\.(input_linear|output_linear)\.weight"
)


class MemberKind(StrEnum):
    """How an expert's part lies in the tensor of all."""

    MATRIX = "[in, out]"
    ROWS = "[out, in]"
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
        owner, matrix, ending, block, linear = found.groups()
        if block is not None:
            owner, matrix, kind = f"{block}.experts", linear, MemberKind.ROWS
        elif ending:
            kind = {"_bias": MemberKind.VECTOR, "_blocks": MemberKind.MXFP4}[ending]
        else:
            kind = MemberKind.ROWS if _lie_in_rows(owner, tensors) else MemberKind.MATRIX
        own = _shape(name, kind, shape, tensors)
        part = "bias" if kind is MemberKind.VECTOR else "weight"
        source = name.removesuffix("_blocks")
        for index in range(shape[0]):
            yield name, f"{owner}.{index}.{matrix}.{part}", Member(source, index, kind), own


def _lie_in_rows(owner: str, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> bool:
    """Return whether the matrices of these experts are `[out, in]`."""
    up, down = (tensors.get(f"{owner}.{name}", ((), ""))[0] for name in ("gate_up_proj", "down_proj"))
    return len(up) == len(down) == 3 and up[1] == 2 * down[2] and up[2] == down[1]


def _shape(
    name: str, kind: MemberKind, shape: tuple[int, ...], tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> tuple[int, ...]:
    """Return the shape of one expert's part."""
    dimensions = {MemberKind.VECTOR: 2, MemberKind.MXFP4: 4}.get(kind, 3)
    if len(shape) != dimensions:
        raise CheckpointError(f"{name} has shape {list(shape)}; expected are {dimensions} dimensions")
    if kind is MemberKind.MATRIX:
        return shape[2], shape[1]
    if kind in (MemberKind.VECTOR, MemberKind.ROWS):
        return shape[1:]
    scales = name.removesuffix("_blocks") + "_scales"
    if shape[3] != MXFP4_GROUP // 2 or tensors[name][1] != "U8":
        raise CheckpointError(f"{name} is {tensors[name][1]} {list(shape)}; MXFP4 has U8 blocks of 16 bytes")
    if tensors.get(scales) != (shape[:3], "U8"):
        given = tensors.get(scales)
        text = "missing" if given is None else f"{given[1]} {list(given[0])}"
        raise CheckpointError(f"{scales} is {text}; beside {name} it is U8 {list(shape[:3])}")
    return shape[1], shape[2] * MXFP4_GROUP
