"""Sampling on CPUs, by the compiled library (`csrc/cpu/sampling.h`): bit for bit the tokens of the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trunkline.kernels.native import NativeContext, library
from trunkline.kernels.reference_sampling import token_keys
from trunkline.kernels.sampling import Draws, LogitEdits, Report


class CpuSampling:
    """Implements `trunkline.kernels.sampling.SamplingOps`."""

    def __init__(self, context: NativeContext) -> None:
        """
        Args:
            context: of the kernels that run on the same thread; sampling uses its threads and memory.
        """
        self._context = context
        self._module: Any = library()
        self._keys = torch.empty(0, dtype=torch.int64)

    def edit_logits(self, logits: Tensor, edits: LogitEdits) -> None:
        module = self._module
        if edits.biases is not None:
            module.sample_bias(logits, *edits.biases)
        if edits.masks is not None:
            module.sample_mask(self._context.handle, logits, *edits.masks)
        if edits.penalties is not None:
            module.sample_penalise(logits, *edits.penalties)

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        rows, vocab_size = logits.shape
        if len(self._keys) != vocab_size:
            self._keys = token_keys(torch.arange(vocab_size))
        out = torch.empty(rows, dtype=torch.int64)
        self._module.sample_draw(self._context.handle, logits, self._keys, *draws[:4], out)
        return out

    def report(self, logits: Tensor, rows: Tensor, chosen: Tensor, count: int) -> Report:
        found = Report(
            torch.empty(len(rows)),
            torch.empty(len(rows), count, dtype=torch.int32),
            torch.empty(len(rows), count),
        )
        self._module.sample_report(self._context.handle, logits, rows, chosen.int(), *found)
        return found
