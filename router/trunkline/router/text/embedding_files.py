"""What a model folder says of embeddings, in the files of Sentence Transformers: how hidden states are pooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

PoolingName = Literal["last", "mean"]

_MODES: Final[dict[str, PoolingName]] = {
    "pooling_mode_lasttoken": "last",
    "lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "mean": "mean",
}
"""Poolings by their names in the files."""
_APPLIED: Final = frozenset({"Transformer", "Pooling", "Normalize"})
"""Modules whose work is done here: the model itself, pooling, and bringing vectors to length 1."""


class Embedder(msgspec.Struct, frozen=True):
    """How a model makes embeddings."""

    pooling: PoolingName = "last"
    is_declared: bool = False
    """Whether the checkpoint is made for embeddings."""
    problem: str = ""
    """Why the checkpoint's own embeddings cannot be made here; "": they can."""


def read_embedder(folder: Path) -> Embedder:
    """Read what a model folder says of embeddings: `modules.json`, and the configuration of its pooling.

    Raises:
        ValueError: A file cannot be read; the text names it.
    """
    listed = _read(folder / "modules.json")
    modules = [module for module in listed if isinstance(module, dict)] if isinstance(listed, list) else []
    kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
    config = _read(folder / kinds.get("Pooling", "1_Pooling") / "config.json")
    if not isinstance(config, dict):
        return Embedder(is_declared=bool(kinds))
    foreign = sorted(kinds.keys() - _APPLIED)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if not modes and isinstance(config.get("pooling_mode"), str):
        modes = [config["pooling_mode"]]
    pooling = _MODES.get(modes[0]) if len(modes) == 1 else None
    problem = ""
    if foreign:
        problem = f"its embeddings go through modules that are not supported: {', '.join(foreign)}"
    elif pooling is None:
        problem = f"its pooling ({', '.join(modes) or 'none'}) is not supported"
    return Embedder(pooling or "last", is_declared=True, problem=problem)


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
