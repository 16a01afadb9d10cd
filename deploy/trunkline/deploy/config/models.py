"""Find the checkpoint that the MODEL argument names, and read what must be known of it before a start.

KV that outlives its server is found again by what it was computed with, so every byte of a checkpoint counts: a
fine-tuned copy may differ in a few of them. Reading 16 GB takes as long as the disk does, once: the digests of
files stand in `digests.json` in the user's cache folder, each with its file's size, inode and times. A note that
is missing, damaged or cannot be written costs that time again, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from xxhash import xxh3_128

from trunkline.deploy.config import gguf_models
from trunkline.deploy.config.machine import cache_folder
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.kvstore.fingerprint import model_fingerprint
from trunkline.router.config import problem_of_model_name
from trunkline.worker.model.tensor_index import gguf_files

DEMO: Final = "demo"
"""The name of the model that is shipped with the package."""
DEMO_FOLDER: Final = Path(__file__).parents[1] / "demo_model"

_WEIGHTS: Final = "*.safetensors"
HUB_PATTERNS: Final = (_WEIGHTS, "*.json", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt")
"""Patterns of the files that are fetched from the hub: weights in safetensors only (other formats can run code),
and text files."""


def resolve(model: str, *, needs_weights: bool = True) -> Path:
    """Return the folder of `model`: the demo, an existing folder, one made for a GGUF file, or one fetched from
    the hub.

    Args:
        needs_weights: False if configuration and tokenizer suffice; then no weights are fetched.

    Raises:
        UserError: There is no such model, it cannot be fetched, or the folder is not a checkpoint.
    """
    if model == DEMO:
        return _checked(DEMO_FOLDER, DEMO)
    if not model:
        raise UserError(
            "MODEL is empty; give 'demo', a folder in Hugging Face format, a .gguf file, or OWNER/NAME of the hub"
        )
    try:
        return _resolved(model, Path(model).expanduser(), needs_weights)
    except OSError as error:
        raise UserError(f"MODEL is {model[:200]!r}, which cannot be read: {error.strerror or error}") from error


def _resolved(model: str, path: Path, needs_weights: bool) -> Path:
    if path.is_dir():
        return _checked(path.resolve(), model, needs_weights)
    if gguf_models.is_gguf(path):
        return gguf_models.folder_of(path)
    if path.exists():
        raise UserError(
            f"{model} is a file; MODEL is the folder that has config.json and *.safetensors, or a .gguf file"
        )
    if not _looks_like_hub_name(model):
        raise UserError(f"there is no folder {model}, and it is no hub name of the form OWNER/NAME either")
    return _checked(_fetch(model, needs_weights), model, needs_weights)


def main_name(settings: ServeSettings) -> str:
    """Return the main name of the model in the API.

    Raises:
        UserError: None was given, and the folder's name cannot be shown.
    """
    return settings.served_names[0] if settings.served_names else default_name(settings.model)


def default_name(model: str) -> str:
    """Return the name of `model` in the API, unless the user chose another one.

    Raises:
        UserError: The folder's name cannot be shown.
    """
    if model == DEMO:
        return "trunkline-demo"
    path = Path(model).expanduser()
    name = path.resolve().name if path.is_dir() else model
    if gguf_models.is_gguf(path):
        name = gguf_models.default_name(path)
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


def weights_digest(folder: Path, tell: Callable[[int], None] = lambda count: None) -> bytes:
    """Return a digest of configuration and weights as they are stored, 16 bytes.

    Args:
        folder: The checkpoint.
        tell: Called with the number of bytes if weights must be read for it (the first time, see `digest_files`).

    Raises:
        UserError: A file cannot be read.
    """
    shards = sorted(folder.glob(_WEIGHTS)) or gguf_files(folder)
    digest = hashlib.blake2b(digest_size=16)
    try:
        digest.update(hashlib.blake2b((folder / "config.json").read_bytes()).digest())
        for path, content in zip(shards, digest_files(shards, tell), strict=True):
            digest.update(path.name.encode() + b"\0" + content)
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    return digest.digest()


def fingerprint(weights: bytes, quantization: str = "none", ep: str = "on") -> str:
    """Return a hexadecimal digest of the model as it is computed with: part of the name of all its KV.

    Args:
        weights: The checkpoint's `weights_digest`.
        quantization: How the weights are rounded when they are loaded.
        ep: How experts are shared among ranks; ranks of a group must agree.
    """
    parts = [quantization] * (quantization != "none") + ["split experts"] * (ep != "on")
    return model_fingerprint(weights, ", ".join(parts)).hex()


def _checked(folder: Path, model: str, needs_weights: bool = True) -> Path:
    """Return `folder` if it has the files that every process needs."""
    if not (folder / "config.json").is_file():
        found = {gguf_models.default_name(path): path for path in sorted(folder.glob("*.gguf"))}
        if len(found) == 1:
            return gguf_models.folder_of(next(iter(found.values())))
        if found:
            names = ", ".join(path.name for path in found.values())
            raise UserError(f"{model} has several GGUF models; give one of the files: {names}")
        raise UserError(f"{model} is no checkpoint: {folder} has no config.json")
    if needs_weights and not any(folder.glob(_WEIGHTS)) and not gguf_files(folder):
        raise UserError(
            f"{model} has no *.safetensors weights; beside them only GGUF is read (convert it with transformers: "
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


PIECE_BYTES: Final = 16 << 20
"""Bytes that one thread reads and digests; a file's digest is made of those of its pieces."""
_READ_BYTES: Final = 1 << 20
_THREADS_MAX: Final = 8
_NOTES: Final = "digests.json"
_NOTES_MAX: Final = 4096
_VERSION: Final = 1
_SETTLED_NS: Final = 2_000_000_000
"""Time in nanoseconds after a file's last change before its digest is noted. Until then the file could change
again without a change of its times."""


