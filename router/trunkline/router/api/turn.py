"""A turn of a stored session: the request's messages and the answer, stored only if the answer is complete.

open_turn ─► history + request = prompt ─► generation ─► store: messages and answer are appended
     └──────────────── an error, or the client leaves: close, the session stays as it was
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from trunkline.router.api.requests import check_length
from trunkline.router.api.responses import ChatMessage
from trunkline.router.errors import bad_value
from trunkline.router.jobs.request_models import ChatRequest, CompletionRequest, Message
from trunkline.router.request_context import request_name
from trunkline.router.service import RouterService
from trunkline.router.stores.record_homes import VALUE_BYTES_MAX
from trunkline.router.stores.session_history import (
    Form,
    KnownPrompt,
    PromptPart,
    SessionState,
    common_mark,
    parts_behind,
    text_of,
)
from trunkline.router.stores.session_store import Lease
from trunkline.router.text.truncation import TokenSpan, clip_spans

_FORMS: Final = {"chat": "conversations (/v1/chat/completions)", "text": "texts (/v1/completions)"}
_MESSAGES_OFF_LOOP: Final = 500
"""Number of messages above which they are validated in a thread. Each takes about 10 microseconds."""
_MESSAGE_BYTES: Final = 256
"""Approximate size in bytes of a message in a record, without its text."""


class SessionTurn:
    """A stored session acquired for a request. Call `close` at the end in any case."""

    def __init__(self, service: RouterService, lease: Lease, form: Form) -> None:
        """
        Raises:
            ApiError: 400, the session is used for another kind of request than `form`.
        """
        self.session = lease.session
        """The session before this turn; only `store_chat` and `store_text` change it."""
        self._service = service
        self._tokenizer = service.tokenizer
        self._lease = lease
        self._form: Form = form
        self._new: list[Message] = []
        self._known = KnownPrompt("", [], 0)
        self.session.begin_turn(request_name())
        self._before = replace(self.session)
        if self.session.form not in ("", form):
            used = _FORMS[self.session.form]
            raise bad_value("session_id", f"this session is used for {used}; please start another one")
        if self.session.vocabulary != self._tokenizer.fingerprint:
            self.session.forget_tokens()

    @property
    def reused_tokens(self) -> int:
        """Number of first tokens of the prompt that come from the history."""
        return self._known.reused_tokens

    @property
    def discards(self) -> tuple[TokenSpan, ...]:
        """Ranges of the prompt that the client has discarded."""
        return clip_spans(self.session.discards, min(self.reused_tokens, len(self._known.tokens) - 1))

    async def messages(self, new: list[Message]) -> list[Message]:
        """Return the whole conversation: the session's messages and the request's."""
        self._new = new
        return await stored_messages(self._service, self.session) + new

    async def tokens_of(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a conversation's text, reusing the history's tokens where it begins with
        them."""
        mark = common_mark(self.session, text, self._tokenizer.vocabulary)
        rest = text[mark.characters :]
        check_length(len(rest), param)
        if mark.tokens:
            tokens = self.session.ids()[: mark.tokens] + await self._tokenizer.encode_rest(rest)
        else:
            tokens = await self._tokenizer.encode_async(text, add_special_tokens=add_special_tokens)
        self._known = KnownPrompt(text, tokens, mark.tokens)
        return tokens

    async def tokens_of_parts(self, parts: Sequence[PromptPart]) -> list[int]:
        """Return the token ids of a prompt in parts, reusing the history's tokens where it begins with them."""
        text = "".join([part.text for part in parts])
        mark = common_mark(self.session, text, self._tokenizer.vocabulary)
        split, rest = parts_behind(parts, mark)
        tokens = self.session.ids()[: mark.tokens]
        if split is not None and split.plain:
            tokens += self._tokenizer.encode_plain(split.rest)
        elif split is not None:
            tokens += await self._tokenizer.encode_rest(split.rest)
        self._known = KnownPrompt(text, tokens + rest, mark.tokens)
        return self._known.tokens

    async def continued(self, given: str | list[int], *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of the history, followed by those of `given`, a text or token ids."""
        history = self.session.ids()
        if self.session.text and not history:  # its tokens were another tokenizer's
            history = await self._tokenizer.encode_async(self.session.text, add_special_tokens=add_special_tokens)
        if not isinstance(given, str):
            new, text = given, text_of(given, self._tokenizer.vocabulary)
        else:
            check_length(len(given), "prompt")
            text = given
            if history:
                new = await self._tokenizer.encode_rest(given)
            else:
                new = await self._tokenizer.encode_async(given, add_special_tokens=add_special_tokens)
        self._known = KnownPrompt(self.session.text + text, history + new, len(history))
        return self._known.tokens

    def check_size(self, param: str) -> None:
        """Refuse a turn that would be too large to store.

        Raises:
            ApiError: 400.
        """
        # The record holds the text twice: as messages, and as it was rendered.
        messages = _MESSAGE_BYTES * (len(self.session.messages) + len(self._new))
        size = 2 * len(self._known.text.encode()) + 4 * len(self._known.tokens) + messages
        if size > VALUE_BYTES_MAX:
            raise bad_value(
                param,
                f"the session's history would have {size} bytes; {VALUE_BYTES_MAX} are kept at most. "
                "Please start another session.",
                code="session_too_long",
            )

    async def store_chat(self, answer: ChatMessage, tokens: Sequence[int]) -> None:
        """Append the request's messages and the answer to the session.

        Raises:
            ApiError: 503 or 409, they could not be stored.
        """
        new = [message.model_dump(exclude_none=True) for message in self._new]
        self.session.messages = [*self.session.messages, *new, _as_stored(answer)]
        self.session.remember(self._known, tokens, self._tokenizer.vocabulary)
        await self._put()

    async def store_text(self, shown: str, tokens: Sequence[int]) -> None:
        """Append the prompt and the answer to the session.

        Args:
            shown: Text of the answer, without the stop string or end token.
            tokens: Tokens of the answer.

        Raises:
            ApiError: As in `store_chat`.
        """
        session, vocabulary = self.session, self._tokenizer.vocabulary
        session.remember(self._known, tokens, vocabulary)
        text = self._known.text + shown
        if session.text != text:
            mark = common_mark(session, text, vocabulary)
            session.show(mark, text, await self._tokenizer.encode_rest(text[mark.characters :]))
        await self._put()

    async def _put(self) -> None:
        session = self.session
        session.form, session.vocabulary = self._form, self._tokenizer.fingerprint
        session.end_turn(request_name(), self._before)
        await self._lease.put()

    def close(self) -> None:
        """Release the session, unchanged if nothing was stored. Calling it again has no effect."""
        self._lease.close()


async def open_turn(
    service: RouterService, body: ChatRequest | CompletionRequest, session_id: str, form: Form
) -> SessionTurn:
    """Acquire the stored session of a request.

    Raises:
        ApiError: 404, there is no such session; 409, it is in use; 400, a parameter is not available in sessions.
    """
    for name in ("n", "best_of"):
        if (getattr(body, name, None) or 1) > 1:
            raise bad_value(
                name, f"`{name}` above 1 is not available in a stored session: only one answer is kept"
            )
    for name in ("use_beam_search", "truncate_prompt_tokens", "echo"):
        if getattr(body, name, None):
            raise bad_value(name, f"`{name}` is not available in a stored session")
    lease = await service.sessions.acquire(session_id)
    try:
        if lease.session.model not in service.model_names:
            lease.session.model = service.model_name  # the model had another name when the session began
        return SessionTurn(service, lease, form)
    except BaseException:
        lease.close()
        raise


async def stored_messages(service: RouterService, session: SessionState) -> list[Message]:
    """Return the messages of a session."""

    def read() -> list[Message]:
        return [Message.model_validate(message) for message in session.messages]

    return await service.large_requests.run(read) if len(session.messages) > _MESSAGES_OFF_LOOP else read()


def _as_stored(answer: ChatMessage) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or ""}
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
