"""Experts in one tensor for a layer, also in MXFP4: logits, slices of ranks, tensors that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from worker.checkpoints import assert_greedy, largest_difference, make_checkpoint
from worker.driver import generate, run_config

from trunkline.kernels.grouped import GroupedWeight
from trunkline.kernels.ops import Activation, PackedLinear, Quantisation, Weight
from trunkline.kernels.reference import ReferenceKernels
from trunkline.worker.errors import CheckpointError
from trunkline.worker.loading import load_runner
from trunkline.worker.model.checkpoint import load_weights
from trunkline.worker.model.families import check_model
from trunkline.worker.model.packed_weights import read_mxfp4
from trunkline.worker.model.shard import Shard
from trunkline.worker.model.stacked_experts import MemberKind, members
from trunkline.worker.model.tensor_index import has_blocks, read_tensor_index

E2M1: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The values of the codes without a sign, as the format's description lists them."""


class Pair(NamedTuple):
    packed: Path
    plain: Path
    """The same numbers in float32."""


def encoded(tensor: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random blocks and scales in place of `[experts, in, out]`, and the numbers that they are."""
    experts, width, out = tensor.shape
    codes = torch.randint(16, (experts, out, width), generator=generator)
    scales = torch.randint(123, 127, (experts, out, width // 32), generator=generator)
    values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    values = values * 2.0 ** (scales - 127).repeat_interleave(32, dim=2)
    pairs = codes.view(experts, out, width // 32, 16, 2)
    blocks = pairs[..., 0] | pairs[..., 1] << 4
    return blocks.to(torch.uint8), scales.to(torch.uint8), values.transpose(1, 2).contiguous()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("mxfp4")
    plain, packed = (
        make_checkpoint(root / "plain", "gpt-oss", hidden_size=64, intermediate_size=32),
        root / "packed",
    )
    packed.mkdir()
    tensors, own = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in list(tensors.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales, tensors[name] = encoded(tensor, generator)
            own |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            own[name] = tensor
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(own, packed / "model.safetensors", metadata={"format": "pt"})
    given = json.loads((plain / "config.json").read_text())
    quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    (packed / "config.json").write_text(json.dumps({**given, "quantization_config": quantisation}))
    return Pair(packed, plain)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_logits_are_those_of_the_same_numbers(kernels: str, pair: Pair) -> None:
    assert has_blocks(pair.packed)
    assert not has_blocks(pair.plain)
    runner = load_runner(run_config(pair.packed, kernels=kernels), lambda *_: None)
    for stream in generate(runner):
        assert largest_difference(pair.plain, stream) <= 1e-4
        assert_greedy(pair.plain, stream)


class Noting(ReferenceKernels):
    """Notes the gated layers that are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.gated: list[tuple[Weight, Tensor | None]] = []

    def pack_gated_linear(
        self, weight: Weight, bias: Tensor | None, activation: Activation, quantisation: Quantisation = ""
    ) -> PackedLinear:
        assert activation == "clamped_silu"
        self.gated.append((weight, bias))
        return super().pack_gated_linear(weight, bias, activation, quantisation)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_have_whole_experts(tp: int, pair: Pair) -> None:
    """Every other row is the gate's; nothing is rounded, and each expert is read by one rank."""
    tensors = load_file(pair.plain / "model.safetensors")
    loaded: list[tuple[Weight, Tensor | None]] = []
    sizes = []
    for rank in range(tp):
        shard, kernels = Shard(check_model(pair.packed, tp, "float32"), rank, tp), Noting()
        weights = load_weights(pair.packed, shard, torch.float32, torch.device("cpu"), kernels, lambda *_: None)
        loaded += kernels.gated[: len(kernels.gated) // 2]  # of the first layer
        sizes.append(weights.bytes_read)
    assert len(loaded) == 4
    for expert, (weight, bias) in enumerate(loaded):
        start = "model.layers.0.mlp.experts.gate_up_proj"
        rows = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2)))
        assert isinstance(weight, GroupedWeight)
        assert torch.equal(weight.dequantise(), tensors[start][expert].T[rows])
        assert bias is not None
        assert torch.equal(bias, tensors[f"{start}_bias"][expert][rows])
    experts = sum(
        tensor.nbytes for name, tensor in load_file(pair.packed / "model.safetensors").items() if "experts" in name
    )
    assert max(sizes) - min(sizes) < experts / 4


