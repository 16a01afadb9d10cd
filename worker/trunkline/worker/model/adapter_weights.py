"""Load an adapter: this rank's part of its matrices, packed for the program's linear ops.

The modules behind one op (queries, keys and values; gate and up) become one pair of matrices: their A below each
other, their B on a diagonal. Ranks divide them as they divide the base layer (`model_config`): of layers that are
split by output rows, each rank has all of A and its rows of B; of those split by input columns its columns of A
and all of B, so the sum over the ranks that the base layer needs is the adapter's, too. Of experts each rank has
the pairs of those that it has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trunkline.kernels.adapters import AdapterLayer, AdapterLayers
from trunkline.kernels.ops import Kernels
from trunkline.worker.errors import AdapterError
from trunkline.worker.model.adapter_experts import both_gates
from trunkline.worker.model.adapters import AdaptedModule, Adapter
from trunkline.worker.model.model_config import Mixture
from trunkline.worker.model.row_order import filled
from trunkline.worker.model.shard import Piece, Shard


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
    """The order of the inputs, likewise."""
    is_here: bool = True
    """Whether this rank has the op; else another one has."""


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
                pairs = _Pairs(file)
                for site in _sites(shard, index, adapter):
                    left -= {(index, piece.name) for piece in site.pieces}
                    pair = _matrices(adapter, index, site, pairs) if site.is_here else None
                    if pair is not None:
                        down, up = (each.to(device=device, dtype=dtype).contiguous() for each in pair)
                        packed = AdapterLayer(kernels.pack_linear(down, None), kernels.pack_linear(up, None))
                        layers[f"{index}.{site.place}"] = packed
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{adapter.file} cannot be read: {error}") from error
    if left:
        raise AdapterError(f"{adapter.file}: {min(left)[1]!r} of layer {min(left)[0]} cannot be changed here")
    return layers


class _Pairs:
    """Reads the pairs of matrices of a layer's modules."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._of_all: dict[str, Tensor] = {}
        """Matrices for all experts, by name: each expert needs a part of them."""

    def of(self, module: AdaptedModule) -> tuple[Tensor, Tensor]:
        """Return A `[rank, in]` and B `[out, rank]`, float32."""
        if module.part is None:
            return self._file.get_tensor(module.a).float(), self._file.get_tensor(module.b).float()
        for name in (module.a, module.b):
            if name not in self._of_all:
                self._of_all[name] = self._file.get_tensor(name).float()
        a, b, part = self._of_all[module.a], self._of_all[module.b], module.part
        a = a.view(part.experts, module.rank, -1)[part.expert]
        b = b.view(len(b), module.rank, part.experts)[:, :, part.expert]
        return (b.T, a.T) if part.is_turned else (a, b)


def _matrices(adapter: Adapter, layer: int, site: _Site, pairs: _Pairs) -> tuple[Tensor, Tensor] | None:
    """Return A `[rank, in]` and B, scaled, `[out, rank]` of an op, float32; None: it has nothing there."""
    names = [
        name for name in dict.fromkeys(piece.name for piece in site.pieces) if (layer, name) in adapter.modules
    ]
    if not names:
        return None
    parts, matrices, ranks = [], {}, 0
    for name in names:
        module = adapter.modules[layer, name]
        a, b = pairs.of(module)
        parts.append(a[:, site.columns])
        matrices[name] = (b * module.scale, slice(ranks, ranks + module.rank))
        ranks += module.rank
    rows = []
    for name, chosen in site.pieces:
        part = torch.zeros(len(range(chosen.start, chosen.stop, chosen.step or 1)), ranks)
        if name in matrices:
            matrix, columns = matrices[name]
            part[:, columns] = matrix[chosen]
        rows.append(part)
    up = torch.cat(rows)
    down = torch.cat(parts)
    if site.inputs is not None:
        down = filled(down.T, site.inputs).T
    return down, up if site.order is None else filled(up, site.order)


def _sites(shard: Shard, layer: int, adapter: Adapter) -> list[_Site]:
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
    if mixture is not None:
        sites.append(_Site("experts.router", [Piece(names.router, slice(0, mixture.experts))]))
        sites += _expert_sites(shard, layer, mixture, adapter)
    return sites


def _expert_sites(shard: Shard, layer: int, mixture: Mixture, adapter: Adapter) -> list[_Site]:
    architecture, width = shard.config.architecture, mixture.width
    names, here = architecture.names, shard.experts
    rows = shard.mlp_rows(width) if mixture.is_split else slice(0, width)
    both = [slice(rows.start, rows.stop), slice(width + rows.start, width + rows.stop)]
    if architecture.interleaved_gates:
        both = [slice(2 * rows.start + odd, 2 * rows.stop, 2) for odd in (0, 1)]
    sites = []
    for expert in range(mixture.experts):
        start, is_here = names.expert.format(expert), expert in here
        joined = start + both_gates(names)
        pieces = [Piece(start + name, rows) for name in names.expert_gates]
        if (layer, joined) in adapter.modules:
            if any((layer, name) in adapter.modules for name, _ in pieces if name != joined):
                raise AdapterError(f"{adapter.file} changes expert {expert} of layer {layer} in two ways")
            pieces = [Piece(joined, part) for part in both]
        down = [Piece(start + names.down, slice(0, shard.config.hidden_size))]
        sites.append(_Site(f"experts.{expert}.up", pieces, is_here=is_here))
        sites.append(_Site(f"experts.{expert}.down", down, rows, is_here=is_here))
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
