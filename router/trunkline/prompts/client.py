"""A client that sends prompts made of modules. Use OpenAI's client for everything else.

    client = Client("http://127.0.0.1:8000")
    answer = client.chat(trip("Lisbon", budget=True), "Plan a Sunday.")

    openai.chat.completions.create(messages=[...], extra_body=client.extra_body(trip("Lisbon")), ...)

The client sends the schema of a prompt program to the server when the program is first used, and again if the
server has deleted it since.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, TypeAlias

import httpx

from trunkline.prompts.errors import RequestError, UnreachableError
from trunkline.prompts.program import PromptCall, PromptProgram
from trunkline.prompts.schemas import Schemas
from trunkline.prompts.transport import DEFAULT_URL, HttpConnection

PromptSource: TypeAlias = PromptCall | str | Mapping[str, Any]
"""A prompt: the call of a prompt program, PML, or `{"schema": …, "modules": […]}`."""

_SCHEMA_UNKNOWN: Final = "E_SCHEMA_UNKNOWN"


@dataclass
class Completion:
    """An answer, with its usage and times."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    """KV found for the prompt: `status`, `tier`, `exact`, …"""
    first_token_s: float | None = None
    """Seconds from the request to the first text; None: the answer is empty."""
    seconds: float = 0.0
    """Seconds from the request to the end of the answer."""


def extra_body(prompt: PromptSource) -> dict[str, Any]:
    """Return the fields of a prompt for OpenAI's client: `create(…, extra_body=extra_body(call))`.

    The server must have the schema already; `Client.extra_body` sends it. OpenAI's client demands a `prompt` for
    plain completions, which these fields replace: pass "".
    """
    if isinstance(prompt, PromptCall):
        return {"prompt": prompt.to_json()}
    if isinstance(prompt, str):
        return {"pml": prompt, "prompt": None}
    return {"prompt": dict(prompt)}


PROGRAM_TTL_S: Final = 7 * 24 * 3600
"""Time to live in seconds of schemas whose names change with their program's text. A client that needs such a
schema later sends it again."""


class Client:
    """A client of one server. Several threads may use it; the end of `with` closes its connections.

    All methods that send requests may raise `RequestError` (`PmlRequestError` if PML is wrong) and
    `UnreachableError`.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """
        Args:
            base_url: Address of the server, with or without `/v1`.
            model: A name under which the server serves its model; None: its first one.
            api_key: Key that is sent as a bearer token.
            timeout_s: Seconds without any data after which a request fails. Requests may wait in a long queue.
            transport: A transport of httpx, for tests.
        """
        self._connection = HttpConnection(base_url, api_key, timeout_s, transport)
        self._model = model
        self.schemas = Schemas(self._connection, model)
        self._known: set[str] = set()
        """Schemas of programs that the server has, as far as this client knows."""
        self._lock = threading.Lock()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._connection.close()

    def complete(
        self, prompt: PromptSource, *, on_text: Callable[[str], None] | None = None, **parameters: Any
    ) -> Completion:
        """Continue a prompt (`/v1/completions`).

        Args:
            prompt: The prompt to continue.
            on_text: Is called with each piece of the answer as it arrives.
            **parameters: Further fields of the request: `max_tokens`, `temperature`, …
        """
        return self._run("/v1/completions", prompt, parameters, on_text)

    def chat(
        self,
        prompt: PromptSource | None,
        messages: str | Sequence[Mapping[str, Any]] = (),
        *,
        on_text: Callable[[str], None] | None = None,
        **parameters: Any,
    ) -> Completion:
        """Answer a conversation that begins with a prompt (`/v1/chat/completions`).

        Args:
            prompt: The prompt in front of the messages; None: there is none.
            messages: The text of a user's message, or messages in OpenAI's form.
            on_text: Is called with each piece of the answer as it arrives.
            **parameters: Further fields of the request: `max_tokens`, `temperature`, …
        """
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        return self._run("/v1/chat/completions", prompt, {"messages": turns, **parameters}, on_text)

    def extra_body(self, prompt: PromptSource) -> dict[str, Any]:
        """Return the fields of a prompt like `extra_body`; send the schema of its program if the server lacks
        it."""
        if isinstance(prompt, PromptCall):
            self.register(prompt.program)
        return extra_body(prompt)

    def register(self, program: PromptProgram[Any], *, cache_salt: str | None = None) -> None:
        """Send the schema of a program, unless this client knows that the server has it."""
        key = f"{cache_salt or ''}/{program.schema_name}"
        with self._lock:
            if key in self._known:
                return
            # A name with a digest always means the same text, so a schema that another process sent will do.
            if not (program.named_by_digest and self._has(program, cache_salt)):
                ttl = PROGRAM_TTL_S if program.named_by_digest else None
                self.schemas.create(program, cache_salt=cache_salt, ttl=ttl)
            self._known.add(key)

    def _has(self, program: PromptProgram[Any], cache_salt: str | None) -> bool:
        try:
            self.schemas.get(program.schema_name, cache_salt=cache_salt)
        except RequestError as error:
            if error.status != 404:
                raise
            return False
        return True

    def _run(
        self,
        path: str,
        prompt: PromptSource | None,
        parameters: Mapping[str, Any],
        on_text: Callable[[str], None] | None,
    ) -> Completion:
        body = {**({} if prompt is None else extra_body(prompt)), **parameters}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self._model is not None:
            body["model"] = self._model
        if not isinstance(prompt, PromptCall):
            return self._collect(path, body, on_text)
        salt = parameters.get("cache_salt")
        self.register(prompt.program, cache_salt=salt)
        try:
            return self._collect(path, body, on_text)
        except RequestError as error:
            if error.code != _SCHEMA_UNKNOWN:
                raise
        with self._lock:  # the server deleted the schema, or another server answers now
            self._known.discard(f"{salt or ''}/{prompt.program.schema_name}")
        self.register(prompt.program, cache_salt=salt)
        return self._collect(path, body, on_text)

    def _collect(self, path: str, body: Mapping[str, Any], on_text: Callable[[str], None] | None) -> Completion:
        answer = Completion()
        started = time.monotonic()
        with contextlib.closing(self._connection.events(path, body)) as events:
            for piece in _take(answer, events):
                if answer.first_token_s is None:
                    answer.first_token_s = time.monotonic() - started
                if on_text is not None:
                    on_text(piece)
        answer.seconds = time.monotonic() - started
        return answer


def _take(answer: Completion, events: Iterator[dict[str, Any]]) -> Iterator[str]:
    """Collect an event stream in `answer`; yield each piece of its text.

    Raises:
        UnreachableError: The events are not those of a completion.
    """
    try:
        for event in events:
            answer.usage = event.get("usage") or answer.usage
            answer.cache = event.get("cache") or answer.cache
            for choice in event["choices"]:
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                piece = choice.get("text") or (choice.get("delta") or {}).get("content")
                if piece:
                    answer.text += piece
                    yield piece
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreachableError(f"the server does not speak the expected protocol: {error!r}") from error
