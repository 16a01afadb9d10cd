"""`/v1/sessions`: conversations that the cluster stores.

Requests of a session send only new messages. The router stores the history with the token ids that the engine saw
(`session_history.py`); the engine keeps its KV as long as there is space. Each request of a session, and each
PATCH, discard and DELETE, holds the session's lease; meanwhile others get 409 `session_busy`.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from fastapi import APIRouter
from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request

from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.kvstore.records import Record
from trunkline.router.api.module_prompts import as_roles, place
from trunkline.router.api.next_route import delete_history, next_route
from trunkline.router.api.paging import answer_of, choice_of, components_of, make_page, page_of, page_parameters
from trunkline.router.api.prompting import Rendering
from trunkline.router.api.requests import check_length, check_model, check_session, of_session, service_of
from trunkline.router.api.session_types import (
    DISCARDS_MAX,
    DiscardRequest,
    ForkRequest,
    Keeps,
    SessionDeleted,
    SessionList,
    SessionObject,
    SessionPrefetch,
    SessionRequest,
    SessionSummary,
    SessionTruncation,
    SessionUpdate,
)
from trunkline.router.api.turn import check_messages, stored_messages
from trunkline.router.errors import bad_value, not_found
from trunkline.router.http.answers import JsonResponse, while_connected
from trunkline.router.http.body import beside_loop, parse_json_object, read_body, read_request, validate
from trunkline.router.jobs.request_models import Message
from trunkline.router.request_context import current
from trunkline.router.service import RouterService
from trunkline.router.stores.history_kinds import SESSIONS
from trunkline.router.stores.session_history import History, HistoryMark, token_at
from trunkline.router.stores.session_memory import StoredSession
from trunkline.router.stores.session_state import SessionState
from trunkline.router.stores.session_store import is_stored
from trunkline.router.tenancy.auth import current_identity
from trunkline.router.text.conversation_memory import common_length
from trunkline.router.text.truncation import (
    RetentionPolicy,
    TokenSpan,
    merge_spans,
)

routes = APIRouter()

FORK_PATIENCE_S: Final = 60.0
"""Longest time in seconds for which a fork waits for the turn that is being made."""
SCHEMAS: Final[dict[str, Any]] = components_of(SessionObject, SessionList, SessionDeleted, SessionPrefetch)
"""JSON schemas of the answers, for the OpenAPI document."""


@routes.post("/v1/sessions", responses=answer_of(SessionObject))
async def create_session(request: Request) -> JsonResponse:
    """Create a session."""
    service = service_of(request)
    body = await read_request(request, SessionRequest, service.config.max_body_bytes, check_session)
    service = check_model(service, body.model)
    model, adapter = body.model or service.model_name, current().adapter
    session = SessionState(model=model, adapter=adapter, truncation=RetentionPolicy())
    await _bind(service, session, body)
    body.apply(session)
    if body.messages is not None:
        await _begin(service, session, body.messages)
    return _answer(await service.sessions.create(service.sessions.draw_id(), session))


async def _bind(service: RouterService, session: SessionState, body: SessionRequest) -> None:
    """Give a session the modules that the request asks for, if any."""
    given = body.modules()
    if given is None:
        return
    messages = as_roles(service.tokenizer, body.messages or [])
    placed = await place(service, given, body.modules_param, messages, add_generation_prompt=True)
    session.truncation, session.history = None, History(form="chat")
    session.modules = replace(given, schema=placed.prompt.schema)


async def _begin(service: RouterService, session: SessionState, messages: list[Message]) -> None:
    """Put messages into an empty session."""
    stored = [message.model_dump(exclude_none=True) for message in messages]
    check_messages(stored, "messages")
    if session.modules is not None:  # the first turn will encode them
        session.history = replace(session.history, messages=stored)
        return
    text = await Rendering().text(service, messages)
    check_length(len(text), "messages")
    tokens = await service.tokenizer.encode_async(text, add_special_tokens=False)
    session.history = History(
        form="chat",
        messages=stored,
        text=text,
        tokens=pack_int32(tokens),
        vocabulary=service.tokenizer.fingerprint,
        marks=[HistoryMark(len(text), len(tokens))] if tokens else [],
    )


@routes.get("/v1/sessions", responses=answer_of(SessionList), openapi_extra={"parameters": page_parameters("asc")})
async def list_sessions(request: Request) -> JsonResponse:
    """List the tenant's sessions, page by page, in the order of their ids; for admins those of all tenants."""
    page, service = page_of(request, "asc", prefix=SESSIONS.prefix), service_of(request)
    if current_identity().is_all:
        found = await service.sessions.page(service.tenants.owners(), page.after, page.limit + 1)
        summaries = [_summary(record, record.key.owner) for record in found]
    else:
        found = await service.sessions.page([current_identity().owner], page.after, page.limit + 1)
        summaries = [_summary(record) for record in found]
    return JsonResponse(make_page(SessionList, summaries, page.limit))


