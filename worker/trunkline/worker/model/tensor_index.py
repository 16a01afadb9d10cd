"""The tensors of a checkpoint, their files and shapes, from the headers of its safetensors files.

A safetensors file starts with a little-endian uint64, the length of a JSON object that gives each tensor's
dtype, shape and byte range behind it. Reading that alone tells whether a download was cut off.

Nothing in these files is believed: whatever they hold, the result is their tensors, or one `CheckpointError` that
names the file and what is wrong with it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, TypeGuard

from trunkline.worker.errors import CheckpointError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_HEADER_BYTES_MAX: Final = 100_000_000  # the format's own limit; for the index, too
_FLOAT_TYPES: Final = ("F64", "F32", "BF16", "F16")
_TYPE_BYTES: Final = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""Types whose size is known; of others the byte range is not compared with the shape."""
_DIMENSIONS_MAX: Final = 16
_SIZE_MAX: Final = 1 << 62
_SHOWN_CHARS: Final = 80


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


class _MalformedError(Exception):
    """What is wrong with a file."""


def read_tensor_index(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint, sharded (with an index file) or in one file.

    Raises:
        CheckpointError: missing, cut-off, unreadable or malformed files.
    """
    tensors: dict[str, TensorEntry] = {}
    for file in _files(folder):
        try:
            tensors.update(_read_header(file))
        except _MalformedError as error:
            raise CheckpointError(f"{file} has a malformed header: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    return tensors


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    try:
        if not index.is_file():
            single = folder / SINGLE_FILE
            if not single.is_file():
                raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
            return [single]
        if (size := index.stat().st_size) > _HEADER_BYTES_MAX:
            raise _MalformedError(f"it has {size} bytes; at most {_HEADER_BYTES_MAX} are read")
        names = _file_names(_parsed(index.read_bytes()))
        missing = [name for name in names if not (folder / name).is_file()]
    except _MalformedError as error:
        raise CheckpointError(f"{index} is malformed: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror or error}") from error
    if missing:
        some = ", ".join(name[:_SHOWN_CHARS] for name in missing[:5])
        raise CheckpointError(f"{folder}: {len(missing)} of {len(names)} weight files are missing: {some}")
    return [folder / name for name in names]


def _file_names(index: Any) -> list[str]:
    """Files of an index, each once, all of them inside of the checkpoint's folder."""
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise _MalformedError("there is no object `weight_map`")
    names: set[str] = set()
    for tensor, name in index["weight_map"].items():
        if not isinstance(name, str):
            raise _MalformedError(f"tensor {_shown(tensor)} is in {_shown(name)}, which is no file's name")
        path = PurePosixPath(name)
        if not path.name or path.is_absolute() or ".." in path.parts or not name.isprintable():
            raise _MalformedError(f"tensor {_shown(tensor)} is in {_shown(name)}, which is no file in this folder")
        names.add(name)
    if not names:
        raise _MalformedError("`weight_map` has no tensors")
    return sorted(names)


def _read_header(file: Path) -> dict[str, TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(size - 8, _HEADER_BYTES_MAX):
            raise CheckpointError(f"{file} is not a whole safetensors file ({size} bytes)")
        header = _parsed(stream.read(length))
    if not isinstance(header, dict):
        raise _MalformedError(f"it is {_shown(header)}, not an object")
    header.pop("__metadata__", None)
    entries, end = {}, 0
    for name, given in header.items():
        entries[name], behind = _entry(file, name, given)
        end = max(end, behind)
    if 8 + length + end > size:
        raise CheckpointError(f"{file} is cut off: {size} of {8 + length + end} bytes")
    return entries


def _entry(file: Path, name: str, given: Any) -> tuple[TensorEntry, int]:
    """A tensor, and where its bytes end behind the header."""
    if not isinstance(given, dict):
        raise _MalformedError(f"tensor {_shown(name)} is {_shown(given)}, not an object")
    dtype, shape, offsets = (given.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        raise _MalformedError(f"`dtype` of {_shown(name)} is {_shown(dtype)}, not a name")
    if not _are_sizes(shape) or len(shape) > _DIMENSIONS_MAX:
        raise _MalformedError(f"`shape` of {_shown(name)} is {_shown(shape)}, not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _MalformedError(
            f"`data_offsets` of {_shown(name)} is {_shown(offsets)}, not where it begins and ends"
        )
    begin, end = offsets
    expected = math.prod(shape) * _TYPE_BYTES.get(dtype, 0)
    if dtype in _TYPE_BYTES and expected != end - begin:
        raise _MalformedError(
            f"{_shown(name)} of shape {_shown(shape)} and type {dtype} takes {expected} bytes, but `data_offsets` "
            f"gives it {end - begin}"
        )
    return TensorEntry(file, tuple(shape), dtype), end


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _SIZE_MAX for value in values)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:  # bad UTF-8 and numbers of too many digits, too
        raise _MalformedError(f"it is no JSON ({error})") from error
    except RecursionError as error:
        raise _MalformedError("it is nested too deeply") from error


def _shown(value: Any) -> str:
    """For a message: short, in one line."""
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
