"""Checkpoints of packed integers: logits, slices of ranks, and everything that is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from packed_checkpoint import compressed, described, rounded, write_packed
from safetensors.torch import load_file, save_file
from torch import Tensor
from worker.checkpoints import assert_greedy, largest_difference, make_checkpoint
from worker.driver import generate, run_config

from trunkline.kernels.grouped import GroupedWeight
from trunkline.kernels.ops import PackedLinear, Quantisation, Weight
from trunkline.kernels.reference import ReferenceKernels
from trunkline.worker.errors import CheckpointError, UnsupportedModelError
from trunkline.worker.loading import load_runner
from trunkline.worker.model.checkpoint import load_weights
from trunkline.worker.model.families import check_model
from trunkline.worker.model.packed_files import packed_matrices, read_scheme
from trunkline.worker.model.packed_weights import read_packed
from trunkline.worker.model.shard import Shard
from trunkline.worker.model.tensor_index import has_blocks, read_tensor_index

SHAPE: Final[dict[str, Any]] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
AWQ: Final[dict[str, Any]] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ: Final[dict[str, Any]] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
CASES: Final[dict[str, dict[str, Any]]] = {
    "awq": AWQ,
    "gptq": {**GPTQ, "checkpoint_format": "gptq"},
    "gptq symmetric": {**GPTQ, "sym": True},
    "gptq 8 bits, rows": {**GPTQ, "bits": 8, "group_size": -1},
    "gptq v2": {**GPTQ, "checkpoint_format": "gptq_v2"},
    "packed 4": compressed("pack-quantized", 4, strategy="group", group_size=32),
    "packed 8": compressed("pack-quantized", 8),
    "int8": compressed("int-quantized", 8),
}
EXPERTS: Final = ("awq experts", "packed 4 experts")
CASES.update({name: CASES[name.removesuffix(" experts")] for name in EXPERTS})


class Pair(NamedTuple):
    packed: Path
    plain: Path
    """The same with its rounded weights in float32."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            model = "qwen3-moe" if name in EXPERTS else "gqa"
            made[name] = make_pair(tmp_path_factory.mktemp("packed"), CASES[name], model)
        return made[name]

    return pair


def make_pair(root: Path, config: dict[str, Any], model: str) -> Pair:
    shape = {**SHAPE, "moe_intermediate_size": 32} if model == "qwen3-moe" else SHAPE
    plain = make_checkpoint(root / "plain", model, **shape)
    packed = write_packed(plain, root / "packed", config)
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = rounded(tensor.float(), *described(config)).weight
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return Pair(packed, plain)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_rounded_weights(name: str, pairs: Callable[[str], Pair]) -> None:
    pair = pairs(name)
    assert has_blocks(pair.packed)
    runner = load_runner(
        run_config(pair.packed, kernels="auto" if name in ("awq", *EXPERTS) else "reference"), lambda *_: None
    )
    for stream in generate(runner):
        assert largest_difference(pair.plain, stream) <= 1e-4
        assert_greedy(pair.plain, stream)


