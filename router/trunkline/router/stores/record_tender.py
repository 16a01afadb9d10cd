"""The work that keeps the record store small: records that have expired go, and their schemas' pins with them.

Every router does its part of it, a bounded portion at a time with pauses between them, so that no stream waits.
The routers of a host take turns: their rounds begin at different parts of a period.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from trunkline.kvstore.records import RecordKey, RecordStore, StoreAwayError, Usage

PERIOD_SECONDS: Final = 5.0
"""Time in seconds between two rounds of a router."""
_PAUSE_SECONDS: Final = 0.05
"""Pause in seconds between two portions of a round."""
_log = structlog.get_logger("trunkline.router.stores.record_tender")


class RecordTender:
    """Tends a record store from `open` to `close`."""

    def __init__(
        self,
        records: RecordStore,
        on_deleted: Callable[[RecordKey], None],
        on_usage: Callable[[Usage], None],
        *,
        phase: float,
    ) -> None:
        """
        Args:
            on_deleted: called with the key of each record that was deleted.
            on_usage: called after each round with the size of all records.
            phase: part of a period after which the first round begins, from 0 to 1.
        """
        self._records = records
        self._on_deleted = on_deleted
        self._on_usage = on_usage
        self._phase = phase
        self._task: asyncio.Task[None] | None = None
        self._portion: asyncio.Task[bool] | None = None

    def open(self) -> None:
        """Begin to tend the store."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop. The portion in progress is waited for: what it has deleted is told, which no router could find out
        later."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._portion is not None:
            await asyncio.gather(self._portion, return_exceptions=True)

    async def _run(self) -> None:
        await asyncio.sleep(self._phase * PERIOD_SECONDS)
        while True:
            try:
                await self._round()
            except StoreAwayError:
                pass  # the store tells of it
            except Exception:  # noqa: BLE001 (no error must end the work for good)
                _log.exception("records_not_tended")
            await asyncio.sleep(PERIOD_SECONDS)

    async def _round(self) -> None:
        while True:
            self._portion = asyncio.create_task(self._tend())
            if await asyncio.shield(self._portion):
                break
            await asyncio.sleep(_PAUSE_SECONDS)
        self._on_usage(await self._records.usage())

    async def _tend(self) -> bool:
        """Tend a portion, and tell which records it has deleted. Return whether that was the last one."""
        tended = await self._records.tend()
        for key in tended.deleted:
            self._on_deleted(key)
        return tended.is_done
