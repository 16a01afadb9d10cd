"""Collectives of a tensor-parallel group (PagedAttention §4.6: Megatron-style, one controller decides).

A thin wrapper over torch.distributed (gloo on CPUs, NCCL on GPUs), so that a group of one costs nothing and
so that faster collectives can take its place.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import PeerLostError, WorkerError

_TIMEOUT: Final = datetime.timedelta(minutes=5)
"""For the rendezvous and for each collective: a peer's death is noticed at once (its connections close); this
only bounds the wait for one that hangs, and must outlast slow loading on one rank."""


@contextmanager
def _peers() -> Iterator[None]:
    """The seam at which the backends' errors, texts of their C++ sources, become ours."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError("another rank of the group is gone or cannot be reached") from error


class TensorParallel:
    """This rank's view of its group. Every method must be called by all ranks in the same order."""

    def __init__(self, rank: int, size: int, device: torch.device, *, active: bool) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._active = active

    @classmethod
    def alone(cls, device: torch.device) -> TensorParallel:
        """A group of one without collectives."""
        return cls(0, 1, device, active=False)

    @classmethod
    def connect(cls, config: WorkerConfig, device: torch.device) -> TensorParallel:
        """Meet the other ranks.

        Raises:
            WorkerError: they did not come in time, or the address cannot be used.
        """
        if config.tp == 1 and not config.force_collectives:
            return cls.alone(device)
        if config.rendezvous.startswith(("tcp://127.", "tcp://localhost", "file:")):
            # Gloo otherwise connects through the address of the host's name, which containers may not have.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=config.rendezvous,
                rank=config.rank,
                world_size=config.tp,
                timeout=_TIMEOUT,
            )
        except (RuntimeError, ValueError) as error:
            raise WorkerError(f"rank {config.rank} found no group at {config.rendezvous}: {error}") from error
        return cls(config.rank, config.tp, device, active=True)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; returns `tensor`, contiguous."""
        if self._active:
            with _peers():
                dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """`[size, *tensor.shape]`: every rank's tensor, on every rank."""
        if not self._active:
            return tensor[None]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with _peers():
            dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    def gather_columns(self, tensor: Tensor) -> Tensor | None:
        """Rank 0 gets all ranks' columns side by side, `[rows, size * columns]`; the others None."""
        if not self._active:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        with _peers():
            dist.gather(tensor.contiguous(), parts, dst=0)
        return torch.cat(parts, dim=1) if parts is not None else None

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with rank 0's, in place; returns it."""
        if self._active:
            with _peers():
                dist.broadcast(tensor, src=0)
        return tensor

    def minimum(self, value: int) -> int:
        """The smallest value given by any rank."""
        if not self._active:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor.item())

    def close(self) -> None:
        """Leave the group."""
        if self._active:
            dist.destroy_process_group()
            self._active = False
