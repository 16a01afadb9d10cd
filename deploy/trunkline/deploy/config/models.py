"""Find the checkpoint that the MODEL argument names, and read what must be known of it before a start."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from trunkline.deploy.config.digests import digest_files
from trunkline.deploy.errors import UserError
from trunkline.kvstore.fingerprint import model_fingerprint
from trunkline.router.config import problem_of_model_name

DEMO: Final = "demo"
"""The name of the model that is shipped with the package."""
DEMO_FOLDER: Final = Path(__file__).parents[1] / "demo_model"

_WEIGHTS: Final = "*.safetensors"
HUB_PATTERNS: Final = (_WEIGHTS, "*.json", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt")
"""What a hub download fetches: weights in safetensors only (other formats can run code), and text files."""


def resolve(model: str, *, needs_weights: bool = True) -> Path:
    """Return the folder of `model`: the demo, an existing folder, or one fetched from the hub.

    Args:
        needs_weights: False if configuration and tokenizer suffice; then no weights are fetched.

    Raises:
        UserError: There is no such model, it cannot be fetched, or the folder is not a checkpoint.
    """
    if model == DEMO:
        return _checked(DEMO_FOLDER, DEMO)
    if not model:
        raise UserError("MODEL is empty; give 'demo', a folder in Hugging Face format, or a hub name OWNER/NAME")
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path.resolve(), model, needs_weights)
    if path.exists():
        raise UserError(f"{model} is a file; MODEL is the folder that has config.json and *.safetensors")
    if not _looks_like_hub_name(model):
        raise UserError(f"there is no folder {model}, and it is no hub name of the form OWNER/NAME either")
    return _checked(_fetch(model, needs_weights), model, needs_weights)


def default_name(model: str) -> str:
    """Return the name of `model` in the API, unless the user chose another one.

    Raises:
        UserError: The folder's name cannot be shown.
    """
    if model == DEMO:
        return "trunkline-demo"
    path = Path(model).expanduser()
    name = path.resolve().name if path.is_dir() else model
    if problem := problem_of_model_name(name):
        raise UserError(f"the model's folder cannot be its name: {problem}; please give --served-model-name")
    return name


def read_config(folder: Path) -> dict[str, Any]:
    """Return the checkpoint's config.json.

    Raises:
        UserError: It cannot be read as a JSON object.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{folder}/config.json is not a JSON object")
    return config


def resolve_dtype(folder: Path, dtype: str, device: str) -> str:
    """Return the number format that `auto` means: the checkpoint's own, but float32 on CPUs.

    There, 16-bit arithmetic is slower as a rule, and greedy answers then do not depend on what was cached.
    """
    if dtype != "auto":
        return dtype
    config = read_config(folder)
    own = config.get("dtype") or config.get("torch_dtype")
    return str(own) if device != "cpu" and own in ("bfloat16", "float16") else "float32"


def fingerprint(folder: Path, quantization: str = "none", tell: Callable[[int], None] = lambda count: None) -> str:
    """Return a hexadecimal digest of configuration and weights: part of the name of all KV computed with them.

    Args:
        folder: The checkpoint.
        quantization: How the weights are stored.
        tell: Called with the number of bytes if weights must be read for it (the first time, see `digests`).

    Raises:
        UserError: A file cannot be read.
    """
    shards = sorted(folder.glob("*.safetensors"))
    digest = hashlib.blake2b(digest_size=16)
    try:
        digest.update(hashlib.blake2b((folder / "config.json").read_bytes()).digest())
        for path, content in zip(shards, digest_files(shards, tell), strict=True):
            digest.update(path.name.encode() + b"\0" + content)
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    return model_fingerprint(digest.digest(), quantization if quantization != "none" else "").hex()


def _checked(folder: Path, model: str, needs_weights: bool = True) -> Path:
    """Return `folder` if it has the files that every process needs."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{model} is no checkpoint: {folder} has no config.json")
    if needs_weights and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{model} has no *.safetensors weights; other formats are not read (convert it with transformers: "
            "save_pretrained(..., safe_serialization=True))"
        )
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{model} has no tokenizer.json; save it with a fast tokenizer (AutoTokenizer, save_pretrained)"
        )
    return folder


def _looks_like_hub_name(model: str) -> bool:
    parts = model.split("/")
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
    return len(parts) == 2 and all(part and not part.startswith(".") and set(part) <= allowed for part in parts)


def _fetch(model: str, needs_weights: bool) -> Path:
    # The hub client takes longer to import than the rest of the command line together.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    try:
        patterns = [p for p in HUB_PATTERNS if needs_weights or p != _WEIGHTS]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except GatedRepoError as error:
        raise UserError(
            f"{model} is gated: accept its terms on the hub, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(f"there is no folder {model} here and no model {model} on the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        raise UserError(
            f"there is no folder {model} here, and it cannot be fetched from the hub: {why} "
            "and it is not in the local cache"
        ) from error
