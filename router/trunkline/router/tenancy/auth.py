"""Which key may do what. Pure: no clock, no I/O.

    (method, path) ─► access_needed ─► may_enter(role of the key) ─► served, or 401, 403

An endpoint that is not classified here is `UNKNOWN`, and is not served: one that is added without a line in the
table cannot be reached with any key.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from trunkline.router.config import NO_LIMITS, TenantLimits

KEY_TOKEN: Final = "tl-"
"""Prefix of every generated key, by which people and secret scanners recognise it."""
_KEY_BYTES: Final = 32
ANONYMOUS: Final = "anonymous"
"""The tenant of requests without a key."""
KEY_PREFIX: Final = "key-"
"""Begins the names of tenants that are known by nothing but their key."""
NAME: Final = re.compile(r"[\x21-\x7e]{1,128}")
"""What a tenant may be called."""


class Role(StrEnum):
    """What a key is for."""

    USER = "user"
    """Text, sessions and schemas of its own tenant."""
    METRICS = "metrics"
    """Scraping, and nothing else."""
    ADMIN = "admin"
    """Everything."""


class Access(StrEnum):
    """Who gets in."""

    OPEN = "open"
    """Everyone: it shows no one's data."""
    USER = "user"
    METRICS = "metrics"
    ADMIN = "admin"
    UNKNOWN = "unknown"
    """No one: there is no such endpoint."""


class Key(msgspec.Struct, frozen=True):
    """What is known of a key; the key itself is not."""

    tenant: str
    name: str = ""
    """For logs, and to tell which key to revoke."""
    role: Role = Role.USER
    expires: float | None = None
    """Unix time in seconds from which on it opens nothing; None: never."""
    gateway: bool = False
    """Whether it may name the tenant that a request is for."""

    def is_over(self, now: float) -> bool:
        """Whether it has expired. `now`: Unix time in seconds."""
        return self.expires is not None and now >= self.expires


class TenantRules(msgspec.Struct, frozen=True):
    """All rules about tenants that the operator has set."""

    default: TenantLimits = NO_LIMITS
    tenants: dict[str, TenantLimits] = {}
    """By name; of the others `default` holds."""
    keys: dict[str, Key] = {}
    """By the SHA-256 of a key, in hexadecimal."""
    salts: dict[str, str] = {}
    """Names of the salts of tenants that do not have one for themselves."""
    has_keys: bool = False
    """Whether a key is needed, also if there is none (any more)."""

    def limits_of(self, name: str) -> TenantLimits:
        """Return a tenant's limits."""
        return self.tenants.get(name, self.default)


_EXACT: Final = {
    "/": Access.OPEN,
    "/health": Access.OPEN,
    "/version": Access.OPEN,
    "/openapi.json": Access.OPEN,
    "/ui": Access.OPEN,
    "/ui/": Access.OPEN,
    "/metrics": Access.METRICS,
    "/flush_cache": Access.ADMIN,
    "/reset_prefix_cache": Access.ADMIN,
    "/tokenize": Access.USER,
    "/detokenize": Access.USER,
    "/v1/models": Access.USER,
    "/v1/chat/completions": Access.USER,
    "/v1/completions": Access.USER,
    "/v1/responses": Access.USER,
    "/v1/messages": Access.USER,
    "/v1/messages/count_tokens": Access.USER,
    "/v1/sessions": Access.USER,
    "/v1/schemas": Access.USER,
}
_BELOW: Final = {
    "/ui/static/": Access.OPEN,
    "/ui/api/": Access.ADMIN,
    "/v1/models/": Access.USER,
    "/v1/sessions/": Access.USER,
    "/v1/schemas/": Access.USER,
}
"""Of all paths that begin so."""


def access_needed(method: str, path: str) -> Access:
    """Return who may call an endpoint. Reading needs no other key than writing: each tenant's data is its own."""
    del method
    exact = _EXACT.get(path)
    if exact is not None:
        return exact
    for beginning, access in _BELOW.items():
        if path.startswith(beginning):
            return access
    return Access.UNKNOWN


def may_enter(role: Role | None, access: Access, *, keys_needed: bool) -> bool:
    """Whether a request gets in.

    Args:
        role: of its key; None: it has none that is known.
        keys_needed: whether there are keys at all; without any, only what an admin may do needs one.
    """
    if access is Access.UNKNOWN:
        return False
    if access is Access.OPEN or role is Role.ADMIN:
        return True
    if not keys_needed and access is not Access.ADMIN:
        return True
    return role is not None and role.value == access.value


# -- keys


def key_of(headers: Mapping[str, str]) -> str:
    """Return the key that a request was sent with; "": none."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return headers.get("x-api-key", "").strip()


def hash_key(key: str) -> str:
    """Return a key's SHA-256 in hexadecimal, as it stands in a file. No key itself is kept or logged.

    A key is found by its digest, so how long the comparison takes says nothing of the keys that there are. With
    256 random bits it need not be hashed slowly, nor guessing be slowed down.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def draw_key() -> str:
    """Return a new key of 256 random bits."""
    return KEY_TOKEN + secrets.token_urlsafe(_KEY_BYTES)


_LOOPBACK_NAME: Final = re.compile(r"(?:[a-z0-9-]+\.)*localhost")


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches an address, given as a number or as `localhost`."""
    text = host.strip("[]").lower()
    if _LOOPBACK_NAME.fullmatch(text):
        return True
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False  # also 127.example.com
