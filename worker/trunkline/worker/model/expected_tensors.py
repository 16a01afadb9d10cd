"""The tensors that a model needs of its checkpoint, with their whole shapes, and the check that they are there.

No torch; of the weight files only the headers are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from trunkline.worker.errors import CheckpointError
from trunkline.worker.model.architecture import Architecture, Mlp, NormKind, Qkv
from trunkline.worker.model.model_config import ModelConfig
from trunkline.worker.model.tensor_index import read_tensor_index

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def find_prefix(architecture: Architecture, tensors: Collection[str]) -> str:
    """Which of the architecture's prefixes the names of a checkpoint have; the first if none fits."""
    name = f"{architecture.names.embedding}.weight"
    return next((x for x in architecture.prefixes if x + name in tensors), architecture.prefixes[0])


def expected_shapes(config: ModelConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder needs, by its name behind `prefix`, with its whole (unsharded) shape."""
    names, hidden = config.architecture.names, config.hidden_size
    width = config.embedding_size or hidden
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{names.embedding}.weight": (config.vocab_size, width)}
    if not config.tied_embeddings:
        shapes[f"{names.head}.weight"] = (config.vocab_size, width)
    if names.positions:
        rows = config.max_positions + config.architecture.position_rows_skipped
        shapes[f"{prefix}{names.positions}.weight"] = (rows, hidden)
    if names.embedding_in:
        shapes[f"{prefix}{names.embedding_in}.weight"] = (hidden, width)
        shapes[f"{prefix}{names.embedding_out}.weight"] = (width, hidden)
    shapes.update((prefix + name, shape) for name, shape in _norm(config, names.final_norm))
    for layer in range(config.layers):
        start = prefix + names.layer.format(layer)
        shapes.update((start + name, shape) for name, shape in _layer_shapes(config))
    return shapes


def _layer_shapes(config: ModelConfig) -> Shapes:
    """Names without the layer's prefix."""
    names, hidden = config.architecture.names, config.hidden_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for norm in (names.attention_norm, names.attention_post_norm, names.mlp_norm, names.mlp_post_norm):
        yield from _norm(config, norm)
    for norm in filter(None, (names.query_norm, names.key_norm)):
        yield f"{norm}.weight", (config.head_dim,)
    if config.architecture.qkv is Qkv.SEPARATE:
        for name, rows in ((names.query, queries), (names.key, keys), (names.value, keys)):
            yield from _linear(config, name, rows, hidden, config.attention_bias)
    else:
        yield from _linear(config, names.qkv, queries + 2 * keys, hidden, config.attention_bias)
    yield from _linear(config, names.attention_out, hidden, queries, config.attention_out_bias)
    if config.architecture.mlp is Mlp.EXPERTS:
        yield from _linear(config, names.router, config.experts, hidden, False)
    for expert in range(max(1, config.experts)):
        for name in filter(None, (names.gate, names.up)):
            yield from _linear(config, name.format(expert), config.intermediate_size, hidden, config.mlp_bias)
        yield from _linear(config, names.down.format(expert), hidden, config.intermediate_size, config.mlp_bias)


def _norm(config: ModelConfig, name: str) -> Shapes:
    if name:
        yield f"{name}.weight", (config.hidden_size,)
        if config.architecture.norm is NormKind.LAYER:
            yield f"{name}.bias", (config.hidden_size,)


def _linear(config: ModelConfig, name: str, rows: int, columns: int, bias: bool) -> Shapes:
    yield f"{name}.weight", (columns, rows) if config.architecture.transposed else (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def check_weights(config: ModelConfig, folder: Path) -> None:
    """Whether the weight files hold every tensor, in its shape and in floating point.

    Raises:
        CheckpointError: missing or cut-off files, missing tensors, wrong shapes, quantised weights.
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
