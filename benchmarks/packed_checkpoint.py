"""Checkpoints of packed integers, as AWQ, GPTQ and compressed-tensors store them, written by plain rounding.

The programs of these names choose scales and codes with the help of texts that the model reads; here each weight
takes its nearest code. So files for use should come from them; these serve tests and measurements, which need
such files without other programs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, from its lowest bits on, of each of eight outputs."""


def compressed(layout: str, bits: int, **weights: Any) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors; `weights` are more fields of its weights."""
    own = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel", **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": own, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


def words(codes: Tensor, bits: int, places: tuple[int, ...] = ()) -> Tensor:
    """Pack codes along rows, number by number, as the formats are described."""
    per_word = 32 // bits
    packed = torch.zeros(codes.shape[0], codes.shape[1] // per_word, dtype=torch.int64)
    for column in range(codes.shape[1]):
        place = places[column % per_word] if places else column % per_word
        packed[:, column // per_word] |= codes[:, column].long() << (bits * place)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


class Rounded(NamedTuple):
    """A matrix as integers; `[out, in]`, scales and zero points `[out, groups]`."""

    codes: Tensor
    scale: Tensor
    zero: Tensor

    @property
    def weight(self) -> Tensor:
        group = self.codes.shape[1] // self.scale.shape[1]
        scale, zero = (part.repeat_interleave(group, dim=1).float() for part in (self.scale, self.zero))
        return scale * (self.codes.float() - zero)


def rounded(weight: Tensor, bits: int, group: int, symmetric: bool) -> Rounded:
    """Round a matrix `[out, in]` to the nearest integers of `bits`.

    Args:
        group: number of inputs that share a scale; -1: a row has one.
    """
    parts = weight.unfold(1, group, group) if group > 0 else weight[:, None]
    low, high, top = parts.amin(dim=2), parts.amax(dim=2), 2**bits - 1
    if symmetric:
        scale = (parts.abs().amax(dim=2) / (2 ** (bits - 1) - 1)).half()
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        scale = ((high - low) / top).half()
        zero = (-low / scale.float()).round().clamp(1, top)
    codes = (parts / scale.float()[..., None] + zero.float()[..., None]).round().clamp(0, top)
    return Rounded(codes.flatten(1).to(torch.uint8), scale, zero.to(torch.uint8))


def stored(name: str, matrix: Rounded, config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a matrix in the format that a `quantization_config` names."""
    method = config["quant_method"]
    if method == "awq":
        return {
            f"{name}.qweight": words(matrix.codes.T, 4, AWQ_PLACES),
            f"{name}.qzeros": words(matrix.zero.T, 4, AWQ_PLACES),
            f"{name}.scales": matrix.scale.T.contiguous(),
        }
    if method == "gptq":
        bits, group = config["bits"], matrix.codes.shape[1] // matrix.scale.shape[1]
        taken = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        return {
            f"{name}.qweight": words(matrix.codes, bits).T.contiguous(),
            f"{name}.qzeros": words(matrix.zero.T - taken, bits),
            f"{name}.scales": matrix.scale.T.contiguous(),
            f"{name}.g_idx": (torch.arange(matrix.codes.shape[1]) // group).to(torch.int32),
        }
    bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
    scale = {f"{name}.weight_scale": matrix.scale}
    if config["format"] == "int-quantized":
        return {f"{name}.weight": (matrix.codes.int() - 128).to(torch.int8), **scale}
    shape = {f"{name}.weight_shape": torch.tensor(matrix.codes.shape)}
    return {f"{name}.weight_packed": words(matrix.codes, bits), **shape, **scale}


def described(config: dict[str, Any]) -> tuple[int, int, bool]:
    """Return bits, group and whether the integers are symmetric, as a `quantization_config` says."""
    if config["quant_method"] != "compressed-tensors":
        return config["bits"], config["group_size"], config.get("sym", False)
    weights = config["config_groups"]["group_0"]["weights"]
    return weights["num_bits"], weights.get("group_size", -1), True


def write_packed(source: Path, folder: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint with the matrices of its layers packed; return `folder`.

    Args:
        source: a folder whose matrices are named `…_proj.weight`, with one file of weights.
        config: the `quantization_config`.
    """
    folder.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            matrix = rounded(tensor.float(), *described(config))
            tensors |= stored(name.removesuffix(".weight"), matrix, config)
        else:
            tensors[name] = tensor
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    given = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, "quantization_config": config}))
    return folder
