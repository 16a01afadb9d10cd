"""The stored part of a request to `/v1/responses`: what it continues, and where its answer is kept.

    previous_response_id ─► a stored response ┐                         ┌► a new record, which shares the history's
    conversation ─► its record, leased        ├► history + input ─► answer      segments and adds one
    neither ─► nothing                        ┘                         └► the conversation's next segment

The history consists of items, in the form of `/v1/responses`. Instructions are not among them: each request has
its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from trunkline.router.api.blocks import renamed
from trunkline.router.api.openai_items import Object, ResponsesRequest
from trunkline.router.api.requests import of_session
from trunkline.router.api.turn import SessionTurn
from trunkline.router.errors import ApiError, in_conflict, not_found
from trunkline.router.http.answers import encoded
from trunkline.router.jobs.request_models import Message
from trunkline.router.request_context import current, request_name
from trunkline.router.service import RouterService
from trunkline.router.stores.owned_records import store_errors
from trunkline.router.stores.session_history import History
from trunkline.router.stores.session_lease import Lease
from trunkline.router.stores.session_memory import Base, StoredSession
from trunkline.router.stores.session_state import SessionState
from trunkline.router.tenancy.auth import current_identity

BACKGROUND_PATIENCE_S: Final = 60.0
"""Longest time in seconds for which a request waits for the response that it continues to be made in the
background."""
_POLL_S: Final = 0.2
_PATIENCE_S: Final = 1.0
"""Time in seconds for which an answer waits to be stored if its client did not ask for that."""


class ResponseTurn(SessionTurn):
    """A request whose answer is stored, or which continues what is stored. Call `close` at the end in any case."""

    takes_modules = True

    def __init__(
        self,
        service: RouterService,
        body: ResponsesRequest,
        session: SessionState,
        base: Base | None = None,
        lease: Lease | None = None,
    ) -> None:
        """
        Args:
            session: the history before this request.
            base: the stored end of the history, to be shared; None: it is not stored, or cannot be shared.
            lease: the lease of the conversation that the request belongs to; None: it belongs to none.
        """
        super().__init__(service, session, "items", lease)
        self.stores = body.store is not False
        """Whether the response is to be stored. `store` may find that it cannot be."""
        self.previous = body.previous_response_id
        self._base = base
        self._must_store = body.store is True or (self.stores and self.previous is not None)

    @property
    def conversation(self) -> str | None:
        """Id of the conversation that the request belongs to."""
        return None if self._lease is None else self._lease.key.id

    @property
    def items(self) -> list[Object]:
        """The items of the history."""
        return self.session.history.messages

    def add(self, items: list[Object]) -> None:
        """Set the request's own items, which are stored together with the answer."""
        self._new = items

    async def messages(self, new: list[Message], *, continues: bool = False) -> list[Message]:
        """Return the whole conversation: of a response, the request has all of it already."""
        return new

    async def store(self, answer: Object, tokens: Sequence[int]) -> Object:
        """Store the request's items and the answer; return the answer as the client gets it.

        Args:
            answer: the response object.
            tokens: tokens of the answer.

        Raises:
            ApiError: 503 or 409, it could not be stored although the client asked for that; 400, it is too large.
        """
        history = self._history.answered(self._known, tokens, self._tokenizer.vocabulary)
        history = replace(history, form="items", messages=[*self.items, *self._new, *answer["output"]])
        if self.stores:
            answer = await self._store_response(answer, history)
        if self._lease is not None:  # last, so that an error leaves the conversation as it was
            await self._put(history)
        return answer

    async def _store_response(self, answer: Object, history: History) -> Object:
        state = SessionState(
            model=self.session.model,
            adapter=self.session.adapter,
            turns=self.session.turns + 1,
            parent=self.previous or "",
            answer=bytes(encoded(answer)),
            history=history,
        )
        try:
            async with asyncio.timeout(None if self._must_store else _PATIENCE_S):
                await self._service.histories.responses.create(
                    answer["id"], state, self._base, is_admitted=self._must_store
                )
        except (TimeoutError, ApiError):
            if self._must_store:
                raise
            self.stores = False
            return {**answer, "store": False}
        return answer


