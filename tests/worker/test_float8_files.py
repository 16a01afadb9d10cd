"""Checkpoints of floats of 8 bits: logits, slices of ranks, and everything that is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from kernels.cuda_emulated import CXX, make_emulated
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor
from worker.checkpoints import assert_greedy, largest_difference, make_checkpoint
from worker.driver import generate, run_config
from worker.ranks import generate_with_each, run_ranks

from trunkline.kernels.grouped import GroupedWeight
from trunkline.kernels.ops import PackedLinear, Quantisation, Weight
from trunkline.kernels.reference import ReferenceKernels
from trunkline.worker.errors import CheckpointError, UnsupportedModelError
from trunkline.worker.loading import load_runner
from trunkline.worker.model.checkpoint import load_weights
from trunkline.worker.model.families import check_model
from trunkline.worker.model.float8_files import Float8Scheme
from trunkline.worker.model.packed_files import packed_matrices, read_scheme
from trunkline.worker.model.packed_weights import read_float8
from trunkline.worker.model.shard import Shard
from trunkline.worker.model.tensor_index import has_blocks, read_tensor_index

BLOCKS: Final[dict[str, Any]] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [24, 48],
}
"""Blocks as DeepSeek's, but smaller, so that the last ones do not fit."""


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    own = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **weights}
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    groups = {"group_0": {"targets": ["Linear"], "weights": own, "input_activations": activations}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        "ignore": ["lm_head"],
    }


def with_inputs(**inputs: Any) -> dict[str, Any]:
    """What is said of inputs, in place of floats of 8 bits."""
    given = compressed("tensor")
    weights = given["config_groups"]["group_0"]["weights"]
    return {**given, "config_groups": {"group_0": {"weights": weights, **inputs}}}


class Case(NamedTuple):
    """A checkpoint and how its matrices are stored."""

    config: dict[str, Any]
    block: tuple[int, int]
    """Outputs and inputs that share a scale; 0: all."""
    scale: str = "weight_scale"
    model: str = "gqa"
    flat: bool = False
    """Whether scales of one block by input are stored without that dimension."""
    kind: torch.dtype = torch.float32
    """Of scales."""


CASES: Final = {
    "blocks": Case(BLOCKS, (24, 48), "weight_scale_inv"),
    "experts": Case(BLOCKS, (24, 48), "weight_scale_inv", "qwen3-moe", kind=torch.bfloat16),
    "shared experts": Case(BLOCKS, (24, 48), "weight_scale_inv", "glm4-moe"),
    "latents": Case(BLOCKS, (24, 48), "weight_scale_inv", "deepseek-v3"),
    "static": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        (0, 0),
        "weight_scale_inv",
        "ministral3",
        kind=torch.bfloat16,
    ),
    "per tensor": Case({"quant_method": "fp8", "ignored_layers": ["lm_head"]}, (0, 0), flat=True),
    "tensor": Case(compressed("tensor"), (0, 0), flat=True),
    "channel": Case(compressed("channel"), (1, 0), model="phi3", kind=torch.bfloat16),
    "flat channel": Case(compressed("channel"), (1, 0), flat=True),
    "group": Case(compressed("group", group_size=32), (1, 32)),
    "block": Case(compressed("block", block_structure=[128, 128]), (128, 128)),
}
SHAPE: Final[dict[str, Any]] = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 16}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "qwen3-moe": {**SHAPE, "moe_intermediate_size": 32},
    "glm4-moe": {**SHAPE, "moe_intermediate_size": 32},
    "deepseek-v3": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 12,
        "v_head_dim": 16,
    },
    "phi3": {**SHAPE, "num_attention_heads": 6, "num_key_value_heads": 2},
}


