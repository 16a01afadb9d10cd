"""Arguments of kernels that lie in host memory: to the device in one copy, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_ALIGNMENT: Final = 16


class ArgumentUpload:
    """Sends small tensors to a device, in stream order, through two pinned buffers that take turns.

    What was sent is valid until the next call: work that was enqueued before still reads what was there.
    """

    def __init__(self) -> None:
        self.generation = 0
        """Number of reallocations: graphs captured before the last one hold stale addresses."""
        self._staging: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._target = torch.empty(0, dtype=torch.uint8)
        self._turn = 0

    def send(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Return the tensors on the device, contiguous: those that are there as they are, others as views of one
        copy."""
        here = [i for i, x in enumerate(tensors) if not _is_there(x, device)]
        if not here:
            return list(tensors)
        starts, size = [], 0
        for i in here:
            starts.append(size)
            size += -(-tensors[i].nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._target):
            self._grow(size, device)
        self._turn ^= 1
        if self._copied:
            self._copied[self._turn].synchronize()  # of the copy before the last one: almost always long done
        staging, sent = self._staging[self._turn], list(tensors)
        for i, start in zip(here, starts, strict=True):
            x = tensors[i]
            _view(staging, start, x).copy_(x)
            sent[i] = _view(self._target, start, x)
        self._target[:size].copy_(staging[:size], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
        return sent

    def _grow(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        for event in self._copied:
            event.synchronize()
        capacity = max(1 << 14, 1 << (size - 1).bit_length())
        self._target = torch.empty(capacity, dtype=torch.uint8, device=device)
        self._staging = [torch.empty(capacity, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if on_gpu else []  # type: ignore[no-untyped-call]
        self.generation += 1


def _is_there(x: Tensor, device: torch.device) -> bool:
    return x.device.type == "cuda" and x.device == device and x.is_contiguous()


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
