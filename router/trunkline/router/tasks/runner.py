"""Looks for tasks that no router does, and does them.

every few seconds: all tasks ─► lease their records ─► `Handler.run` ─► the task is removed
                       └─ those that are to be cancelled are told

Servers of different models may share a store, as all do that one user starts on a machine. A task that needs a
model which this router does not have is left to others, unless it only has to be ended.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import Final, Protocol

import structlog

from trunkline.kvstore.records import BusyError, MissingError, RecordError, RecordKey, StoreAwayError
from trunkline.router.errors import ApiError
from trunkline.router.service import RouterService
from trunkline.router.stores.task_store import Task
from trunkline.router.tasks.task_lease import TaskLease

PERIOD_SECONDS: Final = 2.0
"""Time in seconds between two looks at all tasks."""
_UNMADE_S: Final = 60.0
"""Age in seconds from which on a task without a record counts as one whose router has died before it made it."""
_log = structlog.get_logger("trunkline.router.tasks")


class Handler(Protocol):
    """Does the tasks of one kind."""

    kind: str
    """Kind of their records."""
    count_max: int
    """Number of tasks that a router does at once."""

    def suits(self, task: Task) -> bool:
        """Return whether this router has the model that a task needs."""

    async def run(self, lease: TaskLease) -> bool:
        """Do a task, or what is left of it. Return whether it is over; if not, a router goes on with it later.

        Raises:
            RecordError: the lease was lost, or the store is away.
        """


class _Run:
    """A task that this router does."""

    def __init__(self, lease: TaskLease) -> None:
        self.lease = lease
        self.work: asyncio.Task[None] | None = None


class TaskRunner:
    """Does tasks from `open` to `close`."""

    def __init__(self, service: RouterService, handlers: Mapping[str, Handler]) -> None:
        """`handlers`: by the prefix of their tasks' ids."""
        self._service = service
        self._tasks = service.tasks
        self._handlers = handlers
        self._runs: dict[str, _Run] = {}
        self._busy_until: dict[str, float] = {}
        """Loop times until which other routers have the leases of tasks."""
        self._loop: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to look for tasks."""
        self._loop = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop all work, and end the leases, so that other routers go on at once."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])
        works = [run.work for run in self._runs.values() if run.work is not None]
        for work in works:
            work.cancel()
        if works:
            await asyncio.wait(works)

    async def _run(self) -> None:
        while True:
            self._tasks.changed.clear()
            try:
                if self._service.live.draining:
                    self._stop_all()
                elif any(link.ready for link in self._service.links):  # others may have engines
                    await self._look()
            except StoreAwayError:
                pass  # the store tells of it
            except Exception:  # noqa: BLE001 (no error must end the work for good)
                _log.exception("tasks_not_looked_at")
            try:
                async with asyncio.timeout(PERIOD_SECONDS):
                    await self._tasks.changed.wait()
            except TimeoutError:
                continue

    def _stop_all(self) -> None:
        for run in self._runs.values():
            run.lease.stopped.set()

    async def _look(self) -> None:
        """Take tasks that no router does, as many as this router may do at once."""
        tasks = await self._tasks.all()
        open_ids = {task.id for task in tasks}
        now = asyncio.get_running_loop().time()
        self._busy_until = {
            task: until for task, until in self._busy_until.items() if task in open_ids and until > now
        }
        for task in tasks:
            run = self._runs.get(task.id)
            if run is not None:
                if task.is_cancelled:
                    run.lease.cancelled.set()
                continue
            handler = self._handler_of(task)
            if handler is None or task.id in self._busy_until or not self._has_room(handler):
                continue
            is_to_end = task.is_cancelled or time.time() >= task.until
            if is_to_end or handler.suits(task):
                await self._take(task, handler)

    def _handler_of(self, task: Task) -> Handler | None:
        return next((each for prefix, each in self._handlers.items() if task.id.startswith(prefix)), None)

    def _has_room(self, handler: Handler) -> bool:
        count = sum(self._handler_of(run.lease.task) is handler for run in self._runs.values())
        return count < handler.count_max

    async def _take(self, task: Task, handler: Handler) -> None:
        key = RecordKey(handler.kind, task.owner, task.id)
        run = _Run(TaskLease(self._service.records, task, key, secrets.token_hex(16)))
        try:
            await run.lease.open(lambda: None if run.work is None else run.work.cancel())
        except BusyError as error:
            self._busy_until[task.id] = asyncio.get_running_loop().time() + error.seconds
            return
        except MissingError:
            if time.time() - task.created > _UNMADE_S:
                await self._tasks.remove(task.id)
            return
        if task.is_cancelled:
            run.lease.cancelled.set()
        self._runs[task.id] = run
        run.work = asyncio.create_task(self._do(run, handler))

    async def _do(self, run: _Run, handler: Handler) -> None:
        task = run.lease.task
        try:
            if await handler.run(run.lease):
                await self._tasks.remove(task.id)
        except (RecordError, ApiError) as error:
            _log.warning("task_interrupted", task=task.id, reason=str(error))
        except Exception:  # noqa: BLE001 (another router, or this one, tries again)
            _log.exception("task_failed", task=task.id)
            self._busy_until[task.id] = asyncio.get_running_loop().time() + _UNMADE_S
        finally:
            self._runs.pop(task.id, None)
            await asyncio.shield(run.lease.close())
            self._tasks.changed.set()
