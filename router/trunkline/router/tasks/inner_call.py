"""Requests that a task makes: the endpoint's own code runs them, as if the tenant had sent them.

What differs from a request over HTTP: no client waits for it, so it waits itself where a client would be told to
try again later (a tenant's limit is reached, no controller is ready).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from trunkline.router.errors import RETRY_AFTER_SECONDS, ApiError
from trunkline.router.http.answers import SPELT, EventStream, error_response
from trunkline.router.request_context import AdapterChoice, RequestRandom, known
from trunkline.router.service import RouterService
from trunkline.router.stores.response_events import EventLog
from trunkline.router.telemetry.request_record import RequestRecord
from trunkline.router.tenancy.auth import Identity
from trunkline.router.tenancy.tenants import OverLimitError, metered

Endpoint = Callable[[Request], Awaitable[Response]]
_RETRIED: Final = (429, 503)
"""Statuses of answers that mean "later", not "no"."""
_PAUSE_S_MAX: Final = 30.0
"""Longest pause in seconds between two tries."""
_JSON: Final = [(b"content-type", b"application/json")]


class InnerRequest(NamedTuple):
    """A request of a task."""

    path: str
    body: bytes
    identity: Identity
    """The tenant that the request is made for."""
    random: RequestRandom
    """Its source of random bytes: the request, made again by another router, gets the same ones."""
    is_behind: bool
    """Whether the request stands behind all requests that clients wait for."""
    until: float = math.inf
    """Unix time in seconds from which on "try again later" is an answer, too."""
    events: EventLog | None = None
    """Takes the events of a request that is streamed."""


class InnerAnswer(NamedTuple):
    """What an endpoint answered."""

    request_id: str
    status: int
    body: bytes


async def make_request(app: Any, endpoint: Endpoint, request: InnerRequest) -> InnerAnswer:
    """Return the answer of an endpoint, once it is one that a client would not be told to ask for again, or the
    request's time is over.

    Args:
        app: the application, whose state has the service.
    """
    service: RouterService = app.state.service
    request_id = request.random.draw("request id", 16).hex()
    pause_s = float(RETRY_AFTER_SECONDS)
    while True:
        try:
            if request.events is not None:
                request.events.begin()
            async with _admitted(service, request, request_id):
                answer = await _answer(app, endpoint, request)
        except OverLimitError as error:
            if time.time() >= request.until:
                return InnerAnswer(request_id, error.status, bytes(error_response(request.path, error).body))
            await asyncio.sleep(min(error.retry_after or pause_s, _PAUSE_S_MAX))
            continue
        if answer.status_code not in _RETRIED or time.time() >= request.until:
            return InnerAnswer(request_id, answer.status_code, bytes(answer.body))
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)


@asynccontextmanager
async def _admitted(service: RouterService, request: InnerRequest, request_id: str) -> AsyncIterator[None]:
    """Count a request as one of its tenant."""
    identity = request.identity
    record = RequestRecord(request_id, asyncio.get_running_loop().time())
    record.tenant = identity.tenant
    meter = await service.tenants.enter(identity.tenant)
    # Each try draws the same bytes as the first one.
    random = RequestRandom(request.random.name, request.random.created)
    context = {"identity": identity, "random": random, "record": record, "choice": AdapterChoice()}
    with metered(meter), known(**context, in_task=True, is_behind=request.is_behind):
        yield


async def _answer(app: Any, endpoint: Endpoint, request: InnerRequest) -> Response:
    """Return the answer of an endpoint; errors are answers, too."""
    unread = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # there is no client that could leave
        raise AssertionError

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.path,
        "query_string": b"",
        "headers": _JSON,
        "app": app,
        "state": {},
    }
    try:
        answer = await endpoint(Request(scope, receive))
        if request.events is not None and isinstance(answer, EventStream):
            async for part in answer.parts():
                request.events.take(part)
        return answer
    except ApiError as error:
        return error_response(request.path, error.renamed(scope.get(SPELT, {})))
    finally:
        app.state.service.large_requests.release(scope)
