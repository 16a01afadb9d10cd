"""Readers of models that see images, too: the text model that is inside is what is read. No torch.

config.json has it under `text_config`, the files under a prefix; a checkpoint's other tensors are ignored. Images
are refused where a request brings them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from trunkline.worker.errors import UnsupportedModelError
from trunkline.worker.model.model_config import ModelConfig
from trunkline.worker.model.reader_base import Reader
from trunkline.worker.model.reader_deepseek import DEEPSEEK_READERS
from trunkline.worker.model.reader_experts import EXPERTS_READERS
from trunkline.worker.model.reader_gemma4 import GEMMA4_READERS
from trunkline.worker.model.reader_llama import LLAMA_READERS

GEMMA3: Final = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
"""The fields that published files leave out, and what `transformers` then takes."""
_PREFIXES: Final = ("language_model.model.", "model.language_model.")
_HEADS: Final = ("language_model.", "")


def text_part(raw: Mapping[str, Any], reader: Reader, defaults: Mapping[str, Any]) -> ModelConfig:
    """Return the text model of a file, by the reader of that family."""
    own = raw.get("text_config")
    if not isinstance(own, Mapping):
        raise ValueError("text_config is not an object")
    given = {**defaults, **own}
    if raw.get("tie_word_embeddings") is not None:
        given["tie_word_embeddings"] = raw["tie_word_embeddings"]
    config = reader(given)
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "")
    architecture = replace(config.architecture, prefixes=_PREFIXES, head_prefixes=_HEADS)
    return replace(config, architecture=architecture, stored_dtype=config.stored_dtype or dtype)


def _gemma3(raw: Mapping[str, Any]) -> ModelConfig:
    return text_part(raw, LLAMA_READERS["Gemma3ForCausalLM"], GEMMA3)


def _gemma4(raw: Mapping[str, Any]) -> ModelConfig:
    packed = {"quantization_config": raw.get("quantization_config")}
    return text_part(raw, GEMMA4_READERS["Gemma4ForCausalLM"], packed)


def _llama4(raw: Mapping[str, Any]) -> ModelConfig:
    return text_part(raw, EXPERTS_READERS["Llama4ForCausalLM"], {})


def _mistral3(raw: Mapping[str, Any]) -> ModelConfig:
    own = raw.get("text_config")
    kind = own.get("model_type", "mistral") if isinstance(own, Mapping) else "mistral"
    reader = MISTRALS.get(kind)
    if reader is None:
        kinds = ", ".join(map(repr, MISTRALS))
        raise UnsupportedModelError(f"text_config.model_type is {kind!r}; supported: {kinds}")
    return text_part(raw, reader, {"sliding_window": None})


MISTRALS: Final[Mapping[str, Reader]] = {
    "mistral": LLAMA_READERS["MistralForCausalLM"],
    "ministral3": LLAMA_READERS["Ministral3ForCausalLM"],
    "mistral4": DEEPSEEK_READERS["Mistral4ForCausalLM"],
}
"""The text models that Mistral 3's checkpoints may have, by their `model_type`."""
WRAPPED_READERS: Final[Mapping[str, Reader]] = {
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Llama4ForConditionalGeneration": _llama4,
    "Mistral3ForConditionalGeneration": _mistral3,
}
