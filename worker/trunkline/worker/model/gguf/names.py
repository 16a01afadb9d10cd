"""What the tensors of a GGUF file are called, and how they are laid out, in the words of `transformers`. No torch.

llama.cpp's converter renames a checkpoint's tensors, adds one to the weights of Gemma's norms, and puts the rows
of Llama's queries and keys as its rotation wants them: the two of a pair side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from trunkline.worker.errors import CheckpointError, UnsupportedModelError
from trunkline.worker.model.gguf.container import GgufTensor, read_gguf


class Layout(StrEnum):
    """What is done to a tensor of a file when it is loaded."""

    PLAIN = "taken as it is"
    PAIRS = "rows of rotary pairs side by side: within a head, all first ones come before all second ones"
    PLUS_ONE = "the norm's weight plus one: one is taken off"


class StoredTensor(NamedTuple):
    """A tensor of a file, and how it is brought into the form that `transformers` has."""

    file: Path
    shape: tuple[int, ...]
    type: str
    """Its type in the format's words: one of the names in `container.TYPES`."""
    offset: int
    """Place of its first byte in the file; all its bytes lie in it."""
    bytes: int
    layout: Layout
    heads: int
    """Number of heads among whose rows the pairs stand; 0 for other layouts."""


class _Family(NamedTuple):
    """An architecture of llama.cpp."""

    architecture: str
    """Its name in config.json's `architectures`."""
    parts: Mapping[str, str]
    """A layer's tensors beside the common ones."""
    has_pairs: bool = False
    has_plus_one: bool = False
    experts: Mapping[str, str] = {}
    """A layer's tensors of all experts, and the name of one expert's part, with `{}` for its index."""


