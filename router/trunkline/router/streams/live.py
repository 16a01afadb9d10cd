"""The generations that run or wait in a router, and their end when the process stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from trunkline.router.messages import FinishReason
from trunkline.router.routing.request import Origin
from trunkline.router.streams.generation import Generation
from trunkline.router.streams.streams import Stream


class LiveRequest(NamedTuple):
    """A generation that runs or waits, as the dashboard shows it."""

    origin: Origin
    stream: Stream
    arrived_at: float
    """Loop time in seconds at which the request arrived."""


class LiveGenerations(Mapping[Generation, LiveRequest]):
    """The generations from `begin` to `end`, in the order of their begin."""

    def __init__(self) -> None:
        self.draining = False
        """Whether new requests are refused because the process is about to exit."""
        self._live: dict[Generation, LiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._live)

    def __getitem__(self, generation: Generation) -> LiveRequest:
        return self._live[generation]

    def begin(self, generation: Generation, request: LiveRequest) -> None:
        """Note that a generation has begun."""
        self._live[generation] = request
        self._idle.clear()

    def end(self, generation: Generation) -> None:
        """Note that a generation has ended."""
        self._live.pop(generation, None)
        if not self._live:
            self._idle.set()

    async def drain(self, timeout_seconds: float) -> bool:
        """Refuse new requests and wait for the running ones. Return False if some of them had to be cut off."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            self.cut_all()
            return False
        return True

    def cut_all(self) -> None:
        """End every running generation with an error."""
        self.draining = True
        for generation in list(self._live):
            generation.cut(FinishReason.DRAINING, "the server is shutting down")
