"""The container format GGUF, versions 2 and 3: metadata, and what tensors there are. No torch.

Little-endian: the magic number, the version, the numbers of tensors and of pairs; pairs of a key and a typed
value; for each tensor its name, dimensions (the fastest first), type and offset; then, aligned, the tensors'
bytes.

The content of these files is not trusted: whatever they hold, the result is a `GgufFile` all of whose tensors lie
inside the file, or one `CheckpointError` that names the file and what is wrong with it. Memory stays within a
small multiple of the header's bytes: every count is compared with the bytes that are left before it is believed.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from trunkline.worker.errors import CheckpointError, UnsupportedModelError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
HEADER_BYTES_MAX: Final = 256 << 20
"""Largest header that is read: the vocabularies and merges of the largest tokenizers take a tenth of it."""
_DEFAULT_ALIGNMENT: Final = 32
_DIMENSIONS_MAX: Final = 4
_KEY_BYTES_MAX: Final = 65535
_NESTING_MAX: Final = 4
_SIZE_MAX: Final = 1 << 62
_SHOWN_CHARS: Final = 80

_STRING: Final = 8
_ARRAY: Final = 9
_NUMBERS: Final = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""The letter that `struct` has for a number's type, by the format's number of that type."""


class BlockType(NamedTuple):
    """A tensor's type: how many values of a row are stored together, and in how many bytes."""

    name: str
    values: int
    bytes: int
    group: int = 1
    """Number of values of a row that share a scale. Ranks that divide a row take whole groups."""


TYPES: Final = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18, 32),
    3: BlockType("Q4_1", 32, 20, 32),
    6: BlockType("Q5_0", 32, 22, 32),
    7: BlockType("Q5_1", 32, 24, 32),
    8: BlockType("Q8_0", 32, 34, 32),
    12: BlockType("Q4_K", 256, 144, 32),
    13: BlockType("Q5_K", 256, 176, 32),
    14: BlockType("Q6_K", 256, 210, 16),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17, 32),
}
"""The types of tensors that are read, by the format's number."""
OTHER_TYPES: Final = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
}
"""Names of types that are not read, for messages."""


