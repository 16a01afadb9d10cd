"""The check behind `/health`: can a token be generated? If none was lately, the check generates one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import msgspec

from trunkline.router.errors import ApiError
from trunkline.router.jobs.job import Job
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.streams import Stream
from trunkline.router.streams.submissions import submission
from trunkline.worker.messages import Sampling

_FRESH_SECONDS: Final = 1.0
"""Time in seconds after a token, or after the last probe, in which no new probe is made."""
_PROBE_SECONDS_MAX: Final = 2.0


class Health(msgspec.Struct, frozen=True):
    """Result of a health check."""

    ok: bool
    why: str
    """The observation that shows that tokens can be generated, or else the fault."""


class HealthProbe:
    """Generates a token on each controller to see whether it works. Callers share probes: one runs at a time, and
    at most about one a second."""

    def __init__(self, links: Collection[ControllerLink], probe_token: Callable[[ControllerLink], int]) -> None:
        """`probe_token`: returns a valid token id of a controller's model; the probe's prompt."""
        self._links = links
        self._probe_token = probe_token
        self._task: asyncio.Task[Health] | None = None
        self._last: Health | None = None
        self._last_at = float("-inf")

    async def check(self) -> Health:
        """Return whether a token can be generated now, within about two seconds."""
        now = asyncio.get_running_loop().time()
        ready = [link for link in self._links if link.ready]
        if not ready:
            return Health(False, describe(self._links))
        if any(now - link.last_token_at < _FRESH_SECONDS for link in ready):
            return Health(True, "a token was generated within the last second")
        if self._last is not None and now - self._last_at < _FRESH_SECONDS:
            return self._last
        if self._task is None:
            self._task = asyncio.create_task(self._probe_all(ready))
            self._task.add_done_callback(self._remember)
        return await asyncio.shield(self._task)

    def _remember(self, task: asyncio.Task[Health]) -> None:
        self._task = None
        if not task.cancelled() and task.exception() is None:
            self._last = task.result()
            self._last_at = task.get_loop().time()

    async def _probe_all(self, ready: Sequence[ControllerLink]) -> Health:
        results = await asyncio.gather(*(self._probe(link) for link in ready))
        return next((result for result in results if result.ok), results[0])

    async def _probe(self, link: ControllerLink) -> Health:
        number = 0
        job = Job(
            prompt=[self._probe_token(link)],
            max_tokens=1,
            sampling=Sampling(temperature=0.0),
            eos_ids=frozenset(),
        )
        stream = Stream(0, lambda _, abort: link.release(number, abort=abort))
        try:
            number = link.submit(lambda request: submission(job, request), stream)
        except ApiError as error:
            return Health(False, error.message)
        try:
            async with asyncio.timeout(_PROBE_SECONDS_MAX):
                batch = await stream.next()
        except TimeoutError:
            return Health(False, f"no token within {_PROBE_SECONDS_MAX:.0f} s")
        finally:
            stream.close()
        if batch.tokens:
            return Health(True, "a token was generated")
        failure = None if batch.end is None else batch.end.error()
        return Health(False, failure.message if failure else "the engine ended a request without a token")


def describe(links: Iterable[ControllerLink]) -> str:
    """Return why no controller takes requests."""
    found = "; ".join(f"controller {link.name}: {link.why_not_ready()}" for link in links)
    return found or "no group has joined"
