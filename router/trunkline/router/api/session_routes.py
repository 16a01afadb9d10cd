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

from trunkline.kvstore.chunks import pack_int32
from trunkline.router.api.module_prompts import as_roles, place
from trunkline.router.api.paging import PAGE_PARAMETERS, answer_of, components_of, make_page, page_of
from trunkline.router.api.prompting import Rendering, instruction_tokens
from trunkline.router.api.requests import check_length, check_model, check_session, service_of
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
from trunkline.router.api.turn import stored_messages
from trunkline.router.errors import bad_value, not_found
from trunkline.router.http.answers import JsonResponse
from trunkline.router.http.body import beside_loop, parse_json_object, read_body, read_request, validate
from trunkline.router.jobs.request_models import Message
from trunkline.router.messages import Record
from trunkline.router.service import RouterService
from trunkline.router.stores.record_homes import VALUE_BYTES_MAX
from trunkline.router.stores.session_history import (
    HistoryMark,
    SessionModules,
    SessionState,
    common_length,
    token_at,
)
from trunkline.router.stores.session_store import StoredSession, is_stored, ttl_of
from trunkline.router.tenancy.auth import cache_salt, current_identity
from trunkline.router.text.truncation import (
    CutError,
    RetentionPolicy,
    TokenSpan,
    clip_spans,
    merge_spans,
    plan_cut,
    room_for,
    span_tokens,
)

routes = APIRouter()

SCHEMAS: Final[dict[str, Any]] = components_of(SessionObject, SessionList, SessionDeleted, SessionPrefetch)
"""JSON schemas of the answers, for the OpenAPI document."""


@routes.post("/v1/sessions", responses=answer_of(SessionObject))
async def create_session(request: Request) -> JsonResponse:
    """Create a session."""
    service = service_of(request)
    body = await read_request(request, SessionRequest, service.config.max_body_bytes, check_session)
    check_model(service, body.model)
    session = SessionState(
        model=body.model or service.model_name,
        vocabulary=service.tokenizer.fingerprint,
        truncation=RetentionPolicy(),
    )
    beside = await _bind(service, session, body)
    body.apply(session)
    if body.messages is not None:
        await _begin(service, session, body.messages)
    return _answer(await service.sessions.create(service.sessions.draw_id(beside), session))


async def _bind(service: RouterService, session: SessionState, body: SessionRequest) -> str:
    """Give a session the modules that the request asks for; return the key of their schema, "" without modules."""
    given = body.modules()
    if given is None:
        return ""
    messages = as_roles(service.tokenizer, body.messages or [])
    placed = await place(service, given, body.modules_param, messages, add_generation_prompt=True)
    session.form, session.truncation = "chat", None
    session.modules = replace(given, schema=placed.schema.name)
    return placed.schema.key


async def _begin(service: RouterService, session: SessionState, messages: list[Message]) -> None:
    """Put messages into an empty session."""
    session.messages = [message.model_dump(exclude_none=True) for message in messages]
    if session.modules is not None:  # the first turn will encode them
        return
    text = await Rendering().text(service, messages)
    check_length(len(text), "messages")
    if 8 * len(text.encode()) > VALUE_BYTES_MAX:
        raise bad_value("messages", "`messages` are too long to be kept", code="session_too_long")
    tokens = await service.tokenizer.encode_async(text, add_special_tokens=False)
    session.form = "chat"
    session.text, session.tokens = text, pack_int32(tokens)
    session.marks = [HistoryMark(len(text), len(tokens))] if tokens else []


@routes.get("/v1/sessions", responses=answer_of(SessionList), openapi_extra={"parameters": PAGE_PARAMETERS})
async def list_sessions(request: Request) -> JsonResponse:
    """List the tenant's sessions, page by page, in the order of their ids; for admins those of all tenants."""
    page, service = page_of(request), service_of(request)
    if current_identity().is_all:
        owners = service.tenants.owners()
        found = await service.sessions.page_of_all(owners, page.after, page.limit + 1)
    else:
        found = [("", record) for record in await service.sessions.page(page.after, page.limit + 1)]
    return JsonResponse(make_page(SessionList, [_summary(record, owner) for owner, record in found], page.limit))


@routes.get("/v1/sessions/{session_id}", responses=answer_of(SessionObject))
async def get_session(request: Request, session_id: str) -> JsonResponse:
    """Return a session; with `include=messages` also its messages."""
    stored = await service_of(request).sessions.get(_stored_id(session_id))
    return _answer(stored, messages="messages" in request.query_params.get("include", "").split(","))


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
    """Delete a session. Its KV is evicted when its space is needed."""
    await service_of(request).sessions.delete(_stored_id(session_id))
    return JsonResponse(SessionDeleted(id=session_id))


@routes.post("/v1/sessions/{session_id}/fork", responses=answer_of(SessionObject))
async def fork_session(request: Request, session_id: str) -> JsonResponse:
    """Copy a session. Both have the same tokens, so they share the KV of the history."""
    service = service_of(request)
    content = await read_body(request, service.config.max_body_bytes)

    def parse() -> ForkRequest:
        return validate(ForkRequest, parse_json_object(content) if content.strip() else {})

    body = await beside_loop(request, parse)
    source = await service.sessions.get(_stored_id(session_id))
    fork = replace(source.session, parent=session_id)
    body.apply(fork)
    return _answer(await service.sessions.create(service.sessions.draw_id(beside=session_id), fork))


