"""A checkpoint as a GGUF file, the form that llama.cpp's server reads.

    python benchmarks/gguf_file.py FOLDER FILE.gguf [--type Q8_0] [--pre qwen2]

GGUF, version 3, little-endian: a magic number and two counts, pairs of keys and typed values, a description of
each tensor, and the tensors, each at a multiple of 32 bytes. Written for the models of benchmarks and tests:
Llama, Mistral, Mixtral, Qwen 2 and 3, Qwen 3 with experts, gpt-oss, Gemma 2 and 3, with matrices as they are or in
blocks (gguf_blocks.py).

`Q4_K_M` is the mixture of that name: Q6_K for the head and, in half of the layers, for values and the MLP's second
matrix; Q4_K for the rest.

The tokenizer is written whole, as the checkpoint has it, and in llama.cpp's form: one that merges bytes with the
name `--pre` of its rules; one that knows whole words (small_model.py) as a word-piece tokenizer. That one puts two
special tokens around a prompt of text; a prompt of ids stays what it is.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from gguf_blocks import KINDS, quantised
from safetensors.torch import load_file
from torch import Tensor

ALIGNMENT: Final = 32
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
INT32: Final = 5
TYPES: Final = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30, "MXFP4": 39}
DENSE: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MIXTURE: Final = "Q4_K_M"
NORMAL, CONTROL = 1, 3
SPACE: Final = "\u2581"
"""How a word-piece tokenizer of llama.cpp writes the beginning of a word."""

ARCHITECTURES: Final = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
}
"""llama.cpp's name of an architecture where it is not config.json's `model_type`."""
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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "self_attn": "attn_sinks",
    **{
        f"experts.{part}": f"ffn_{part.removesuffix('_proj')}_exps"
        for part in ("gate_proj", "up_proj", "down_proj")
    },
}
EXPERT_PARTS: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
EXPERT: Final = re.compile(r"(model\.layers\.\d+)\..*\.experts\.(\d+)\.(\w+)\.weight")
STACKED: Final = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?")
GEMMA_NAMES: Final = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(folder: Path, path: Path, dtype: torch.dtype | str, pre: str = "") -> None:
    """Write the checkpoint of `folder` to `path`.

    Args:
        dtype: Of the matrices: one of `TYPES`, `MIXTURE`, or float32 or bfloat16. Norms are float32.
        pre: llama.cpp's name of the rules by which a tokenizer that merges bytes cuts texts.
    """
    kind = dtype if isinstance(dtype, str) else {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    config = json.loads((folder / "config.json").read_text())
    files = [load_file(part) for part in sorted(folder.glob("*.safetensors"))]
    tensors = [
        (_name(name, config), *_stored(_laid_out(name, tensor, config), kind_of(name, kind, config)))
        for name, tensor in _with_experts({name: each for file in files for name, each in file.items()}).items()
    ]
    if (factors := _rope_factors(config)) is not None:
        tensors.append(("rope_freqs.weight", *_stored(factors, kind)))
    pairs = [*_shape(config), *_tokenizer(folder, pre)]
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)))
        for key, value_kind, value in pairs:
            file.write(_string(key) + struct.pack("<I", value_kind) + _value(value_kind, value))
        offset = 0
        for name, tensor_type, sizes, data in tensors:
            file.write(_string(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *reversed(sizes)))
            file.write(struct.pack("<IQ", TYPES[tensor_type], offset))
            offset += -(-data.nbytes // ALIGNMENT) * ALIGNMENT
        _align(file)
        for *_, data in tensors:
            file.write(data.contiguous().view(torch.uint8).numpy().tobytes())
            _align(file)


def kind_of(name: str, kind: str, config: dict[str, Any]) -> str:
    """Return the type of a checkpoint's tensor in a file of that type."""
    if "router" in name or name.endswith("bias"):
        return "F32"
    if kind != MIXTURE:
        return kind
    if name.startswith("lm_head"):
        return "Q6_K"
    layers, layer = config["num_hidden_layers"], re.search(r"layers\.(\d+)\.", name)
    if layer is None or not re.search(r"v_proj|down_proj", name):
        return "Q4_K"
    number, eighth = int(layer[1]), layers // 8
    fine = number < eighth or number >= layers * 7 // 8 or (number - eighth) % 3 == 2
    return "Q6_K" if fine else "Q4_K"


