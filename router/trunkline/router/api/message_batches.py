"""`/v1/messages/batches`: batches in Anthropic's form.

They are the batches of `batch_routes.py`, seen in another way: the requests that a client sends become an input
file, and the results are the lines of both result files. So each batch of messages can be asked for at either
place.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from trunkline.kvstore.records import MissingError
from trunkline.router.api.batch_routes import cancelled_batch
from trunkline.router.api.paging import id_of, limit_of
from trunkline.router.api.requests import service_of
from trunkline.router.errors import bad_value, in_conflict
from trunkline.router.http.answers import JsonResponse
from trunkline.router.http.body import beside_loop, read_request
from trunkline.router.jobs.late_model import LateModel
from trunkline.router.service import RouterService
from trunkline.router.stores.batch_store import OVER, PREFIX, BatchState, ResultFile, StoredBatch
from trunkline.router.stores.file_store import PART_BYTES, FileInfo
from trunkline.router.stores.owned_records import store_errors
from trunkline.router.tenancy.auth import current_identity

routes = APIRouter()
_PATH: Final = "/v1/messages"
_INPUT_NAME: Final = "message_batch.jsonl"
"""Name of input files that are made here. They are deleted with their batch."""
_WINDOW_S: Final = 24 * 3600.0
_REQUESTS_MAX: Final = 50_000
_CUSTOM_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PAGE_MAX: Final = 1000
_STORE_PAGE: Final = 100
_UNANSWERED: Final = {"batch_cancelled": "canceled", "batch_expired": "expired"}
"""Types of results of requests that were not answered, by the code in the error file."""
_encode = msgspec.json.Encoder().encode
Object = dict[str, Any]


class MessageBatchRequest(LateModel):
    """The body of `POST /v1/messages/batches`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    requests: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=_REQUESTS_MAX)]
    """Objects with `custom_id`, and `params`: the body of a request to `/v1/messages`."""


class _Said(msgspec.Struct):
    """The answer to a request of a batch."""

    body: msgspec.Raw
    status_code: int


class _Unanswered(msgspec.Struct):
    """Why a request of a batch was not answered."""

    code: str


class _ResultLine(msgspec.Struct):
    """A line of a result file."""

    custom_id: str
    response: _Said | None = None
    error: _Unanswered | None = None


@routes.post("/v1/messages/batches")
async def create_message_batch(request: Request) -> Response:
    """Have many requests answered, behind all that clients wait for."""
    service, identity = service_of(request), current_identity()
    body = await read_request(request, MessageBatchRequest, service.config.max_body_bytes)
    content = await beside_loop(request, lambda: b"".join(_input_lines(body.requests)))
    file_id = await _store_input(service, identity.owner, content)
    state = BatchState(
        tenant=identity.tenant,
        endpoint=_PATH,
        input_file_id=file_id,
        window="24h",
        expires=time.time() + _WINDOW_S,
        outputs=ResultFile(id=service.files.draw_id()),
        errors=ResultFile(id=service.files.draw_id()),
        total=len(body.requests),
    )
    with store_errors("message_batch", ""):
        return JsonResponse(_object(await service.batches.create(identity.owner, state, service.model_name)))


@routes.get("/v1/messages/batches")
async def list_message_batches(request: Request) -> Response:
    """List the tenant's batches of messages, page by page, the newest first."""
    limit = limit_of(request, most=_PAGE_MAX)
    after, before = (id_of(request, name, PREFIX) for name in ("after_id", "before_id"))
    with store_errors("message_batch", after or before):
        found, more = await _page(service_of(request), after, before, limit)
    return JsonResponse(
        {
            "data": [_object(batch) for batch in found],
            "has_more": more,
            "first_id": found[0].id if found else None,
            "last_id": found[-1].id if found else None,
        }
    )


@routes.get("/v1/messages/batches/{batch_id}")
async def get_message_batch(request: Request, batch_id: str) -> Response:
    """Return a batch: how far it is, and once it is over where its results are."""
    return JsonResponse(_object(await _find(service_of(request), batch_id)))


@routes.post("/v1/messages/batches/{batch_id}/cancel")
async def cancel_message_batch(request: Request, batch_id: str) -> Response:
    """Cancel a batch. Answers that were made are in its results."""
    await _find(service_of(request), batch_id)
    return JsonResponse(_object(await cancelled_batch(service_of(request), batch_id)))


@routes.get("/v1/messages/batches/{batch_id}/results")
async def message_batch_results(request: Request, batch_id: str) -> Response:
    """Return the results of a batch that is over, one in each line."""
    service = service_of(request)
    batch = await _find(service, batch_id)
    if not batch.state.is_over:
        raise in_conflict("batch_id", "the batch is not over yet, so it has no results", code="batch_not_over")
    return StreamingResponse(_results(service, batch), media_type="application/x-jsonl")


@routes.delete("/v1/messages/batches/{batch_id}")
async def delete_message_batch(request: Request, batch_id: str) -> Response:
    """Delete a batch that is over, with its results."""
    service, owner = service_of(request), current_identity().owner
    batch = await _find(service, batch_id)
    if not batch.state.is_over:
        raise in_conflict("batch_id", "the batch is not over yet; cancel it first", code="batch_not_over")
    with store_errors("message_batch", batch_id):
        for file_id in (batch.state.outputs.id, batch.state.errors.id):
            with suppress(MissingError):
                await service.files.delete(owner, file_id)
        with suppress(MissingError):
            given = await service.files.get(owner, batch.state.input_file_id)
            if given.info.name == _INPUT_NAME:
                await service.files.delete(owner, given.id)
        await service.batches.delete(owner, batch_id)
    return JsonResponse({"id": batch_id, "type": "message_batch_deleted"})


