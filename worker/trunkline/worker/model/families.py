"""Read a model folder into a `ModelConfig`, or say what is wrong with it. No torch.

The launcher calls `check_model` before it starts any process; workers call it again to build their shard.
"""

from __future__ import annotations

import json
from pathlib import Path

from trunkline.worker.config import DTYPES
from trunkline.worker.errors import ModelError, UnsupportedModelError
from trunkline.worker.model.expected_tensors import check_weights
from trunkline.worker.model.family_readers import READERS, REFUSED
from trunkline.worker.model.model_config import ModelConfig
from trunkline.worker.model.sharding import check_parallelism

__all__ = ["ModelConfig", "check_model", "check_parallelism", "read_model_config"]


def check_model(folder: Path, tp: int, dtype: str) -> ModelConfig:
    """Read config.json and the headers of the weight files, and check that `tp` ranks can serve them.

    Args:
        folder: Hugging Face checkpoint: config.json, one or more safetensors files.
        tp: tensor-parallel ranks.
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        UnsupportedModelError: architecture, activation, rope scaling or dtype that is not implemented.
        ParallelismError: heads, KV heads, MLP or experts that cannot be divided by `tp`.
        CheckpointError: missing or cut-off files, missing tensors, wrong shapes.
        ModelError: no readable config.json.
    """
    config = read_model_config(folder)
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    check_parallelism(config, tp)
    check_weights(config, folder)
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
    if raw.get("quantization_config"):
        raise UnsupportedModelError(f"{path}: quantization_config: quantised checkpoints are not supported")
    try:
        return READERS[name](raw)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {name}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{path}: {what}") from error
