"""The tensors of a checkpoint: those that its safetensors files hold, and those that the model needs. No torch.

Weights are in safetensors files, or, if there are none, in a GGUF file (`gguf`).

A safetensors file starts with a little-endian uint64, the length of a JSON object that gives each tensor's dtype,
shape and byte range behind it. Only these headers are read here; that alone tells whether a download was cut off.

The content of these files is not trusted: whatever they hold, the result is their tensors, or one
`CheckpointError` that names the file and what is wrong with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, TypeGuard

from trunkline.worker.errors import CheckpointError, ParallelismError
from trunkline.worker.model.architecture import Architecture, NormKind, Qkv
from trunkline.worker.model.gguf.container import TYPES
from trunkline.worker.model.gguf.names import StoredTensor, read_stored
from trunkline.worker.model.model_config import LatentAttention, ModelConfig
from trunkline.worker.model.packed_files import PackedMatrix, packed_matrices, scheme_of
from trunkline.worker.model.parallelism import obstacles
from trunkline.worker.model.stacked_experts import MXFP4_GROUP, Member, MemberKind, members

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
GGUF_FILES: Final = ("model.gguf", "model-*-of-*.gguf")
"""The GGUF file of a folder, or the pattern of its parts."""
_HEADER_BYTES_MAX: Final = 100_000_000  # the format's own limit; for the index, too
_FLOAT_TYPES: Final = ("F64", "F32", "BF16", "F16")
_TYPE_BYTES: Final = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""Bytes of one element, by type. For other types the byte range is not compared with the shape."""
_DIMENSIONS_MAX: Final = 16
_SIZE_MAX: Final = 1 << 62
_SHOWN_CHARS: Final = 80


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """Type of the tensor in the format's words: "F32", "BF16", "U8", "Q4_K", …"""
    stored: StoredTensor | None = None
    """How a GGUF file has it; None: it is in a safetensors file."""
    packed: PackedMatrix | None = None
    """The tensors that it is packed in; None: it is a tensor itself."""
    member: Member | None = None
    """Where it lies in a tensor of all experts; None: it is a tensor itself."""

    @property
    def is_float(self) -> bool:
        """Whether weights can be read from the tensor's type."""
        if self.stored is not None or self.packed is not None or self.is_mxfp4:
            return True
        return self.dtype in _FLOAT_TYPES

    @property
    def is_mxfp4(self) -> bool:
        return self.member is not None and self.member.kind is MemberKind.MXFP4

    @property
    def group(self) -> int:
        """Number of values that share a scale; 0: they have none."""
        if self.stored is not None:
            return next(kind.group for kind in TYPES.values() if kind.name == self.dtype)
        return MXFP4_GROUP if self.is_mxfp4 else self.packed.group if self.packed else 0


class _MalformedError(Exception):
    """A file does not follow its format; the message says why."""


def read_tensor_index(folder: Path) -> dict[str, TensorEntry]:
    """Return all tensors of a checkpoint, sharded (with an index file) or in one file; of a GGUF file those of the
    decoder.

    Raises:
        CheckpointError: missing, cut-off, unreadable or malformed files.
        UnsupportedModelError: a GGUF file with what is not read.
    """
    if parts := gguf_files(folder):
        return {
            name: TensorEntry(each.file, each.shape, each.type, each) for name, each in read_stored(parts).items()
        }
    tensors: dict[str, TensorEntry] = {}
    for file in _files(folder):
        tensors.update(read_header(file))
    described = {name: (each.shape, each.dtype) for name, each in tensors.items()}
    scheme = scheme_of(folder)
    try:
        for stacked, name, member, shape in members(described):
            tensors[name] = TensorEntry(tensors[stacked].file, shape, tensors[stacked].dtype, member=member)
        packed = {} if scheme is None else packed_matrices(scheme, described)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    for name, (matrix, shape) in packed.items():
        method = f"{matrix.scheme.method}, {matrix.scheme.bits} bits"
        tensors[f"{matrix.name}.weight"] = TensorEntry(tensors[name].file, shape, method, packed=matrix)
    return tensors


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file.

    Raises:
        CheckpointError: it cannot be read, is cut off or malformed.
    """
    try:
        return _read_header(file)
    except _MalformedError as error:
        raise CheckpointError(f"{file} has a malformed header: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder in their order; none if it has weights in safetensors files."""
    if any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        return []
    return [path for pattern in GGUF_FILES for path in sorted(folder.glob(pattern))]


