"""Load one rank's shard: only its slices are read from the safetensors files.

What a rank's slices are is in `model_config`. Matrices that read the same input are fused into one, and each is
packed for the kernels at once, so that no more than one exists in two forms. Kernels that pack into memory of
their own read matrices from the file's mapping; all else is copied, so that no weight in use depends on the file.
Whatever the checkpoint's layout (transposed matrices, queries, keys and values in one, norms stored minus one),
the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trunkline.kernels.gguf_blocks import BLOCKS
from trunkline.kernels.grouped import GroupedWeight
from trunkline.kernels.ops import Activation, Kernels, PackedLinear, QkNorm, Quantisation, Weight
from trunkline.worker.errors import CheckpointError
from trunkline.worker.model.architecture import NormKind
from trunkline.worker.model.float8_files import Float8Scheme
from trunkline.worker.model.gguf.weights import GgufSlices
from trunkline.worker.model.model_config import LatentAttention, Mixture
from trunkline.worker.model.packed_files import PackedMatrix
from trunkline.worker.model.packed_weights import read_float8, read_mxfp4, read_packed
from trunkline.worker.model.row_order import filled, reordered, stacked_rows
from trunkline.worker.model.shard import Piece, Shard
from trunkline.worker.model.stacked_experts import Member, MemberKind
from trunkline.worker.model.tensor_index import find_prefix, head_name, read_tensor_index
from trunkline.worker.model.weights import (
    ExpertNorms,
    ExpertWeights,
    LatentWeights,
    LayerEmbedding,
    LayerInput,
    LayerWeights,
    MlpWeights,
    NormWeights,
    Weights,
)

log = structlog.get_logger()

_KV_SCALES: Final = (".k_scale", ".v_scale", ".kv_scale")
"""Endings of tensors that say for a whole layer how to keep its KV in 8 bits."""
Progress = Callable[[str, float], None]
"""Function that is called with a stage's name and the fraction done."""


