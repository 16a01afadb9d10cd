"""`/v1/conversations`: items that the cluster keeps, for requests to `/v1/responses` that name the conversation.

A conversation's record is a session's, with items instead of messages (`session_store.py`). Each change of it
holds its lease; meanwhile others get 409 `conversation_locked`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter
from msgspec.structs import replace
from pydantic import ConfigDict, Field
from pydantic.json_schema import WithJsonSchema
from starlette.requests import Request

from trunkline.router.api.blocks import renamed
from trunkline.router.api.item_lists import ITEM_PARAMETERS, ItemList, list_of, page_of_items
from trunkline.router.api.next_route import delete_history
from trunkline.router.api.openai_items import Object
from trunkline.router.api.paging import answer_of, components_of
from trunkline.router.api.requests import service_of
from trunkline.router.api.response_input import NO_SEAL, has_sealed, to_items, to_messages
from trunkline.router.api.turn import check_messages
from trunkline.router.errors import bad_value, not_found
from trunkline.router.http.answers import JsonResponse
from trunkline.router.http.body import beside_loop, parse_json_object, read_body, read_request, validate
from trunkline.router.jobs.late_model import LateModel
from trunkline.router.jobs.parameters import Metadata
from trunkline.router.jobs.request_models import MESSAGES_MAX
from trunkline.router.request_context import draw_hex, request_name
from trunkline.router.service import RouterService
from trunkline.router.stores.seals import Seal
from trunkline.router.stores.session_history import History
from trunkline.router.stores.session_lease import Lease
from trunkline.router.stores.session_memory import StoredSession
from trunkline.router.stores.session_state import SessionState

routes = APIRouter()

_ITEMS_AT_ONCE: Final = 20
_Items = Annotated[list[Any], WithJsonSchema({"type": "array", "items": {"type": "object"}})]


class ConversationUpdate(LateModel):
    """The request `POST /v1/conversations/{id}`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    metadata: Metadata


class ConversationRequest(LateModel):
    """The request `POST /v1/conversations`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    items: Annotated[_Items, Field(max_length=_ITEMS_AT_ONCE)] | None = None
    """First items of the conversation."""
    metadata: Metadata | None = None


class ItemsRequest(LateModel):
    """The request `POST /v1/conversations/{id}/items`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    items: Annotated[_Items, Field(min_length=1, max_length=_ITEMS_AT_ONCE)]


class ConversationObject(msgspec.Struct, kw_only=True):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(msgspec.Struct, kw_only=True):
    """The answer to `DELETE /v1/conversations/{id}`."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


SCHEMAS: Final[dict[str, Any]] = components_of(ConversationObject, ConversationDeleted)
"""JSON schemas of the answers, for the OpenAPI document."""


@routes.post("/v1/conversations", responses=answer_of(ConversationObject))
async def create_conversation(request: Request) -> JsonResponse:
    """Create a conversation."""
    service = service_of(request)
    content = await read_body(request, service.config.max_body_bytes)
    body = await beside_loop(
        request, lambda: validate(ConversationRequest, parse_json_object(content) if content.strip() else {})
    )
    given = body.items or []
    seal = await _seal(service, given)
    items = await beside_loop(request, lambda: _checked(given, [], seal))
    state = SessionState(
        model=service.model_name, metadata=body.metadata or {}, history=History(form="items", messages=items)
    )
    conversations = service.histories.conversations
    return _answer(await conversations.create(conversations.draw_id(), state))


@routes.get("/v1/conversations/{conversation_id}", responses=answer_of(ConversationObject))
async def get_conversation(request: Request, conversation_id: str) -> JsonResponse:
    """Return a conversation."""
    return _answer(await service_of(request).histories.conversations.get(conversation_id))


@routes.post("/v1/conversations/{conversation_id}", responses=answer_of(ConversationObject))
async def update_conversation(request: Request, conversation_id: str) -> JsonResponse:
    """Replace a conversation's metadata as a whole."""
    body = await read_request(request, ConversationUpdate, service_of(request).config.max_body_bytes)
    async with _leased(request, conversation_id) as lease:
        lease.session.metadata = body.metadata
        return _answer(await lease.put())


