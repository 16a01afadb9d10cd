"""Who sends a request, found once, before anything is done for it; and whose the things are that it may touch.

    headers ─► Authenticator ─► Identity ─► current_identity() for all that works for the request

Owners. With keys (or a gateway that names tenants), sessions, schemas and cached KV belong to a tenant: others do
not find them, and cannot tell by the time of an answer whether they are there. Without keys there is one owner,
"", whom also the operator's own keys act for, and who has all that was stored before there were keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec

from trunkline.router.errors import ApiError, bad_value
from trunkline.router.request_context import current
from trunkline.router.tenancy.auth import (
    ANONYMOUS,
    KEY_PREFIX,
    NAME,
    Access,
    Key,
    Role,
    TenantRules,
    hash_key,
    key_of,
    may_enter,
)

DEFAULT: Final = "default"
"""The tenant of the one key that is given without a file. It owns what nobody else does."""
ADMIN: Final = "admin"
"""The tenant of the key that a cluster draws at its start."""
SHARED: Final = "shared"
"""The salt of tenants that share their KV with who has none."""
_SALT_MARK: Final = b"\xff"
"""Before a tenant's salt: clients' salts are UTF-8, in which there is no such byte, so none can be made up."""
_SALT_BYTES: Final = 16
_ONCE: Final = ("authorization", "x-api-key", "host")
"""Headers that a proxy and this program might read differently, were they there twice."""


class Identity(msgspec.Struct, frozen=True):
    """Who sends a request."""

    tenant: str = ANONYMOUS
    """The tenant whose limits the request counts against."""
    role: Role | None = None
    """Role of the request's key; None if no role is known."""
    key: str = ""
    """Name of its key, for logs."""
    owner: str = ""
    """Whose sessions and schemas it sees."""
    salt: bytes = b""
    """Of its KV, before what the request says itself."""
    is_all: bool = False
    """Whether it sees those of all owners."""


_NOBODY: Final = Identity()


def current_identity() -> Identity:
    """Return who sends the request at hand."""
    return current().identity or _NOBODY


def cache_salt(given: str | None) -> bytes:
    """Return the salt of the request's KV: its tenant's salt, then `given`, its own."""
    return current_identity().salt + (given or "").encode()


def tenant_salt(name: str) -> bytes:
    """Return the salt of this name, of a tenant or of several that share it."""
    return _SALT_MARK + hashlib.blake2b(name.encode(), digest_size=_SALT_BYTES).digest()


class AuthError(ApiError):
    """401: who sends this must say who they are."""

    def headers(self) -> dict[str, str]:
        """Return `WWW-Authenticate` besides the others."""
        return {**super().headers(), "WWW-Authenticate": 'Bearer realm="trunkline"'}


