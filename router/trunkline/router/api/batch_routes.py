"""`/v1/batches`: many requests in a file, answered without hurry, as in OpenAI's API."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.anthropic import messages
from trunkline.router.api.chat import chat_completions
from trunkline.router.api.completions import completions
from trunkline.router.api.embeddings import embeddings
from trunkline.router.api.file_routes import expiry_after
from trunkline.router.api.openai_responses import responses
from trunkline.router.api.paging import answer_of, components_of, make_page, page_of, page_parameters
from trunkline.router.api.requests import service_of
from trunkline.router.errors import bad_value, in_conflict
from trunkline.router.http.answers import JsonResponse
from trunkline.router.http.body import read_request
from trunkline.router.jobs.late_model import LateModel
from trunkline.router.service import RouterService
from trunkline.router.stores.batch_store import PREFIX, BatchState, Problem, ResultFile, Status, StoredBatch
from trunkline.router.stores.owned_records import store_errors
from trunkline.router.tenancy.auth import current_identity

routes = APIRouter()
ENDPOINTS: Final[Mapping[str, Callable[[Request], Awaitable[Response]]]] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/embeddings": embeddings,
    "/v1/responses": responses,
    "/v1/messages": messages,
}
"""The endpoints whose requests may be in a batch."""
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,2})h", re.ASCII)
_WINDOW_HOURS_MAX: Final = 336
_METADATA_MAX: Final = 16
_MetadataKey = Annotated[str, Field(max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]


class BatchRequest(LateModel):
    """The body of `POST /v1/batches`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    input_file_id: str
    """A file with purpose "batch": one request in each line."""
    endpoint: str
    """The endpoint that all requests are for."""
    completion_window: str
    """Time within which the batch is done or ends, in hours: "24h"."""
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=_METADATA_MAX)] | None = None
    output_expires_after: dict[str, Any] | None = None
    """When the result files are deleted: `anchor` "created_at", and `seconds`."""


class BatchProblems(msgspec.Struct, kw_only=True):
    """`errors` of a batch whose input is wrong."""

    object: Literal["list"] = "list"
    data: list[Problem]


class RequestCounts(msgspec.Struct):
    """`request_counts` of a batch."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch in answers to clients. Times are Unix time in seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    """A page of batches, the newest first."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


SCHEMAS: Final = components_of(BatchObject, BatchList)
"""JSON schemas of the answers, for the OpenAPI document."""


@routes.post("/v1/batches", responses=answer_of(BatchObject))
async def create_batch(request: Request) -> JsonResponse:
    """Have the requests in a file answered, behind all that clients wait for."""
    service, identity = service_of(request), current_identity()
    body = await read_request(request, BatchRequest, service.config.max_body_bytes)
    if body.endpoint not in ENDPOINTS:
        raise bad_value("endpoint", f"`endpoint` is {body.endpoint[:80]!r}; allowed are {', '.join(ENDPOINTS)}")
    window = _WINDOW.fullmatch(body.completion_window)
    if window is None or int(window[1]) > _WINDOW_HOURS_MAX:
        raise bad_value(
            "completion_window",
            f'`completion_window` is {body.completion_window[:80]!r}; allowed are "1h" to "{_WINDOW_HOURS_MAX}h"',
        )
    expiry = body.output_expires_after
    with store_errors("input_file", body.input_file_id):
        file = await service.files.get(identity.owner, body.input_file_id)
    if file.info.purpose != "batch":
        raise bad_value(
            "input_file_id", f'`input_file_id`: the file\'s purpose is {file.info.purpose!r}, not "batch"'
        )
    state = BatchState(
        tenant=identity.tenant,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        window=body.completion_window,
        expires=time.time() + 3600.0 * int(window[1]),
        outputs=ResultFile(id=service.files.draw_id()),
        errors=ResultFile(id=service.files.draw_id()),
        metadata=body.metadata,
        result_ttl=0.0 if expiry is None else expiry_after(expiry, "output_expires_after", "created_at"),
    )
    with store_errors("batch", ""):
        return JsonResponse(_object(await service.batches.create(identity.owner, state, service.model_name)))


@routes.get("/v1/batches", responses=answer_of(BatchList), openapi_extra={"parameters": page_parameters("desc")})
async def list_batches(request: Request) -> JsonResponse:
    """List the tenant's batches, page by page, the newest first."""
    page, service = page_of(request, "desc", prefix=PREFIX), service_of(request)
    with store_errors("batch", ""):
        found = await service.batches.page(current_identity().owner, page.after, page.limit + 1)
    return JsonResponse(make_page(BatchList, [_object(batch) for batch in found], page.limit))


@routes.get("/v1/batches/{batch_id}", responses=answer_of(BatchObject))
async def get_batch(request: Request, batch_id: str) -> JsonResponse:
    """Return a batch: how far it is, and the ids of its result files once it is over."""
    with store_errors("batch", batch_id):
        return JsonResponse(_object(await service_of(request).batches.get(current_identity().owner, batch_id)))


@routes.post("/v1/batches/{batch_id}/cancel", responses=answer_of(BatchObject))
async def cancel_batch(request: Request, batch_id: str) -> JsonResponse:
    """Cancel a batch. Answers that were made are in its result files."""
    return JsonResponse(_object(await cancelled_batch(service_of(request), batch_id)))


async def cancelled_batch(service: RouterService, batch_id: str) -> StoredBatch:
    """Have a batch of the tenant cancelled, and return it.

    Raises:
        ApiError: 404, there is no such batch; 409, it is over; 503, the store is away.
    """
    owner = current_identity().owner
    with store_errors("batch", batch_id):
        stored = await service.batches.get(owner, batch_id)
        if stored.state.is_over or not await service.tasks.cancel(batch_id):
            stored = await service.batches.get(owner, batch_id)
            raise in_conflict(
                "batch_id", f"the batch has status {stored.state.status!r}", code="batch_not_cancellable"
            )
        return await service.batches.get(owner, batch_id)


def _object(stored: StoredBatch) -> BatchObject:
    state = stored.state
    times: dict[str, Any] = {f"{status}_at": state.times.get(status) for status in _TIMED}
    return BatchObject(
        id=stored.id,
        endpoint=state.endpoint,
        errors=BatchProblems(data=state.problems) if state.problems else None,
        input_file_id=state.input_file_id,
        completion_window=state.window,
        status=state.status,
        output_file_id=state.outputs.id if state.is_over and state.outputs.parts else None,
        error_file_id=state.errors.id if state.is_over and state.errors.parts else None,
        created_at=int(stored.created),
        expires_at=int(state.expires),
        request_counts=RequestCounts(state.total, state.completed, state.failed),
        metadata=state.metadata,
        **times,
    )


_TIMED: Final = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
"""States whose beginnings are told."""
