"""Checkpoints whose matrices are packed integers, AWQ, GPTQ, compressed-tensors, or fp8. No torch.

`quantization_config` in config.json says how a matrix `X.weight` is stored in several tensors:

      awq                   X.qweight [in, out / 8], X.qzeros [groups, out / 8], X.scales [groups, out]
      gptq                  X.qweight [in · bits / 32, out], X.qzeros [groups, out · bits / 32], X.scales
      mxfp4                 of experts alone, all of a layer in one tensor: `stacked_experts`
      compressed-tensors    pack-quantized: X.weight_packed [out, in · bits / 32], X.weight_scale [out, groups]
                            int-quantized: X.weight int8 [out, in], X.weight_scale [out, groups]
      fp8, or compressed-tensors with float-quantized: `float8_files`

`join` puts one entry for the matrix in their place; `packed_weights` reads it. A matrix without such tensors is
stored as always, whatever the configuration says of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from trunkline.worker.errors import CheckpointError, UnsupportedModelError
from trunkline.worker.model.float8_files import GROUP_QUANTUM, Float8Scheme, float8_matrices

_ROW_GROUPS: Final = (128, 64, 32, 16)
"""Groups into which rows with one scale are cut: the first that divides the parts of `_RANKS` ranks, else the last
that divides the rows."""
_RANKS: Final = 8
_ACCEPTED: Final = (
    "accepted are awq (gemm, 4 bits), gptq (4 or 8 bits, without desc_act), mxfp4 of experts, fp8 (e4m3, by "
    "tensor or block) and compressed-tensors (pack-quantized with 4 or 8 bits, int-quantized with 8; symmetric "
    "integers by channel or group; float-quantized with 8 by tensor, channel, group or block)"
)
_INTEGERS: Final = {"awq": "I32", "gptq": "I32", "pack-quantized": "I32", "int-quantized": "I8"}


class PackedScheme(NamedTuple):
    """How the matrices of a checkpoint are packed."""

    method: str
    """"awq", "gptq", "pack-quantized", "int-quantized", or "mxfp4", which no matrix of its own is packed in."""
    bits: int
    """4 or 8."""
    group: int
    """Number of inputs of a group; 0: a row has one scale."""
    zero_added: int = 0
    """What the stored zero points are too small by: 1 in GPTQ's first format."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The names of a matrix's tensors behind its own, integers first, then scales, then zero points."""
        if self.method in ("awq", "gptq"):
            return ("qweight", "scales", "qzeros")
        return ("weight_packed" if self.method == "pack-quantized" else "weight", "weight_scale")

    def widths(self, integers: tuple[int, ...]) -> tuple[int, int]:
        """Return outputs and inputs of a matrix whose integers are stored in this shape."""
        per_word = 32 // self.bits
        first, second = integers
        return {
            "awq": (second * per_word, first),
            "gptq": (second, first * per_word),
            "pack-quantized": (first, second * per_word),
            "int-quantized": (first, second),
        }[self.method]

    def shapes(self, out: int, width: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a matrix's tensors, in the order of `suffixes`."""
        groups, per_word = width // self.group if self.group else 1, 32 // self.bits
        if self.method == "awq":
            return (width, out // per_word), (groups, out), (groups, out // per_word)
        if self.method == "gptq":
            return (width // per_word, out), (groups, out), (groups, out // per_word)
        packed = width // per_word if self.method == "pack-quantized" else width
        return (out, packed), (out, groups)

    def group_of(self, width: int) -> int:
        """Return the number of inputs of a group in memory, 0 if rows of this width have none."""
        if self.group:
            return self.group if width % self.group == 0 else 0
        fitting = [group for group in _ROW_GROUPS if width % group == 0]
        divisible = [group for group in fitting if width % (group * _RANKS) == 0]
        return (divisible or fitting[::-1] or [0])[0]


class PackedMatrix(NamedTuple):
    """A matrix of several tensors."""

    name: str
    """Of the matrix, without ".weight"."""
    scheme: PackedScheme | Float8Scheme
    group: int
    """Number of inputs that are not divided: of a group in memory, or the least of one."""


def read_scheme(given: Any) -> PackedScheme | Float8Scheme:
    """Return what a `quantization_config` says.

    Raises:
        UnsupportedModelError: another method, or a kind of it that is not read; the message says what is accepted.
    """
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method == "awq":
        _refuse_unless("awq", {"bits": (4,), "version": ("gemm", None), "zero_point": (True, None)}, given)
        return PackedScheme("awq", 4, _group(given.get("group_size", 128)))
    if method == "gptq":
        formats = ("gptq", "gptq_v2", None)
        _refuse_unless("gptq", {"bits": (4, 8), "desc_act": (False, None), "checkpoint_format": formats}, given)
        added = 0 if given.get("checkpoint_format") == "gptq_v2" else 1
        return PackedScheme("gptq", given["bits"], _group(given.get("group_size", 128)), added)
    if method == "compressed-tensors":
        return _compressed(given)
    if method == "mxfp4":
        return PackedScheme("mxfp4", 4, 32)
    if method == "fp8":
        _refuse_unless("fp8", {"fmt": ("e4m3", None), "expert_dtype": ("fp8", None)}, given)
        return Float8Scheme(_block(given, "weight_block_size"), ("weight_scale_inv", "weight_scale"), True)
    raise UnsupportedModelError(f"quantization_config: quant_method is {method!r}; {_ACCEPTED}")


def _compressed(given: dict[str, Any]) -> PackedScheme | Float8Scheme:
    groups = given.get("config_groups")
    each = list(groups.values()) if isinstance(groups, dict) else []
    weights = each[0].get("weights") if len(each) == 1 and isinstance(each[0], dict) else None
    if not isinstance(weights, dict):
        raise UnsupportedModelError(
            f"quantization_config: config_groups is not one group with weights; {_ACCEPTED}"
        )
    _refuse_unless(
        "compressed-tensors",
        {"format": ("pack-quantized", "int-quantized", "float-quantized"), "sparsity_config": (None, {})},
        given,
    )
    layout = given["format"]
    if layout == "float-quantized":
        return _compressed_floats(weights, each[0].get("input_activations"))
    _refuse_unless(
        layout,
        {
            "num_bits": (8,) if layout == "int-quantized" else (4, 8),
            "type": ("int",),
            "symmetric": (True, None),
            "strategy": ("channel", "group"),
            "actorder": (None, False),
        },
        weights,
    )
    group = _group(weights.get("group_size")) if weights["strategy"] == "group" else 0
    return PackedScheme(layout, weights["num_bits"], group)


def _compressed_floats(weights: dict[str, Any], inputs: Any) -> Float8Scheme:
    _refuse_unless(
        "float-quantized",
        {
            "num_bits": (8,),
            "type": ("float",),
            "symmetric": (True, None),
            "strategy": ("tensor", "channel", "group", "block"),
            "actorder": (None, False),
        },
        weights,
    )
    strategy = weights["strategy"]
    if strategy == "group":
        block = (1, _group(weights.get("group_size")))
    elif strategy == "block":
        block = _block(weights, "block_structure")
        _refuse_unless("float-quantized in blocks", {"block_structure": (list(block),)}, weights)
    else:
        block = (0, 0) if strategy == "tensor" else (1, 0)
    own = isinstance(inputs, dict) and (inputs.get("num_bits"), inputs.get("type")) == (8, "float")
    return Float8Scheme(block, ("weight_scale",), own)


def _block(given: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return the outputs and inputs that share a scale; 0, 0: all, if nothing is said."""
    sizes = given.get(name)
    if sizes is None:
        return 0, 0
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or any(type(size) is not int or size <= 0 for size in sizes)
        or sizes[1] % GROUP_QUANTUM
    ):
        raise UnsupportedModelError(
            f"quantization_config: {name} {sizes!r}; accepted are outputs and inputs of a block, the inputs a "
            f"multiple of {GROUP_QUANTUM}"
        )
    return sizes[0], sizes[1]


def _refuse_unless(what: str, allowed: Mapping[str, tuple[Any, ...]], given: Mapping[str, Any]) -> None:
    for name, values in allowed.items():
        found = given.get(name)
        if not any(found == value and type(found) is type(value) for value in values):
            raise UnsupportedModelError(f"quantization_config: {what} with {name} {found!r}; {_ACCEPTED}")


def _group(size: Any) -> int:
    if size == -1:
        return 0
    if type(size) is not int or size <= 0 or size % GROUP_QUANTUM:
        raise UnsupportedModelError(
            f"quantization_config: group_size {size!r}; accepted are multiples of {GROUP_QUANTUM}, and -1"
        )
    return size


def scheme_of(folder: Path) -> PackedScheme | Float8Scheme | None:
    """Return how the matrices of a folder are packed; None: they are not.

    Raises:
        UnsupportedModelError: as `read_scheme`.
    """
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # reading the configuration says so
    config = given.get("quantization_config") if isinstance(given, dict) else None
    return read_scheme(config) if config else None


def packed_matrices(
    scheme: PackedScheme | Float8Scheme, tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, tuple[PackedMatrix, tuple[int, int]]]:
    """Return the matrices that are packed, by the name of their integers, and their shapes `[out, in]`.

    Args:
        tensors: shape and type of each tensor of the files.

    Raises:
        CheckpointError: tensors of a matrix that are missing or do not fit each other.
    """
    if isinstance(scheme, Float8Scheme):
        return {
            name: (PackedMatrix(name.removesuffix(".weight"), scheme, GROUP_QUANTUM), shape)
            for name, shape in float8_matrices(scheme, tensors).items()
        }
    if scheme.method == "mxfp4":
        return {}
    integers, *others = scheme.suffixes
    found = {}
    for name, (shape, kind) in tensors.items():
        owner, _, suffix = name.rpartition(".")
        if suffix != integers or (scheme.method == "int-quantized" and kind != "I8"):
            continue
        if kind != _INTEGERS[scheme.method] or len(shape) != 2:
            raise CheckpointError(
                f"{name} is {kind} {list(shape)}; expected are {_INTEGERS[scheme.method]} matrices"
            )
        out, width = scheme.widths(shape)
        group = scheme.group_of(width)
        if not group:
            raise CheckpointError(f"{name}: {width} inputs are no whole groups of {scheme.group or GROUP_QUANTUM}")
        for other, expected in zip((integers, *others), scheme.shapes(out, width), strict=True):
            given = tensors.get(f"{owner}.{other}")
            if given is None or given[0] != expected:
                text = "missing" if given is None else f"{given[1]} {list(given[0])}"
                raise CheckpointError(f"{owner}.{other} is {text}; beside {name} it is {list(expected)}")
        found[name] = (PackedMatrix(owner, scheme, group), (out, width))
    return found
