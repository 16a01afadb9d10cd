"""`/v1/responses/{id}`: what is stored of responses."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.background_responses import cancel_response, delete_background, find_response
from trunkline.router.api.item_lists import ITEM_PARAMETERS, ItemList, page_of_items
from trunkline.router.api.next_route import delete_history
from trunkline.router.api.paging import answer_of, components_of
from trunkline.router.api.requests import service_of
from trunkline.router.api.response_streams import asked_number, stream_response
from trunkline.router.errors import ApiError
from trunkline.router.http.answers import JsonResponse

routes = APIRouter()


class ResponseDeleted(msgspec.Struct, kw_only=True):
    """The answer to `DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class _Answer(msgspec.Struct):
    """The part of a stored response that says how many of the history's items are its own."""

    output: list[msgspec.Raw]


SCHEMAS: Final[dict[str, Any]] = components_of(ResponseDeleted, ItemList)
"""JSON schemas of the answers, for the OpenAPI document."""


@routes.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    """Return a response: as it was answered, or how far it is in the background; or its stream."""
    after = asked_number(request)
    if after is not None:
        return await stream_response(service_of(request), response_id, after)
    return JsonResponse(await find_response(service_of(request), response_id))


@routes.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> JsonResponse:
    """Cancel a response that is made in the background."""
    return JsonResponse(await cancel_response(service_of(request), response_id))


@routes.delete("/v1/responses/{response_id}", responses=answer_of(ResponseDeleted))
async def delete_response(request: Request, response_id: str) -> JsonResponse:
    """Delete a stored response, and the KV that nothing else uses. Responses that continue it stay as they are."""
    service = service_of(request)
    try:
        await delete_history(service, service.histories.responses, response_id)
        is_stored = True
    except ApiError as error:
        if error.status != 404:
            raise
        is_stored = False
    await delete_background(service, response_id, is_stored=is_stored)
    return JsonResponse(ResponseDeleted(id=response_id))


@routes.get(
    "/v1/responses/{response_id}/input_items",
    responses=answer_of(ItemList),
    openapi_extra={"parameters": ITEM_PARAMETERS},
)
async def list_input_items(request: Request, response_id: str) -> JsonResponse:
    """List the items that a stored response was made from, those of the responses before it included."""
    session = (await service_of(request).histories.responses.get(response_id)).session
    items = session.history.messages
    outputs = len(msgspec.json.decode(session.answer, type=_Answer).output)
    return JsonResponse(page_of_items(request, items[: len(items) - outputs]))