def load_weights(
    folder: Path,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    progress: Progress,
    quantisation: Quantisation = "",
) -> Weights:
    """Read this rank's slices of a checkpoint that `check_model` has accepted, packed for `kernels`.

    Args:
        quantisation: how the layers' big matrices are quantised. Embeddings, head and routers are small beside
            them or sensitive to it, and stay as they are. A head that is stored in blocks is one in any case.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    try:
        with ExitStack() as stack:
            files = _Files(folder, dtype, device, stack, lends=kernels.name == "cpu")
            ignored = sum(name.endswith(_KV_SCALES) for name in files.index)
            if ignored and shard.rank == 0:
                log.info(
                    "the checkpoint's scales of KV are not used: KV in 8 bits has one for each head and token",
                    tensors=ignored,
                )
            return _ShardReader(files, shard, kernels, quantisation).read(progress)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: {error}") from error


class _Files:
    """Reads slices by name, opening each file once, and counts bytes."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, stack: ExitStack, *, lends: bool
    ) -> None:
        """`lends`: matrices are packed into other memory, so `part` need not copy them out of the file."""
        self.index = read_tensor_index(folder)
        self._sources = {name: entry.file for name, entry in self.index.items()}
        self._counted = 0
        self._blocks = GgufSlices(dtype, device)
        self._opened: dict[Path, Any] = {}
        self._last: tuple[str, Weight] = ("", torch.empty(0))
        self._stack = stack
        self._lends = lends
        self.dtype, self.device = dtype, device

    def part(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Weight:
        """Return a part of a matrix to be packed, in blocks if it is stored so; `columns` without `rows`.

        Half types round what they multiply anyway; with them the layer rounds its inputs to int8, which costs
        little of what rounding the weights did. float32 gives the results of the weights as they are stored. Codes
        that are floats are no integers to multiply.
        """
        found = self._part(name, rows, columns)
        if isinstance(found, GroupedWeight) and not found.floats:
            return replace(found, int8_inputs=self.dtype != torch.float32)
        return found

    def _part(self, name: str, rows: slice | None, columns: slice | None) -> Weight:
        entry = self.index[name]
        stored, packed = entry.stored, entry.packed
        if entry.member is not None:
            found = self._whole_member(name, entry.member)
            if isinstance(found, GroupedWeight):
                return found.rows(rows or slice(None)) if columns is None else found.columns(columns)
            part = found[rows or slice(None)] if columns is None else found[:, columns]
            return self._own(part)
        if packed is not None and isinstance(packed.scheme, Float8Scheme):
            return self._float8(packed.name, packed.scheme, rows or slice(None), columns or slice(None))
        if packed is not None:
            whole = self._packed(packed)
            return whole.rows(rows or slice(None)) if columns is None else whole.columns(columns)
        if stored is None:
            part = self._stored(name, rows, columns)
            return part.to(self.dtype) if self._lends else self._own(part)
        read = self._blocks.read(stored, rows, columns)
        return read if isinstance(read, GroupedWeight) else self._own(read)

    def _whole_member(self, name: str, member: Member) -> Weight:
        """Return an expert's part of a tensor of all, as it is stored. The last one is kept: a matrix of gate and
        up is asked for twice."""
        if self._last[0] != name:
            self._last = (name, self._read_member(member))
        return self._last[1]

    def _read_member(self, member: Member) -> Weight:
        def own_part(ending: str) -> Tensor:
            source = member.source + ending
            part: Tensor = self._open(self._sources[source]).get_slice(source)[member.expert]
            self._counted += part.nbytes
            return part

        if member.kind is MemberKind.MXFP4:
            blocks, scales = (own_part(ending).to(self.device) for ending in ("_blocks", "_scales"))
            return read_mxfp4(member.source, blocks, scales, self.dtype)
        return own_part("").T if member.kind is MemberKind.MATRIX else own_part("")

    def _float8(self, name: str, scheme: Float8Scheme, rows: slice, columns: slice) -> GroupedWeight:
        """Return a part of a matrix of floats of 8 bits: only its bytes are read, and all scales."""
        weight = f"{name}.weight"
        part: Tensor = self._open(self._sources[weight]).get_slice(weight)[rows, columns]
        self._counted += part.nbytes
        scale = self._tensor(scheme.scale_name(name, self._sources) or "")
        assert scale is not None  # the headers were checked
        scale = scale.reshape(scheme.scale_shape(*self.index[weight].shape))
        first = (rows.start or 0, columns.start or 0)
        return read_float8(name, scheme, part.to(self.device, copy=True), scale, first, self.dtype)

    def is_in_blocks(self, name: str) -> bool:
        entry = self.index[name]
        return entry.packed is not None or (entry.stored is not None and entry.stored.type in BLOCKS)

    def _stored(self, name: str, rows: slice | None, columns: slice | None) -> Tensor:
        """Return a part of a plain tensor in the file's mapping."""
        stored = self._open(self.index[name].file).get_slice(name)
        part: Tensor = stored[:, columns] if columns is not None else stored[rows or slice(None)]
        self._counted += part.numel() * part.element_size()
        return part

    def slice(
        self,
        name: str,
        rows: slice | None = None,
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return a part of a tensor, contiguous; `columns` are of a matrix, without `rows`."""
        entry = self.index[name]
        blocks = entry.stored
        if blocks is not None or entry.packed is not None or entry.member is not None:
            found = self.part(name, rows, columns) if blocks is None else self._blocks.read(blocks, rows, columns)
            dense = found.dequantise(dtype or self.dtype) if isinstance(found, GroupedWeight) else found
            return self._own(dense, dtype)
        return self._own(self._stored(name, rows, columns), dtype)

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._opened[file]

    def _packed(self, matrix: PackedMatrix) -> GroupedWeight:
        """Return a whole matrix: its words are not divided as its rows and columns are."""

        return read_packed(matrix, self._tensor, self.dtype)

    def _tensor(self, name: str) -> Tensor | None:
        if name not in self._sources:
            return None
        found: Tensor = self._open(self._sources[name]).get_tensor(name)
        self._counted += found.nbytes
        return found.to(self.device)

    @property
    def bytes_read(self) -> int:
        return self._counted + self._blocks.bytes_read

    def _own(self, part: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of its own: the file's mapping can then be closed, and slices become contiguous."""
        return part.to(device=self.device, dtype=dtype or self.dtype, copy=True).contiguous()


class _ShardReader:
    """Reads the weights of a shard from where its family keeps them."""

    def __init__(self, files: _Files, shard: Shard, kernels: Kernels, quantisation: Quantisation) -> None:
        self._files = files
        self._shard = shard
        self._config = shard.config
        self._architecture = shard.config.architecture
        self._names = self._architecture.names
        self._prefix = find_prefix(self._architecture, files.index)
        self._kernels = kernels
        self._quantisation = quantisation

    def read(self, progress: Progress) -> Weights:
        config, names, prefix = self._config, self._names, self._prefix
        embedding = self._vocabulary(f"{prefix}{names.embedding}.weight")
        layers = []
        for layer in range(config.layers):
            layers.append(self._layer(prefix + names.layer.format(layer), layer))
            progress("loading weights", (layer + 1) / config.layers)
        return Weights(
            embedding=embedding,
            embedding_in=self._replicated(prefix, names.embedding_in),
            positions=self._positions(),
            layer_embedding=self._layer_embedding(),
            layers=layers,
            final_norm=self._norm(prefix, names.final_norm),
            embedding_out=self._replicated(prefix, names.embedding_out),
            head=self._head(embedding),
            bytes_read=self._files.bytes_read,
        )

    def _layer(self, prefix: str, layer: int) -> LayerWeights:
        config, names = self._config, self._names
        mixture = config.mixture_of(layer)
        if mixture is None:
            width = config.of_layer(layer).intermediate_size
            mlp: MlpWeights | ExpertWeights = self._mlp(prefix + names.dense, width)
        else:
            mlp = self._experts(prefix, mixture)
        return LayerWeights(
            attention_norm=self._norm(prefix, names.attention_norm),
            qkv=self._qkv(prefix, layer) if config.latent is None else self._latent(prefix, config.latent),
            qk_norm=self._qk_norm(prefix, layer),
            sinks=self._sinks(prefix),
            attention_out=self._attention_out(prefix + names.attention_out, layer),
            attention_post_norm=self._norm(prefix, names.attention_post_norm),
            mlp_norm=self._norm(prefix, names.mlp_norm),
            mlp=mlp,
            mlp_post_norm=self._norm(prefix, names.mlp_post_norm),
            layer_input=self._layer_input(prefix),
            scale=float(self._files.slice(prefix + names.layer_scale)) if names.layer_scale else 1.0,
        )

    def _layer_embedding(self) -> LayerEmbedding | None:
        names, prefix = self._names, self._prefix
        projection = self._of_embeddings(prefix, names.layer_projection)
        if projection is None:
            return None
        table = self._vocabulary(f"{prefix}{names.layer_embedding}.weight")
        norm = self._files.slice(f"{prefix}{names.layer_projection_norm}.weight", dtype=torch.float32)
        return LayerEmbedding(table, projection, norm)

    def _layer_input(self, prefix: str) -> LayerInput | None:
        names = self._names
        gate, out = (self._of_embeddings(prefix, name) for name in (names.layer_gate, names.layer_out))
        return LayerInput(gate, out, self._some_norm(prefix + names.layer_out_norm)) if gate and out else None

    def _of_embeddings(self, prefix: str, name: str) -> PackedLinear | None:
        """Return a matrix of the layers' own embeddings, if there are any."""
        return self._replicated(prefix, name if self._config.layer_embedding_size else "")

    def _qkv(self, prefix: str, layer: int) -> PackedLinear:
        shard = self._shard
        pieces = shard.of_layer(layer).qkv_pieces()
        weight, bias = self._column_parallel(prefix, pieces, self._config.attention_bias)
        if (rows := shard.filled_rows(layer)) is not None:
            return self._pack(*reordered(weight, bias, rows))
        if self._architecture.interleaved:
            return self._pack(*reordered(weight, bias, shard.parted_rows()))
        return self._pack(weight, bias)

    def _attention_out(self, name: str, layer: int) -> PackedLinear:
        shard, has_bias = self._shard, self._config.attention_out_bias
        weight = self._matrix(f"{name}.weight", columns=shard.of_layer(layer).out_columns)
        bias = self._files.slice(f"{name}.bias") if has_bias and shard.rank == 0 else None
        if (columns := shard.filled_columns(layer)) is not None:
            assert isinstance(weight, Tensor)  # families with such layers have no packed files
            weight = filled(weight.T, columns).T.contiguous()
        return self._pack(weight, bias)

    def _latent(self, prefix: str, sizes: LatentAttention) -> LatentWeights:
        """Return the projections into latent attention, rotary parts in front of queries."""
        names, shard, pack = self._names, self._shard, self._kernels.pack_linear
        apart, has_bias = self._architecture.interleaved, self._config.attention_bias
        query_down = query_norm = None
        if sizes.query_rank:
            piece = Piece(names.query_down, slice(None))
            query_down = self._pack(*self._column_parallel(prefix, [piece], has_bias))
            query_norm = self._norm_weight(prefix + names.query_down_norm)
        queries = self._matrix(f"{prefix}{names.query}.weight", shard.query_rows)
        stored = self._column_parallel(prefix, [Piece(names.latent, slice(None))], has_bias)
        expand = self._files.slice(f"{prefix}{names.expand}.weight", shard.head_rows(sizes.plain + sizes.value))
        by_head = expand.view(shard.heads, sizes.plain + sizes.value, sizes.latent)
        return LatentWeights(
            query_down,
            query_norm,
            self._pack(*reordered(queries, None, shard.latent_query_rows())),
            self._pack(*reordered(*stored, sizes.key_order(apart))),
            self._pack(*reordered(*stored, list(range(sizes.latent)))),
            self._norm_weight(prefix + names.latent_norm),
            tuple(pack(own[: sizes.plain].T.contiguous(), None, self._quantisation) for own in by_head),
            tuple(pack(own[sizes.plain :], None, self._quantisation) for own in by_head),
        )

    def _mlp(self, prefix: str, width: int) -> MlpWeights:
        """Return this rank's part of an MLP."""
        has_bias, rows = self._config.mlp_bias, self._shard.mlp_rows(width)
        return MlpWeights(
            self._up(prefix, rows, width, (self._names.gate, self._names.up)),
            self._row_parallel(prefix + self._names.down, rows, has_bias and self._shard.rank == 0),
        )

    def _experts(self, prefix: str, mixture: Mixture) -> ExpertWeights:
        names, here, width = self._names, self._shard.experts, mixture.width
        rows = self._shard.mlp_rows(width) if mixture.is_split else slice(0, width)
        has_bias = self._config.mlp_bias and not (mixture.is_split and self._shard.rank)
        experts = []
        for start in (prefix + names.expert.format(expert) for expert in here):
            down = self._row_parallel(start + names.down, rows, has_bias)
            up = self._up(start, rows, width, names.expert_gates)
            experts.append(MlpWeights(up, down))
        stack = self._kernels.stack_experts(experts, self._files.dtype)
        if stack is not None:
            experts = [MlpWeights(*layers) for layers in stack.layers]
        return ExpertWeights(
            self._router(prefix + names.router, mixture),
            here.start,
            experts,
            self._vector(prefix, names.choice_bias),
            self._mlp(prefix + names.shared_experts, mixture.shared_width) if mixture.shared_width else None,
            stack,
            self._replicated(prefix, names.shared_gate),
            self._vector(prefix, names.expert_scale),
            self._expert_norms(prefix),
        )

    def _expert_norms(self, prefix: str) -> ExpertNorms | None:
        names = self._names
        if not names.experts_norm:
            return None
        router = self._files.slice(prefix + names.router_norm, dtype=torch.float32)
        router *= self._config.hidden_size**-0.5
        own = (names.experts_norm, names.experts_post_norm, names.shared_post_norm)
        return ExpertNorms(NormWeights(router, None), *(self._some_norm(prefix + name) for name in own))

    def _router(self, name: str, mixture: Mixture) -> PackedLinear:
        bias = self._files.slice(f"{name}.bias") if mixture.router_bias else None
        return self._kernels.pack_linear(self._matrix(f"{name}.weight"), bias)

    def _sinks(self, prefix: str) -> Tensor | None:
        name, first = self._names.sinks, self._shard.first_head
        rows = slice(first, first + self._shard.heads)
        return self._files.slice(prefix + name, rows, dtype=torch.float32) if name else None

    def _vector(self, prefix: str, name: str) -> Tensor | None:
        """Return a vector in float32, if the family has it."""
        return self._files.slice(prefix + name, dtype=torch.float32).flatten() if name else None

    def _up(self, prefix: str, rows: slice, width: int, gates: tuple[str, str]) -> PackedLinear:
        """Return rows of an MLP's first matrix, and of its gate if there is one, of an MLP of that width."""
        gate, up = gates
        pieces = [Piece(name, rows) for name in (gate, up) if name]
        if gate == up and self._architecture.interleaved_gates:
            pieces = [Piece(up, slice(2 * rows.start + odd, 2 * rows.stop, 2)) for odd in (0, 1)]
        elif gate == up:
            pieces[1] = Piece(up, slice(width + rows.start, width + rows.stop))
        weight, bias = self._column_parallel(prefix, pieces, self._config.mlp_bias)
        if not gate:
            return self._pack(weight, bias)
        activation = cast("Activation", self._config.activation)
        return self._kernels.pack_gated_linear(weight, bias, activation, self._quantisation)

    def _pack(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        return self._kernels.pack_linear(weight, bias, self._quantisation)

    def _column_parallel(self, prefix: str, pieces: list[Piece], has_bias: bool) -> tuple[Weight, Tensor | None]:
        """Return the weight, and the bias if there is one, of several matrices stacked into one."""
        weight = stacked_rows([self._matrix(f"{prefix}{name}.weight", rows) for name, rows in pieces])
        if not has_bias:
            return weight, None
        return weight, torch.cat([self._files.slice(f"{prefix}{name}.bias", rows) for name, rows in pieces])

    def _row_parallel(self, name: str, columns: slice, has_bias: bool) -> PackedLinear:
        """Return a matrix split by input columns. Only one rank adds the bias, because the ranks' results are
        summed."""
        weight = self._matrix(f"{name}.weight", columns=columns)
        return self._pack(weight, self._files.slice(f"{name}.bias") if has_bias else None)

    def _replicated(self, prefix: str, name: str) -> PackedLinear | None:
        return self._kernels.pack_linear(self._files.slice(f"{prefix}{name}.weight"), None) if name else None

    def _matrix(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Weight:
        """Return output rows or input columns of a layer's matrix, `[out, in]` however it is stored."""
        if self._architecture.transposed:
            return self._files.slice(name, columns, rows).T.contiguous()
        return self._files.part(name, rows, columns)

    def _norm(self, prefix: str, name: str) -> NormWeights | None:
        return self._some_norm(prefix + name) if name else None

    def _some_norm(self, name: str) -> NormWeights:
        bias = self._files.slice(f"{name}.bias") if self._architecture.norm is NormKind.LAYER else None
        return NormWeights(self._norm_weight(name), bias)

    def _qk_norm(self, prefix: str, layer: int) -> QkNorm | None:
        names = self._names
        if not names.query_norm:
            return None
        shard, wide = self._shard, self._architecture.wide_norms
        query = self._norm_weight(prefix + names.query_norm, shard.query_rows if wide else None)
        key = query
        if layer < self._config.kv_layers:
            key = self._norm_weight(prefix + names.key_norm, shard.key_rows if wide else None)
        missing = self._config.head_dim - len(query) if not wide else 0
        # Zeros are part of the mean then, which the eps and the scale of the scores make up for (`step_program`).
        share = self._config.head_share(self._config.attention[layer])
        query, key = (torch.nn.functional.pad(weight, (0, missing)) for weight in (query, key))
        return QkNorm(query, key, self._config.norm_eps * share)

    def _norm_weight(self, name: str, rows: slice | None = None) -> Tensor:
        weight = self._files.slice(f"{name}.weight", rows)
        return weight + 1 if self._architecture.norm is NormKind.RMS_OFFSET else weight

    def _positions(self) -> Tensor | None:
        if not self._names.positions or self._shard.rank:
            return None
        first = self._architecture.position_rows_skipped
        rows = slice(first, first + self._config.max_positions)
        return self._files.slice(f"{self._prefix}{self._names.positions}.weight", rows)

    def _head(self, embedding: Tensor) -> PackedLinear:
        prefix, is_tied = self._prefix, self._config.tied_embeddings
        own = f"{prefix}{self._names.embedding}.weight" if is_tied else head_name(self._architecture, prefix)
        if is_tied and not self._files.is_in_blocks(own):
            return self._kernels.pack_linear(embedding, None)
        stored = self._files.part(own, self._shard.vocab_rows)
        if isinstance(stored, GroupedWeight):
            return self._kernels.pack_linear(stored.padded(self._shard.vocab_size), None)
        return self._kernels.pack_linear(self._padded(stored), None)

    def _vocabulary(self, name: str) -> Tensor:
        return self._padded(self._files.slice(name, self._shard.vocab_rows))

    def _padded(self, rows: Tensor) -> Tensor:
        padding = self._shard.vocab_size - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(padding, rows.shape[1])]) if padding else rows
