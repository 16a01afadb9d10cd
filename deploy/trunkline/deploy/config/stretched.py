"""A checkpoint whose context is made longer than its own by scaling its rotary positions (`--rope-scaling`).

The weights stay as they are. What changes is config.json, so the stretched model is a folder of its own in the
user's cache folder: links to the checkpoint's files and another config.json. All that reads a checkpoint (workers,
routers, digests that name KV) then reads a model with a longer context, and KV of the two is never mixed up.

A model was not trained for such positions. YaRN keeps short texts nearly as they were; answers over long ones are
worse than those of a model that was made for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from trunkline.deploy.config import models
from trunkline.deploy.config.made_folders import CONFIG, made_folder
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.worker.errors import WorkerError
from trunkline.worker.model.families import read_model_config
from trunkline.worker.model.model_config import ModelConfig

MARK: Final = "stretched_from"
"""The field that a stretched model's config.json has: the number of positions that the model was made for. Routers
show it."""
_FOLDER: Final = "stretched"
_FACTOR_MAX: Final = 1024


def folder_of(settings: ServeSettings, *, needs_weights: bool = True) -> Path:
    """Return the folder of the model that the settings name, stretched if they say so.

    Args:
        settings: The settings of one model.
        needs_weights: As in `models.resolve`.

    Raises:
        UserError: There is no such model, or it cannot be stretched so.
    """
    folder = models.resolve(settings.model, needs_weights=needs_weights)
    if settings.rope_scaling == "none":
        return folder
    if settings.max_context is None:
        raise UserError("--rope-scaling stretches the context to --max-context; please give that, too")
    try:
        raw, model = models.read_config(folder), read_model_config(folder)
    except (WorkerError, ValueError, KeyError) as error:
        raise UserError(str(error)) from error
    if settings.max_context <= model.max_positions:
        raise UserError(
            f"--rope-scaling is {settings.rope_scaling}, but --max-context is {settings.max_context}, and the "
            f"model has {model.max_positions} positions of its own; leave --rope-scaling out"
        )
    return _linked(folder, stretched(raw, model, settings.rope_scaling, settings.max_context))


def stretched(raw: dict[str, Any], model: ModelConfig, kind: str, max_context: int) -> dict[str, Any]:
    """Return a model's config.json with more positions, in the form that transformers reads, too.

    Args:
        raw: The model's own config.json.
        model: The same, read.
        kind: "yarn" or "linear".
        max_context: Positions that the model gets, more than it has.

    Raises:
        UserError: The model's positions are not rotary ones, are scaled already, or differ from layer to layer.
    """
    ropes = {layer.rope for layer in model.attention}
    plain = len(ropes) == 1 and all(rope is not None and rope.kind == "default" for rope in ropes)
    if not plain or "max_position_embeddings" not in raw:
        raise UserError(
            "--rope-scaling is for models whose layers all have the same rotary positions, not scaled yet; this "
            "model has others"
        )
    factor = max_context / model.max_positions
    if factor > _FACTOR_MAX:
        raise UserError(f"--max-context is more than {_FACTOR_MAX} times the model's own {model.max_positions}")
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": model.max_positions,
    }
    own = raw.get("rope_parameters")
    place = {"rope_parameters": {**own, **scaling}} if isinstance(own, dict) else {"rope_scaling": scaling}
    return {**raw, **place, "max_position_embeddings": max_context, MARK: model.max_positions}


def _linked(folder: Path, config: dict[str, Any]) -> Path:
    """Return the folder with this configuration and links to all other files of `folder`.

    Raises:
        UserError: It cannot be made.
    """
    text = json.dumps(config, indent=2, sort_keys=True)
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != CONFIG)
    return made_folder(
        _FOLDER, text, {path.name: path for path in files}, lambda: {CONFIG: text}, "--rope-scaling"
    )
