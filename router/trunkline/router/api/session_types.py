"""`/v1/sessions`: its requests as pydantic models, its answers as structs."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from trunkline.kvstore.cuts import DROPS_MAX
from trunkline.router.jobs.late_model import LateModel
from trunkline.router.jobs.parameters import Metadata, ModulesPrompt, SessionId, SessionTtl, Trailing, Truncation
from trunkline.router.jobs.request_models import Messages
from trunkline.router.stores.session_state import SessionModules, SessionState
from trunkline.router.text.truncation import TokenSpan

DISCARDS_MAX: Final = DROPS_MAX - 1
"""Largest number of discarded ranges of a session: one less than the engine accepts, because a cut may add one."""


def _ranges(value: Any) -> Any:
    whole = isinstance(value, list) and all(
        isinstance(item, list) and len(item) == 2 and all(type(end) is int for end in item) for item in value
    )
    if not whole:
        raise PydanticCustomError("tokens", "must be a list of ranges [first, end] of token numbers")
    if not 1 <= len(value) <= DISCARDS_MAX:
        raise PydanticCustomError("tokens", f"must have 1 to {DISCARDS_MAX} ranges, not {len(value)}")
    return value


_PAIR: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2}
_RANGES: Final[dict[str, Any]] = {"type": "array", "items": _PAIR, "minItems": 1, "maxItems": DISCARDS_MAX}
_Ranges = Annotated[Any, BeforeValidator(_ranges), WithJsonSchema(_RANGES)]
_Index = Annotated[int, Field(ge=0)]


class SessionUpdate(LateModel):
    """The request `PATCH /v1/sessions/{id}`. Fields that are missing or null stay as they are."""

    model_config = ConfigDict(strict=True, extra="forbid")

    ttl: SessionTtl | None = None
    truncation: Truncation | None = None
    metadata: Metadata | None = None

    def apply(self, session: SessionState) -> None:
        """Apply the changes to a session."""
        if self.ttl is not None:
            session.ttl = float(self.ttl)
        if self.truncation is not None:
            session.truncation = self.truncation.policy()
        if self.metadata is not None:
            session.metadata = self.metadata


class ForkRequest(SessionUpdate):
    """The request `POST /v1/sessions/{id}/fork`: changes in the copy."""

    while_busy: Literal["wait", "refuse", "before"] | None = None
    """What happens while a turn is being made: the fork waits for it (None, too), is refused, or has the history
    before it."""


class SessionRequest(SessionUpdate):
    """The request `POST /v1/sessions`."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None
    messages: Annotated[Messages, Field(min_length=1)] | None = None
    """First messages of the conversation."""
    pml: str | None = None
    """A prompt of modules that precedes every turn, in PML."""
    prompt: ModulesPrompt | None = None
    """A prompt of modules that precedes every turn, as an object."""
    schema_: Annotated[str | None, Field(alias="schema", min_length=1)] = None
    """The name of a schema whose own texts precede every turn."""
    trailing: Trailing | None = None
    cache_salt: SessionId | None = None
    """The salt that the schema was made with."""

    @model_validator(mode="after")
    def _check_modules(self) -> SessionRequest:
        given = [name for name in ("pml", "prompt", "schema_") if getattr(self, name) is not None]
        if len(given) > 1:
            raise PydanticCustomError(
                "prompt", "give one of `pml`, `prompt` and `schema`", {"param": given[1].rstrip("_")}
            )
        if self.trailing is not None and not given:
            raise PydanticCustomError(
                "trailing", "is about prompts of modules (`pml`, `prompt`, `schema`)", {"param": "trailing"}
            )
        return self

    @property
    def modules_param(self) -> str:
        """The parameter that gives the modules."""
        return "pml" if self.pml is not None else "schema" if self.schema_ is not None else "prompt"

    def modules(self) -> SessionModules | None:
        """Return the modules that precede every turn; None if there are none."""
        source = self.pml if self.pml is not None else self.prompt
        if self.schema_ is not None:
            source = {"schema": self.schema_, "modules": []}
        if source is None:
            return None
        return SessionModules(source, self.trailing or "fixed", self.cache_salt or "")


class DiscardRequest(LateModel):
    """The request `POST /v1/sessions/{id}/discard`, with one of both fields."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tokens: _Ranges | None = None
    """Ranges of history tokens that are to be hidden. The end of a range is not part of it."""
    messages: Annotated[list[_Index], Field(min_length=1, max_length=DISCARDS_MAX)] | None = None
    """Indices of messages that are to be hidden."""

    @model_validator(mode="after")
    def _check_one(self) -> DiscardRequest:
        if (self.tokens is None) == (self.messages is None):
            raise PydanticCustomError("tokens", "give either `tokens` or `messages`", {"param": "tokens"})
        return self


class Keeps(msgspec.Struct):
    """`truncation.keep`."""

    instructions: bool
    sink_tokens: int


class SessionTruncation(msgspec.Struct):
    """`truncation` where it is not "disabled"."""

    retention_ratio: float
    keep: Keeps
    type: Literal["retention_ratio"] = "retention_ratio"


class SessionObject(msgspec.Struct, kw_only=True):
    """A session in answers to clients. Times are Unix time in seconds."""

    id: str
    object: Literal["session"] = "session"
    created_at: int
    last_used_at: int
    expires_at: int
    """Time at which the session is deleted if it is not used before."""
    ttl: int
    """Seconds without use after which the session is deleted."""
    model: str
    parent: str | None
    """Id of the session that this one was forked from; None: it was not forked."""
    schema: str | None
    """The schema whose modules precede every turn."""
    turns: int
    """Number of requests that were answered."""
    tokens: int
    """Tokens of the whole history, including discarded ones."""
    discards: list[TokenSpan]
    """Ranges of history tokens that no later request sees."""
    message_count: int
    truncation: SessionTruncation | Literal["disabled"]
    metadata: dict[str, str]
    messages: list[dict[str, Any]] | UnsetType = UNSET
    """The session's messages, with `?include=messages`."""


class SessionSummary(msgspec.Struct, kw_only=True):
    """A session in a list."""

    id: str
    object: Literal["session"] = "session"
    tenant: str | UnsetType = UNSET
    """The session's tenant; for admins only."""
    created_at: int
    last_used_at: int
    expires_at: int


class SessionList(msgspec.Struct, kw_only=True):
    """`GET /v1/sessions`."""

    object: Literal["list"] = "list"
    data: list[SessionSummary]
    first_id: str | None
    last_id: str | None
    """The value of `after` for the next page."""
    has_more: bool


class SessionDeleted(msgspec.Struct, kw_only=True):
    """`DELETE /v1/sessions/{id}`."""

    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: bool = True


class SessionPrefetch(msgspec.Struct, kw_only=True):
    """`POST /v1/sessions/{id}/prefetch`."""

    id: str
    object: Literal["session.prefetch"] = "session.prefetch"
    tokens: int
    """Tokens of the history, with which the next request begins."""
    known_tokens: int
    """Number of tokens of the history whose KV is in some tier."""
    coming_tokens: int
    """Number of tokens of the history whose KV is now being fetched from a slow tier."""