def has_blocks(folder: Path) -> bool:
    """Whether weights of a checkpoint are quantised in blocks.

    Raises:
        ModelError: as `read_tensor_index`.
    """
    return any(
        (each.stored is not None and each.dtype not in _FLOAT_TYPES) or each.packed is not None or each.is_mxfp4
        for each in read_tensor_index(folder).values()
    )


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
    """Return the files of an index, each once, all of them inside the checkpoint's folder."""
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
    """Return a tensor, and where its bytes end behind the header."""
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
    """Return a value as text for a message: short, in one line."""
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def find_prefix(architecture: Architecture, tensors: Collection[str]) -> str:
    """Return which of the architecture's prefixes the names of a checkpoint have; the first if none fits."""
    name = f"{architecture.names.embedding}.weight"
    return next((x for x in architecture.prefixes if x + name in tensors), architecture.prefixes[0])


def head_name(architecture: Architecture, prefix: str) -> str:
    """Return the name of the head's tensor in a checkpoint whose names have that prefix."""
    own = dict(zip(architecture.prefixes, architecture.head_prefixes, strict=False))
    return f"{own.get(prefix, '')}{architecture.names.head}.weight"


def expected_shapes(config: ModelConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the whole (unsharded) shape of every tensor that the decoder needs, by name behind `prefix`."""
    names, hidden = config.architecture.names, config.hidden_size
    width = config.embedding_size or hidden
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{names.embedding}.weight": (config.vocab_size, width)}
    if not config.tied_embeddings:
        shapes[head_name(config.architecture, prefix)] = (config.vocab_size, width)
    if names.positions:
        rows = config.max_positions + config.architecture.position_rows_skipped
        shapes[f"{prefix}{names.positions}.weight"] = (rows, hidden)
    if names.embedding_in:
        shapes[f"{prefix}{names.embedding_in}.weight"] = (hidden, width)
        shapes[f"{prefix}{names.embedding_out}.weight"] = (width, hidden)
    if size := config.layer_embedding_size:
        shapes[f"{prefix}{names.layer_embedding}.weight"] = (config.vocab_size, config.layers * size)
        shapes[f"{prefix}{names.layer_projection}.weight"] = (config.layers * size, hidden)
        shapes[f"{prefix}{names.layer_projection_norm}.weight"] = (size,)
    shapes.update((prefix + name, shape) for name, shape in _norm(config, names.final_norm))
    for layer in range(config.layers):
        start = prefix + names.layer.format(layer)
        shapes.update((start + name, shape) for name, shape in layer_shapes(config, layer))
    return shapes


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Yield the tensors of a layer; names are without its prefix."""
    config = config.of_layer(layer)
    names, hidden = config.architecture.names, config.hidden_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for norm in (names.attention_norm, names.attention_post_norm, names.mlp_norm, names.mlp_post_norm):
        yield from _norm(config, norm)
    wide = config.architecture.wide_norms
    for norm, columns in ((names.query_norm, queries), (names.key_norm, keys)):
        if norm:
            yield f"{norm}.weight", (columns if wide else config.head_dim,)
    if config.latent is not None:
        yield from _latent_shapes(config, config.latent)
    elif config.architecture.qkv is Qkv.SEPARATE:
        for name, rows in ((names.query, queries), (names.key, keys), (names.value, keys)):
            if name:
                yield from _linear(config, name, rows, hidden, config.attention_bias)
    else:
        yield from _linear(config, names.qkv, queries + 2 * keys, hidden, config.attention_bias)
    out = queries if config.latent is None else config.heads * config.latent.value
    yield from _linear(config, names.attention_out, hidden, out, config.attention_out_bias)
    if names.layer_scale:
        yield names.layer_scale, (1,)
    if size := config.layer_embedding_size:
        yield from _linear(config, names.layer_gate, size, hidden, False)
        yield from _linear(config, names.layer_out, hidden, size, False)
        yield from _norm(config, names.layer_out_norm)
    if names.sinks:
        yield names.sinks, (config.heads,)
    mixture = config.mixture_of(layer)
    if mixture is None:
        yield from _mlp(config, names.dense, config.intermediate_size, (names.gate, names.up))
        return
    yield from _linear(config, names.router, mixture.experts, hidden, mixture.router_bias)
    if names.choice_bias:
        is_row = config.architecture.choice_bias_is_row
        yield names.choice_bias, (1, mixture.experts) if is_row else (mixture.experts,)
    if names.expert_scale:
        yield names.expert_scale, (mixture.experts,)
    if names.router_norm:
        yield names.router_norm, (hidden,)
    for norm in (names.experts_norm, names.experts_post_norm, names.shared_post_norm):
        yield from _norm(config, norm)
    for expert in range(mixture.experts):
        yield from _mlp(config, names.expert.format(expert), mixture.width, names.expert_gates)
    if mixture.shared_width:
        yield from _mlp(config, names.shared_experts, mixture.shared_width, (names.gate, names.up))
    if names.shared_gate:
        yield from _linear(config, names.shared_gate, 1, hidden, False)


def _latent_shapes(config: ModelConfig, sizes: LatentAttention) -> Shapes:
    names, hidden, bias = config.architecture.names, config.hidden_size, config.attention_bias
    if sizes.query_rank:
        yield from _linear(config, names.query_down, sizes.query_rank, hidden, bias)
        yield f"{names.query_down_norm}.weight", (sizes.query_rank,)
    yield from _linear(config, names.query, config.heads * sizes.query, sizes.query_rank or hidden, False)
    yield from _linear(config, names.latent, sizes.latent + sizes.rotary, hidden, bias)
    yield f"{names.latent_norm}.weight", (sizes.latent,)
    yield from _linear(config, names.expand, config.heads * (sizes.plain + sizes.value), sizes.latent, False)


def _mlp(config: ModelConfig, prefix: str, width: int, gates: tuple[str, str]) -> Shapes:
    names, hidden, bias = config.architecture.names, config.hidden_size, config.mlp_bias
    if gates[0] == gates[1]:
        yield from _linear(config, prefix + gates[1], 2 * width, hidden, bias)
    else:
        for name in filter(None, gates):
            yield from _linear(config, prefix + name, width, hidden, bias)
    yield from _linear(config, prefix + names.down, hidden, width, bias)


def _norm(config: ModelConfig, name: str) -> Shapes:
    if name:
        yield f"{name}.weight", (config.hidden_size,)
        if config.architecture.norm is NormKind.LAYER:
            yield f"{name}.bias", (config.hidden_size,)


def _linear(config: ModelConfig, name: str, rows: int, columns: int, bias: bool) -> Shapes:
    yield f"{name}.weight", (columns, rows) if config.architecture.transposed else (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def check_weights(config: ModelConfig, folder: Path, tp: int = 1) -> None:
    """Check that the weight files hold every tensor, in its shape and of a type that is read, and that `tp` ranks
    can divide those whose values are in groups.

    Raises:
        CheckpointError: missing or cut-off files, missing tensors, wrong shapes, unknown types.
        ParallelismError: groups that would be divided; the message has the numbers of ranks that work.
    """
    found = read_tensor_index(folder)
    expected = expected_shapes(config, find_prefix(config.architecture, found))
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(expected)} tensors are missing: "
            f"{', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}"
        )
    for name, shape in expected.items():
        entry = found[name]
        if not entry.is_float:
            raise CheckpointError(f"{entry.file}: {name} is {entry.dtype}, not floating point; quantised weights?")
        if entry.shape != shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(entry.shape)}; config.json implies {list(shape)}"
            )
    _check_groups(config, found, tp)


def _check_groups(config: ModelConfig, found: dict[str, TensorEntry], tp: int) -> None:
    names = config.architecture.names
    divisible: tuple[str, ...] = (names.attention_out, names.dense + names.down, names.shared_experts + names.down)
    if config.mixture is not None and config.mixture.is_split:
        divisible += tuple(names.expert.format(expert) + names.down for expert in range(config.mixture.experts))
    prefix = find_prefix(config.architecture, found)
    layers = [prefix + names.layer.format(layer) for layer in range(config.layers)]
    split = [f"{layer}{name}.weight" for layer in layers for name in divisible]
    widths = [(name, found[name].shape[1], found[name].group) for name in split if name in found]

    def divided(ranks: int) -> list[str]:
        return [
            f"{name} ({width} inputs in groups of {group})"
            for name, width, group in widths
            if group and width % (ranks * group)
        ]

    if tp > 1 and (divides := divided(tp)):
        allowed = [n for n in range(1, tp) if not obstacles(config, n) and not divided(n)]
        raise ParallelismError(
            f"{tp} ranks would divide groups of quantised values in {len(divides)} tensors, such as {divides[0]}; "
            f"possible for this file: {', '.join(map(str, allowed))}"
        )
