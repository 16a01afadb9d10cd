"""The streams of responses that are made in the background: what was told of them, and then what is.

The router that makes a response stores its events (`stores/response_events.py`); any router tells them, from any
number on, to any number of clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Final

from starlette.requests import Request

from trunkline.kvstore.records import Reading
from trunkline.router.api.background_responses import find_response
from trunkline.router.api.blocks import named_event
from trunkline.router.errors import ApiError, bad_value, draining
from trunkline.router.http.answers import EventStream
from trunkline.router.service import RouterService
from trunkline.router.stores.background_store import state_of
from trunkline.router.stores.owned_records import store_errors
from trunkline.router.stores.response_events import events_of
from trunkline.router.tenancy.auth import current_identity

_PAUSES: Final = (0.05, 0.5)
"""The first and the longest pause, in seconds, between two looks at a response of which nothing new is told."""


def asked_number(request: Request) -> int | None:
    """Return the number of the event behind which a client wants a response's stream; -1: all of it; None: it
    wants no stream.

    Raises:
        ApiError: 400, one of the query's parameters is wrong.
    """
    given = request.query_params
    stream, after = given.get("stream", "false").lower(), given.get("starting_after")
    if stream not in ("true", "false"):
        raise bad_value("stream", f"`stream` is {stream[:80]!r}; allowed are `true` and `false`")
    if after is not None and stream == "false":
        raise bad_value("starting_after", "`starting_after` is about streams: `stream=true`")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) <= 18):
        raise bad_value(
            "starting_after", f"`starting_after` is {after[:80]!r}; it must be the `sequence_number` of an event"
        )
    return None if stream == "false" else -1 if after is None else int(after)


async def stream_response(service: RouterService, response_id: str, after: int = -1) -> EventStream:
    """Return the stream of a response that is made in the background, or was.

    Args:
        after: number of the last event that the client has.

    Raises:
        ApiError: 400, its events are not kept (any more); 404, there is no such response.
    """
    owner = current_identity().owner
    try:
        with store_errors("response", response_id):
            reading = await service.background.follow(owner, response_id)
    except ApiError as error:
        if error.status != 404:
            raise
        await find_response(service, response_id)
        raise _not_kept() from None
    if not state_of(reading.record).streams:
        raise _not_kept()
    return EventStream(ExitStack(), _events(service, owner, reading, after))


async def _events(service: RouterService, owner: str, reading: Reading, after: int) -> AsyncIterator[bytes]:
    response_id, unread = reading.record.key.id, reading.segments[1:]
    pause, longest = _PAUSES
    while True:
        told = [event for chunk in unread for event in events_of(chunk.content, after)]
        if told:
            yield b"".join([named_event(event["type"], event) for event in told])
            pause = _PAUSES[0]
        if state_of(reading.record).is_over:
            return
        if service.live.draining:
            raise draining()
        await asyncio.sleep(pause)
        pause = min(1.5 * pause, longest)
        with store_errors("response", response_id):
            reading = await service.background.follow(owner, response_id, reading.record.head)
        unread = reading.segments


def _not_kept() -> ApiError:
    return bad_value(
        "stream",
        "only a response that was made with `background` and `stream` is streamed by its id, until an hour after "
        "it was complete",
    )