@pytest.mark.parametrize("name", CASES)
def test_matrices_are_the_stored_numbers(name: str, pairs: Callable[[str], Pair]) -> None:
    """To the last bit, and so are a rank's columns and rows. Experts are not cut."""
    pair = pairs(name)
    check_model(pair.packed, 2, "float32")
    files = load_file(pair.packed / "model.safetensors")
    plain = load_file(pair.plain / "model.safetensors")
    packed = {key: entry.packed for key, entry in read_tensor_index(pair.packed).items() if entry.packed}
    assert len(packed) == (2 * (4 + 8 * 3) if name in EXPERTS else 14)
    for key, matrix in packed.items():
        weight = read_packed(matrix, files.get, torch.float32)
        assert isinstance(weight, GroupedWeight)
        assert weight.bits == described(CASES[name])[0]
        torch.testing.assert_close(weight.dequantise(), plain[key], rtol=2e-7, atol=1e-7)
        if ".experts." in key:
            continue
        half = weight.shape[1] // 2
        torch.testing.assert_close(
            weight.columns(slice(half, 2 * half)).dequantise(), plain[key][:, half:], rtol=2e-7, atol=1e-7
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 4}, "quant_method is None; accepted are awq"),
        ([4], "quant_method is None"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'; accepted"),
        ({**AWQ, "version": "gemv"}, "awq with version 'gemv'"),
        ({**AWQ, "bits": 8}, "awq with bits 8"),
        ({**AWQ, "bits": True}, "awq with bits True"),
        ({**AWQ, "zero_point": False}, "zero_point False"),
        ({**AWQ, "group_size": 24}, "group_size 24; accepted are multiples of 16, and -1"),
        ({**AWQ, "group_size": "32"}, "group_size '32'"),
        ({**GPTQ, "desc_act": True}, "gptq with desc_act True"),
        ({**GPTQ, "bits": 3}, "gptq with bits 3"),
        ({**GPTQ, "bits": None}, "gptq with bits None"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (compressed("nvfp4-pack-quantized", 4, type="float"), "format 'nvfp4-pack-quantized'"),
        (compressed("int-quantized", 4), "int-quantized with num_bits 4"),
        (compressed("pack-quantized", 4, symmetric=False), "symmetric False"),
        (compressed("pack-quantized", 4, strategy="tensor"), "strategy 'tensor'"),
        (compressed("pack-quantized", 4, actorder="group"), "actorder 'group'"),
        ({**compressed("int-quantized", 8), "config_groups": {}}, "config_groups is not one group"),
        (
            {**compressed("int-quantized", 8), "config_groups": {"a": {}, "b": {}}},
            "config_groups is not one group",
        ),
    ],
)
def test_what_is_refused_by_name(config: Any, message: str, pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_scheme(config)
    given = json.loads((pairs("int8").packed / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**given, "quantization_config": config}))
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        check_model(tmp_path, 1, "float32")


def test_tensors_that_do_not_fit_are_refused() -> None:
    scheme = read_scheme(GPTQ)
    good = {"a.qweight": ((8, 24), "I32"), "a.qzeros": ((2, 3), "I32"), "a.scales": ((2, 24), "F16")}
    ((matrix, shape),) = packed_matrices(scheme, good).values()
    assert (matrix.name, matrix.group, shape) == ("a", 32, (24, 64))
    changes: list[tuple[str, tuple[tuple[int, ...], str], str]] = [
        ("a.qweight", ((8, 24), "F16"), "a.qweight is F16"),
        ("a.qweight", ((8, 24, 1), "I32"), "expected are I32 matrices"),
        ("a.qweight", ((6, 24), "I32"), "48 inputs are no whole groups of 32"),
        ("a.qzeros", ((2, 4), "I32"), r"a.qzeros is I32 \[2, 4\]; beside a.qweight it is \[2, 3\]"),
        ("a.scales", ((1, 24), "F16"), r"a.scales is F16 \[1, 24\]"),
    ]
    for name, changed, message in changes:
        with pytest.raises(CheckpointError, match=message):
            packed_matrices(scheme, {**good, name: changed})
    with pytest.raises(CheckpointError, match=r"a\.scales is missing"):
        packed_matrices(scheme, {name: each for name, each in good.items() if name != "a.scales"})


def test_inputs_in_another_order_are_refused(pairs: Callable[[str], Pair]) -> None:
    files = load_file(pairs("gptq").packed / "model.safetensors")
    matrix = next(each.packed for each in read_tensor_index(pairs("gptq").packed).values() if each.packed)
    index = f"{matrix.name}.g_idx"
    files[index] = files[index].flip(0)
    with pytest.raises(CheckpointError, match=r"g_idx: the inputs of a group do not adjoin; desc_act"):
        read_packed(matrix, files.get, torch.float32)


def test_half_types_round_their_inputs(pairs: Callable[[str], Pair]) -> None:
    """float32 multiplies the stored weights as they are; half types do so with inputs of 8 bits."""
    layers: dict[str, bool] = {}

    class Watching(ReferenceKernels):
        def pack_linear(
            self, weight: Weight, bias: Tensor | None, quantisation: Quantisation = ""
        ) -> PackedLinear:
            if isinstance(weight, GroupedWeight):
                layers[str(weight.dtype)] = weight.int8_inputs
            return super().pack_linear(weight, bias, quantisation)

    folder = pairs("awq").packed
    for dtype in (torch.float32, torch.bfloat16):
        shard = Shard(check_model(folder, 1, "float32"), 0, 1)
        load_weights(folder, shard, dtype, torch.device("cpu"), Watching(), lambda *_: None)
    assert layers == {"torch.float32": False, "torch.bfloat16": True}
