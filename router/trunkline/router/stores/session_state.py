"""The state of a stored session: what the header of its record says, and its history. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from trunkline.router.stores.session_history import History
from trunkline.router.text.truncation import RetentionPolicy

_FORMAT: Final = 2
"""Number of the format of headers: 2, the history is in the record's segments. A header without a number was
written by an earlier version and has the whole history in it."""
_NO_HISTORY: Final = History()


class SessionModules(msgspec.Struct, frozen=True, omit_defaults=True):
    """The prompt of modules that precedes every turn of a session."""

    source: str | dict[str, Any]
    """PML, or the equivalent JSON object."""
    trailing: Literal["fixed", "compact"] = "fixed"
    salt: str = ""
    """`cache_salt` under which the schema is found and KV is shared."""
    schema: str = ""
    """Name of the schema, for answers to clients."""


class LastTurn(msgspec.Struct, frozen=True, array_like=True):
    """What is needed to undo a session's last turn, when its request is sent again."""

    request: bytes
    """Name of the turn's request (`request_context.py`)."""
    base: bytes
    """Name of the record's segment before the turn; b"": the turn was the beginning of the history."""


class SessionState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A stored session. All fields but `history` are the header of its record. New fields need a default: older
    headers lack them."""

    format: int = 0
    """Set by `pack_header`."""
    model: str
    truncation: RetentionPolicy | None = None
    """How to cut a prompt that does not fit; None: it is refused."""
    ttl: float = 0.0
    """Seconds without use after which the session is deleted; 0: the client gave none."""
    metadata: dict[str, str] = {}
    turns: int = 0
    parent: str = ""
    """Id of the session that this one was forked from."""
    modules: SessionModules | None = None
    last_turn: LastTurn | None = None
    """The last turn, if its request has a name under which it may be sent again."""
    answer: bytes = b""
    """A stored response as its client got it, as JSON; b"": this is no response."""
    token_count: int = 0
    """Tokens of the history as it was stored, for readers of headers alone."""
    message_count: int = 0
    """Messages of the history as it was stored."""
    adapter: str = ""
    """Name of the adapter with which the last turn was made; "": the model alone."""
    history: History = _NO_HISTORY


def pack_header(session: SessionState) -> bytes:
    """Return the header of a session's record."""
    history = session.history
    header = replace(
        session,
        format=_FORMAT,
        token_count=history.token_count,
        message_count=len(history.messages),
        history=_NO_HISTORY,
    )
    return msgspec.msgpack.encode(header)


def unpack_header(header: bytes) -> tuple[SessionState, bool]:
    """Return the session in the header of its record, and whether its history is in the header, too. If not, the
    session's history is empty.

    Raises:
        ValueError: this is no header of a session.
    """
    try:
        session = msgspec.msgpack.decode(header, type=SessionState)
        if session.format:
            return session, False
        history = msgspec.msgpack.decode(header, type=History)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a session: {error}") from error
    counts = {"token_count": history.token_count, "message_count": len(history.messages)}
    return replace(session, history=history, **counts), True


class ModulesName(msgspec.Struct, frozen=True):
    """The part of `SessionModules` that lists of sessions show."""

    schema: str = ""


class HeaderSummary(msgspec.Struct, frozen=True):
    """The part of a header that lists of sessions show."""

    turns: int = 0
    parent: str = ""
    token_count: int = 0
    modules: ModulesName | None = None
    tokens: bytes = b""
    """The history's tokens, in headers of earlier versions, which have no `token_count`."""


def summary_of(header: bytes) -> HeaderSummary:
    """Return the part of a header that lists of sessions show.

    Raises:
        ValueError: this is no header of a session.
    """
    try:
        return msgspec.msgpack.decode(header, type=HeaderSummary)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a session: {error}") from error
