"""A Llama checkpoint as a GGUF file, the form that llama.cpp's server reads.

GGUF, version 3, little-endian: a magic number and two counts, pairs of keys and typed values, a description of
each tensor, and the tensors, each at a multiple of 32 bytes. Written for the models of these benchmarks: dense
Llama layers without biases, and a tokenizer that knows whole words (small_model.py), which llama.cpp reads as a
word-piece tokenizer. That one puts two special tokens around a prompt of text; a prompt of ids stays what it is.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

ALIGNMENT: Final = 32
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
INT32: Final = 5
TENSOR_TYPES: Final = {torch.float32: 0, torch.bfloat16: 30}
NORMAL, CONTROL = 1, 3
SPACE: Final = "\u2581"
"""How a word-piece tokenizer of llama.cpp writes the beginning of a word."""

NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, path: Path, dtype: torch.dtype) -> None:
    """Write the checkpoint of `folder` to `path`.

    Args:
        dtype: Of the matrices: float32 or bfloat16. Norms are float32.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = [
        (_name(name), _laid_out(name, tensor, config).to(dtype if tensor.dim() > 1 else torch.float32))
        for name, tensor in load_file(folder / "model.safetensors").items()
    ]
    pairs = [*_shape(config), *_tokenizer(folder)]
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)))
        for key, kind, value in pairs:
            file.write(_string(key) + struct.pack("<I", kind) + _value(kind, value))
        offset = 0
        for name, tensor in tensors:
            sizes = tuple(reversed(tensor.shape))
            file.write(_string(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
            file.write(struct.pack("<IQ", TENSOR_TYPES[tensor.dtype], offset))
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        _align(file)
        for _, tensor in tensors:
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            _align(file)


def _name(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.weight"
    number, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{number}.{NAMES[part]}.weight"


def _laid_out(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Return a tensor with the rows of queries and keys as llama.cpp rotates them: the two of a pair side by side,
    where the checkpoint has all first ones before all second ones."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    found = next((config[key] for part, key in heads.items() if part in name), 0)
    if not found:
        return tensor
    out, width = tensor.shape
    return tensor.reshape(found, 2, out // found // 2, width).transpose(1, 2).reshape(out, width)


def _shape(config: dict[str, Any]) -> Iterator[tuple[str, int, Any]]:
    yield "general.architecture", STRING, "llama"
    yield "general.alignment", UINT32, ALIGNMENT
    heads = config["num_attention_heads"]
    for key, value in {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "rope.dimension_count": config.get("head_dim") or config["hidden_size"] // heads,
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
    }.items():
        yield f"llama.{key}", UINT32, value
    yield "llama.attention.layer_norm_rms_epsilon", FLOAT32, config["rms_norm_eps"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    yield "llama.rope.freq_base", FLOAT32, theta


def _tokenizer(folder: Path) -> Iterator[tuple[str, int, Any]]:
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    inner = sorted(words, key=words.__getitem__)
    special = {word: words[word] for word in inner if word.startswith("<")}
    yield "tokenizer.ggml.model", STRING, "bert"
    tokens = [word if word in special else SPACE + word for word in inner]
    yield "tokenizer.ggml.tokens", ARRAY, (STRING, tokens)
    kinds = [CONTROL if word in special else NORMAL for word in inner]
    yield "tokenizer.ggml.token_type", ARRAY, (INT32, kinds)
    yield "tokenizer.ggml.add_bos_token", BOOL, False
    yield "tokenizer.ggml.bos_token_id", UINT32, words["<s>"]
    for role in ("eos", "unknown", "seperator", "padding"):  # the format's own spelling
        yield f"tokenizer.ggml.{role}_token_id", UINT32, words["</s>"]
    template = folder / "chat_template.jinja"
    if template.exists():
        yield "tokenizer.chat_template", STRING, template.read_text()


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(_value(inner, each) for each in values)
    return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}[kind], value)


def _align(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))
