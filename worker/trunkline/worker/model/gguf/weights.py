"""Slices of a GGUF file's tensors: dense where the file is, else in the packed form of the kernels."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from trunkline.kernels.gguf_blocks import BLOCKS, from_blocks
from trunkline.kernels.grouped import GroupedWeight
from trunkline.worker.model.gguf.names import Layout, StoredTensor

DENSE: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufSlices:
    """Reads slices of tensors that `container` has checked, each file mapped once."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: type of what the matrices are multiplied with. `device`: where matrices in blocks go."""
        self.bytes_read = 0
        self._dtype, self._device = dtype, device
        self._mapped: dict[Path, mmap.mmap] = {}

    def read(
        self, tensor: StoredTensor, rows: slice | None = None, columns: slice | None = None
    ) -> Tensor | GroupedWeight:
        """Return a part of a tensor, a matrix in blocks as such; `columns` are of a matrix, without `rows`. Dense
        parts are views of the file, of its type.

        Raises:
            OSError: the file cannot be read.
            ValueError: columns that are no whole groups.
        """
        raw = self._rows(tensor)[rows or slice(None)]
        if tensor.layout is Layout.PAIRS:
            raw = _parted(raw, tensor.heads * raw.shape[0] // tensor.shape[0])
        if tensor.type in DENSE:
            part = raw.contiguous().view(DENSE[tensor.type])
            part = part[:, columns or slice(None)] if len(tensor.shape) > 1 else part[:, 0]
            self.bytes_read += part.nbytes
            return part.float() - 1 if tensor.layout is Layout.PLUS_ONE else part
        block = BLOCKS[tensor.type]
        first, stop, _ = (columns or slice(None)).indices(tensor.shape[-1])
        start = first // block.values
        covering = raw[:, start * block.bytes : -(-stop // block.values) * block.bytes]
        self.bytes_read += covering.nbytes
        weight = from_blocks(tensor.type, covering.to(self._device), self._dtype)
        if columns is None:
            return weight
        return weight.columns(slice(first - start * block.values, stop - start * block.values))

    def _rows(self, tensor: StoredTensor) -> Tensor:
        """Return the bytes of a tensor, uint8 `[rows, bytes]`; of one with one dimension, each value is a row."""
        if not tensor.bytes:
            return torch.empty(tensor.shape[0] if tensor.shape else 0, 0, dtype=torch.uint8)
        data = torch.frombuffer(
            self._map(tensor.file), dtype=torch.uint8, count=tensor.bytes, offset=tensor.offset
        )
        return data.view(math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0], -1)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._mapped:
            with file.open("rb") as stream:
                # Copy on write: tensors over memory that cannot be written are warned of.
                self._mapped[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._mapped[file]


def _parted(raw: Tensor, heads: int) -> Tensor:
    """Return rows in which, within each head, all first ones of the pairs come before all second ones."""
    return raw.view(heads, -1, 2, raw.shape[1]).transpose(1, 2).reshape(raw.shape)
