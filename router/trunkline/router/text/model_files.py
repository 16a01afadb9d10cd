"""Read the configuration files of a Hugging Face model folder: limits, end tokens, default sampling, chat
template.

The files are read once, at the start. A missing optional file means defaults; a broken file is an error that names
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec

_SPECIAL_TOKEN_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_CONTEXT_NAMES: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_FALLBACK_CONTEXT: Final = 2048


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Sampling parameters of `generation_config.json`, for requests that do not give them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ModelFiles(msgspec.Struct, frozen=True):
    """A model's properties in its configuration files."""

    max_context: int
    """Positions the model was trained for."""
    vocab_size: int
    """Rows of the embedding; 0 if the configuration does not give them."""
    eos_ids: tuple[int, ...]
    """Ids that end a text, without the tokenizer's own end token (`special_tokens["eos_token"]`)."""
    defaults: SamplingDefaults
    special_tokens: dict[str, str]
    """Special tokens by the names that templates use: `bos_token`, `eos_token`, …"""
    chat_template: str | None
    tool_chat_template: str | None = None
    """Separate template for conversations with tools; few models have one."""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def _token_text(value: object) -> str | None:
    """Return a special token's text, given as a string or as an `AddedToken` object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for source in (_read_json(folder / "special_tokens_map.json"), tokenizer_config):
        for name in _SPECIAL_TOKEN_NAMES:
            text = _token_text(source.get(name))
            if text is not None:
                tokens[name] = text
    return tokens


def _chat_templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return the templates by name: "default", "tool_use". Files take precedence over the tokenizer's
    configuration."""
    template = tokenizer_config.get("chat_template")
    found: dict[str, Any] = {"default": template}
    if isinstance(template, list):  # several named ones: [{"name": …, "template": …}, …]
        found = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
    files = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates/tool_use.jinja",
    }
    found |= {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list):
        return tuple(item for item in value if isinstance(item, int))
    return ()


def _defaults(generation: dict[str, Any]) -> SamplingDefaults:
    known = {
        name: generation[name] for name in SamplingDefaults.__struct_fields__ if generation.get(name) is not None
    }
    if generation.get("do_sample") is False:  # given as false, not left out: the model is meant to answer greedily
        known["temperature"] = 0.0
    try:
        return msgspec.convert(known, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ValueError(f"generation_config.json: {error}") from error


def read_model_files(folder: Path) -> ModelFiles:
    """Read the configuration files of a model folder.

    Raises:
        ValueError: A file cannot be read; the text names it.
    """
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    config = {**config, **(text_config or {})}
    generation = _read_json(folder / "generation_config.json")
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    contexts = [config[name] for name in _CONTEXT_NAMES if isinstance(config.get(name), int)]
    vocab_size = config.get("vocab_size")
    templates = _chat_templates(folder, tokenizer_config)
    return ModelFiles(
        max_context=contexts[0] if contexts else _FALLBACK_CONTEXT,
        vocab_size=vocab_size if isinstance(vocab_size, int) else 0,
        eos_ids=_ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id")),
        defaults=_defaults(generation),
        special_tokens=_special_tokens(folder, tokenizer_config),
        chat_template=templates.get("default"),
        tool_chat_template=templates.get("tool_use"),
    )
