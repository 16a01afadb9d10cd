"""A proxy that passes a request on, but keeps the answer and ends the connection."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self


class CuttingProxy:
    """Listens on a free port and cuts connections while `cuts` is above zero, once for each."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.cuts = 0

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._listener is not None
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        assert self._listener is not None
        return f"redis://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}/0"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        asked = asyncio.create_task(self._pass_on(reader, to_server))
        try:
            while answer := await from_server.read(1 << 16):
                if self.cuts:
                    self.cuts -= 1
                    break
                writer.write(answer)
                await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            asked.cancel()
            for each in (writer, to_server):
                each.close()
            self._tasks.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while request := await reader.read(1 << 16):
                writer.write(request)
                await writer.drain()
            writer.close()
