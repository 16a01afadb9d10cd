"""Loading one rank's shard: only its slices are read from the safetensors files, straight into place.

Column-parallel matrices (queries, keys, values, gate, up, embedding, head) are split by output rows,
row-parallel ones (attention output, down) by input columns. KV heads fewer than ranks are replicated. The
vocabulary is padded to a multiple of the ranks. Matrices that read the same input are fused into one, and each
is packed for the kernels at once, so that no more than one exists in two forms.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trunkline.kernels.ops import Kernels, PackedLinear
from trunkline.worker.errors import CheckpointError
from trunkline.worker.families import ModelConfig
from trunkline.worker.tensor_index import read_tensor_index

Progress = Callable[[str, float], None]
"""Called with a stage's name and the fraction done."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer on one rank."""

    attention_norm: Tensor
    qkv: PackedLinear
    """`[(heads + 2 * kv_heads) * head_dim, hidden]`: queries, keys, values."""
    attention_out: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    """`[2 * intermediate, hidden]`: gate, up, and the activation."""
    down: PackedLinear


@dataclass(frozen=True)
class Weights:
    """A model's shard on one rank."""

    embedding: Tensor
    """`[padded vocabulary / tp, hidden]`."""
    layers: list[LayerWeights]
    final_norm: Tensor
    head: PackedLinear
    """`[padded vocabulary / tp, hidden]`; of the embedding if they are tied."""
    bytes_read: int
    """From the files, for this shard."""


@dataclass(frozen=True)
class Shard:
    """Which part of a model one of `tp` ranks holds."""

    config: ModelConfig
    rank: int
    tp: int

    @property
    def heads(self) -> int:
        return self.config.heads // self.tp

    @property
    def kv_heads(self) -> int:
        return max(1, self.config.kv_heads // self.tp)

    @property
    def query_rows(self) -> slice:
        width = self.heads * self.config.head_dim
        return slice(self.rank * width, (self.rank + 1) * width)

    @property
    def key_rows(self) -> slice:
        first = self.rank * self.config.kv_heads // self.tp  # the same for neighbours if there are too few
        return slice(first * self.config.head_dim, (first + self.kv_heads) * self.config.head_dim)

    @property
    def mlp_rows(self) -> slice:
        width = self.config.intermediate_size // self.tp
        return slice(self.rank * width, (self.rank + 1) * width)

    @property
    def vocab_size(self) -> int:
        """Rows of embedding and head per rank, padding included."""
        return -(-self.config.vocab_size // self.tp)

    @property
    def vocab_start(self) -> int:
        """Token id of the first row."""
        return self.rank * self.vocab_size

    @property
    def vocab_rows(self) -> slice:
        """The rows that exist: fewer than `vocab_size` on the last ranks if the vocabulary was padded."""
        stop = min(self.config.vocab_size, self.vocab_start + self.vocab_size)
        return slice(min(self.vocab_start, stop), stop)


def load_weights(
    folder: Path, shard: Shard, dtype: torch.dtype, device: torch.device, kernels: Kernels, progress: Progress
) -> Weights:
    """Read this rank's slices of a checkpoint that `check_model` has accepted, packed for `kernels`.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    try:
        with ExitStack() as stack:
            reader = _Reader(folder, shard, (dtype, device), kernels, stack)
            return reader.read(progress)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: {error}") from error


class _Reader:
    """Reads slices by name, opening each file once, and counts bytes."""

    def __init__(
        self,
        folder: Path,
        shard: Shard,
        target: tuple[torch.dtype, torch.device],
        kernels: Kernels,
        stack: ExitStack,
    ) -> None:
        self._index = read_tensor_index(folder)
        self._files: dict[Path, Any] = {}
        self._stack = stack
        self._shard = shard
        self._dtype, self._device = target
        self._kernels = kernels
        self._bytes_read = 0

    def read(self, progress: Progress) -> Weights:
        shard, names = self._shard, self._shard.config.architecture.names
        embedding = self._vocabulary(f"{names.embedding}.weight")
        layers = []
        for layer in range(shard.config.layers):
            layers.append(self._layer(names.layer.format(layer)))
            progress("loading weights", (layer + 1) / shard.config.layers)
        head = embedding if shard.config.tied_embeddings else self._vocabulary(f"{names.head}.weight")
        return Weights(
            embedding=embedding,
            layers=layers,
            final_norm=self._slice(f"{names.final_norm}.weight"),
            head=self._kernels.pack_linear(head, None),
            bytes_read=self._bytes_read,
        )

    def _layer(self, prefix: str) -> LayerWeights:
        shard, config = self._shard, self._shard.config
        names = config.architecture.names
        queries, keys, mlp = shard.query_rows, shard.key_rows, shard.mlp_rows
        qkv = [(prefix + names.query, queries), (prefix + names.key, keys), (prefix + names.value, keys)]
        gate_up = [(prefix + names.gate, mlp), (prefix + names.up, mlp)]
        return LayerWeights(
            attention_norm=self._slice(f"{prefix}{names.attention_norm}.weight"),
            qkv=self._kernels.pack_linear(*self._column_parallel(qkv, config.attention_bias)),
            attention_out=self._row_parallel(prefix + names.attention_out, queries, config.attention_out_bias),
            mlp_norm=self._slice(f"{prefix}{names.mlp_norm}.weight"),
            gate_up=self._kernels.pack_gated_linear(*self._column_parallel(gate_up, config.mlp_bias), "silu"),
            down=self._row_parallel(prefix + names.down, mlp, config.mlp_bias),
        )

    def _column_parallel(self, parts: list[tuple[str, slice]], bias: bool) -> tuple[Tensor, Tensor | None]:
        """Weight and bias."""
        weight = torch.cat([self._slice(f"{name}.weight", rows) for name, rows in parts])
        if not bias:
            return weight, None
        return weight, torch.cat([self._slice(f"{name}.bias", rows) for name, rows in parts])

    def _row_parallel(self, name: str, columns: slice, bias: bool) -> PackedLinear:
        # The bias is added once: the ranks' results are summed.
        has_bias = bias and self._shard.rank == 0
        weight = self._slice(f"{name}.weight", columns=columns)
        return self._kernels.pack_linear(weight, self._slice(f"{name}.bias") if has_bias else None)

    def _vocabulary(self, name: str) -> Tensor:
        rows = self._slice(name, self._shard.vocab_rows)
        padding = self._shard.vocab_size - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(padding, rows.shape[1])]) if padding else rows

    def _slice(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        file = self._index[name].file
        if file not in self._files:
            self._files[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        stored = self._files[file].get_slice(name)
        part: Tensor = stored[:, columns] if columns is not None else stored[rows or slice(None)]
        self._bytes_read += part.numel() * part.element_size()
        # A copy of its own: the file's mapping can then be closed, and slices become contiguous.
        return part.to(device=self._device, dtype=self._dtype, copy=True).contiguous()
