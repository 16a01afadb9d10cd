"""The next request that continues what is stored: where its KV is fetched before it comes, and dropped if it never
will."""

from __future__ import annotations

from contextlib import suppress

from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.router.api.module_prompts import as_roles, place, truncated
from trunkline.router.api.prompting import Rendering, instruction_tokens
from trunkline.router.api.requests import of_session
from trunkline.router.api.turn import stored_messages
from trunkline.router.errors import ApiError
from trunkline.router.request_context import AdapterChoice, known
from trunkline.router.routing.request import RouteRequest
from trunkline.router.service import RouterService, scoped_session
from trunkline.router.stores.session_state import SessionState
from trunkline.router.stores.session_store import SessionStore
from trunkline.router.tenancy.auth import cache_salt
from trunkline.router.text.token_ids import TokenIds
from trunkline.router.text.truncation import CutError, TokenSpan, clip_spans, plan_cut, room_for, span_tokens


async def delete_history(service: RouterService, store: SessionStore, history_id: str) -> None:
    """Delete a session, a stored response or a conversation, and the KV that nothing else uses.

    The KV of the whole history goes, from its end back to where the KV of another prompt begins. What other
    records share with it and no such prompt holds is computed again when they are continued.

    Raises:
        ApiError: 404, there is no such record; 409, it is in use.
    """
    route = None
    # What cannot be continued any more can be deleted all the same. A purge deletes others next: their salts must
    # not begin with the adapter of this one.
    with suppress(ApiError), known(choice=AdapterChoice()):
        session = (await store.peek(history_id)).session
        route, _ = await next_route(of_session(service, session), history_id, session)
    await store.delete(history_id)
    if route is not None and route.tokens:
        service.forget(route)


async def next_route(service: RouterService, history_id: str, session: SessionState) -> tuple[RouteRequest, int]:
    """Return the next request of a session as far as it is known, and the number of its modules' tokens.

    Args:
        history_id: id of the session, or of another record that has a history.

    Raises:
        ApiError: its modules' schema does not exist any more, or has changed.
    """
    session.history = session.history.in_vocabulary(service.tokenizer.fingerprint)
    given = session.modules
    if given is None:
        salt = cache_salt(None)
        drops = await _drops(service, session, TokenIds(unpack_int32(session.history.tokens)))
        return RouteRequest(session.history.tokens, salt, scoped_session(history_id, salt), drops=drops), 0
    messages = as_roles(service.tokenizer, await stored_messages(service, session))
    policy = session.truncation
    placed = await place(service, given, "session_id", messages, add_generation_prompt=True, fits=policy is None)
    own = placed.prompt.own.tolist()[: placed.prompt.messages_from] + session.history.ids()
    if policy is not None:
        with suppress(ApiError):  # the next request will report it
            own = truncated(service, placed, own, policy, None, "session_id").own
    salt = cache_salt(given.salt)
    route = RouteRequest(
        pack_int32(own),
        salt,
        scoped_session(history_id, salt),
        home=service.schemas.home_of(key, service.model_name).index if (key := placed.key) else -1,
        layout=placed.layout(len(own)),
    )
    return route, placed.prompt.module_tokens


async def _drops(service: RouterService, session: SessionState, tokens: TokenIds) -> tuple[TokenSpan, ...]:
    """Return the ranges of the history that the next request will probably not see."""
    context, policy = service.limits.max_context, session.truncation
    room = room_for(None, context)
    history = session.history
    discards = clip_spans(history.discards, len(tokens) - 1)
    head = 0
    overflows = len(tokens) - span_tokens(discards) + room > context
    if policy is not None and policy.keep_instructions and history.messages and overflows:
        messages = await stored_messages(service, session)
        head = await instruction_tokens(service, Rendering(), messages, history.text, tokens)
    try:
        return plan_cut(len(tokens), context, room, policy, head=head, discards=discards).drops
    except CutError:  # the next request will report it
        return discards