async def open_response_turn(service: RouterService, body: ResponsesRequest) -> ResponseTurn | None:
    """Begin the stored part of a request; None: it has none.

    Raises:
        ApiError: 404, what it continues does not exist; 409, its conversation is in use; 429, the tenant's records
            have reached their quota; 503, the store of records does not answer.
    """
    if body.conversation is not None:
        return await _continue_conversation(service, body, body.conversation)
    if body.previous_response_id is not None:
        return await _continue_response(service, body, body.previous_response_id)
    if body.store:
        await service.histories.responses.check_room()
    elif body.store is False or service.records.away:
        return None
    return ResponseTurn(service, body, _new_state(service, body))


async def open_reading_turn(service: RouterService, body: ResponsesRequest) -> ResponseTurn:
    """Begin the stored part of a request that stores nothing; it needs no `close`. A conversation may be in use.

    Raises:
        ApiError: 404, what it continues does not exist; 503, the store of records does not answer.
    """
    body.store = False
    if body.conversation is not None:
        with renamed({"conversation_id": "conversation"}):
            stored = await service.histories.conversations.get(body.conversation)
        service = _service_for(service, body, stored.session)
        return ResponseTurn(
            service,
            body,
            replace(stored.session, model=service.model_name, adapter=current().adapter),
            stored.base,
        )
    if body.previous_response_id is not None:
        return await _continue_response(service, body, body.previous_response_id)
    return ResponseTurn(service, body, _new_state(service, body))


async def _continue_conversation(
    service: RouterService, body: ResponsesRequest, conversation: str
) -> ResponseTurn:
    with renamed({"conversation_id": "conversation"}):
        lease = await service.histories.conversations.acquire(conversation, extends=True)
    try:
        await lease.undo(request_name())
        service = _service_for(service, body, lease.session)
        lease.session.model, lease.session.adapter = service.model_name, current().adapter
        return ResponseTurn(service, body, lease.session, lease.base, lease)
    except BaseException:
        lease.close()
        raise


async def _continue_response(service: RouterService, body: ResponsesRequest, previous: str) -> ResponseTurn:
    try:
        stored = await service.histories.responses.get(previous, extends=body.store is not False)
    except ApiError as error:
        if error.status != 404:
            raise
        found = await _once_made(service, previous, extends=body.store is not False)
        if found is None:
            raise not_found(
                "previous_response_id",
                f"previous response with id {previous[:80]!r} not found",
                code="previous_response_not_found",
            ) from None
        stored = found
    service = _service_for(service, body, stored.session)
    session = replace(stored.session, model=service.model_name, adapter=current().adapter)
    return ResponseTurn(service, body, session, stored.base)


async def _once_made(service: RouterService, previous: str, *, extends: bool) -> StoredSession | None:
    """Return a response that is made in the background, once it is stored; None: there is none, or it has failed.

    Raises:
        ApiError: 409, it is still being made after `BACKGROUND_PATIENCE_S`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + BACKGROUND_PATIENCE_S
    try:
        while True:
            with store_errors("response", previous):
                state = await service.background.get(current_identity().owner, previous)
            if state.is_over:
                return None
            if loop.time() >= deadline:
                message = f"previous response {previous[:80]!r} is still being made in the background; wait for it"
                raise in_conflict("previous_response_id", message, code="response_busy")
            await asyncio.sleep(_POLL_S)
    except ApiError as error:
        if error.status != 404:
            raise
    try:  # it is not in the background any more, because it is stored
        return await service.histories.responses.get(previous, extends=extends)
    except ApiError as error:
        if error.status != 404:
            raise
        return None


def _service_for(service: RouterService, body: ResponsesRequest, session: SessionState) -> RouterService:
    """Return the service of the model that a request asks for or, if it names none, the one before it had."""
    return of_session(service, session) if body.model is None else service


def _new_state(service: RouterService, body: ResponsesRequest) -> SessionState:
    return SessionState(model=body.model or service.model_name, adapter=current().adapter)
