"""A turn of a stored session: the request's messages and the answer, stored only if the answer is complete.

open_turn ─► history + request = prompt ─► generation ─► store: messages and answer are appended
     └──────────────── an error, or the client leaves: close, the session stays as it was
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
from msgspec.structs import replace

from trunkline.kvstore.chunks import unpack_int32
from trunkline.router.api.requests import check_length, of_session
from trunkline.router.api.responses import ChatMessage
from trunkline.router.errors import bad_value
from trunkline.router.jobs.request_models import STORED_MESSAGES, ChatRequest, CompletionRequest, Message
from trunkline.router.request_context import current, request_name
from trunkline.router.service import RouterService
from trunkline.router.stores.session_changes import MESSAGE_BYTES_MAX
from trunkline.router.stores.session_history import (
    Form,
    History,
    HistoryMark,
    KnownPrompt,
    PromptPart,
    common_mark,
    parts_behind,
    text_of,
)
from trunkline.router.stores.session_lease import Lease
from trunkline.router.stores.session_state import SessionState
from trunkline.router.tenancy.auth import cache_salt
from trunkline.router.text.conversation_memory import beginning_of_fields
from trunkline.router.text.prompt_memory import NOTHING, ReadsSame, agreed_tokens
from trunkline.router.text.remembered_prompts import RememberedPrompt
from trunkline.router.text.token_ids import TokenIds
from trunkline.router.text.truncation import TokenSpan, clip_spans

_FORMS: Final = {
    "chat": "conversations (/v1/chat/completions)",
    "text": "texts (/v1/completions)",
    "items": "responses (/v1/responses)",
}
MESSAGES_OFF_LOOP: Final = 500
"""Number of messages above which they are validated in a thread, if they are not known. Each takes about 10
microseconds."""


class SessionTurn:
    """A request of a stored session. Call `close` at the end in any case."""

    takes_modules: ClassVar[bool] = False
    """Whether each request gives the modules of its prompt itself."""

    def __init__(
        self, service: RouterService, session: SessionState, form: Form, lease: Lease | None = None
    ) -> None:
        """
        Args:
            session: the session before this turn.
            lease: the lease under which the turn is stored; None: it is not stored, and the session is only read.

        Raises:
            ApiError: 400, the session is used for another kind of request than `form`.
        """
        self.session = session
        """The session before this turn; only `store_chat` and `store_text` change it."""
        self._service = service
        self._tokenizer = service.tokenizer
        self._lease = lease
        self._form: Form = form
        self._new: list[dict[str, Any]] = []
        self._continues = False
        self._known = KnownPrompt("", [], 0)
        if session.history.form not in ("", form):
            used = _FORMS[session.history.form]
            raise bad_value("session_id", f"this session is used for {used}; please start another one")
        self._history = session.history.in_vocabulary(self._tokenizer.fingerprint)

    @property
    def service(self) -> RouterService:
        """The service of the model that the turn asks for: the request's or, if it names none, the session's."""
        return self._service

    @property
    def reused_tokens(self) -> int:
        """Number of first tokens of the prompt that come from the history."""
        return self._known.reused_tokens

    @property
    def discards(self) -> tuple[TokenSpan, ...]:
        """Ranges of the prompt that the client has discarded."""
        return clip_spans(self._history.discards, min(self.reused_tokens, len(self._known.tokens) - 1))

    async def messages(self, new: list[Message], *, continues: bool = False) -> list[Message]:
        """Return the whole conversation: the session's messages and the request's.

        Args:
            continues: Whether the answer continues the last message, and is stored as one with it.
        """
        self._continues = continues
        self._new = [message.model_dump(exclude_none=True) for message in new]
        return await stored_messages(self._service, self.session) + new

    async def tokens_of(
        self, text: str, param: str, *, add_special_tokens: bool, salt: bytes, same: ReadsSame
    ) -> tuple[Sequence[int], RememberedPrompt | None]:
        """Return the token ids of a conversation's text, reusing the history's tokens where it begins with them,
        and the prompt as it is remembered; None: it is not.

        Args:
            salt: Salt of the request's KV.
            same: See `PromptMemory.reuse`.
        """
        mark = common_mark(self._history, text, self._tokenizer.vocabulary)
        agreed = mark.characters if mark.characters == len(self._history.text) else -1
        check_length(len(text) - mark.characters, param)
        prompts = self._service.model.remembered
        if add_special_tokens or not prompts.is_on:
            return await self._from_history(text, mark, add_special_tokens=add_special_tokens), None
        known = prompts.known(text, salt, same)
        history = unpack_int32(self._history.tokens)
        reused = agreed_tokens(history, known.tokens)
        if known.characters > mark.characters and reused >= mark.tokens:
            # An answer came back otherwise than the history has it, or another prompt has more of this one.
            remembered = await prompts.encoded(text, salt, known)
            marks = (HistoryMark(known.characters, len(known.tokens)),)
            self._known = KnownPrompt(text, remembered.ids, reused, marks, agreed)
            return self._known.tokens, remembered
        if mark.tokens and len(known.tokens) <= min(reused, mark.tokens):  # the usual case: little is copied
            behind = history[len(known.tokens) : mark.tokens].tolist()
            behind += await self._tokenizer.encode_rest(text[mark.characters :])
            remembered = prompts.keep(text, salt, known, behind)
            self._known = KnownPrompt(text, remembered.ids, mark.tokens, agreed=agreed)
            return self._known.tokens, remembered
        tokens = await self._from_history(text, mark, add_special_tokens=False)
        if agreed_tokens(known.tokens, np.asarray(tokens, np.int32)) < len(known.tokens):
            known = NOTHING
        return tokens, prompts.keep(text, salt, known, tokens[len(known.tokens) :])

    async def _from_history(self, text: str, mark: HistoryMark, *, add_special_tokens: bool) -> Sequence[int]:
        rest = text[mark.characters :]
        tokens: Sequence[int]
        if mark.tokens:
            history = unpack_int32(self._history.tokens)[: mark.tokens]
            tokens = TokenIds.of(history, await self._tokenizer.encode_rest(rest))
        else:
            tokens = await self._tokenizer.encode_async(text, add_special_tokens=add_special_tokens)
        self._known = KnownPrompt(text, tokens, mark.tokens)
        return tokens

    async def tokens_of_parts(self, parts: Sequence[PromptPart]) -> list[int]:
        """Return the token ids of a prompt in parts, reusing the history's tokens where it begins with them."""
        text = "".join([part.text for part in parts])
        mark = common_mark(self._history, text, self._tokenizer.vocabulary)
        split, rest = parts_behind(parts, mark)
        tokens = self._history.ids()[: mark.tokens]
        if split is not None and split.plain:
            tokens += self._tokenizer.encode_plain(split.rest)
        elif split is not None:
            tokens += await self._tokenizer.encode_rest(split.rest)
        tokens += rest
        self._known = KnownPrompt(text, tokens, mark.tokens)
        return tokens

    async def continued(self, given: str | Sequence[int], *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of the history, followed by those of `given`, a text or token ids."""
        history = self._history.ids()
        if self._history.text and not history:  # its tokens were another tokenizer's
            history = await self._tokenizer.encode_async(self._history.text, add_special_tokens=add_special_tokens)
        if not isinstance(given, str):
            new, text = list(given), text_of(given, self._tokenizer.vocabulary)
        else:
            check_length(len(given), "prompt")
            text = given
            if history:
                new = await self._tokenizer.encode_rest(given)
            else:
                new = await self._tokenizer.encode_async(given, add_special_tokens=add_special_tokens)
        tokens = history + new
        self._known = KnownPrompt(self._history.text + text, tokens, self._history.token_count)
        return tokens

    def check_size(self, param: str) -> None:
        """Refuse a turn with a message that is too large to be stored.

        Raises:
            ApiError: 400.
        """
        check_messages(self._new, param)

    async def store_chat(self, answer: ChatMessage, tokens: Sequence[int]) -> None:
        """Append the request's messages and the answer to the session.

        Raises:
            ApiError: 503 or 409, they could not be stored.
        """
        history = self._history.answered(self._known, tokens, self._tokenizer.vocabulary)
        new, message = self._new, _as_stored(answer)
        if self._continues:
            *new, begun = new
            message = {**begun, **message, "content": begun["content"] + message["content"]}
        await self._put(replace(history, messages=[*history.messages, *new, message]))

    async def store_text(self, shown: str, tokens: Sequence[int]) -> None:
        """Append the prompt and the answer to the session.

        Args:
            shown: Text of the answer, without the stop string or end token.
            tokens: Tokens of the answer.

        Raises:
            ApiError: As in `store_chat`.
        """
        vocabulary = self._tokenizer.vocabulary
        history = self._history.answered(self._known, tokens, vocabulary)
        text = self._known.text + shown
        if history.text != text:
            mark = common_mark(history, text, vocabulary)
            history = history.shown(mark, text, await self._tokenizer.encode_rest(text[mark.characters :]))
        await self._put(history)

    async def _put(self, history: History) -> None:
        assert self._lease is not None, "this session is only read"
        self.session.history = replace(history, form=self._form)
        await self._lease.put(request_name())

    def close(self) -> None:
        """Release the session, unchanged if nothing was stored. Calling it again has no effect."""
        if self._lease is not None:
            self._lease.close()


async def open_turn(
    service: RouterService, body: ChatRequest | CompletionRequest, session_id: str, form: Form
) -> SessionTurn:
    """Acquire the stored session of a request.

    Raises:
        ApiError: 404, there is no such session; 409, it is in use; 400, a parameter is not available in sessions;
            429, the tenant's records have reached their quota.
    """
    for name in ("n", "best_of"):
        if (getattr(body, name, None) or 1) > 1:
            raise bad_value(
                name, f"`{name}` above 1 is not available in a stored session: only one answer is kept"
            )
    for name in ("use_beam_search", "truncate_prompt_tokens", "echo"):
        if getattr(body, name, None):
            raise bad_value(name, f"`{name}` is not available in a stored session")
    lease = await service.sessions.acquire(session_id, extends=True)
    try:
        await lease.undo(request_name())
        if body.model is None:
            service = of_session(service, lease.session)
        lease.session.adapter = current().adapter
        if lease.session.model not in service.model.names:
            lease.session.model = service.model_name  # it had another name, or another model goes on from here
        return SessionTurn(service, lease.session, form, lease)
    except BaseException:
        lease.close()
        raise


async def stored_messages(service: RouterService, session: SessionState) -> list[Message]:
    """Return the messages of a session."""
    stored = session.history.messages

    def read() -> list[Message]:
        return STORED_MESSAGES.validate_python(stored)

    is_long = len(stored) > MESSAGES_OFF_LOOP and len(stored) - _known_count(stored) > MESSAGES_OFF_LOOP
    return await service.large_requests.run(read) if is_long else read()


def _known_count(stored: list[dict[str, Any]]) -> int:
    """Return how many first messages of a stored conversation were checked before."""
    memory = current().conversations
    known = None if memory is None else memory.checked.find(cache_salt(None), beginning_of_fields(stored), stored)
    return 0 if known is None else known.agreed


def check_messages(messages: Sequence[dict[str, Any]], param: str) -> None:
    """Refuse messages that are too large to be stored.

    Raises:
        ApiError: 400.
    """
    for message in messages:
        size = len(msgspec.msgpack.encode(message))
        if size > MESSAGE_BYTES_MAX:
            raise bad_value(
                param,
                f"a message has {size} bytes; {MESSAGE_BYTES_MAX} can be stored. Please send it in parts.",
                code="session_too_long",
            )


def _as_stored(answer: ChatMessage) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or ""}
    if answer.reasoning_content:
        message["reasoning_content"] = answer.reasoning_content
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in answer.tool_calls
        ]
    return message