class Authenticator:
    """Tells who sends a request."""

    def __init__(
        self, *, header: str = "", single_key: str = "", admin_key: str = "", needs_keys: bool = False
    ) -> None:
        """
        Args:
            header: in which a trusted gateway names the tenant; "": there is none.
            single_key: digest of a key that is not in the file; with `header` it is the gateway's.
            admin_key: digest of the key that commands on this machine use.
            needs_keys: whether requests need keys, whatever there are.
        """
        self._header = header
        self._own: dict[str, Key] = {}
        if single_key:
            self._own[single_key] = Key(DEFAULT, DEFAULT, gateway=bool(header))
        if admin_key:
            self._own[admin_key] = Key(ADMIN, ADMIN, Role.ADMIN)
        self._needs_keys = needs_keys or bool(single_key)

    def needs_keys(self, rules: TenantRules) -> bool:
        """Whether requests need keys. Once they do, they do until the process ends: a file whose last key was
        taken out must not open everything."""
        self._needs_keys = self._needs_keys or rules.has_keys
        return self._needs_keys

    def admit(self, headers: Mapping[str, str], access: Access, rules: TenantRules, now: float) -> Identity:
        """Return who sends a request.

        Args:
            access: what it needs.
            now: Unix time in seconds.

        Raises:
            ApiError: 400, it says so in a way that cannot be; 401, nobody knows its key; 403, its key is not for
                this.
        """
        needed = self.needs_keys(rules)
        given = key_of(headers)
        digest = hash_key(given) if given else ""
        key = (self._own.get(digest) or rules.keys.get(digest)) if digest else None
        is_over = key is not None and key.is_over(now)
        if is_over:
            key = None
        if not may_enter(None if key is None else key.role, access, keys_needed=needed):
            raise _refusal(access, key, has_key=bool(given), is_over=is_over, needed=needed)
        named = self._named(headers)
        if named and needed and not (key is not None and (key.gateway or key.role is Role.ADMIN)):
            raise ApiError(
                403,
                f"header {self._header}: this key may not name a tenant; only a gateway's key may",
                kind="permission_error",
                code="insufficient_permissions",
            )
        if named:
            role, name = (Role.USER, "") if key is None else (key.role, key.name)
            return Identity(named, role, name, owner=named, salt=salt_of(named, rules))
        if key is not None:
            return _of_key(key, rules, owns=needed)
        tenant = f"{KEY_PREFIX}{digest[:32]}" if digest else ANONYMOUS
        return Identity(tenant)

    def acting_for(self, identity: Identity, tenant: str, rules: TenantRules) -> Identity:
        """Return an admin's identity acting for a tenant.

        Raises:
            ApiError: 400, that is no tenant's name; 403, it is no admin.
        """
        if identity.role is not Role.ADMIN:
            raise ApiError(
                403,
                "`tenant` needs an admin's key",
                kind="permission_error",
                param="tenant",
                code="insufficient_permissions",
            )
        if not NAME.fullmatch(tenant):
            raise bad_value(
                "tenant", "`tenant`: a tenant's name has 1 to 128 printable ASCII characters, no spaces"
            )
        if tenant in (DEFAULT, ANONYMOUS, ADMIN):
            return msgspec.structs.replace(identity, owner="", salt=b"", is_all=False)
        salt = salt_of(tenant, rules)
        return msgspec.structs.replace(identity, owner=tenant, salt=salt, is_all=False)

    def _named(self, headers: Mapping[str, str]) -> str:
        """Return the tenant that a gateway names; "": none."""
        name = headers.get(self._header) if self._header else None
        if not name:
            return ""
        if sum(given.lower() == self._header.lower() for given in headers) > 1:
            # A gateway that adds its own instead of replacing the client's would let clients choose.
            raise bad_value(self._header, f"header {self._header}: it is given more than once")
        if not NAME.fullmatch(name):
            raise bad_value(
                self._header,
                f"header {self._header}: a tenant's name has 1 to 128 printable ASCII characters, no spaces",
            )
        return name


def check_once(headers: Mapping[str, str]) -> None:
    """Refuse two headers where there can be one only.

    Raises:
        ApiError: 400.
    """
    given = [name.lower() for name in headers]
    for name in _ONCE:
        if given.count(name) > 1:
            raise bad_value(name, f"header {name}: it is given more than once")


def salt_of(tenant: str, rules: TenantRules) -> bytes:
    """Return a tenant's salt: its own, unless the operator lets it share its KV with others."""
    name = rules.salts.get(tenant)
    if name == SHARED:
        return b""
    return tenant_salt(f"tenant/{tenant}" if name is None else f"group/{name}")


def _of_key(key: Key, rules: TenantRules, *, owns: bool) -> Identity:
    is_admin = key.role is Role.ADMIN
    if not owns or key.tenant in (DEFAULT, ADMIN, ANONYMOUS):
        return Identity(key.tenant, key.role, key.name, is_all=is_admin)
    return Identity(key.tenant, key.role, key.name, key.tenant, salt_of(key.tenant, rules), is_admin)


def _refusal(access: Access, key: Key | None, *, has_key: bool, is_over: bool, needed: bool) -> ApiError:
    if key is not None:
        return ApiError(
            403,
            f"this needs a key of role {access.value}; this one's role is {key.role.value}",
            kind="permission_error",
            code="insufficient_permissions",
        )
    wanted = "an API key" if needed and access is not Access.ADMIN else f"a key of role {access.value}"
    how = "send it as `Authorization: Bearer KEY`"
    if is_over:
        text = "this API key has expired"
    elif has_key:
        text = f"Incorrect API key provided: this needs {wanted} that the server knows"
    else:
        text = f"this needs {wanted}; {how}"
    return AuthError(401, text, code="invalid_api_key")
