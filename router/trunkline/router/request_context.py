"""The context of the HTTP request at hand: its log record, its identity (the tenant that sends it), the meter that
counts its tokens, and its random numbers.

    RequestMiddleware ─► id, record     AccessMiddleware ─► identity, meter     ReplayMiddleware ─► random

Each layer of the middleware adds its part with `known`. Code in the request's task, or in a task started by it,
reads the parts with `current`. Outside of a request, as in a health probe, all parts are absent.

With an `Idempotency-Key` the seed and the ids of a request follow from the key: the same request, sent again to
any router, gets the same text and the same ids.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from trunkline.router.telemetry.request_record import RequestRecord
    from trunkline.router.tenancy.auth import Identity
    from trunkline.router.tenancy.tenants import Meter
    from trunkline.router.text.conversation_memory import ConversationMemory


class RequestRandom:
    """Random bytes that follow from a request's name. Each purpose has a sequence of its own, which does not
    depend on what is drawn for other purposes."""

    def __init__(self, name: bytes, created: int) -> None:
        """
        Args:
            name: name of the request, 1 to 64 bytes. A repeated request has the same name as the first one.
            created: Unix time in seconds at which the request first came.
        """
        self.name = name
        self.created = created
        self._counts: Counter[str] = Counter()

    def draw(self, purpose: str, size: int) -> bytes:
        """Return the next `size` bytes, 64 at most, for a purpose."""
        number = self._counts[purpose]
        self._counts[purpose] += 1
        return hashlib.blake2b(f"{purpose} {number}".encode(), key=self.name, digest_size=size).digest()


@dataclass(slots=True)
class AdapterChoice:
    """The adapter of a request. It changes while the request is read, also in tasks of its own."""

    name: str = ""
    key: bytes = b""


class RequestContext(msgspec.Struct, frozen=True):
    """The parts of a request's context; None: the part is not set yet, or the request has none."""

    record: RequestRecord | None = None
    """The request's id, its trace, and the fields of its log line."""
    identity: Identity | None = None
    """The tenant that sends the request, and what its key may do."""
    meter: Meter | None = None
    """The tenant's account to which the request's tokens are charged."""
    random: RequestRandom | None = None
    """The source of the request's random bytes; None: the request has no `Idempotency-Key`."""
    conversations: ConversationMemory | None = None
    """What the router remembers of conversations; None: nothing."""
    in_task: bool = False
    """Whether the request is made by a task (`tasks/`), not sent by a client."""
    is_behind: bool = False
    """Whether the request stands behind all requests that clients wait for, as those of batches do."""
    choice: AdapterChoice | None = None
    """The adapter that the request has chosen, once its body is read."""

    @property
    def adapter(self) -> str:
        """Name of the adapter that the request has chosen as its model; "": the base model."""
        return "" if self.choice is None else self.choice.name

    @property
    def adapter_key(self) -> bytes:
        """The key of that adapter, with which the salts of the request's KV begin."""
        return b"" if self.choice is None else self.choice.key


_current: Final[ContextVar[RequestContext]] = ContextVar("request_context", default=RequestContext())  # noqa: B039


def current() -> RequestContext:
    """Return the context of the request at hand."""
    return _current.get()


class _Known:
    """What `known` returns. A generator would run more code at the beginning of each request."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._token: Token[RequestContext] | None = None

    def __enter__(self) -> None:
        self._token = _current.set(self._context)

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current.reset(self._token)


def known(**parts: Any) -> AbstractContextManager[None]:
    """Add parts to the current context inside of a `with` block, and in tasks that are started there."""
    return _Known(msgspec.structs.replace(_current.get(), **parts))


def log_fields() -> dict[str, str]:
    """Return what log lines say of the request at hand: its ids, its tenant and the name of its key."""
    context = _current.get()
    fields: dict[str, str] = {}
    if context.record is not None:
        fields["request_id"] = context.record.id
        if context.record.trace is not None:
            fields["trace_id"] = context.record.trace.context.trace_id.hex()
    if context.identity is not None:
        named = {"tenant": context.identity.tenant, "key": context.identity.key}
        fields.update({name: value for name, value in named.items() if value})
    return fields


def choose_adapter(name: str, key: bytes) -> None:
    """Set the adapter of the request at hand; "": the base model."""
    choice = _current.get().choice
    assert choice is not None, "without a request at hand, the choice would be lost, and the base model answer"
    choice.name, choice.key = name, key


def request_name() -> bytes:
    """Return the name of the request at hand; b"": it has no `Idempotency-Key`, and so no name."""
    random = _current.get().random
    return b"" if random is None else random.name


def draw_bytes(purpose: str, size: int) -> bytes:
    """Return up to 64 random bytes. A request that is repeated with its `Idempotency-Key` gets the same ones."""
    random = _current.get().random
    return os.urandom(size) if random is None else random.draw(purpose, size)


def draw_hex(purpose: str, size: int) -> str:
    """Return the result of `draw_bytes` in hexadecimal."""
    return draw_bytes(purpose, size).hex()


def draw_seed() -> int:
    """Return a seed for a request without one, so that a stream can be continued elsewhere."""
    return int.from_bytes(draw_bytes("seed", 8), "little")


def created_at() -> int:
    """Return the Unix time in seconds at which the request at hand was made. For a repeated request it is the time
    of the first one."""
    random = _current.get().random
    return int(time.time()) if random is None else random.created
