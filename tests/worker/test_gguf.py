"""GGUF files as models: logits, slices of ranks, and everything that is refused; damaged files."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from gguf_blocks import KINDS, quantised
from gguf_file import ARRAY, DENSE, FLOAT32, INT32, STRING, UINT32, write_gguf
from safetensors.torch import load_file, save_file
from seeds import seeds
from torch import Tensor
from worker.checkpoints import assert_greedy, largest_difference, make_checkpoint
from worker.driver import generate, run_config
from worker.gguf_files import METADATA, TENSORS, file_of

from trunkline.kernels.gguf_blocks import BLOCKS, from_blocks
from trunkline.kernels.grouped import GroupedWeight
from trunkline.kernels.ops import PackedLinear
from trunkline.kernels.reference import ReferenceKernels
from trunkline.worker.errors import CheckpointError, ModelError, ParallelismError, UnsupportedModelError
from trunkline.worker.loading import load_runner
from trunkline.worker.model.checkpoint import load_weights
from trunkline.worker.model.families import check_model
from trunkline.worker.model.gguf.config import config_of
from trunkline.worker.model.gguf.container import TYPES, read_gguf
from trunkline.worker.model.gguf.folder import describe, parts_of, stem_of
from trunkline.worker.model.gguf.names import DENSE_TYPES, read_stored
from trunkline.worker.model.gguf.weights import GgufSlices
from trunkline.worker.model.shard import Shard

WIDE: Final[dict[str, Any]] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
"""Rows of whole blocks of 256 values."""
GEMMA: Final[dict[str, Any]] = {"query_pre_attn_scalar": 8}
"""What the format cannot say is what llama.cpp takes: a head's size."""
CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "mha": ("Q8_0", {"head_dim": 16, "intermediate_size": 128}),
    "mqa-tied": ("Q4_K", WIDE),
    "biases": ("F32", {}),
    "llama3-rope": ("F16", {}),
    "linear-rope": ("F32", {}),
    "yarn-rope": ("Q8_0", {}),
    "mistral": ("BF16", {}),
    "qwen2": ("Q6_K", WIDE),
    "qwen3": ("Q4_0", {}),
    "mixtral": ("Q8_0", {"intermediate_size": 64}),
    "qwen3-moe": ("Q4_0", {"moe_intermediate_size": 32}),
    "gpt-oss": ("MXFP4", {"intermediate_size": 64, "sliding_window": 128}),
    "gemma2": ("Q8_0", GEMMA),
    "gemma3": ("Q4_K", {**WIDE, **GEMMA, "num_hidden_layers": 6, "layer_types": None}),
}
"""Type of the matrices, and changes of the checkpoint, by its name."""


class Pair:
    """A GGUF file's folder, and the checkpoint with its rounded weights."""

    def __init__(self, root: Path, name: str, kind: str, changes: dict[str, Any]) -> None:
        source = make_checkpoint(root / "source", name, **changes)
        self.folder, self.rounded = root / "gguf", root / "rounded"
        self.rounded.mkdir(parents=True)
        tensors = load_file(source / "model.safetensors")
        # Wide layers get smaller weights, so that logits stay as large as those of narrow ones.
        factor = 0.4 if "hidden_size" in changes else 1.0
        small = {key: (each * factor if each.dim() > 1 else each).contiguous() for key, each in tensors.items()}
        save_file(small, source / "model.safetensors", metadata={"format": "pt"})
        rounded = {
            key: each if "router" in key or key.endswith("bias") else rounded_as(kind, each)
            for key, each in small.items()
        }
        save_file(rounded, self.rounded / "model.safetensors", metadata={"format": "pt"})
        (self.rounded / "config.json").write_text((source / "config.json").read_text())
        self.folder.mkdir()
        write_gguf(source, self.folder / "model.gguf", kind)
        content = read_gguf(self.folder / "model.gguf")
        factors = rope_factors(self.folder / "model.gguf")
        (self.folder / "config.json").write_text(json.dumps(config_of(content.metadata, content.tensors, factors)))