@routes.get("/v1/sessions/{session_id}", responses=answer_of(SessionObject))
async def get_session(request: Request, session_id: str) -> JsonResponse:
    """Return a session; with `include=messages` also its messages."""
    include = choice_of(request, "include", "", ("messages",))
    stored = await service_of(request).sessions.get(_stored_id(session_id))
    return _answer(stored, messages=bool(include))


@routes.patch("/v1/sessions/{session_id}", responses=answer_of(SessionObject))
async def update_session(request: Request, session_id: str) -> JsonResponse:
    """Change a session's time to live, truncation or metadata. Metadata are replaced as a whole."""
    service = service_of(request)
    body = await read_request(request, SessionUpdate, service.config.max_body_bytes)
    lease = await service.sessions.acquire(_stored_id(session_id))
    try:
        body.apply(lease.session)
        return _answer(await lease.put())
    finally:
        lease.close()


@routes.delete("/v1/sessions/{session_id}", responses=answer_of(SessionDeleted))
async def delete_session(request: Request, session_id: str) -> JsonResponse:
    """Delete a session, and the KV that nothing else uses."""
    service = service_of(request)
    await delete_history(service, service.sessions, _stored_id(session_id))
    return JsonResponse(SessionDeleted(id=session_id))


@routes.post("/v1/sessions/{session_id}/fork", responses=answer_of(SessionObject))
async def fork_session(request: Request, session_id: str) -> JsonResponse:
    """Copy a session, with the turn that is being made of it. Both share the stored history and its KV."""
    service = service_of(request)
    content = await read_body(request, service.config.max_body_bytes)

    def parse() -> ForkRequest:
        return validate(ForkRequest, parse_json_object(content) if content.strip() else {})

    body = await beside_loop(request, parse)
    if body.while_busy == "before":
        source = await service.sessions.get(_stored_id(session_id))
    else:
        patience_s = 0.0 if body.while_busy == "refuse" else FORK_PATIENCE_S
        found = service.sessions.get_settled(_stored_id(session_id), patience_s)
        source = await while_connected(request, found)
    fork = replace(source.session, parent=session_id, last_turn=None)
    body.apply(fork)
    return _answer(await service.sessions.create(service.sessions.draw_id(), fork, source.base))


@routes.post("/v1/sessions/{session_id}/prefetch", responses=answer_of(SessionPrefetch))
async def prefetch_session(request: Request, session_id: str) -> JsonResponse:
    """Announce a request of a session, so that its KV is fetched from slow tiers."""
    service = service_of(request)
    session = (await service.sessions.get(_stored_id(session_id))).session
    service = of_session(service, session)
    route, module_tokens = await next_route(service, session_id, session)
    tokens = len(unpack_int32(route.tokens)) + module_tokens
    known = coming = 0
    if tokens:
        found = await service.prefetch(route)
        # The engine counts a text's last chunk as if it were full.
        known, coming = min(found.known_tokens, tokens), min(found.coming_tokens, tokens)
    return JsonResponse(SessionPrefetch(id=session_id, tokens=tokens, known_tokens=known, coming_tokens=coming))