def _with_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as llama.cpp's converter has them: of all experts of a layer in one, gates and ups apart."""
    found: dict[str, Tensor] = {}
    members: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if (one := EXPERT.fullmatch(name)) is not None:
            part = f"{one[1]}.experts.{EXPERT_PARTS.get(one[3], one[3])}.weight"
            members.setdefault(part, {})[int(one[2])] = tensor
        elif (stacked := STACKED.fullmatch(name)) is not None:
            ending = "bias" if stacked[3] else "weight"
            rows = tensor if stacked[3] else tensor.transpose(1, 2)
            parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if stacked[2] == "gate_up" else {"down": rows}
            found |= {f"{stacked[1]}.experts.{part}_proj.{ending}": each for part, each in parts.items()}
        else:
            found[name] = tensor
    return found | {part: torch.stack([own[index] for index in range(len(own))]) for part, own in members.items()}


def _stored(tensor: Tensor, kind: str) -> tuple[str, tuple[int, ...], Tensor]:
    """Return a tensor's type, sizes and bytes. Rows that are no whole blocks become float16."""
    if tensor.dim() == 1:
        return "F32", tuple(tensor.shape), tensor.float()
    if kind in KINDS and tensor.shape[-1] % KINDS[kind][0]:
        kind = "F16"
    rows = tensor.reshape(-1, tensor.shape[-1])
    return kind, tuple(tensor.shape), quantised(kind, rows) if kind in KINDS else rows.to(DENSE[kind])


def _architecture(config: dict[str, Any]) -> str:
    model_type: str = config.get("model_type", "llama")
    return ARCHITECTURES.get(model_type, model_type)


def _name(name: str, config: dict[str, Any]) -> str:
    """Return llama.cpp's name of a tensor."""
    names = GEMMA_NAMES if _architecture(config).startswith("gemma") else NAMES
    if _architecture(config) == "gpt-oss":
        names = {**NAMES, "post_attention_layernorm": "post_attention_norm"}
    stem, _, ending = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{names[stem]}.{ending}"
    number, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{number}.{names[part]}.{'weight' if ending == 'sinks' else ending}"