@routes.delete("/v1/conversations/{conversation_id}", responses=answer_of(ConversationDeleted))
async def delete_conversation(request: Request, conversation_id: str) -> JsonResponse:
    """Delete a conversation with its items, and the KV that nothing else uses. Responses that were stored stay."""
    service = service_of(request)
    await delete_history(service, service.histories.conversations, conversation_id)
    return JsonResponse(ConversationDeleted(id=conversation_id))


@routes.post("/v1/conversations/{conversation_id}/items", responses=answer_of(ItemList))
async def create_items(request: Request, conversation_id: str) -> JsonResponse:
    """Add items to a conversation; return them."""
    service = service_of(request)
    body = await read_request(request, ItemsRequest, service.config.max_body_bytes)
    seal = await _seal(service, body.items)
    async with _leased(request, conversation_id, extends=True) as lease:
        await lease.undo(request_name())
        history = lease.session.history
        items = await beside_loop(request, lambda: _checked(body.items, history.messages, seal))
        lease.session.history = replace(history, form="items", messages=[*history.messages, *items])
        await lease.put(request_name())
        return JsonResponse(list_of(items))


@routes.get(
    "/v1/conversations/{conversation_id}/items",
    responses=answer_of(ItemList),
    openapi_extra={"parameters": ITEM_PARAMETERS},
)
async def list_items(request: Request, conversation_id: str) -> JsonResponse:
    """List a conversation's items."""
    stored = await service_of(request).histories.conversations.get(conversation_id)
    return JsonResponse(page_of_items(request, stored.session.history.messages))


@routes.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def get_item(request: Request, conversation_id: str, item_id: str) -> JsonResponse:
    """Return an item of a conversation."""
    stored = await service_of(request).histories.conversations.get(conversation_id)
    items = stored.session.history.messages
    return JsonResponse(items[_place(items, item_id)])


@routes.delete("/v1/conversations/{conversation_id}/items/{item_id}", responses=answer_of(ConversationObject))
async def delete_item(request: Request, conversation_id: str, item_id: str) -> JsonResponse:
    """Remove an item from a conversation; return the conversation."""
    async with _leased(request, conversation_id) as lease:
        history = lease.session.history
        place = _place(history.messages, item_id)
        kept = [*history.messages[:place], *history.messages[place + 1 :]]
        lease.session.history = replace(history, messages=kept)
        return _answer(await lease.put())


@asynccontextmanager
async def _leased(request: Request, conversation_id: str, *, extends: bool = False) -> AsyncIterator[Lease]:
    """Hold the lease of a conversation. `extends`: as in `SessionStore.acquire`."""
    lease = await service_of(request).histories.conversations.acquire(conversation_id, extends=extends)
    try:
        yield lease
    finally:
        lease.close()


async def _seal(service: RouterService, given: list[Any]) -> Seal:
    """Return what reads the items that this cluster has sealed.

    Raises:
        ApiError: 503, the store of records does not answer.
    """
    return await service.histories.seals.current(required=True) if has_sealed(given) else NO_SEAL


def _checked(given: list[Any], before: list[Object], seal: Seal) -> list[Object]:
    """Return items of a request as they are stored.

    Args:
        before: items that the conversation has already.
        seal: as in `to_messages`.

    Raises:
        ApiError: 400, naming the item that is wrong.
    """
    if len(before) + len(given) > MESSAGES_MAX:
        raise bad_value("items", f"a conversation has {MESSAGES_MAX} items at most")
    with renamed({"input": "items"}):
        to_messages(given, None, (), seal)
    items = to_items(given, [item["id"] for item in before], lambda: draw_hex("input", 24), seal)
    check_messages(items, "items")
    return items


def _place(items: list[Object], item_id: str) -> int:
    """Return the index of an item.

    Raises:
        ApiError: 404, there is no such item.
    """
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index
    raise not_found("item_id", f"the conversation has no item {item_id[:80]!r}", code="item_not_found")


def _answer(stored: StoredSession) -> JsonResponse:
    record, session = stored.record, stored.session
    return JsonResponse(
        ConversationObject(id=record.key.id, created_at=int(record.created), metadata=session.metadata)
    )
