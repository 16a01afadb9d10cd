"""Load an adapter: this rank's part of its matrices, packed for the program's linear ops.

The modules behind one op (queries, keys and values; gate and up) become one pair of matrices: their A below each
other, their B on a diagonal. Ranks divide them as they divide the base layer (`model_config`): of layers that are
split by output rows, each rank has all of A and its rows of B; of those split by input columns its columns of A
and all of B, so the sum over the ranks that the base layer needs is the adapter's, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trunkline.kernels.adapters import AdapterLayer, AdapterLayers
from trunkline.kernels.ops import Kernels
from trunkline.worker.errors import AdapterError
from trunkline.worker.model.adapters import Adapter
from trunkline.worker.model.model_config import Piece, Shard
from trunkline.worker.model.row_order import filled


class _Site(NamedTuple):
    """A linear op of a layer, and the modules behind it."""

    place: str
    pieces: list[Piece]
    """Rows of the modules' outputs, in the order in which the op has them."""
    columns: slice = slice(None)
    """Inputs."""
    order: list[int] | None = None
    """The order of the pieces' rows, -1 for zeros; None: as they are."""
    inputs: list[int] | None = None
    """The same of the inputs."""


def load_adapter(
    adapter: Adapter, shard: Shard, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> AdapterLayers:
    """Read this rank's part of an adapter that `read_adapter` has accepted.

    Raises:
        AdapterError: The file cannot be read any more.
    """
    layers: dict[str, AdapterLayer] = {}
    left = set(adapter.modules)
    try:
        with safe_open(adapter.file, framework="pt") as file:
            for index in sorted({layer for layer, _ in adapter.modules}):
                for site in _sites(shard, index):
                    left -= {(index, piece.name) for piece in site.pieces}
                    pair = _matrices(adapter, index, site, file)
                    if pair is not None:
                        down, up = (each.to(device=device, dtype=dtype).contiguous() for each in pair)
                        packed = AdapterLayer(kernels.pack_linear(down, None), kernels.pack_linear(up, None))
                        layers[f"{index}.{site.place}"] = packed
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{adapter.file} cannot be read: {error}") from error
    if left:
        raise AdapterError(f"{adapter.file}: {min(left)[1]!r} of layer {min(left)[0]} cannot be changed here")
    return layers


def _matrices(adapter: Adapter, layer: int, site: _Site, file: Any) -> tuple[Tensor, Tensor] | None:
    """Return A `[rank, in]` and B, scaled, `[out, rank]` of an op, float32; None: it has nothing there."""
    names = [
        name for name in dict.fromkeys(piece.name for piece in site.pieces) if (layer, name) in adapter.modules
    ]
    if not names:
        return None
    parts, matrices, ranks = [], {}, 0
    for name in names:
        module = adapter.modules[layer, name]
        parts.append(file.get_tensor(module.a)[:, site.columns].float())
        matrices[name] = (file.get_tensor(module.b).float() * module.scale, slice(ranks, ranks + module.rank))
        ranks += module.rank
    rows = []
    for name, chosen in site.pieces:
        part = torch.zeros(chosen.stop - chosen.start, ranks)
        if name in matrices:
            matrix, columns = matrices[name]
            part[:, columns] = matrix[chosen]
        rows.append(part)
    up = torch.cat(rows)
    down = torch.cat(parts)
    if site.inputs is not None:
        down = filled(down.T, site.inputs).T
    return down, up if site.order is None else filled(up, site.order)


def _sites(shard: Shard, layer: int) -> list[_Site]:
    config, names = shard.config, shard.config.architecture.names
    hidden = slice(0, config.hidden_size)
    own, order = shard.of_layer(layer), shard.filled_rows(layer)
    if config.architecture.interleaved:
        order = shard.parted_rows()
    out = [Piece(names.attention_out, hidden)]
    sites = [_Site("attention_out", out, own.out_columns, inputs=shard.filled_columns(layer))]
    sites += _latent_sites(shard) if config.latent else [_Site("qkv", own.qkv_pieces(), order=order)]
    if size := config.layer_embedding_size:
        sites.append(_Site("layer_gate", [Piece(names.layer_gate, slice(0, size))]))
        sites.append(_Site("layer_out", [Piece(names.layer_out, hidden)]))
    mixture = config.mixture_of(layer)
    mlps = [("", names.dense, own.config.intermediate_size)]
    if mixture is not None:
        mlps = [("shared_", names.shared_experts, mixture.shared_width)] if mixture.shared_width else []
    for kind, prefix, width in mlps:
        rows = shard.mlp_rows(width)
        pieces = [Piece(prefix + name, rows) for name in (names.gate, names.up) if name]
        if names.gate == names.up:
            pieces[1] = Piece(prefix + names.up, slice(width + rows.start, width + rows.stop))
        sites += [
            _Site(f"{kind}up", pieces),
            _Site(f"{kind}down", [Piece(prefix + names.down, hidden)], rows),
        ]
    return sites


def _latent_sites(shard: Shard) -> list[_Site]:
    sizes, architecture = shard.config.latent, shard.config.architecture
    assert sizes is not None
    names = architecture.names
    stored = [Piece(names.latent, slice(0, sizes.latent + sizes.rotary))]
    sites = [
        _Site("query", [Piece(names.query, shard.query_rows)], order=shard.latent_query_rows()),
        _Site("latent", stored, order=list(range(sizes.latent))),
        _Site("rotary", stored, order=sizes.key_order(architecture.interleaved)),
    ]
    if sizes.query_rank:
        sites.append(_Site("query_down", [Piece(names.query_down, slice(0, sizes.query_rank))]))
    return sites
