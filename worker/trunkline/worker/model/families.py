"""Read a model folder into a `ModelConfig`, or say what is wrong with it. No torch.

One function per family reads its config.json (`reader_llama`, `reader_experts`, `reader_others`): it chooses the
record of `architecture` and takes the numbers. Defaults are those of the family's configuration class in
`transformers`, since files leave them out. A field whose value would change the computation in a way that is not
implemented is refused by name.

The launcher calls `check_model` before it starts any process; workers call it again to build their shard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trunkline.worker.config import DTYPES
from trunkline.worker.errors import ModelError, UnsupportedModelError
from trunkline.worker.model.model_config import ModelConfig
from trunkline.worker.model.packed_files import read_scheme
from trunkline.worker.model.parallelism import check_parallelism
from trunkline.worker.model.reader_base import Reader
from trunkline.worker.model.reader_deepseek import DEEPSEEK_READERS
from trunkline.worker.model.reader_experts import EXPERTS_READERS
from trunkline.worker.model.reader_gemma4 import GEMMA4_READERS
from trunkline.worker.model.reader_llama import LLAMA_READERS
from trunkline.worker.model.reader_others import OTHER_READERS
from trunkline.worker.model.reader_wrapped import WRAPPED_READERS
from trunkline.worker.model.tensor_index import check_weights


def check_model(
    folder: Path, tp: int, dtype: str, max_context: int = 0, *, expert_parallel: bool = True
) -> ModelConfig:
    """Read config.json and the headers of the weight files, and check that `tp` ranks can serve them.

    Args:
        folder: Hugging Face checkpoint: config.json, one or more safetensors files.
        tp: tensor-parallel ranks.
        dtype: "float32", "bfloat16" or "float16".
        max_context: longest context that is served; 0: the model's own.
        expert_parallel: whether each rank has whole experts, or else a part of every one.

    Raises:
        UnsupportedModelError: architecture, activation, rope scaling or dtype that is not implemented.
        ParallelismError: heads, KV heads, MLP or experts that cannot be divided by `tp`.
        CheckpointError: missing or cut-off files, missing tensors, wrong shapes.
        ModelError: no readable config.json.
    """
    config = read_model_config(folder).serving(max_context, expert_parallel=expert_parallel)
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    check_parallelism(config, tp)
    check_weights(config, folder, tp)
    return config


def read_model_config(folder: Path) -> ModelConfig:
    """Parse `folder/config.json`.

    Raises:
        UnsupportedModelError: see `check_model`.
        ModelError: missing or malformed file.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{folder} is not a model folder: {error.strerror or error} ({path.name})") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    names = raw.get("architectures") or [] if isinstance(raw, dict) else []
    name = next((name for name in names if name in READERS), "")
    if not name:
        given = ", ".join(map(str, names)) or "none named"
        reason = next((f" ({REFUSED[name]})" for name in names if name in REFUSED), "")
        raise UnsupportedModelError(
            f"{path}: unsupported architecture: {given}{reason}; supported: {', '.join(sorted(READERS))}"
        )
    try:
        if raw.get("quantization_config"):
            read_scheme(raw["quantization_config"])
        return READERS[name](raw)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {name}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{path}: {what}") from error


READERS: Final[Mapping[str, Reader]] = {
    **LLAMA_READERS,
    **EXPERTS_READERS,
    **DEEPSEEK_READERS,
    **GEMMA4_READERS,
    **OTHER_READERS,
    **WRAPPED_READERS,
}
"""The reader of each name in config.json's `architectures`."""

REFUSED: Final[Mapping[str, str]] = {
    "Qwen2_5_VLForConditionalGeneration": "its positions have three dimensions",
}
"""The reason why a known architecture is not supported, by its name."""
