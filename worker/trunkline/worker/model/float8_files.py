"""Checkpoints whose safetensors files hold floats of 8 bits (e4m3) with scales. No torch.

A matrix `X.weight` of type F8_E4M3 `[out, in]` has its scales in `X.weight_scale_inv` (DeepSeek, Qwen, Mistral) or
`X.weight_scale` (compressed-tensors and others), whatever the name says: numbers that multiply the weights. Blocks
of outputs and inputs share one:

      per tensor      [], [1] or [1, 1]
      per channel     [out, 1] or [out]
      per block       [ceil(out / rows), ceil(in / columns)]; the last blocks of a matrix may be smaller
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from trunkline.worker.errors import CheckpointError

GROUP_QUANTUM: Final = 16
"""What the number of inputs of a group is a multiple of (`trunkline.kernels.grouped`)."""
_SCALE_TYPES: Final = ("F32", "BF16", "F16")


class Float8Scheme(NamedTuple):
    """Which weights of a matrix share a scale, and what the scales are called."""

    block: tuple[int, int]
    """Outputs and inputs that share a scale, inputs a multiple of `GROUP_QUANTUM`; 0: all."""
    scales: tuple[str, ...]
    """Names that a matrix's scales may have behind its own."""
    rounds_inputs: bool = False
    """Whether inputs are meant to be rounded to floats of 8 bits, too."""

    @property
    def method(self) -> str:
        return "fp8"

    @property
    def bits(self) -> int:
        return 8

    def scale_shape(self, out: int, width: int) -> tuple[int, int]:
        """Return how many blocks a matrix has, by output and by input."""
        rows, columns = self.block
        return (-(-out // rows) if rows else 1, -(-width // columns) if columns else 1)

    def group_of(self, first: int, width: int) -> int:
        """Return the number of inputs of a group in memory, for `width` inputs from `first` on: the largest of
        which none has two scales."""
        return math.gcd(self.block[1], first, width) if self.block[1] else width

    def scale_name(self, owner: str, tensors: Mapping[str, object]) -> str | None:
        """Return the name of a matrix's scales; None: it has none."""
        return next((f"{owner}.{name}" for name in self.scales if f"{owner}.{name}" in tensors), None)


def float8_matrices(
    scheme: Float8Scheme, tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, tuple[int, int]]:
    """Return the matrices of floats of 8 bits by their tensors' names, and their shapes `[out, in]`.

    Args:
        tensors: shape and type of each tensor of the files.

    Raises:
        CheckpointError: other types of 8 bits; scales that are missing or do not fit.
    """
    found = {}
    for name, (shape, kind) in tensors.items():
        if not name.endswith(".weight") or not kind.startswith("F8_"):
            continue
        if kind != "F8_E4M3" or len(shape) != 2:
            raise CheckpointError(f"{name} is {kind} {list(shape)}; expected are F8_E4M3 matrices")
        out, width = shape
        if width % GROUP_QUANTUM or not width:
            raise CheckpointError(f"{name}: {width} inputs are no whole groups of {GROUP_QUANTUM}")
        _check_scales(scheme, name, (out, width), tensors)
        found[name] = (out, width)
    return found


def _check_scales(
    scheme: Float8Scheme, name: str, size: tuple[int, int], tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
    owner = name.removesuffix(".weight")
    expected = scheme.scale_shape(*size)
    allowed: list[tuple[int, ...]] = [expected]
    if not scheme.block[1]:
        allowed.append(expected[:1])
    if scheme.block == (0, 0):
        allowed.append(())
    text = f"{' or '.join(str(list(shape)) for shape in allowed)} of {', '.join(_SCALE_TYPES)}"
    scale = scheme.scale_name(owner, tensors)
    if scale is None:
        raise CheckpointError(f"{owner}.{' or .'.join(scheme.scales)} is missing; beside {name} it is {text}")
    shape, kind = tensors[scale]
    if shape not in allowed or kind not in _SCALE_TYPES:
        raise CheckpointError(f"{scale} is {kind} {list(shape)}; beside {name} {list(size)} it is {text}")
