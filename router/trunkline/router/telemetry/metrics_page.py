"""`/metrics`: any router process of a cluster answers with the values of all of them.

    Prometheus ─► router 1 ─┬─ metrics-0 (socket in the run folder) ─► router 0: its own families, labelled
                            ├─ its own families, labelled
                            └─ families that are the same in all routers (controllers, tiers), once, unlabelled

Router processes on one port share no memory, and any of them may get the next scrape. So each answers for all. The
series of each process have the label `router`, its number, and are not added up: when a process is replaced, its
counters begin at 0, which Prometheus understands of a series but not of a sum. A process that does not answer in
time is left out of the scrape, and its `trunkline_router_up` is 0. A single router has no such label.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from trunkline.router.telemetry.metric_families import Exposition, Family
from trunkline.router.telemetry.metrics import Metrics

ANSWER_SECONDS_MAX: Final = 2.0
"""Longest time in seconds to wait for another process's answer. Prometheus gives up after ten by default."""
_ANSWER_BYTES_MAX: Final = 16 << 20
UP: Final = Family(
    "trunkline_router_up",
    "gauge",
    "1 if the router process answers; of several the one that is asked says so of all.",
    ("router",),
)
_decoder: Final = msgspec.msgpack.Decoder(Exposition)


class MetricsPage:
    """Collects the values of all router processes for a scrape, and gives its own to the others."""

    def __init__(self, metrics: Metrics, path: str, number: int, routers: int) -> None:
        """
        Args:
            metrics: metrics of this process.
            path: path of each process's socket without the number at its end; "": there is one process only.
            number: number of this process.
            routers: how many router processes there are.
        """
        self._metrics = metrics
        self._path = path
        self._number = number
        self._routers = routers if path else 1

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Answer the other router processes while the context is open."""
        if self._routers == 1:
            yield
            return
        server = await asyncio.start_unix_server(self._answer, sock=self._bound())
        try:
            yield
        finally:
            server.close()

    def _bound(self) -> socket.socket:
        """Return a listening socket at this process's path. It takes the place of an older process's socket."""
        path = f"{self._path}-{self._number}"
        own = f"{path}.{os.getpid()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(own)
            listener.bind(own)
            os.rename(own, path)
        except BaseException:
            listener.close()
            raise
        return listener

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(msgspec.msgpack.encode(self._own()))
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                await writer.drain()
        except (OSError, TimeoutError):
            pass  # the other process has ended
        finally:
            writer.close()

    def _own(self) -> Exposition:
        return self._metrics.own({"router": str(self._number)} if self._routers > 1 else {})

    async def scrape(self) -> bytes:
        """Return all values in Prometheus' text form."""
        others = [number for number in range(self._routers) if number != self._number]
        answers = dict(zip(others, await asyncio.gather(*map(self._ask, others)), strict=True))
        answers[self._number] = self._own()
        up = "".join(
            f'{UP.name}{{router="{number}"}} {float(answers[number] is not None)}\n'
            for number in range(self._routers)
            if number in answers
        )
        head = f"# HELP {UP.name} {UP.text}\n# TYPE {UP.name} {UP.kind}\n"
        parts = [part for _, part in sorted(answers.items()) if part is not None]
        return self._metrics.scrape([[(head, up)], *parts])

    async def _ask(self, number: int) -> Exposition | None:
        """Return another process's values; None: it does not answer."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                reader, writer = await asyncio.open_unix_connection(f"{self._path}-{number}")
                try:
                    return _decoder.decode(await _read_all(reader))
                finally:
                    writer.close()
        except (OSError, TimeoutError, msgspec.MsgspecError):
            return None


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Return what is sent until the connection ends.

    Raises:
        OSError: it is longer than any router's metrics.
    """
    parts: list[bytes] = []
    size = 0
    while part := await reader.read(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _ANSWER_BYTES_MAX:
            raise OSError(f"a router's metrics are more than {_ANSWER_BYTES_MAX} bytes")
    return b"".join(parts)
