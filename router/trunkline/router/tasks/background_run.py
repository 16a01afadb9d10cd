"""Makes responses in the background: the request that a client has left goes to `POST /v1/responses`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import msgspec

from trunkline.router.api.openai_responses import responses
from trunkline.router.errors import ApiError
from trunkline.router.request_context import RequestRandom, known
from trunkline.router.service import RouterService
from trunkline.router.stores import background_store
from trunkline.router.stores.background_store import KIND, BackgroundState, change_of, state_of
from trunkline.router.stores.response_events import EventLog
from trunkline.router.stores.task_store import Task
from trunkline.router.tasks.inner_call import InnerAnswer, InnerRequest, make_request
from trunkline.router.tasks.task_lease import TaskLease
from trunkline.router.tenancy.auth import Identity

_RESPONSES_AT_ONCE: Final = 64
_PATH: Final = "/v1/responses"
_FLUSH_S: Final = 0.25
"""Time in seconds between two times that the events of a response are stored."""


class BackgroundHandler:
    """Makes the background responses that this router has taken."""

    kind = KIND
    count_max = _RESPONSES_AT_ONCE

    def __init__(self, app: Any) -> None:
        """`app`: the application, whose endpoint makes the responses."""
        self._app = app
        self._service: RouterService = app.state.service

    def suits(self, task: Task) -> bool:
        """See `Handler`."""
        return self._service.models.find(task.model) is not None

    async def run(self, lease: TaskLease) -> bool:
        """See `Handler`."""
        state = state_of(lease.record)
        if state.is_over:
            return True
        identity = self._service.tenants.identity_of(state.tenant, lease.task.owner)
        log = EventLog([each.content for each in lease.segments[1:]]) if state.streams else None
        if await self._is_stored(lease, identity):  # a router has died after it stored the response
            await self._complete(lease, state, log, identity)
            return True
        await self._enter(lease, state, "in_progress", log)
        random = RequestRandom(state.name, state.created)
        until = state.created + background_store.TRIED_S
        body = lease.segments[0].content
        request = InnerRequest(_PATH, body, identity, random, is_behind=False, until=until, events=log)
        answer = None if lease.cancelled.is_set() else await self._answer(lease, state, request)
        if answer is None and not lease.cancelled.is_set():
            return False
        is_made = (
            answer is not None and answer.status == 200
        )  # stored, too; its client may have deleted it already
        if is_made or await self._is_stored(lease, identity):
            await self._complete(lease, state, log, identity)
        elif answer is None:
            await self._enter(lease, state, "cancelled", log)
        else:
            error = msgspec.json.decode(answer.body)["error"]
            if answer.status in (429, 503):
                tried = f"it was tried for {background_store.TRIED_S / 3600:.0f} hours without success"
                error["message"] = f"{tried}: {error['message']}"
            code = error["code"] or ("server_error" if answer.status >= 500 else "invalid_prompt")
            state.answer["error"] = {"code": code, "message": error["message"]}
            await self._enter(lease, state, "failed", log)
        return True

    async def _answer(self, lease: TaskLease, state: BackgroundState, request: InnerRequest) -> InnerAnswer | None:
        """Return the answer to a request; None: it was cancelled, or this router stops. Meanwhile events are
        stored."""
        work = asyncio.create_task(make_request(self._app, responses, request))
        ends = [asyncio.create_task(event.wait()) for event in (lease.cancelled, lease.stopped)]
        log = request.events
        try:
            while True:
                timeout = None if log is None else _FLUSH_S
                done, _ = await asyncio.wait([work, *ends], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return work.result() if work.done() else None
                if log is not None and log.end is None and (events := log.flush()):
                    await lease.put(change_of(state, lease.record.head, events))
        finally:
            for task in (work, *ends):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(work, return_exceptions=True)

    async def _complete(
        self, lease: TaskLease, state: BackgroundState, log: EventLog | None, identity: Identity
    ) -> None:
        """Finish the record of a response that is stored: its events stay for a while, if they are kept."""
        if log is None:
            await lease.delete()
            return
        if log.end is None:  # another router has died behind storing the response
            with known(identity=identity):
                stored = await self._service.histories.responses.get(lease.task.id)
            answer = msgspec.json.decode(stored.session.answer)
            log.add(f"response.{answer['status']}", response=answer)
        assert log.end is not None
        state.answer["status"] = log.end["response"]["status"]
        await lease.put(change_of(state, lease.record.head, log.flush()))

    async def _is_stored(self, lease: TaskLease, identity: Identity) -> bool:
        """Return whether the response is stored as one that is complete."""
        try:
            with known(identity=identity):
                await self._service.histories.responses.get(lease.task.id)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _enter(self, lease: TaskLease, state: BackgroundState, status: str, log: EventLog | None) -> None:
        state.answer["status"] = status
        if log is not None and state.is_over:
            log.add("response.failed", response=state.answer)
        await lease.put(change_of(state, lease.record.head, [] if log is None else log.flush()))