class GgufTensor(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    """Sizes, the fastest dimension last."""
    type: str
    """Name of its type: one of `TYPES`."""
    offset: int
    """Place of its first byte in the file."""
    bytes: int


class GgufFile(NamedTuple):
    """The content of a file, without the tensors' bytes."""

    metadata: dict[str, Any]
    """Numbers, booleans, texts, and lists of those."""
    tensors: dict[str, GgufTensor]


class _MalformedError(Exception):
    """A file does not follow the format; the message says why."""


def read_gguf(path: Path, wanted: Callable[[str], bool] = lambda key: True) -> GgufFile:
    """Read a file's header.

    Args:
        path: The file.
        wanted: Which keys are kept. Other values are checked and left out, which saves their memory.

    Raises:
        CheckpointError: a file that cannot be read, is cut off or damaged.
        UnsupportedModelError: a version or a type of tensors that is not read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise _MalformedError(f"it has {size} bytes, too few for a header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(_Cursor(data, size), wanted)
    except _MalformedError as error:
        raise CheckpointError(f"{path} is no sound GGUF file: {error}") from error
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


class _Cursor:
    """Reads one value after the other, and nothing behind the header's limit."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self.at = 0
        self.size = size
        self._data = data
        self._end = min(size, HEADER_BYTES_MAX)

    def take(self, count: int) -> bytes:
        at = self._pass(count)
        return self._data[at : at + count]

    def numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        width = struct.calcsize(f"<{letter}")
        at = self._pass(count * width)
        if letter == "?" and self._data[at : at + count].strip(b"\0\1"):
            raise _MalformedError("a truth value is neither 0 nor 1")
        return struct.unpack_from(f"<{count}{letter}", self._data, at)

    def number(self, letter: str) -> Any:
        return self.numbers(letter, 1)[0]

    def text(self, limit: int = HEADER_BYTES_MAX) -> str:
        length = self.number("Q")
        if length > limit:
            raise _MalformedError(f"a text at byte {self.at} has {length} bytes")
        at = self.at
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise _MalformedError(f"the text at byte {at} is no UTF-8") from error

    def skip_texts(self, count: int) -> None:
        """Pass texts without making them."""
        data, at, end, unpack = self._data, self.at, self._end, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end:
                break
            at += 8 + unpack(data, at)[0]
        else:
            self._pass(at - self.at)
            return
        raise _MalformedError("it ends inside its header")

    def count(self, least: int) -> int:
        """Return a number of things that take at least `least` bytes each."""
        count: int = self.number("Q")
        if count * least > self._end - self.at:
            raise _MalformedError(f"{count} entries at byte {self.at} do not fit into it")
        return count

    def _pass(self, count: int) -> int:
        at = self.at
        if count > self._end - at:
            if self._end < self.size:
                raise _MalformedError(f"its header has more than {HEADER_BYTES_MAX} bytes")
            raise _MalformedError("it ends inside its header")
        self.at = at + count
        return at


def _read(cursor: _Cursor, wanted: Callable[[str], bool]) -> GgufFile:
    if (magic := cursor.take(4)) != MAGIC:
        raise _MalformedError(f"it begins with {magic!r}, not with {MAGIC!r}")
    version = cursor.number("I")
    if version not in VERSIONS:
        if version & 0xFFFF == 0:
            raise UnsupportedModelError("big-endian GGUF is not read; convert it to little-endian")
        raise UnsupportedModelError(f"GGUF version {version} is not read; versions {VERSIONS} are")
    tensor_count = cursor.count(8 + 4 + 4 + 8)
    metadata: dict[str, Any] = {}
    seen: set[str] = set()
    for _ in range(cursor.count(8 + 4 + 1)):
        key = cursor.text(_KEY_BYTES_MAX)
        if key in seen:
            raise _MalformedError(f"the key {_shown(key)} stands in it twice")
        seen.add(key)
        keep = key == "general.alignment" or wanted(key)
        value = _value(cursor, cursor.number("I"), keep)
        if keep:
            metadata[key] = value
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise _MalformedError(f"general.alignment is {_shown(alignment)}, not a power of two from 8 on")
    found = [_tensor(cursor) for _ in range(tensor_count)]
    begin = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in found:
        if name in tensors:
            raise _MalformedError(f"the tensor {_shown(name)} stands in it twice")
        if tensor.offset % alignment:
            raise _MalformedError(f"{_shown(name)} begins at {tensor.offset}, no multiple of {alignment}")
        placed = tensor._replace(offset=begin + tensor.offset)
        if placed.offset + placed.bytes > cursor.size:
            raise _MalformedError(
                f"it is cut off: {_shown(name)} ends at byte {placed.offset + placed.bytes} of {cursor.size}"
            )
        tensors[name] = placed
    return GgufFile(metadata, tensors)


def _value(cursor: _Cursor, kind: int, keep: bool, nesting: int = 0) -> Any:
    if kind in _NUMBERS:
        return cursor.number(_NUMBERS[kind])
    if kind == _STRING:
        return cursor.text()
    if kind != _ARRAY:
        raise _MalformedError(f"a value at byte {cursor.at} has the unknown type {kind}")
    inner = cursor.number("I")
    if inner in _NUMBERS:
        letter = _NUMBERS[inner]
        return list(cursor.numbers(letter, cursor.count(struct.calcsize(f"<{letter}"))))
    if inner == _STRING:
        count = cursor.count(8)
        if keep:
            return [cursor.text() for _ in range(count)]
        return cursor.skip_texts(count)
    if nesting == _NESTING_MAX:
        raise _MalformedError("its lists are nested too deeply")
    count = cursor.count(8 + 4)
    return [_value(cursor, inner, keep, nesting + 1) for _ in range(count)]


def _tensor(cursor: _Cursor) -> tuple[str, GgufTensor]:
    """Return a tensor with its offset behind the header."""
    name = cursor.text(_KEY_BYTES_MAX)
    dimensions = cursor.number("I")
    if dimensions > _DIMENSIONS_MAX:
        raise _MalformedError(f"{_shown(name)} has {dimensions} dimensions; at most {_DIMENSIONS_MAX} are allowed")
    sizes = cursor.numbers("Q", dimensions)
    number, offset = cursor.number("I"), cursor.number("Q")
    count = math.prod(sizes)
    if not 0 < count < _SIZE_MAX or offset >= _SIZE_MAX:
        raise _MalformedError(f"{_shown(name)} has {_shown(sizes)} values from {offset} on")
    kind = TYPES.get(number)
    if kind is None:
        given = OTHER_TYPES.get(number, f"of the unknown type {number}")
        read = ", ".join(each.name for each in TYPES.values())
        raise UnsupportedModelError(f"tensor {_shown(name)} is {given}; read are {read}")
    row = sizes[0] if sizes else 1
    if row % kind.values:
        raise _MalformedError(f"{_shown(name)} has rows of {row}; {kind.name} holds multiples of {kind.values}")
    return name, GgufTensor(tuple(reversed(sizes)), kind.name, offset, count // kind.values * kind.bytes)


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
