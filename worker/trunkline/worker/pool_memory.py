"""Make a rank's KV pools, on the device and in host memory, and say how many blocks fit."""

from __future__ import annotations

import torch

from trunkline.kernels.ops import KvPool
from trunkline.kernels.thin_memory import ThinMemory, ThinMemoryError
from trunkline.kvstore.chunks import Int32Array
from trunkline.kvstore.window_share import blocks_within, whole_blocks
from trunkline.worker.config import WorkerConfig
from trunkline.worker.device import choose_kernels
from trunkline.worker.errors import PlanError, WorkerConfigError
from trunkline.worker.model.decoder import make_kv_pool
from trunkline.worker.model.model_config import ModelConfig
from trunkline.worker.tiers.copier import Copier
from trunkline.worker.tiers.copy_lane import CopyOptions
from trunkline.worker.tiers.host_pool import HostPool


class PoolMaker:
    """Makes the KV pool of a rank, whose blocks can be thin if the configuration says so."""

    def __init__(self, config: WorkerConfig, model: ModelConfig, device: torch.device) -> None:
        """
        Raises:
            WorkerConfigError: blocks are to be thin, and the model has no layers with a window beside others.
        """
        self._config = config
        self._device = device
        self._windowed = [own.window > 0 for own in model.attention[: model.kv_layers]]
        if config.window_share < 1 and not model.part_window:
            raise WorkerConfigError(
                f"window_share is {config.window_share:g}, but not some of the model's layers have a window while "
                "others see all tokens; use 1"
            )
        self.part = model.chunk_format(config.chunk_size, config.dtype, config.kv_dtype).of_rank(config.tp)
        """What a chunk is on this rank."""

    @property
    def fitting(self) -> int:
        """Number of blocks that fit into the memory that the configuration gives."""
        config = self._config
        return config.pool_blocks or blocks_within(
            config.kv_memory_bytes, self.part, self._windowed, config.window_share
        )

    def make(self, blocks: int) -> KvPool:
        """Return a pool of so many blocks.

        Raises:
            WorkerConfigError: its blocks cannot be thin.
        """
        if self._config.window_share == 1:
            return make_kv_pool(blocks, self.part, self._device)
        try:
            return ThinMemory(blocks, self.part, self._windowed).pool
        except ThinMemoryError as error:
            raise WorkerConfigError(str(error)) from error


def windows_of(model: ModelConfig, pool: KvPool, share: float) -> dict[str, int]:
    """Return what the controller has to know of a rank's windows, by the names of `WorkerReady`."""
    whole = whole_blocks(pool.blocks, share) if pool.thin is not None else 0
    return {"window": model.window, "part_window": model.part_window, "whole_blocks": whole}


def thin_blocks(pool: KvPool, blocks: Int32Array) -> None:
    """Give back the memory of blocks for layers with a window.

    Raises:
        PlanError: The pool keeps its memory, or does not have these blocks.
    """
    if pool.thin is None or not (blocks.min() >= 0 and blocks.max() < pool.blocks):
        raise PlanError(f"blocks {blocks.tolist()} are to become thin, which this rank's pool does not allow")
    pool.thin(blocks)


def make_copier(config: WorkerConfig, pool: KvPool, memory_bytes: int, options: CopyOptions) -> Copier | None:
    """Return the copier between the device pool and a new host pool of this size; None for 0 bytes.

    Raises:
        WorkerConfigError: The host pool has no room for a block.
    """
    if not memory_bytes:
        return None
    slots = memory_bytes // pool.format.chunk_bytes
    if slots < 1:
        raise WorkerConfigError("the host pool has no room for a single block; give it more memory, or none")
    return Copier(HostPool(slots, pool), pool.data.device, pool.blocks, lambda: choose_kernels(config, 1), options)