def digest_files(paths: Sequence[Path], tell: Callable[[int], None] = lambda count: None) -> list[bytes]:
    """Return a digest of each file's content, 16 bytes. It is not cryptographic: it only tells files apart.

    Args:
        paths: Paths of readable files.
        tell: Called with the number of bytes before they are read.

    Raises:
        OSError: A file cannot be read.
    """
    notes = _read_notes()
    known = {path: _noted(notes, path) for path in paths}
    missing = [path for path, digest in known.items() if digest is None]
    if missing:
        tell(sum(path.stat().st_size for path in missing))
        for path in missing:
            stat = _identity(path)
            known[path] = fresh = _digest(path)
            if stat == _identity(path) and time.time_ns() - max(stat[2], stat[3]) > _SETTLED_NS:
                notes.pop(_key(path), None)
                notes[_key(path)] = [*stat, fresh.hex()]
        _write_notes(notes)
    return [digest for path in paths if (digest := known[path]) is not None]


def _digest(path: Path) -> bytes:
    size = path.stat().st_size
    whole = blake2b(size.to_bytes(8, "little"), digest_size=16)
    with path.open("rb") as file, ThreadPoolExecutor(min(_THREADS_MAX, os.cpu_count() or 1)) as pool:
        number = file.fileno()
        for piece in pool.map(lambda start: _digest_piece(number, start), range(0, size, PIECE_BYTES)):
            whole.update(piece)
    return whole.digest()


def _digest_piece(file: int, start: int) -> bytes:
    digest = xxh3_128()
    offset, stop = start, start + PIECE_BYTES
    while offset < stop and (data := os.pread(file, min(_READ_BYTES, stop - offset), offset)):
        digest.update(data)
        offset += len(data)
    return digest.digest()


def _identity(path: Path) -> tuple[int, int, int, int]:
    """Return a file's size, inode and times, which change with its content. The last of the times changes even if
    the file's date is set back."""
    stat = path.stat()
    return stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


def _key(path: Path) -> str:
    return str(path.resolve())


def _noted(notes: dict[str, list[Any]], path: Path) -> bytes | None:
    note = notes.get(_key(path))
    if not isinstance(note, list) or note[:-1] != list(_identity(path)):
        return None
    with contextlib.suppress(ValueError, TypeError):
        digest = bytes.fromhex(note[-1])
        return digest if len(digest) == 16 else None
    return None


def _read_notes() -> dict[str, list[Any]]:
    folder = cache_folder()
    if folder is None:
        return {}
    try:
        content = json.loads((folder / _NOTES).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    files = content.get("files") if isinstance(content, dict) and content.get("version") == _VERSION else None
    return files if isinstance(files, dict) else {}


def _write_notes(notes: dict[str, list[Any]]) -> None:
    """Write the latest `_NOTES_MAX` notes, whole or not at all."""
    folder = cache_folder()
    if folder is None:
        return
    latest = dict(list(notes.items())[-_NOTES_MAX:])
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(prefix=_NOTES, dir=folder)
        try:
            with open(file, "w") as stream:
                json.dump({"version": _VERSION, "files": latest}, stream)
            os.replace(name, folder / _NOTES)
        except BaseException:
            os.unlink(name)
            raise
