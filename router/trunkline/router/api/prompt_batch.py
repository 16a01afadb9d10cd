"""`PromptBatch`: the generations of several prompts in one HTTP request, started, read and aborted together.

`start` is for a single one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar

from starlette.requests import Request

from trunkline.router.api.answer_fields import Collected, collect_choices
from trunkline.router.api.loop_budget import LoopBudget
from trunkline.router.errors import ApiError
from trunkline.router.http.answers import while_connected
from trunkline.router.jobs.job import Job
from trunkline.router.service import RouterService
from trunkline.router.streams.generation import Delta, Generation


async def start(service: RouterService, job: Job, request: Request | None = None) -> Generation:
    """Submit a job, at once, and wait until an engine accepts it.

    Args:
        request: Of the client that waits; None: the caller looks after clients that leave.

    Raises:
        ApiError: No engine accepted it.
        ClientLeftError: The client has left.
    """
    generation = service.generate(job)
    try:
        await (generation.begin() if request is None else while_connected(request, generation.begin()))
    except BaseException:  # cancellation included: the client left
        generation.close()
        raise
    return generation


_T = TypeVar("_T")
_TASKS_PER_TURN: Final = 64


async def _begin_all(tasks: list[asyncio.Future[_T]], work: Iterable[Coroutine[Any, Any, _T]]) -> None:
    """Start a task for each piece of work and put it into `tasks`. All tasks started in one turn of the event loop
    begin in the next turn, so only a few are started per turn."""
    for each in work:
        tasks.append(asyncio.ensure_future(each))
        if len(tasks) % _TASKS_PER_TURN == 0:
            await asyncio.sleep(0)


async def _end_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what still runs, and wait for its end."""
    for start in range(0, len(tasks), _TASKS_PER_TURN):
        some = tasks[start : start + _TASKS_PER_TURN]
        for task in some:
            task.cancel()
        await asyncio.gather(*some, return_exceptions=True)


class PromptBatch:
    """The generations of one request, in the order of its prompts. Call `close` at the end in any case."""

    def __init__(self, params: Sequence[str] = ()) -> None:
        """
        Args:
            params: Names of the prompts in errors; empty: `prompt`, or with an index if there are several.
        """
        self._params = params
        self.generations: list[Generation] = []

    async def submit(self, service: RouterService, jobs: Sequence[Job]) -> None:
        """Submit all jobs or none. Other tasks run in between: a thousand jobs take a fifth of a second.

        Raises:
            ApiError: 503 or 429, the router or its engines cannot accept them now.
        """
        if len(jobs) > 1:  # else `generate` checks as much
            service.check_admission(len(jobs))
        budget = LoopBudget()
        try:
            for job in jobs:
                self.generations.append(service.generate(job))
                await budget.yield_if_spent()
        except BaseException:  # cancellation included: the client left
            self.close()
            raise

    def close(self) -> None:
        """Abort all generations that still run. Calling it again has no effect."""
        for generation in self.generations:
            generation.close()

    async def begin(self) -> None:
        """Wait until one of the generations, whichever is first, is accepted or refused.

        Raises:
            ApiError: The generation was refused; all generations are aborted.
        """
        tasks: list[asyncio.Future[None]] = []
        try:
            if len(self.generations) == 1:
                return await self._begin(0)
            await _begin_all(tasks, map(self._begin, range(len(self.generations))))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except BaseException:  # cancellation included: the client left
            self.close()
            raise
        finally:
            if tasks:
                await _end_all(tasks)

    async def collect(self) -> list[list[Collected]]:
        """Return the whole choices of each prompt.

        Raises:
            ApiError: A generation failed; all are aborted.
        """
        tasks: list[asyncio.Future[list[Collected]]] = []
        try:
            await _begin_all(tasks, map(self._collect, range(len(self.generations))))
            return await asyncio.gather(*tasks)
        finally:
            self.close()
            await _end_all(tasks)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield the deltas of all prompts as they come, each with its prompt's index.

        Raises:
            ApiError: A generation failed; all are aborted.
        """
        if len(self.generations) == 1:
            async for delta in self.generations[0].deltas():
                yield 0, delta
            return
        # A small queue: tokens that are not read yet wait in their streams, where they become one delta.
        queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(len(self.generations))
        tasks: list[asyncio.Future[None]] = []
        running = len(self.generations)
        try:
            await _begin_all(tasks, (self._pump(index, queue) for index in range(running)))
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            self.close()
            await _end_all(tasks)

    async def _begin(self, index: int) -> None:
        try:
            await self.generations[index].begin()
        except ApiError as error:
            raise self._located(error, index) from None

    async def _collect(self, index: int) -> list[Collected]:
        await self._begin(index)
        try:
            return await collect_choices(self.generations[index])
        except ApiError as error:
            raise self._located(error, index) from None

    async def _pump(self, index: int, queue: asyncio.Queue[tuple[int, Delta] | Exception | None]) -> None:
        """Put a generation's deltas into `queue`, then None or the error."""
        try:
            async for delta in self.generations[index].deltas():
                await queue.put((index, delta))
        except ApiError as error:
            await queue.put(self._located(error, index))
        except Exception as error:  # noqa: BLE001 (raised by who reads the queue)
            await queue.put(error)
        else:
            await queue.put(None)

    def _located(self, error: ApiError, index: int) -> ApiError:
        """Return the error with the name of its prompt, if that is not `prompt`."""
        alone = not self._params and len(self.generations) == 1
        if alone or error.status != 400 or error.param not in (None, "prompt"):
            return error
        param = self._params[index] if self._params else f"prompt[{index}]"
        return ApiError(error.status, f"`{param}`: {error.message}", param=param, code=error.code)
