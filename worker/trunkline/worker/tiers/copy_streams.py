"""What copies beside the computation need of a device: an order between the computation's work and theirs.

On a CPU an op is over when its call returns, so there is nothing to order. On a GPU calls only enqueue: copies
have a stream of their own, wait there for marks in the computation's stream, and are over when the host has seen
their stream empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class CopyStream(Protocol):
    """One copy thread's side of a device."""

    def use(self) -> Any:
        """A context in which the thread's ops go to this stream."""

    def after(self, mark: object) -> None:
        """What is enqueued from now on begins when everything before the mark (see `mark_of`) is done."""

    def finish(self) -> None:
        """Until everything enqueued is done."""


class HostStream:
    """Of a CPU."""

    @contextmanager
    def use(self) -> Iterator[None]:
        yield

    def after(self, mark: object) -> None:
        pass

    def finish(self) -> None:
        pass


class CudaStream:
    """A side stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def use(self) -> Iterator[None]:
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            yield

    def after(self, mark: object) -> None:
        if isinstance(mark, torch.cuda.Event):
            self._stream.wait_event(mark)

    def finish(self) -> None:
        self._stream.synchronize()


def make_stream(device: torch.device) -> CopyStream:
    """For one copy thread."""
    return CudaStream(device) if device.type == "cuda" else HostStream()


def mark_of(device: torch.device) -> object:
    """A mark behind everything that the calling thread has given the device; None on a CPU, where that is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
