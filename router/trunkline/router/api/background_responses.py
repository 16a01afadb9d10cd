"""`/v1/responses` with `background: true`: the client gets an id at once, and asks for the response later.

The request is stored as a task. A router does it by calling `POST /v1/responses` (`tasks/background_run.py`), so
the response is stored as every other one, under the id that the client has.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from trunkline.kvstore.records import BusyError, MissingError
from trunkline.router.api.openai_items import Object, ResponsesRequest, asked_fields
from trunkline.router.errors import ApiError, bad_value, in_conflict
from trunkline.router.request_context import RequestRandom, created_at, draw_bytes
from trunkline.router.service import RouterService
from trunkline.router.stores.background_store import BackgroundState
from trunkline.router.stores.owned_records import store_errors
from trunkline.router.stores.response_events import EventLog
from trunkline.router.tenancy.auth import current_identity

_CANCEL_PATIENCE_S: Final = 10.0
"""Longest time in seconds for which a request to cancel a response waits until that is done."""
_DELETE_PATIENCE_S: Final = 2.0
"""Longest time in seconds for which the deletion of a complete response waits for the router that finishes it."""
_POLL_S: Final = 0.1


async def begin_background(service: RouterService, body: ResponsesRequest) -> Object:
    """Store a request as a task, and return the response as it is now: "queued".

    Raises:
        ApiError: 400, it cannot be made in the background, or is too large for that; 429, the tenant's records
            have reached their quota; 503, the store of records does not answer.
    """
    if body.store is False:
        raise bad_value("background", "`background` needs `store`: the response is asked for by its id")
    identity = current_identity()
    name, created = draw_bytes("background", 16), created_at()
    response_id = f"resp_{RequestRandom(name, created).draw('id', 24).hex()}"
    given = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
    answer = _queued(body, given, response_id, created, body.model or service.model_name)
    state = BackgroundState(
        tenant=identity.tenant, name=name, created=created, answer=answer, streams=bool(body.stream)
    )
    log = EventLog()
    if state.streams:
        log.add("response.created", response=answer)
        log.add("response.queued", response=answer)
    if body.previous_response_id is None and body.conversation is None:
        given["model"] = answer["model"]  # else it goes on with the model or adapter of what it continues
    segments = [msgspec.json.encode({**given, "store": True}), *log.flush()]
    with store_errors("response", response_id):
        try:
            await service.background.create(identity.owner, state, segments, service.model_name)
        except ValueError as error:
            message = f"the request is too large to be kept: {error}"
            raise ApiError(400, message, code="response_too_long") from None
    return answer


async def find_response(service: RouterService, response_id: str) -> msgspec.Raw | Object:
    """Return a response: a stored one, or one that is made in the background.

    Raises:
        ApiError: 404, there is none.
    """
    try:
        return msgspec.Raw((await service.histories.responses.get(response_id)).session.answer)
    except ApiError as error:
        if error.status != 404:
            raise
    with store_errors("response", response_id):
        try:
            return (await service.background.get(current_identity().owner, response_id)).answer
        except MissingError:  # it may have been completed just now
            return msgspec.Raw((await service.histories.responses.get(response_id)).session.answer)


async def cancel_response(service: RouterService, response_id: str) -> msgspec.Raw | Object:
    """Cancel a response that is made in the background, and return it: it may have been completed before.

    Raises:
        ApiError: 400, it is not made in the background; 404, there is none.
    """
    found = await find_response(service, response_id)
    if not _is_background(found):
        raise bad_value("response_id", "only a response with `background: true` can be cancelled")
    with store_errors("response", response_id):
        if isinstance(found, dict) and await service.tasks.cancel(response_id):
            end = asyncio.get_running_loop().time() + _CANCEL_PATIENCE_S
            while isinstance(found, dict) and found["status"] in ("queued", "in_progress"):
                if asyncio.get_running_loop().time() > end:
                    break
                await asyncio.sleep(_POLL_S)
                found = await find_response(service, response_id)
    return found


async def delete_background(service: RouterService, response_id: str, *, is_stored: bool) -> None:
    """Delete what is kept of a response because it was made in the background: its events, or that it has failed
    or was cancelled.

    Args:
        is_stored: whether it was complete, and stored like others. Then nothing may be kept any more, or a router
            is just finishing it.

    Raises:
        ApiError: 404, there is nothing; 409, a router makes it.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + (_DELETE_PATIENCE_S if is_stored else 0.0)
    with store_errors("response", response_id):
        while True:
            try:
                await service.background.delete(current_identity().owner, response_id)
            except MissingError:
                if not is_stored:
                    raise
            except BusyError:
                if loop.time() >= end:
                    raise in_conflict(
                        "response_id", "the response is being made; cancel it first", code="response_busy"
                    ) from None
                await asyncio.sleep(_POLL_S)
                continue
            return


def _is_background(found: msgspec.Raw | Object) -> bool:
    fields = found if isinstance(found, dict) else msgspec.json.decode(found)
    return bool(fields.get("background"))


def _queued(body: ResponsesRequest, given: Object, response_id: str, created: int, model: str) -> Object:
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "queued",
        "error": None,
        "incomplete_details": None,
        **asked_fields(body),
        "conversation": None if body.conversation is None else {"id": body.conversation},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "store": True,
        "temperature": body.temperature,
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": given.get("tools") or [],
        "top_p": body.top_p,
        "usage": None,
        **({} if body.warnings is None else {"warnings": body.warnings}),
    }
