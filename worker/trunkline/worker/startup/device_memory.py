"""Divide a GPU's memory: the KV pool gets what weights and the largest step leave. Pure.

      total memory of the GPU
      ├── what `gpu_memory_fraction` allows this rank ───────────────────────────┐ rest: other processes,
      │   weights │ largest step │ outside (NCCL, kernels) │ KV pool             │ the CUDA context, reserve

Only `CudaMemory` asks a device; tests put other numbers in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch

from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import WorkerConfigError, WorkerError

BLOCKS_MIN: Final = 2
"""Blocks that a controller needs to work with."""
OUTSIDE_BYTES_MAX: Final = 2 << 30
"""Of memory that is taken outside torch while this rank loads: beyond that it is another process's, not NCCL's."""


class MemoryMeter(Protocol):
    """What a device says of its memory. Numbers are bytes."""

    def total_and_free(self) -> tuple[int, int]:
        """Of the whole device, all its processes together."""

    def held(self) -> int:
        """Taken from the device by torch in this process, after all that it does not need was given back."""

    def begin_peak(self) -> None:
        """Let the next `peak` count from now on."""

    def peak(self) -> int:
        """The most that torch has taken from the device since `begin_peak`; waits for the device."""


class CudaMemory:
    """Memory of a CUDA device, as torch and the driver say."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_and_free(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return total, free

    def held(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)


@dataclass(frozen=True)
class MemoryUse:
    """Where a GPU's memory is, after the largest step was run once without a KV pool to speak of. In bytes."""

    total: int
    free: int
    """Of the device now, used by no process."""
    weights: int
    step: int
    """What the largest step takes beside the weights, at its peak: activations, logits, partial results."""
    kept: int
    """The part of `step` that is still taken."""
    outside: int
    """What this rank has taken besides, while it loaded: NCCL, loaded kernels."""

    def left(self, fraction: float) -> int:
        """For KV, within a fraction of the total; negative if there is not enough for the rest."""
        return int(self.total * fraction) - self.weights - self.step - self.outside

    @property
    def available(self) -> int:
        """For KV, as far as other processes have left it free."""
        return self.free - (self.step - self.kept)


def measured(meter: MemoryMeter, free_at_start: int, weights: int, peak: int) -> MemoryUse:
    """Put together what was read at several moments; the last readings are taken now.

    Args:
        free_at_start: before this rank had taken anything.
        weights: `held` when they had been loaded.
        peak: of the largest step.
    """
    held = meter.held()
    total, free = meter.total_and_free()
    outside = min(max(0, free_at_start - free - held), OUTSIDE_BYTES_MAX)
    return MemoryUse(total, free, weights, max(0, peak - weights), max(0, held - weights), outside)


def blocks_that_fit(use: MemoryUse, config: WorkerConfig, block_bytes: int) -> int:
    """Blocks of the KV pool: as many as the configuration asks for, or as many as fit.

    Raises:
        WorkerConfigError: too few fit this GPU, so there will never be enough memory.
        WorkerError: other processes take the memory now.
    """
    asked = config.pool_blocks * block_bytes or config.kv_memory_bytes
    limit = use.left(1.0) if asked else use.left(config.gpu_memory_fraction)
    wanted = asked or limit
    needed = max(asked, BLOCKS_MIN * block_bytes)
    if limit < needed:
        raise WorkerConfigError(_too_little(use, config, block_bytes, asked))
    if use.available < needed:
        raise WorkerError(
            f"KV needs {gib(needed)} GiB, but other processes have left {gib(max(0, use.available))} GiB of this "
            f"GPU's {gib(use.total)}; this rank has {gib(use.weights + use.kept + use.outside)} and needs "
            f"{gib(use.step - use.kept)} more for its largest step. End what else uses the GPU, or give a smaller "
            "--gpu-memory-fraction or --kv-memory"
        )
    return min(wanted, max(use.available, asked)) // block_bytes


def _too_little(use: MemoryUse, config: WorkerConfig, block_bytes: int, asked: int) -> str:
    allowed = 1.0 if asked else config.gpu_memory_fraction
    left = gib(max(0, use.left(allowed)))
    taken = (
        f"this GPU has {gib(use.total)} GiB"
        + ("" if asked else f", of which --gpu-memory-fraction {allowed:g} allows {gib(int(use.total * allowed))}")
        + f"; the weights take {gib(use.weights)}, the largest step ({config.token_budget} tokens, "
        f"{config.max_rows} rows) {gib(use.step)}, NCCL and kernels {gib(use.outside)}, so {left} are left"
    )
    cures = "more GPUs for each group (--tp), --quantization int8, a smaller --token-budget or --max-batch"
    if asked:
        return f"the KV pool is to have {gib(asked)} GiB, but {taken}. Give a smaller --kv-memory, or {cures}"
    need = f"{BLOCKS_MIN} blocks of {config.chunk_size} tokens take {gib(BLOCKS_MIN * block_bytes)}"
    return f"there is no room for KV: {taken}, and {need}. Give a larger --gpu-memory-fraction, {cures}"


def gib(count: int) -> str:
    """Bytes as GiB, for people."""
    return f"{count / (1 << 30):.2f}"