def rope_factors(path: Path) -> list[float] | None:
    tensor = read_gguf(path).tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    return list(struct.unpack_from(f"<{tensor.bytes // 4}f", path.read_bytes(), tensor.offset))


def rounded_as(kind: str, tensor: Tensor) -> Tensor:
    if tensor.dim() == 1:
        return tensor
    if tensor.dim() == 3:  # of all experts, inputs first
        return torch.stack([rounded_as(kind, each.T).T for each in tensor]).contiguous()
    if kind in KINDS and tensor.shape[1] % KINDS[kind][0]:
        kind = "F16"
    if kind in KINDS:
        return from_blocks(kind, quantised(kind, tensor), torch.float32).dequantise()
    return tensor.to(DENSE[kind]).float()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            made[name] = Pair(tmp_path_factory.mktemp(name), name, *CASES[name])
        return made[name]

    return pair


def test_types_are_those_of_the_kernels() -> None:
    """The launcher refuses by this table, without torch."""
    tables = {kind.name: (kind.values, kind.bytes) for kind in TYPES.values()}
    assert {name: (each.values, each.bytes) for name, each in BLOCKS.items()} == {
        name: sizes for name, sizes in tables.items() if name not in DENSE_TYPES
    }
    assert {name for name in tables if name in DENSE_TYPES} == set(DENSE_TYPES)
    for kind in TYPES.values():
        if kind.name in BLOCKS:
            weight = from_blocks(kind.name, torch.zeros(1, kind.bytes, dtype=torch.uint8), torch.float32)
            assert weight.group == kind.group


@pytest.mark.parametrize("name", CASES)
def test_logits_and_text_equal_transformers(name: str, pairs: Callable[[str], Pair]) -> None:
    pair = pairs(name)
    runner = load_runner(run_config(pair.folder), lambda *_: None)
    for stream in generate(runner):
        assert largest_difference(pair.rounded, stream) <= 1e-4
        assert_greedy(pair.rounded, stream)