def rounded(weight: Tensor, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and the numbers that they are, block by block."""
    rows, columns = (given or size for given, size in zip(case.block, weight.shape, strict=True))
    codes, numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale = (weight[place].abs().max() / 448).to(case.kind).float()
            codes[place] = (weight[place] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            numbers[place] = codes[place].float() * scale
            scales[i, j] = scale
    scales = scales.to(case.kind)
    if case.flat:
        scales = scales[:, 0]
    return codes, scales.reshape(()) if case.block == (0, 0) and not case.flat else scales, numbers


class Pair(NamedTuple):
    stored: Path
    plain: Path
    """The same numbers in float32."""


def make_pair(root: Path, folder: str, case: Case) -> Pair:
    plain = make_checkpoint(root / "plain", case.model, **SHAPES.get(case.model, SHAPE))
    stored = root / folder
    stored.mkdir()
    tensors, own = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in list(tensors.items()):
        if not name.endswith(("_proj.weight", "_with_mqa.weight")):
            own[name] = tensor
            continue
        codes, scales, tensors[name] = rounded(tensor.float(), case)
        owner = name.removesuffix(".weight")
        own |= {name: codes, f"{owner}.{case.scale}": scales, f"{owner}.input_scale": torch.tensor(0.5)}
        if owner.endswith(("k_proj", "v_proj")):  # of KV: not used, whatever it is kept in
            own[f"{owner}.{owner[-6]}_scale"] = torch.tensor(0.25)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file({name: each.contiguous() for name, each in own.items()}, stored / "model.safetensors")
    given = json.loads((plain / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**given, "quantization_config": case.config}))
    return Pair(stored, plain)


Pairs = Callable[[str], Pair]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            made[name] = make_pair(tmp_path_factory.mktemp("float8"), name, CASES[name])
        return made[name]

    return pair


@pytest.mark.parametrize(
    ("name", "kernels"), [*((name, "auto") for name in CASES), ("blocks", "reference"), ("latents", "reference")]
)
def test_logits_are_those_of_the_same_numbers(name: str, kernels: str, pairs: Pairs) -> None:
    pair = pairs(name)
    assert has_blocks(pair.stored)
    runner = load_runner(run_config(pair.stored, kernels=kernels), lambda *_: None)
    for stream in generate(runner):
        assert largest_difference(pair.plain, stream) <= 1e-4
        assert_greedy(pair.plain, stream)


@pytest.mark.parametrize(("name", "rank", "number"), [("tensor", 0, 4), ("tensor", 1, None), ("latents", 0, None)])
def test_scales_of_kv_are_ignored_aloud(name: str, rank: int, number: int | None, pairs: Pairs) -> None:
    stored = pairs(name).stored
    shard = Shard(check_model(stored, 2, "float32"), rank, 2)
    with capture_logs() as logs:
        device = torch.device("cpu")
        load_weights(stored, shard, torch.float32, device, ReferenceKernels(), lambda *_: None)
    said = [line["tensors"] for line in logs if "scales of KV are not used" in line["event"]]
    assert said == ([] if number is None else [number])


@pytest.mark.processes
def test_ranks_give_the_same(pairs: Pairs) -> None:
    names = ("blocks", "experts", "latents", "static", "channel")
    results, *_ = run_ranks(generate_with_each, 2, [pairs(name).stored for name in names])
    split = ("shared experts",)
    parts, *_ = run_ranks(
        partial(generate_with_each, expert_parallel=False), 2, [pairs(name).stored for name in split]
    )
    for name, streams in zip((*names, *split), [*results, *parts], strict=True):
        for stream in streams:
            assert largest_difference(pairs(name).plain, stream) <= 1e-4, name
            assert_greedy(pairs(name).plain, stream)


@pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")
@pytest.mark.parametrize("name", ["static", "per tensor", "tensor", "channel", "experts", "blocks"])
def test_what_a_gpu_multiplies_as_it_is(name: str, pairs: Pairs) -> None:
    """Scales of tensors and channels, each rank's part. Blocks of other sizes than 128 inputs become floats."""
    kernels, pair = make_emulated(), pairs(name)
    for rank in range(2):
        shard = Shard(check_model(pair.stored, 2, "bfloat16"), rank, 2)
        weights = load_weights(pair.stored, shard, torch.bfloat16, torch.device("cpu"), kernels, lambda *_: None)
        for layer in weights.layers:
            for packed in (layer.qkv, layer.attention_out):
                assert isinstance(packed, PackedLinear)
                stored = packed.data[0]
                assert stored.floats
                assert stored.float8_inputs == (CASES[name].block[1] == 0)


@pytest.mark.parametrize(
    ("config", "is_meant"),
    [
        (BLOCKS, True),
        (CASES["static"].config, True),
        (compressed("channel"), True),
        (with_inputs(), False),
        (with_inputs(input_activations=None), False),
        (with_inputs(input_activations={"num_bits": 8, "type": "int"}), False),
    ],
)
def test_who_says_that_inputs_are_to_be_rounded(config: dict[str, Any], is_meant: bool) -> None:
    scheme = read_scheme(config)
    assert isinstance(scheme, Float8Scheme)
    assert scheme.rounds_inputs == is_meant


class Noting(ReferenceKernels):
    """Notes the matrices that are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[Weight] = []

    def pack_linear(self, weight: Weight, bias: Tensor | None, quantisation: Quantisation = "") -> PackedLinear:
        self.packed.append(weight)
        return super().pack_linear(weight, bias, quantisation)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_read_their_slices(tp: int, dtype: torch.dtype, pairs: Pairs) -> None:
    """To the last bit, in the largest groups that their part allows; each byte once, and scales by every rank."""
    pair = pairs("blocks")
    plain = load_file(pair.plain / "model.safetensors")
    start = "model.layers.0.self_attn"
    joined, sizes = list[Tensor](), 0
    for rank in range(tp):
        shard, kernels = Shard(check_model(pair.stored, tp, "float32"), rank, tp), Noting()
        weights = load_weights(pair.stored, shard, dtype, torch.device("cpu"), kernels, lambda *_: None)
        _, qkv, out, *_ = kernels.packed
        assert isinstance(qkv, GroupedWeight)
        assert isinstance(out, GroupedWeight)
        assert (qkv.floats, qkv.int8_inputs, qkv.dtype, qkv.group) == (True, False, dtype, 48)
        assert out.group == 16
        heads = (tp, min(tp, 2), min(tp, 2))  # there are two of keys and values
        parts = [
            plain[f"{start}.{each}_proj.weight"].chunk(count)[rank * count // tp]
            for each, count in zip("qkv", heads, strict=True)
        ]
        assert torch.equal(qkv.dequantise(), torch.cat(parts))
        joined.append(out.dequantise())
        sizes += weights.bytes_read
    assert torch.equal(torch.cat(joined, dim=1), plain[f"{start}.o_proj.weight"])
    codes = sum(
        tensor.numel() for name, tensor in plain.items() if "layers" in name and name.endswith("proj.weight")
    )
    scales = sum(
        tensor.nbytes for name, tensor in load_file(pair.stored / "model.safetensors").items() if "scale" in name
    )
    rest = sum(tensor.nbytes for name, tensor in plain.items() if not name.endswith("proj.weight"))
    assert codes < sizes <= codes * (1 if tp < 4 else 1.2) + tp * (scales + rest)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**BLOCKS, "fmt": "e5m2"}, "fp8 with fmt 'e5m2'; accepted are"),
        ({**BLOCKS, "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ({**BLOCKS, "weight_block_size": [128, 24]}, r"weight_block_size \[128, 24\]; accepted are .* of 16"),
        ({**BLOCKS, "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({**BLOCKS, "weight_block_size": [0, 128]}, r"weight_block_size \[0, 128\]"),
        ({**BLOCKS, "weight_block_size": [True, 128]}, r"weight_block_size \[True, 128\]"),
        ({**BLOCKS, "weight_block_size": "128"}, "weight_block_size '128'"),
        (compressed("token"), "float-quantized with strategy 'token'"),
        (compressed("tensor", num_bits=4), "float-quantized with num_bits 4"),
        (compressed("tensor", type="int"), "float-quantized with type 'int'"),
        (compressed("group", group_size=8), "group_size 8; accepted are multiples of 16"),
        (compressed("block"), "float-quantized in blocks with block_structure None"),
        ({**compressed("tensor"), "format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt'; accepted are"),
        ({"quant_method": "fbgemm_fp8"}, "'fbgemm_fp8'; accepted are"),
    ],
)
def test_what_is_refused_by_name(config: Any, message: str, pairs: Pairs, tmp_path: Path) -> None:
    given = json.loads((pairs("blocks").stored / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**given, "quantization_config": config}))
    with pytest.raises(UnsupportedModelError, match=message):
        check_model(tmp_path, 1, "float32")


def test_tensors_that_do_not_fit_are_refused() -> None:
    scheme = read_scheme({**BLOCKS, "weight_block_size": [128, 128]})
    good: dict[str, tuple[tuple[int, ...], str]] = {
        "a.weight": ((576, 1600), "F8_E4M3"),
        "a.weight_scale_inv": ((5, 13), "F32"),
        "b.weight": ((576,), "BF16"),
    }
    ((matrix, shape),) = packed_matrices(scheme, good).values()
    assert (matrix.name, matrix.group, shape) == ("a", 16, (576, 1600))
    expected = r"beside a.weight \[576, 1600\] it is \[5, 13\] of F32, BF16, F16"
    changes: list[tuple[str, tuple[tuple[int, ...], str], str]] = [
        (
            "a.weight",
            ((576, 1600), "F8_E5M2"),
            r"a.weight is F8_E5M2 \[576, 1600\]; expected are F8_E4M3 matrices",
        ),
        ("a.weight", ((2, 576, 1600), "F8_E4M3"), r"a.weight is F8_E4M3 \[2, 576, 1600\]; expected"),
        ("a.weight", ((576, 1608), "F8_E4M3"), "a.weight: 1608 inputs are no whole groups of 16"),
        ("a.weight", ((576, 1728), "F8_E4M3"), r"a.weight_scale_inv is F32 \[5, 13\]; .* it is \[5, 14\]"),
        ("a.weight_scale_inv", ((4, 13), "F32"), rf"a.weight_scale_inv is F32 \[4, 13\]; {expected}"),
        ("a.weight_scale_inv", ((), "F32"), rf"a.weight_scale_inv is F32 \[\]; {expected}"),
        ("a.weight_scale_inv", ((5, 13), "F8_E8M0"), rf"a.weight_scale_inv is F8_E8M0 \[5, 13\]; {expected}"),
        ("b.weight", ((576,), "F8_E4M3"), r"b.weight is F8_E4M3 \[576\]; expected are F8_E4M3 matrices"),
    ]
    for name, changed, message in changes:
        with pytest.raises(CheckpointError, match=message):
            packed_matrices(scheme, {**good, name: changed})
    del good["a.weight_scale_inv"]
    with pytest.raises(
        CheckpointError, match=r"a\.weight_scale_inv or \.weight_scale is missing; beside a\.weight"
    ):
        packed_matrices(scheme, good)
    per_tensor = read_scheme({"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match=r"it is \[1, 1\] or \[1\] or \[\] of F32"):
        packed_matrices(per_tensor, {**good, "a.weight_scale": ((5, 13), "F32")})


def test_what_is_no_number_is_refused_by_name(pairs: Pairs, tmp_path: Path) -> None:
    pair = pairs("blocks")
    (tmp_path / "config.json").write_text((pair.stored / "config.json").read_text())
    owner = "model.layers.1.mlp.down_proj"
    for name, place, message in (
        (f"{owner}.weight", (3, 100), f"{owner}.weight: a weight is not a number"),
        (f"{owner}.weight_scale_inv", (1, 1), f"{owner}.weight: a scale is not a number"),
    ):
        tensors = load_file(pair.stored / "model.safetensors")
        tensors[name][place] = float("nan")
        save_file(tensors, tmp_path / "model.safetensors")
        shard = Shard(check_model(tmp_path, 1, "float32"), 0, 1)
        with pytest.raises(CheckpointError, match=message):
            load_weights(tmp_path, shard, torch.float32, torch.device("cpu"), ReferenceKernels(), lambda *_: None)


def test_any_part_of_a_matrix(pairs: Pairs) -> None:
    """Whatever block it begins in."""
    tensors = load_file(pairs("blocks").stored / "model.safetensors")
    plain = load_file(pairs("blocks").plain / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    entry = read_tensor_index(pairs("blocks").stored)[f"{name}.weight"]
    assert entry.packed is not None
    assert isinstance(entry.packed.scheme, Float8Scheme)
    codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
    for top, bottom, left, right in ((0, 96, 0, 192), (5, 30, 48, 96), (23, 24, 16, 192), (90, 96, 80, 96)):
        part = codes[top:bottom, left:right]
        found = read_float8(name, entry.packed.scheme, part, scale, (top, left), torch.float32)
        assert torch.equal(found.dequantise(), plain[f"{name}.weight"][top:bottom, left:right])