def test_half_types_take_powers_of_two_exactly() -> None:
    """From the least, which is denormal in bfloat16, to the largest; 255 is no number."""
    blocks = torch.full((255, 1, 16), 0x12, dtype=torch.uint8)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    weight = read_mxfp4("a", blocks, scales, torch.float32).dequantise(torch.float64)
    expected = 2.0 ** (scales.double() - 127) * torch.tensor([1.0, 0.5] * 16, dtype=torch.float64)
    assert torch.equal(weight, expected)
    with pytest.raises(CheckpointError, match="a_scales: a scale is not a number"):
        read_mxfp4("a", blocks[:1], torch.tensor([[255]], dtype=torch.uint8), torch.float32)


def test_which_way_matrices_lie() -> None:
    """Told by their shapes; what fits neither way is taken as `[in, out]`, and refused for its shape later."""
    ways = {MemberKind.MATRIX: ((2, 8, 12), (2, 6, 8)), MemberKind.ROWS: ((2, 12, 8), (2, 8, 6))}
    for kind, (up, down) in ways.items():
        stacked = {"x.experts.gate_up_proj": (up, "F32"), "x.experts.down_proj": (down, "F32")}
        found = {part: (member.kind, shape) for _, part, member, shape in members(stacked)}
        assert found["x.experts.1.gate_up_proj.weight"] == (kind, (12, 8))
        assert found["x.experts.0.down_proj.weight"] == (kind, (8, 6))
    alone = list(members({"x.experts.gate_up_proj": ((2, 12, 8), "F32")}))
    assert alone[0][2:] == (("x.experts.gate_up_proj", 0, MemberKind.MATRIX), (8, 12))
    granite = {
        "x.block_sparse_moe.input_linear.weight": ((3, 12, 8), "F32"),
        "x.shared_mlp.input_linear.weight": ((12, 8), "F32"),
    }
    found = {part: (member.kind, shape) for _, part, member, shape in members(granite)}
    assert list(found) == [f"x.block_sparse_moe.experts.{i}.input_linear.weight" for i in range(3)]
    assert set(found.values()) == {(MemberKind.ROWS, (12, 8))}
    with pytest.raises(CheckpointError, match="expected are 3 dimensions"):
        list(members({"x.block_sparse_moe.input_linear.weight": ((12, 8), "F32")}))


def test_tensors_that_do_not_fit_are_refused() -> None:
    name = "x.experts.down_proj"
    good: dict[str, tuple[tuple[int, ...], str]] = {
        f"{name}_blocks": ((2, 8, 3, 16), "U8"),
        f"{name}_scales": ((2, 8, 3), "U8"),
        f"{name}_bias": ((2, 8), "BF16"),
    }
    found = {part: (member.expert, member.kind, shape) for _, part, member, shape in members(good)}
    assert found["x.experts.1.down_proj.weight"] == (1, MemberKind.MXFP4, (8, 96))
    assert found["x.experts.1.down_proj.bias"] == (1, MemberKind.VECTOR, (8,))
    changes: list[tuple[str, Any, str]] = [
        ("_blocks", ((2, 8, 3), "U8"), "expected are 4 dimensions"),
        ("_blocks", ((2, 8, 3, 8), "U8"), r"U8 \[2, 8, 3, 8\]; MXFP4 has U8 blocks of 16 bytes"),
        ("_blocks", ((2, 8, 3, 16), "I8"), "down_proj_blocks is I8"),
        ("_scales", ((2, 8, 4), "U8"), r"down_proj_scales is U8 \[2, 8, 4\]; beside .* it is U8 \[2, 8, 3\]"),
        ("_bias", ((8,), "BF16"), "expected are 2 dimensions"),
    ]
    for ending, changed, message in changes:
        with pytest.raises(CheckpointError, match=message):
            list(members({**good, name + ending: changed}))
    with pytest.raises(CheckpointError, match="down_proj_scales is missing"):
        list(members({f"{name}_blocks": good[f"{name}_blocks"]}))


def test_damaged_stacks_are_refused_before_a_process_starts(pair: Pair, tmp_path: Path) -> None:
    def changed(change: Callable[[dict[str, Tensor]], None]) -> Path:
        tensors = load_file(pair.packed / "model.safetensors")
        change(tensors)
        save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((pair.packed / "config.json").read_text())
        return tmp_path

    name = "model.layers.1.mlp.experts.gate_up_proj"
    with pytest.raises(CheckpointError, match=f"{name}_scales is missing"):
        read_tensor_index(changed(lambda tensors: tensors.__delitem__(f"{name}_scales")))
    short = changed(lambda tensors: tensors.update({f"{name}_bias": tensors[f"{name}_bias"][:3]}))
    with pytest.raises(CheckpointError, match=r"1 of .* tensors are missing: .*experts\.3\.gate_up_proj\.bias"):
        check_model(short, 1, "float32")