@pytest.mark.parametrize("name", ["mha", "mqa-tied", "qwen2"])
def test_ranks_read_their_slices(name: str, pairs: Callable[[str], Pair]) -> None:
    """Two ranks' layers and heads together are those of one, and of the rounded checkpoint."""
    pair = pairs(name)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))

    def layer(folder: Path, rank: int, tp: int) -> tuple[Tensor, Tensor, Tensor]:
        config = check_model(folder, tp, "float32")
        weights = load_weights(
            folder,
            Shard(config, rank, tp),
            torch.float32,
            torch.device("cpu"),
            ReferenceKernels(),
            lambda *_: None,
        )
        assert weights.bytes_read > 0
        first, kernels = weights.layers[0], ReferenceKernels()
        assert isinstance(first.qkv, PackedLinear)
        attended = x[:, : config.heads * config.head_dim].chunk(tp, dim=1)[rank]
        states, head = x[:, : config.hidden_size], weights.head
        query = kernels.linear(states, first.qkv)[:, : config.heads // tp * config.head_dim]
        in_blocks = head.packed_bytes < 2 * head.in_features * head.out_features
        assert in_blocks == (folder == pair.folder), "a head that the file has in blocks stays in them"
        return kernels.linear(attended, first.attention_out), query, kernels.linear(states, head)

    whole, rounded = (layer(folder, 0, 1) for folder in (pair.folder, pair.rounded))
    halves = [layer(pair.folder, rank, 2) for rank in range(2)]
    queries, logits = (torch.cat([half[part] for half in halves], dim=1) for part in (1, 2))
    vocabulary = whole[2].shape[1]
    assert not bool(logits[:, vocabulary:].any()), "what fills the ranks' parts up are zeros"
    for found in (whole, (halves[0][0] + halves[1][0], queries, logits[:, :vocabulary])):
        for ours, theirs in zip(found, rounded, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("seed", seeds(2))
def test_random_slices_are_those_of_the_whole(seed: int, pairs: Callable[[str], Pair]) -> None:
    rng = random.Random(seed)
    stored = {
        name: each
        for case in ("mqa-tied", "qwen2", "mha", "mistral")
        for name, each in read_stored([pairs(case).folder / "model.gguf"]).items()
        if len(each.shape) == 2
    }
    for _ in range(60):
        tensor = stored[rng.choice(sorted(stored))]
        slices = GgufSlices(torch.float32, torch.device("cpu"))
        whole = dense(slices.read(tensor))
        assert slices.bytes_read == tensor.bytes
        step = max(tensor.shape[0] // max(1, tensor.heads), 1) if tensor.heads else 1
        first, last = sorted(rng.sample(range(0, tensor.shape[0] + 1, step), 2))
        assert torch.equal(dense(slices.read(tensor, rows=slice(first, last))), whole[first:last])
        group = {kind.name: kind.group for kind in TYPES.values()}[tensor.type]
        first, last = sorted(rng.sample(range(0, tensor.shape[1] + 1, group), 2))
        assert torch.equal(dense(slices.read(tensor, columns=slice(first, last))), whole[:, first:last])


def dense(part: Tensor | GroupedWeight) -> Tensor:
    return part.dequantise() if isinstance(part, GroupedWeight) else part.float()


def test_groups_are_not_divided(pairs: Callable[[str], Pair]) -> None:
    pair = pairs("mha")
    check_model(pair.folder, 2, "float32")
    with pytest.raises(ParallelismError, match=r"4 ranks would divide groups .* possible for this file: 1, 2"):
        check_model(pair.folder, 4, "float32")


# What is refused


def load(folder: Path, data: bytes) -> None:
    """Do what a start does, up to the weights."""
    path = folder / "model.gguf"
    path.write_bytes(data)
    for name, text in describe([path]).items():
        (folder / name).write_text(text)
    check_model(folder, 1, "float32")
    slices = GgufSlices(torch.float32, torch.device("cpu"))
    for tensor in read_stored([path]).values():
        slices.read(tensor)


def test_the_tiny_file_is_read(tmp_path: Path) -> None:
    load(tmp_path, file_of(METADATA, TENSORS))
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "eos_token_id": [2],
        "temperature": 0.5,
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rms_norm_eps"], config["tie_word_embeddings"], config["vocab_size"]) == (1e-5, True, 9)
    data = file_of(METADATA, TENSORS)
    load(tmp_path, data[:4] + struct.pack("<I", 2) + data[8:])


EXPERTS: Final = {"llama.expert_count": (UINT32, 4), "llama.expert_used_count": (UINT32, 2)}
REFUSED: Final[list[tuple[dict[str, Any], dict[str, Any], str]]] = [
    (
        {"general.architecture": (STRING, "mamba")},
        {},
        r"architecture: 'mamba'; of GGUF files are read: llama, qwen2",
    ),
    ({"general.architecture": (UINT32, 7)}, {}, "unsupported architecture"),
    ({"general.alignment": (UINT32, 12)}, {}, "alignment is 12"),
    ({"llama.block_count": None}, {}, r"llama\.block_count is None"),
    ({"llama.embedding_length": (STRING, "x")}, {}, r"llama\.embedding_length is 'x'"),
    ({"llama.attention.head_count": (ARRAY, (UINT32, [2, 4]))}, {}, "differs from layer to layer"),
    ({"llama.attention.head_count": (UINT32, 3)}, {}, "3 heads|3 attention heads"),
    ({"llama.attention.value_length": (UINT32, 8)}, {}, "different sizes"),
    ({"llama.rope.dimension_count": (UINT32, 8)}, {}, "partial rotary"),
    (
        {"llama.rope.scaling.type": (STRING, "longrope")},
        {},
        "'longrope' is not supported; supported: none, linear",
    ),
    ({"llama.expert_count": (UINT32, 8)}, {}, r"llama\.expert_used_count is None, not a number"),
    ({**EXPERTS, "llama.expert_weights_scale": (FLOAT32, 2.5)}, {}, r"expert_weights_scale is 2\.5, which is not"),
    ({**EXPERTS, "llama.expert_shared_count": (UINT32, 1)}, {}, r"expert_shared_count is 1"),
    (
        EXPERTS,
        {"blk.0.ffn_up_exps.weight": (8, (32, 32))},
        r"ffn_up_exps\.weight of shape \[32, 32\] is not that of all",
    ),
    (EXPERTS, {"blk.0.ffn_up_exps.weight": (8, (3, 32, 32))}, r"tensors are missing: .*block_sparse_moe"),
    ({"llama.attention.scale": (FLOAT32, 0.5)}, {}, r"llama\.attention\.scale is 0\.5"),
    ({"llama.attention.layer_norm_rms_epsilon": (FLOAT32, float("nan"))}, {}, "epsilon is nan"),
    (
        {"tokenizer.ggml.model": (STRING, "t5")},
        {},
        r"model is 't5', which is not supported; supported: gpt2, llama",
    ),
    ({"tokenizer.ggml.model": (STRING, "gpt2")}, {}, r"ggml\.pre is missing"),
    (
        {"tokenizer.ggml.model": (STRING, "gpt2"), "tokenizer.ggml.pre": (STRING, "bloom")},
        {},
        r"pre is 'bloom'; supported: llama-bpe",
    ),
    (
        {
            "tokenizer.ggml.model": (STRING, "gpt2"),
            "tokenizer.ggml.pre": (STRING, "qwen2"),
            "tokenizer.ggml.merges": (ARRAY, (STRING, ["a x"])),
        },
        {},
        "merges has 'a x', which joins no two tokens to one",
    ),
    ({"tokenizer.ggml.tokens": None}, {}, "tokens is missing"),
    ({"tokenizer.ggml.tokens": (ARRAY, (STRING, []))}, {}, "tokens is empty"),
    ({"tokenizer.ggml.scores": (ARRAY, (FLOAT32, [1.0]))}, {}, "scores has 1 entries for 9 tokens"),
    ({"tokenizer.ggml.token_type": (ARRAY, (INT32, [1]))}, {}, "token_type has 1 entries for 9 tokens"),
    ({"tokenizer.ggml.eos_token_id": (UINT32, 9)}, {}, "eos_token_id is 9; there are 9 tokens"),
    ({"split.count": (UINT32, 2)}, {}, "part 0 of 2, not of 1"),
    ({}, {"token_embd.weight": None}, r"no matrix token_embd\.weight"),
    ({}, {"blk.0.ffn_up.weight": None}, "1 of 11 tensors are missing: model.layers.0.mlp.up_proj.weight"),
    ({}, {"blk.0.ffn_up.weight": (0, (32, 16))}, r"has shape \[32, 16\]; config.json implies \[32, 32\]"),
    ({}, {"blk.0.ffn_up.weight": (16, (32, 256))}, "ffn_up.weight' is IQ2_XXS; read are F32, F16, Q4_0"),
    ({}, {"blk.0.ffn_up.weight": (99, (32, 32))}, "is of the unknown type 99"),
    ({}, {"blk.0.ffn_up.weight": (12, (32, 32))}, "rows of 32; Q4_K holds multiples of 256"),
    ({}, {"blk.0.attn_norm.weight": (8, (32,))}, "is Q8_0; only matrices may be"),
    ({}, {"blk.0.ssm_conv1d.weight": (0, (4, 4))}, "ssm_conv1d.weight' is not known for architecture 'llama'"),
    ({}, {"rope_freqs.weight": (0, (8,))}, "rope_freqs.weight has 8 values that are no factors"),
    ({}, {"blk.0.attn_q.weight": (8, (30, 32))}, "no pairs of rows in 2 heads|30 .*heads"),
]
"""Changed keys and tensors (None: left out), and what the message says."""


@pytest.mark.parametrize(("keys", "tensors", "message"), REFUSED)
def test_what_is_refused(keys: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    def changed(given: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in {**given, **changes}.items() if value is not None}

    with pytest.raises(ModelError, match=message):
        load(tmp_path, file_of(changed(METADATA, keys), changed(TENSORS, tensors)))


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"", CheckpointError, "0 bytes"),
        (b"GGML" + bytes(40), CheckpointError, "begins with b'GGML'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), UnsupportedModelError, "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModelError, "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), CheckpointError, "entries .* do not fit"),
        (file_of(METADATA, TENSORS)[:-33], CheckpointError, "is cut off"),
        (file_of(METADATA, TENSORS)[:300], CheckpointError, "ends inside its header"),
    ],
)
def test_files_that_are_no_models(data: bytes, kind: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=message):
        load(tmp_path, data)


def test_parts(tmp_path: Path) -> None:
    """A model in several files is that of one file."""
    names = list(TENSORS)
    halves = [names[:4], names[4:]]
    for number, half in enumerate(halves):
        split = {
            "split.count": (UINT32, 2),
            "split.no": (UINT32, number),
            "split.tensors.count": (INT32, len(names)),
        }
        keys = {**METADATA, **split} if number == 0 else split
        (tmp_path / f"model-0000{number + 1}-of-00002.gguf").write_bytes(
            file_of(keys, {name: TENSORS[name] for name in half})
        )
    parts = parts_of(tmp_path / "model-00002-of-00002.gguf")
    assert [part.name for part in parts] == ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]
    assert stem_of(parts[0]) == "model"
    for name, text in describe(parts).items():
        (tmp_path / name).write_text(text)
    check_model(tmp_path, 1, "float32")
    assert len(read_stored(parts)) == len(names)
    with pytest.raises(CheckpointError, match="part 1 of 2"):
        read_stored(parts[::-1])
    parts[0].unlink()
    with pytest.raises(CheckpointError, match=r"1 of its 2 parts are missing: model-00001-of-00002\.gguf"):
        parts_of(parts[1])


def mutations(data: bytes, rng: random.Random, count: int) -> Iterator[bytes]:
    """Yield damaged files: bytes changed, numbers of eight bytes made large, pieces left out or doubled, an end
    cut off. The tensors' bytes, which may be anything, are left alone."""
    header = len(data) - 7000
    odd = (0, 1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 62) + 1, (1 << 64) - 1)
    for _ in range(count):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            if not damaged:
                break
            place, kind = rng.randrange(min(header, len(damaged))), rng.random()
            if kind < 0.4:
                damaged[place] = rng.randrange(256)
            elif kind < 0.7:
                damaged[place : place + 8] = struct.pack("<Q", rng.choice(odd))
            elif kind < 0.8:
                del damaged[place : place + rng.randrange(1, 40)]
            elif kind < 0.9:
                damaged[place:place] = damaged[place : place + rng.randrange(1, 40)]
            else:
                del damaged[rng.randrange(1, len(damaged) + 1) :]
        yield bytes(damaged)


@pytest.mark.parametrize("seed", seeds(1))
def test_damaged_files_are_read_or_refused(seed: int, tmp_path: Path) -> None:
    """10,000 of them: no other error, no tensor outside the file."""
    path, rng, sound = tmp_path / "model.gguf", random.Random(seed), 0
    data = file_of(METADATA, TENSORS)
    for number, damaged in enumerate(mutations(data, rng, 10_000)):
        path.unlink(missing_ok=True)  # a file that is emptied and written anew waits for the disk
        path.write_bytes(damaged)
        with suppress(ModelError):
            content = read_gguf(path)
            assert all(each.offset + each.bytes <= len(damaged) for each in content.tensors.values())
            sound += 1
            if number % 10 == 0:
                (tmp_path / "config.json").write_text(describe([path])["config.json"])
                check_model(tmp_path, 1, "float32")
                slices = GgufSlices(torch.float32, torch.device("cpu"))
                for tensor in read_stored([path]).values():
                    slices.read(tensor)
    assert 1000 < sound < 9000