@routes.post("/v1/sessions/{session_id}/discard", responses=answer_of(SessionObject))
async def discard_tokens(request: Request, session_id: str) -> JsonResponse:
    """Hide parts of the history from all later requests. They still count as `tokens`."""
    service = service_of(request)
    body = await read_request(request, DiscardRequest, service.config.max_body_bytes)
    lease = await service.sessions.acquire(_stored_id(session_id))
    try:
        session, service = lease.session, of_session(service, lease.session)
        session.history = session.history.in_vocabulary(service.tokenizer.fingerprint)
        if session.modules is not None:
            raise bad_value("session_id", "nothing can be discarded in a session with modules")
        if body.tokens is not None:
            spans = _token_spans(session.history, body.tokens)
        else:
            spans = [await _message_span(service, session, index) for index in body.messages or []]
        merged = merge_spans([*session.history.discards, *spans])
        if len(merged) > DISCARDS_MAX:
            raise bad_value("tokens", f"a session has {DISCARDS_MAX} discarded ranges at most, not {len(merged)}")
        session.history = replace(session.history, discards=list(merged))
        return _answer(await lease.put())
    finally:
        lease.close()


def _token_spans(history: History, ranges: list[list[int]]) -> list[TokenSpan]:
    for index, (start, stop) in enumerate(ranges):
        if not 0 <= start < stop <= history.token_count:
            raise bad_value(
                f"tokens[{index}]",
                f"`tokens[{index}]` is [{start}, {stop}]; a range lies within the {history.token_count} tokens of "
                "the history and is not empty",
            )
    return [TokenSpan(start, stop) for start, stop in ranges]


async def _message_span(service: RouterService, session: SessionState, index: int) -> TokenSpan:
    """Return the range of a message's tokens, including those that the template writes around it.

    Raises:
        ApiError: 400, there is no such message, or the place of its tokens is unknown.
    """
    messages = await stored_messages(service, session)
    if index >= len(messages):
        raise bad_value(
            "messages", f"`messages`: there is no message {index}; the session has {len(messages)} of them"
        )
    start, stop = 0, session.history.token_count
    first = service.tokenizer.special_token_id("bos_token")
    if index == 0 and session.history.ids()[:1] == [first]:
        start = 1  # keep the BOS, which every model expects
    if index > 0:
        start = await _tokens_before(service, session.history, messages, index)
    if index + 1 < len(messages):
        stop = await _tokens_before(service, session.history, messages, index + 1)
    return TokenSpan(start, stop)


async def _tokens_before(service: RouterService, history: History, messages: list[Message], index: int) -> int:
    before = await Rendering().text(service, messages[:index])
    found = None
    if common_length(before, history.text) == len(before):
        found = token_at(history, len(before), service.tokenizer.vocabulary)
    if found is None:
        raise bad_value(
            "messages",
            f"`messages`: where message {index} begins cannot be seen in what the model was shown (tools are "
            "shown, or its template rewrites earlier turns); please give `tokens`",
        )
    return found


def _stored_id(session_id: str) -> str:
    if not is_stored(session_id):
        raise not_found("session_id", f"session {session_id[:80]!r} does not exist", code="session_not_found")
    return session_id


def _summary(record: Record, owner: str = "") -> SessionSummary:
    return SessionSummary(
        tenant=owner or UNSET,
        id=record.key.id,
        created_at=int(record.created),
        last_used_at=int(record.used),
        expires_at=int(record.used + record.ttl),
    )


def _answer(stored: StoredSession, *, messages: bool = False) -> JsonResponse:
    record, session, history = stored.record, stored.session, stored.session.history
    return JsonResponse(
        SessionObject(
            id=record.key.id,
            created_at=int(record.created),
            last_used_at=int(record.used),
            expires_at=int(record.used + record.ttl),
            ttl=int(SESSIONS.ttl_of(session)),
            model=session.adapter or session.model,
            parent=session.parent or None,
            schema=None if session.modules is None else session.modules.schema,
            turns=session.turns,
            tokens=history.token_count,
            discards=history.discards,
            message_count=len(history.messages),
            truncation=_truncation(session.truncation),
            metadata=session.metadata,
            messages=history.messages if messages else UNSET,
        )
    )


def _truncation(policy: RetentionPolicy | None) -> SessionTruncation | Literal["disabled"]:
    if policy is None:
        return "disabled"
    return SessionTruncation(policy.retention_ratio, Keeps(policy.keep_instructions, policy.sink_tokens))