@routes.post("/v1/sessions/{session_id}/prefetch", responses=answer_of(SessionPrefetch))
async def prefetch_session(request: Request, session_id: str) -> JsonResponse:
    """Announce a request of a session, so that its KV is fetched from slow tiers."""
    service = service_of(request)
    session = _with_known_tokens(service, (await service.sessions.get(_stored_id(session_id))).session)
    if session.modules is not None:
        return JsonResponse(await _prefetch_modules(service, session_id, session, session.modules))
    tokens = session.ids()
    known = coming = 0
    if tokens:
        drops = await _drops(service, session, tokens)
        found = await service.sessions.prefetch(session_id, tokens, drops, salt=cache_salt(None))
        known, coming = found.known_tokens, found.coming_tokens
    return JsonResponse(
        SessionPrefetch(id=session_id, tokens=len(tokens), known_tokens=known, coming_tokens=coming)
    )


async def _prefetch_modules(
    service: RouterService, session_id: str, session: SessionState, given: SessionModules
) -> SessionPrefetch:
    messages = as_roles(service.tokenizer, await stored_messages(service, session))
    placed = await place(service, given, "session_id", messages, add_generation_prompt=True)
    own = placed.prompt.own.tolist()[: placed.prompt.messages_from] + session.ids()
    found = await service.sessions.prefetch(
        session_id, own, salt=cache_salt(given.salt), layout=placed.layout(len(own))
    )
    tokens = len(own) + placed.prompt.module_tokens
    # The engine counts a text's last chunk as if it were full.
    return SessionPrefetch(
        id=session_id,
        tokens=tokens,
        known_tokens=min(found.known_tokens, tokens),
        coming_tokens=min(found.coming_tokens, tokens),
    )


async def _drops(service: RouterService, session: SessionState, tokens: list[int]) -> tuple[TokenSpan, ...]:
    """Return the ranges of the history that the next request will probably not see."""
    context, policy = service.limits.max_context, session.truncation
    room = room_for(None, context)
    discards = clip_spans(session.discards, len(tokens) - 1)
    head = 0
    overflows = len(tokens) - span_tokens(discards) + room > context
    if policy is not None and policy.keep_instructions and session.messages and overflows:
        messages = await stored_messages(service, session)
        head = await instruction_tokens(service, Rendering(), messages, session.text, tokens)
    try:
        return plan_cut(len(tokens), context, room, policy, head=head, discards=discards).drops
    except CutError:  # the next request will report it
        return discards


@routes.post("/v1/sessions/{session_id}/discard", responses=answer_of(SessionObject))
async def discard_tokens(request: Request, session_id: str) -> JsonResponse:
    """Hide parts of the history from all later requests. They still count as `tokens`."""
    service = service_of(request)
    body = await read_request(request, DiscardRequest, service.config.max_body_bytes)
    lease = await service.sessions.acquire(_stored_id(session_id))
    try:
        session = _with_known_tokens(service, lease.session)
        if session.modules is not None:
            raise bad_value("session_id", "nothing can be discarded in a session with modules")
        if body.tokens is not None:
            spans = _token_spans(session, body.tokens)
        else:
            spans = [await _message_span(service, session, index) for index in body.messages or []]
        merged = merge_spans([*session.discards, *spans])
        if len(merged) > DISCARDS_MAX:
            raise bad_value("tokens", f"a session has {DISCARDS_MAX} discarded ranges at most, not {len(merged)}")
        session.discards = list(merged)
        return _answer(await lease.put())
    finally:
        lease.close()


def _token_spans(session: SessionState, ranges: list[list[int]]) -> list[TokenSpan]:
    for index, (start, stop) in enumerate(ranges):
        if not 0 <= start < stop <= session.token_count:
            raise bad_value(
                f"tokens[{index}]",
                f"`tokens[{index}]` is [{start}, {stop}]; a range lies within the {session.token_count} tokens of "
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
    start, stop = 0, session.token_count
    first = service.tokenizer.special_token_id("bos_token")
    if index == 0 and session.ids()[:1] == [first]:
        start = 1  # keep the BOS, which every model expects
    if index > 0:
        start = await _tokens_before(service, session, messages, index)
    if index + 1 < len(messages):
        stop = await _tokens_before(service, session, messages, index + 1)
    return TokenSpan(start, stop)


async def _tokens_before(
    service: RouterService, session: SessionState, messages: list[Message], index: int
) -> int:
    before = await Rendering().text(service, messages[:index])
    found = None
    if common_length(before, session.text) == len(before):
        found = token_at(session, len(before), service.tokenizer.vocabulary)
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


def _with_known_tokens(service: RouterService, session: SessionState) -> SessionState:
    """Return a session after dropping token ids of another tokenizer."""
    if session.vocabulary != service.tokenizer.fingerprint:
        session.forget_tokens()
        session.vocabulary = service.tokenizer.fingerprint
    return session


def _summary(record: Record, owner: str = "") -> SessionSummary:
    return SessionSummary(
        tenant=owner or UNSET,
        id=record.id,
        created_at=int(record.created),
        last_used_at=int(record.used),
        expires_at=int(record.expires),
    )


def _answer(stored: StoredSession, *, messages: bool = False) -> JsonResponse:
    record, session = stored.record, stored.session
    return JsonResponse(
        SessionObject(
            id=record.id,
            created_at=int(record.created),
            last_used_at=int(record.used),
            expires_at=int(record.expires),
            ttl=int(ttl_of(session)),
            model=session.model,
            parent=session.parent or None,
            schema=None if session.modules is None else session.modules.schema,
            turns=session.turns,
            tokens=session.token_count,
            discards=session.discards,
            message_count=len(session.messages),
            truncation=_truncation(session.truncation),
            metadata=session.metadata,
            messages=session.messages if messages else UNSET,
        )
    )


def _truncation(policy: RetentionPolicy | None) -> SessionTruncation | Literal["disabled"]:
    if policy is None:
        return "disabled"
    return SessionTruncation(policy.retention_ratio, Keeps(policy.keep_instructions, policy.sink_tokens))
