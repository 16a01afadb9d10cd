"""What a controller receives about adapters: from workers, and from routers. Part of `messages`."""

from __future__ import annotations

import msgspec


class AdapterReady(msgspec.Struct, array_like=True, frozen=True, tag="adapter_ready"):
    """A rank has read an adapter, or has found that it cannot be used."""

    rank: int
    ticket: int
    """Number of the order (`LoadAdapter`)."""
    key: bytes = b""
    """Key of the adapter: it depends on its name and the content of its files."""
    problem: str = ""
    """Why it cannot be used; "": it can."""


class AdapterCall(msgspec.Struct, array_like=True, frozen=True, tag="adapter"):
    """Load an adapter, or unload it. Answered by `AdapterReply`: when all ranks have it, or when no new request
    can use it any more."""

    ticket: int
    name: str
    path: str = ""
    """Its folder, on the hosts of the group; "": unload it."""
