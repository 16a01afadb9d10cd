"""What tensors a checkpoint has, where and in what shape, from the headers of its safetensors files.

A safetensors file starts with a little-endian uint64, the length of a JSON object that gives each tensor's
dtype, shape and byte range behind it. Reading that alone tells whether a download was cut off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from trunkline.worker.errors import CheckpointError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_HEADER_BYTES_MAX: Final = 100_000_000  # the format's own limit
_FLOAT_TYPES: Final = ("F64", "F32", "BF16", "F16")


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """In the format's words: "F32", "BF16", "U8", …"""

    @property
    def is_float(self) -> bool:
        """Of a type that weights are read from."""
        return self.dtype in _FLOAT_TYPES


def read_tensor_index(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint, sharded (with an index file) or in one file.

    Raises:
        CheckpointError: missing, cut-off or malformed files.
    """
    tensors: dict[str, TensorEntry] = {}
    for file in _files(folder):
        tensors.update(_read_header(file))
    return tensors


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.is_file():
        single = folder / SINGLE_FILE
        if not single.is_file():
            raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is malformed: {error!r}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing[:5])}"
        )
    return [folder / name for name in names]


def _read_header(file: Path) -> dict[str, TensorEntry]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size, _HEADER_BYTES_MAX):
                raise CheckpointError(f"{file} is not a whole safetensors file ({size} bytes)")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        entries = {
            name: TensorEntry(file, tuple(entry["shape"]), str(entry["dtype"])) for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has a malformed header: {error!r}") from error
    if end > size:
        raise CheckpointError(f"{file} is cut off: {size} of {end} bytes")
    return entries
