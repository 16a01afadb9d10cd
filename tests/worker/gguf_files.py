"""Tiny GGUF files of a few keys and tensors of zeros, which tests change."""

from __future__ import annotations

import math
import struct
from typing import Any, Final

from gguf_file import ARRAY, FLOAT32, INT32, STRING, UINT32

from trunkline.worker.model.gguf.container import TYPES


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def typed(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return string(value)
    if kind == ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(typed(inner, each) for each in values)
    return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f", 7: "<?", 10: "<Q", 12: "<d"}[kind], value)


PIECES: Final = ["<unk>", "<s>", "</s>", "<0x0A>", "\u2581", "a", "b", "ab", "\u2581ab"]
METADATA: Final[dict[str, tuple[int, Any]]] = {
    "general.architecture": (STRING, "llama"),
    "llama.context_length": (UINT32, 64),
    "llama.embedding_length": (UINT32, 32),
    "llama.block_count": (UINT32, 1),
    "llama.feed_forward_length": (UINT32, 32),
    "llama.attention.head_count": (UINT32, 2),
    "llama.attention.head_count_kv": (UINT32, 1),
    "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
    "tokenizer.ggml.model": (STRING, "llama"),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, PIECES)),
    "tokenizer.ggml.scores": (ARRAY, (FLOAT32, [0.0, 0.0, 0.0, 0.0, -5.0, -6.0, -7.0, -1.0, -2.0])),
    "tokenizer.ggml.token_type": (ARRAY, (INT32, [2, 3, 3, 6, 1, 1, 1, 1, 1])),
    "tokenizer.ggml.bos_token_id": (UINT32, 1),
    "tokenizer.ggml.eos_token_id": (UINT32, 2),
    "general.sampling.temp": (12, 0.5),
    "general.quantization_version": (10, 2),
    "tokenizer.ggml.add_bos_token": (7, True),
}
TENSORS: Final[dict[str, tuple[int, tuple[int, ...]]]] = {
    "token_embd.weight": (8, (9, 32)),
    "output_norm.weight": (0, (32,)),
    "blk.0.attn_norm.weight": (0, (32,)),
    "blk.0.ffn_norm.weight": (0, (32,)),
    "blk.0.attn_q.weight": (8, (32, 32)),
    "blk.0.attn_k.weight": (8, (16, 32)),
    "blk.0.attn_v.weight": (2, (16, 32)),
    "blk.0.attn_output.weight": (8, (32, 32)),
    "blk.0.ffn_gate.weight": (8, (32, 32)),
    "blk.0.ffn_up.weight": (30, (32, 32)),
    "blk.0.ffn_down.weight": (8, (32, 32)),
}
"""Number of the type, and shape."""


def file_of(metadata: dict[str, tuple[int, Any]], tensors: dict[str, tuple[int, tuple[int, ...]]]) -> bytes:
    """Return a file of zeros with these keys and tensors."""
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, (kind, value) in metadata.items():
        data += string(key) + struct.pack("<I", kind) + typed(kind, value)
    offset = 0
    for name, (kind, shape) in tensors.items():
        data += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        data += struct.pack("<IQ", kind, offset)
        size = math.prod(shape) // TYPES[kind].values * TYPES[kind].bytes if kind in TYPES else 0
        offset += -(-size // 32) * 32
    return data + bytes(-len(data) % 32 + offset)