def _laid_out(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Return a tensor as llama.cpp has it: Gemma's norms plus one, and of Llama the rows of queries and keys as
    it rotates them: the two of a pair side by side, where the checkpoint has all first ones before all second
    ones."""
    architecture = _architecture(config)
    if architecture.startswith("gemma"):
        return tensor.float() + 1 if "norm" in name else tensor
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    found = next((config[key] for part, key in heads.items() if part in name), 0)
    if not found or architecture != "llama":
        return tensor
    rows = tensor.shape[0] // found
    return tensor.reshape(found, 2, rows // 2, -1).transpose(1, 2).reshape(tensor.shape)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {}), **config}
    return {**rope, **rope.get("full_attention", {})}


def _rope_factors(config: dict[str, Any]) -> Tensor | None:
    """Return what the frequencies of Llama 3's rotary positions are divided by; None: they are not scaled so."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    half = _head_dim(config) // 2
    turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** -(torch.arange(half) / half)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept: Tensor = ((turns / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
    slowed: Tensor = (1 - kept) / rope["factor"]
    return (slowed + kept).reciprocal()


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _shape(config: dict[str, Any]) -> Iterator[tuple[str, int, Any]]:
    name, rope = _architecture(config), _rope(config)
    yield "general.architecture", STRING, name
    yield "general.alignment", UINT32, ALIGNMENT
    head_dim = _head_dim(config)
    for key, value in {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "rope.dimension_count": head_dim,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
    }.items():
        yield f"{name}.{key}", UINT32, value
    yield f"{name}.attention.layer_norm_rms_epsilon", FLOAT32, config["rms_norm_eps"]
    yield f"{name}.rope.freq_base", FLOAT32, rope["rope_theta"]
    if (kind := rope.get("rope_type")) in ("linear", "yarn"):
        yield f"{name}.rope.scaling.type", STRING, kind
        yield f"{name}.rope.scaling.factor", FLOAT32, rope["factor"]
        if kind == "yarn":
            original = rope["original_max_position_embeddings"]
            yield f"{name}.rope.scaling.original_context_length", UINT32, original
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        yield f"{name}.expert_count", UINT32, experts
        yield f"{name}.expert_used_count", UINT32, config["num_experts_per_tok"]
        if name != "llama":
            width = config.get("moe_intermediate_size") or config["intermediate_size"]
            yield f"{name}.expert_feed_forward_length", UINT32, width
    if "mistral" in config.get("model_type", "") or name.startswith(("gemma", "gpt-oss")):
        yield f"{name}.attention.sliding_window", UINT32, config.get("sliding_window") or 0
    for theirs, ours in (("attn", "attn_logit_softcapping"), ("final", "final_logit_softcapping")):
        if config.get(ours):
            yield f"{name}.{theirs}_logit_softcapping", FLOAT32, config[ours]
    if nearby := rope.get("sliding_attention"):
        yield f"{name}.rope.freq_base_swa", FLOAT32, nearby["rope_theta"]


def _tokenizer(folder: Path, pre: str) -> Iterator[tuple[str, int, Any]]:
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    text = path.read_text()
    whole = json.loads(text)
    words = whole["model"]["vocab"]
    inner = sorted(words, key=words.__getitem__)
    special = {each["content"] for each in whole.get("added_tokens", ()) if each["special"]}
    special |= {word for word in inner if word.startswith("<")} if not pre else set()
    kinds = [CONTROL if word in special else NORMAL for word in inner]
    if pre:
        yield "tokenizer.ggml.model", STRING, "gpt2"
        yield "tokenizer.ggml.pre", STRING, pre
        yield "tokenizer.huggingface.json", STRING, text
        merges = [each if isinstance(each, str) else " ".join(each) for each in whole["model"]["merges"]]
        yield "tokenizer.ggml.tokens", ARRAY, (STRING, inner)
        yield "tokenizer.ggml.merges", ARRAY, (STRING, merges)
    else:
        yield "tokenizer.ggml.model", STRING, "bert"
        yield "tokenizer.huggingface.json", STRING, text
        tokens = [word if word in special else SPACE + word for word in inner]
        yield "tokenizer.ggml.tokens", ARRAY, (STRING, tokens)
    yield "tokenizer.ggml.token_type", ARRAY, (INT32, kinds)
    yield "tokenizer.ggml.add_bos_token", BOOL, False
    yield from _special_tokens(folder, words) if pre else _word_tokens(words)
    template = folder / "chat_template.jinja"
    if template.exists():
        yield "tokenizer.chat_template", STRING, template.read_text()


def _word_tokens(words: dict[str, int]) -> Iterator[tuple[str, int, Any]]:
    yield "tokenizer.ggml.bos_token_id", UINT32, words["<s>"]
    for role in ("eos", "unknown", "seperator", "padding"):  # the format's own spelling
        yield f"tokenizer.ggml.{role}_token_id", UINT32, words["</s>"]


def _special_tokens(folder: Path, words: dict[str, int]) -> Iterator[tuple[str, int, Any]]:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for role, name in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        if (token := config.get(f"{role}_token")) in words:
            yield f"tokenizer.ggml.{name}_token_id", UINT32, words[token]
    if template := config.get("chat_template"):
        yield "tokenizer.chat_template", STRING, template


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=(*TYPES, MIXTURE), default="Q8_0")
    parser.add_argument("--pre", default="")
    arguments = parser.parse_args()
    write_gguf(arguments.folder, arguments.file, arguments.type, arguments.pre)


if __name__ == "__main__":
    main()
