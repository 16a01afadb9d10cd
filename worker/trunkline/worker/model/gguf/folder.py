"""A GGUF file as the files that a checkpoint's folder has beside its weights. No torch."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Final

from trunkline.worker.errors import CheckpointError, ModelError
from trunkline.worker.model.gguf.config import config_of
from trunkline.worker.model.gguf.container import GgufFile, read_gguf
from trunkline.worker.model.gguf.names import ROPE_FACTORS
from trunkline.worker.model.gguf.tokenizer import tokenizer_files

ENDING: Final = ".gguf"
_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_FACTORS_MAX: Final = 4096


def parts_of(path: Path) -> list[Path]:
    """Return all files of a model of which one is given, in their order.

    Raises:
        CheckpointError: some of them are missing.
    """
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, _, count = found.groups()
    parts = [path.with_name(f"{stem}-{number:05}-of-{count}{ENDING}") for number in range(1, int(count) + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise CheckpointError(
            f"{path}: {len(missing)} of its {int(count)} parts are missing: {', '.join(missing[:3])}"
        )
    return parts


def stem_of(path: Path) -> str:
    """Return a file's name without its ending and its part's number."""
    found = _PART.fullmatch(path.name)
    return found[1] if found else path.name.removesuffix(ENDING)


def describe(parts: list[Path]) -> dict[str, str]:
    """Return the texts of config.json and the tokenizer's files, by name.

    Args:
        parts: all files of the model; the first has the metadata.

    Raises:
        UnsupportedModelError: an architecture, a tokenizer or a value that is not read; the message names it.
        CheckpointError: files that are missing or damaged, or values that do not fit each other.
    """
    files = [read_gguf(part) for part in parts]
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    try:
        config = config_of(files[0].metadata, tensors, _rope_factors(parts, files))
        return {"config.json": json.dumps(config, indent=2), **tokenizer_files(files[0].metadata)}
    except ModelError as error:
        raise type(error)(f"{parts[0]}: {error}") from error


def _rope_factors(parts: list[Path], files: list[GgufFile]) -> list[float] | None:
    for path, file in zip(parts, files, strict=True):
        tensor = file.tensors.get(ROPE_FACTORS)
        if tensor is not None:
            if tensor.type != "F32" or tensor.bytes > 4 * _FACTORS_MAX:
                raise CheckpointError(f"{ROPE_FACTORS} is {tensor.type} of shape {list(tensor.shape)}")
            with path.open("rb") as stream:
                stream.seek(tensor.offset)
                data = stream.read(tensor.bytes)
            return list(struct.unpack(f"<{len(data) // 4}f", data))
    return None