_COMMON: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MLP_NORM: Final = {"ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _expert_parts(prefix: str, names: tuple[str, str, str]) -> dict[str, str]:
    return {f"ffn_{part}_exps": prefix + name for part, name in zip(("gate", "up", "down"), names, strict=True)}


_PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")
FAMILIES: Final = {
    "llama": _Family("LlamaForCausalLM", _MLP_NORM, has_pairs=True),
    "qwen2": _Family("Qwen2ForCausalLM", _MLP_NORM),
    "qwen3": _Family("Qwen3ForCausalLM", {**_MLP_NORM, **_HEAD_NORMS}),
    "qwen3moe": _Family(
        "Qwen3MoeForCausalLM",
        {**_MLP_NORM, **_HEAD_NORMS, "ffn_gate_inp": "mlp.gate"},
        experts=_expert_parts("mlp.experts.{}.", _PROJECTIONS),
    ),
    "gpt-oss": _Family(
        "GptOssForCausalLM",
        {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        experts=_expert_parts("mlp.experts.{}.", _PROJECTIONS),
    ),
    "gemma2": _Family("Gemma2ForCausalLM", _GEMMA, has_plus_one=True),
    "gemma3": _Family("Gemma3ForCausalLM", {**_GEMMA, **_HEAD_NORMS}, has_plus_one=True),
}
"""The families that are read, by `general.architecture`."""
_MIXTRAL: Final = _Family(
    "MixtralForCausalLM",
    {**_MLP_NORM, "ffn_gate_inp": "block_sparse_moe.gate"},
    has_pairs=True,
    experts=_expert_parts("block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
)
"""A "llama" with experts."""
DENSE_TYPES: Final = ("F32", "F16", "BF16")
"""Types of tensors that are not in blocks."""
_ENDS: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS: Final = "rope_freqs.weight"
"""The tensor that divides the frequencies of Llama 3's rotary positions. `metadata` reads it."""
_LAYER_TENSOR: Final = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([a-z_]+)\.(weight|bias)")


def family_of(metadata: Mapping[str, Any]) -> tuple[str, _Family]:
    """Return a file's architecture in llama.cpp's words, and its family.

    Raises:
        UnsupportedModelError: none that is read.
    """
    given = metadata.get("general.architecture")
    if not isinstance(given, str) or given not in FAMILIES:
        said = repr(given) if given else "none named"
        raise UnsupportedModelError(
            f"unsupported architecture: {said}; of GGUF files are read: {', '.join(FAMILIES)}"
        )
    return given, _MIXTRAL if given == "llama" and metadata.get("llama.expert_count") else FAMILIES[given]


def head_counts(metadata: Mapping[str, Any], architecture: str) -> tuple[int, int]:
    """Return the numbers of heads and of KV heads.

    Raises:
        CheckpointError: the file does not give them.
        UnsupportedModelError: layers differ.
    """
    key = f"{architecture}.attention.head_count"
    counts: list[int] = []
    for name in (key, f"{key}_kv"):
        value = metadata.get(name, counts[0] if counts else None)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModelError(f"{name} differs from layer to layer")
            value = value[0]
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{name} is {value!r}, not a number of heads")
        counts.append(value)
    return counts[0], counts[1]


def read_stored(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the tensors that the decoder reads, by their names in `transformers`.

    Args:
        files: the parts of a model in their order, often one. The first has the metadata.

    Raises:
        UnsupportedModelError: an architecture that is not read, or a tensor that it is not known to have: leaving
            that out would change the results.
        CheckpointError: files that are missing or damaged, or values that do not fit.
    """
    found: dict[str, StoredTensor] = {}
    metadata: dict[str, Any] = {}
    for number, file in enumerate(files):
        content = read_gguf(file, lambda key: not key.startswith("tokenizer."))
        metadata = metadata or content.metadata
        count = content.metadata.get("split.count", 1)
        if count != len(files) or content.metadata.get("split.no", number) != number:
            raise CheckpointError(
                f"{file} is part {content.metadata.get('split.no', 0)} of {count}, not of {len(files)}"
            )
        try:
            for name, tensor in _stored(file, metadata, content.tensors):
                if name in found:
                    raise CheckpointError(f"{name} is in it twice")
                found[name] = tensor
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{file}: {error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from error
    return found


def _stored(
    file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]
) -> Iterator[tuple[str, StoredTensor]]:
    architecture, family = family_of(metadata)
    heads, kv_heads = head_counts(metadata, architecture)
    pairs = {"attn_q": heads, "attn_k": kv_heads} if family.has_pairs else {}
    parts = {**_COMMON, **family.parts}
    for given, tensor in tensors.items():
        if given == ROPE_FACTORS:
            continue
        layer = _LAYER_TENSOR.fullmatch(given)
        stem, _, ending = given.rpartition(".")
        part = layer[2] if layer else stem
        if layer and part in family.experts:
            yield from _of_experts(file, f"model.layers.{layer[1]}.{family.experts[part]}.{ending}", given, tensor)
            continue
        known = parts.get(part) if layer else _ENDS.get(stem)
        if known is None or ending not in ("weight", "bias"):
            raise UnsupportedModelError(f"tensor {given!a:.80} is not known for architecture {architecture!r}")
        if len(tensor.shape) != 2 and tensor.type not in DENSE_TYPES:
            raise UnsupportedModelError(
                f"{given} of shape {list(tensor.shape)} is {tensor.type}; only matrices may be"
            )
        name = f"model.layers.{layer[1]}.{known}.{ending}" if layer else f"{known}.{ending}"
        name = name.removesuffix(".weight") if known == "self_attn.sinks" else name
        layout, found = Layout.PLAIN, pairs.get(part, 0) if layer else 0
        if found:
            layout = Layout.PAIRS
            if not tensor.shape or tensor.shape[0] % (2 * found):
                raise CheckpointError(
                    f"{given} of shape {list(tensor.shape)} has no pairs of rows in {found} heads"
                )
        elif family.has_plus_one and part.endswith("norm"):
            layout = Layout.PLUS_ONE
        yield name, StoredTensor(file, tensor.shape, tensor.type, tensor.offset, tensor.bytes, layout, found)


def _of_experts(file: Path, name: str, given: str, tensor: GgufTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Yield each expert's part of a tensor of all: they lie one behind the other.

    Args:
        name: The parts' name, with `{}` for an expert's index.
    """
    shape = tensor.shape
    if len(shape) != (3 if given.endswith(".weight") else 2) or not shape[0] or tensor.bytes % shape[0]:
        raise CheckpointError(f"{given} of shape {list(shape)} is not that of all experts of a layer")
    size = tensor.bytes // shape[0]
    for expert in range(shape[0]):
        place = tensor.offset + expert * size
        yield name.format(expert), StoredTensor(file, shape[1:], tensor.type, place, size, Layout.PLAIN, 0)