def _input_lines(requests: list[Object]) -> Iterator[bytes]:
    """Yield the lines of the input file.

    Raises:
        ApiError: 400, naming the field that is wrong.
    """
    names: set[str] = set()
    for index, request in enumerate(requests):
        name, params = request.get("custom_id"), request.get("params")
        place = f"requests[{index}]"
        if not isinstance(name, str) or not _CUSTOM_ID.fullmatch(name):
            raise bad_value(f"{place}.custom_id", f"`{place}.custom_id` must be 1 to 64 of A-Z a-z 0-9 _ -")
        if name in names:
            raise bad_value(f"{place}.custom_id", f"`{place}.custom_id`: {name!r} is that of an earlier request")
        if not isinstance(params, dict):
            raise bad_value(f"{place}.params", f"`{place}.params` must be an object: the body of a request")
        names.add(name)
        yield _encode({"custom_id": name, "method": "POST", "url": _PATH, "body": params}) + b"\n"


async def _store_input(service: RouterService, owner: str, content: bytes) -> str:
    """Store the input file of a new batch; return its id."""
    file_id = service.files.draw_id()
    pieces = [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]
    with store_errors("file", file_id):  # parts of a file that is not made expire by themselves
        parts = [await service.files.add_part(owner, file_id, piece) for piece in pieces]
        info = FileInfo(name=_INPUT_NAME, purpose="batch", bytes=len(content), parts=parts)
        await service.files.create(owner, file_id, info)
    return file_id


async def _find(service: RouterService, batch_id: str) -> StoredBatch:
    """Return a batch of messages.

    Raises:
        ApiError: 404, the tenant has none with this id; 503, the store is away.
    """
    with store_errors("message_batch", batch_id):
        found = await service.batches.get(current_identity().owner, batch_id)
        if found.state.endpoint != _PATH:
            raise MissingError(batch_id)
        return found


async def _page(service: RouterService, after: str, before: str, limit: int) -> tuple[list[StoredBatch], bool]:
    """Return up to `limit` batches behind the one with the id `after`, or the last ones in front of `before`, and
    whether there are more."""
    if before:
        last: deque[StoredBatch] = deque(maxlen=limit + 1)
        async for batch in _batches(service, ""):
            if batch.id == before:
                break
            last.append(batch)
        return list(last)[-limit:], len(last) > limit
    found: list[StoredBatch] = []
    async for batch in _batches(service, after):
        if len(found) == limit:
            return found, True
        found.append(batch)
    return found, False


async def _batches(service: RouterService, after: str) -> AsyncIterator[StoredBatch]:
    """Yield the tenant's batches of messages behind the one with the id `after`, the newest first."""
    owner = current_identity().owner
    while True:
        page = await service.batches.page(owner, after, _STORE_PAGE)
        for batch in page:
            if batch.state.endpoint == _PATH:
                yield batch
        if len(page) < _STORE_PAGE:
            return
        after = page[-1].id


def _object(batch: StoredBatch) -> Object:
    """Return a batch in Anthropic's form. Requests are counted by their results when all have one."""
    state = batch.state
    unanswered = state.unanswered if state.is_over else 0
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if state.is_over:
        counts["succeeded"] = state.completed
        counts["expired" if state.status == "expired" else "canceled"] = unanswered
        counts["errored"] = state.total - state.completed - unanswered
    else:
        counts["processing"] = state.total
    ended = next((state.times[status] for status in OVER if status in state.times), None)
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if state.is_over else "canceling" if _cancels(state) else "in_progress",
        "request_counts": counts,
        "created_at": _time(batch.created),
        "expires_at": _time(state.expires),
        "ended_at": _time(ended),
        "cancel_initiated_at": _time(state.times.get("cancelling")),
        "archived_at": None,
        # Without a host: behind a proxy the server does not know its own. Clients add their base URL.
        "results_url": f"{_PATH}/batches/{batch.id}/results" if state.is_over else None,
    }


def _cancels(state: BatchState) -> bool:
    return state.status == "cancelling" or state.ending == "cancelled"


def _time(seconds: float | None) -> str | None:
    """Return a Unix time as text; None: nothing has happened yet."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def _results(service: RouterService, batch: StoredBatch) -> AsyncIterator[bytes]:
    """Yield the results of a batch. A file that was deleted has none."""
    owner = current_identity().owner
    for file in (batch.state.outputs, batch.state.errors):
        rest = b""
        with suppress(MissingError):
            async for part in service.files.content(owner, await service.files.get(owner, file.id)):
                whole, newline, rest = (rest + part).rpartition(b"\n")
                yield await asyncio.to_thread(_result_lines, whole + newline)


def _result_lines(content: bytes) -> bytes:
    """Return lines of a result file in Anthropic's form."""
    lines = (msgspec.json.decode(line, type=_ResultLine) for line in content.splitlines())
    return b"".join(_encode({"custom_id": line.custom_id, "result": _result(line)}) + b"\n" for line in lines)


def _result(line: _ResultLine) -> Object:
    said = line.response
    if said is None:
        code = "" if line.error is None else line.error.code
        return {"type": _UNANSWERED.get(code, "canceled")}
    if 200 <= said.status_code < 300:
        return {"type": "succeeded", "message": said.body}
    return {"type": "errored", "error": said.body}
