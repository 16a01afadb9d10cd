"""Identities: who sends a request, what its key may do, and whose sessions, schemas and cached KV it sees.

    headers ─► Authenticator ─► Identity ─► current_identity() in all code that works for the request
    path ─► access_needed ─► may_enter(role of the key) ─► served, or 401, 403

An endpoint without a line in the table of this module is `Access.UNKNOWN` and is not served: no key opens an
endpoint that was added without being classified.

Owners. With keys (or a gateway that names tenants), sessions, schemas and cached KV belong to a tenant. Other
tenants do not find them, and cannot tell from the time of an answer whether they exist. Without keys there is one
owner, "". The operator's own keys act for this owner, too. It has all that was stored before there were keys.
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

from trunkline.kvstore.adapters import adapter_salt
from trunkline.router.config import NO_LIMITS, TenantLimits
from trunkline.router.errors import ApiError, bad_value
from trunkline.router.request_context import current

KEY_TOKEN: Final = "tl-"
"""Prefix of every generated key, by which people and secret scanners recognise it."""
_KEY_BYTES: Final = 32
ANONYMOUS: Final = "anonymous"
"""The tenant of requests without a key."""
KEY_PREFIX: Final = "key-"
"""Prefix of the name of a tenant that is known only by its key."""
NAME: Final = re.compile(r"[\x21-\x7e]{1,128}")
"""Matches the names that a tenant may have."""
_LOOPBACK_NAME: Final = re.compile(r"(?:[a-z0-9-]+\.)*localhost")
DEFAULT: Final = "default"
"""The tenant of the one key that is given without a file. It owns everything that no other tenant owns."""
ADMIN: Final = "admin"
"""The tenant of the key that a cluster draws at its start."""
SHARED: Final = "shared"
"""Name of the salt that a tenant has to share its KV with requests that have no salt."""
_SALT_MARK: Final = b"\xff"
"""First byte of a tenant's salt. Clients' salts are UTF-8, which never has it, so no client can forge one."""
_SALT_BYTES: Final = 16
_ONCE: Final = ("authorization", "x-api-key", "host")
"""Headers that a request may have only once. Of two such headers, a proxy and this program might read different
ones."""


class KeyRole(StrEnum):
    """The role of a key, which says what the key may do."""

    USER = "user"
    """The key may generate text, and use the sessions and schemas of its own tenant."""
    METRICS = "metrics"
    """The key may read metrics, and do nothing else."""
    ADMIN = "admin"
    """The key may do everything."""


class Access(StrEnum):
    """The access that an endpoint asks of a request's key."""

    OPEN = "open"
    """Requests need no key: the endpoint shows no tenant's data."""
    USER = "user"
    METRICS = "metrics"
    ADMIN = "admin"
    UNKNOWN = "unknown"
    """The router has no endpoint at this path. Requests are refused with every key."""


class Key(msgspec.Struct, frozen=True):
    """The properties of a key. The router does not have the key itself, only its digest."""

    tenant: str
    name: str = ""
    """Name of the key, for logs, and so that the operator knows which key to revoke."""
    role: KeyRole = KeyRole.USER
    expires: float | None = None
    """Unix time in seconds at which the key expires; None: never."""
    gateway: bool = False
    """Whether requests with this key may name a tenant in a header."""

    def is_over(self, now: float) -> bool:
        """Return whether the key has expired. `now`: Unix time in seconds."""
        return self.expires is not None and now >= self.expires


class TenantRules(msgspec.Struct, frozen=True):
    """All rules about tenants that the operator has set."""

    default: TenantLimits = NO_LIMITS
    tenants: dict[str, TenantLimits] = {}
    """Limits by name of the tenant. Tenants that are not in it have the limits `default`."""
    keys: dict[str, Key] = {}
    """Keys by their SHA-256 in hexadecimal."""
    salts: dict[str, str] = {}
    """Names of salts by tenant, for tenants that share their salt with others. All other tenants have salts of
    their own."""
    has_keys: bool = False
    """Whether requests need a key, even if the file has no keys or has lost its last one."""

    def limits_of(self, name: str) -> TenantLimits:
        """Return a tenant's limits."""
        return self.tenants.get(name, self.default)


_EXACT: Final = {
    "/": Access.OPEN,
    "/health": Access.OPEN,
    "/ping": Access.OPEN,
    "/load": Access.OPEN,
    "/version": Access.OPEN,
    "/docs": Access.OPEN,
    "/openapi.json": Access.OPEN,
    "/ui": Access.OPEN,
    "/ui/": Access.OPEN,
    "/metrics": Access.METRICS,
    "/flush_cache": Access.ADMIN,
    "/reset_prefix_cache": Access.ADMIN,
    "/v1/load_lora_adapter": Access.ADMIN,
    "/v1/unload_lora_adapter": Access.ADMIN,
    "/tokenize": Access.USER,
    "/detokenize": Access.USER,
    "/tokenizer_info": Access.USER,
    "/v1/models": Access.USER,
    "/v1/chat/completions": Access.USER,
    "/v1/completions": Access.USER,
    "/v1/embeddings": Access.USER,
    "/score": Access.USER,
    "/v1/score": Access.USER,
    "/rerank": Access.USER,
    "/v1/rerank": Access.USER,
    "/v2/rerank": Access.USER,
    "/v1/responses": Access.USER,
    "/v1/conversations": Access.USER,
    "/v1/messages": Access.USER,
    "/v1/messages/count_tokens": Access.USER,
    "/v1/messages/batches": Access.USER,
    "/v1/files": Access.USER,
    "/v1/batches": Access.USER,
    "/v1/sessions": Access.USER,
    "/v1/schemas": Access.USER,
    **{
        f"/api/{name}": Access.USER
        for name in ("chat", "generate", "embed", "embeddings", "tags", "show", "ps", "version")
    },
}
_BELOW: Final = {
    "/ui/static/": Access.OPEN,
    "/ui/api/": Access.ADMIN,
    "/v1/models/": Access.USER,
    "/v1/responses/": Access.USER,
    "/v1/conversations/": Access.USER,
    "/v1/files/": Access.USER,
    "/v1/batches/": Access.USER,
    "/v1/messages/batches/": Access.USER,
    "/v1/sessions/": Access.USER,
    "/v1/schemas/": Access.USER,
}
"""What endpoints ask of a key, by the beginning of their path."""


def access_needed(path: str) -> Access:
    """Return what an endpoint asks of a key. Reading asks as much as writing: each tenant has data of its own."""
    exact = _EXACT.get(path)
    if exact is not None:
        return exact
    for beginning, access in _BELOW.items():
        if path.startswith(beginning):
            return access
    return Access.UNKNOWN


def may_enter(role: KeyRole | None, access: Access, *, keys_needed: bool) -> bool:
    """Return whether a request may use an endpoint.

    Args:
        role: role of the request's key; None: it has no key that the router knows.
        keys_needed: whether requests need keys; otherwise only the admin's endpoints need one.
    """
    if access is Access.UNKNOWN:
        return False
    if access is Access.OPEN or role is KeyRole.ADMIN:
        return True
    if not keys_needed and access is not Access.ADMIN:
        return True
    return role is not None and role.value == access.value


# -- keys


def key_of(headers: Mapping[str, str]) -> str:
    """Return the key in a request's headers; "": it has none."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return headers.get("x-api-key", "").strip()


def hash_key(key: str) -> str:
    """Return a key's SHA-256 in hexadecimal, as in the file of tenants. The key itself is never stored or logged.

    Keys are looked up by their digests, so the time of a look-up tells nothing about the valid keys. A key has 256
    random bits, so neither a slow hash nor a limit on wrong guesses is needed.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def draw_key() -> str:
    """Return a new key of 256 random bits."""
    return KEY_TOKEN + secrets.token_urlsafe(_KEY_BYTES)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address. `host`: a number, or `localhost`."""
    text = host.strip("[]").lower()
    if _LOOPBACK_NAME.fullmatch(text):
        return True
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False  # also 127.example.com


class Identity(msgspec.Struct, frozen=True):
    """The sender of a request, and what the sender may see."""

    tenant: str = ANONYMOUS
    """The tenant whose limits the request counts against."""
    role: KeyRole | None = None
    """Role of the request's key; None: it has no key that the router knows."""
    key: str = ""
    """Name of the request's key, for logs."""
    owner: str = ""
    """The owner whose sessions and schemas the request sees."""
    salt: bytes = b""
    """Salt of the tenant's KV. In chunk names, the request's own salt follows it."""
    is_all: bool = False
    """Whether the request sees the sessions and schemas of all owners."""


_ANONYMOUS: Final = Identity()


def current_identity() -> Identity:
    """Return who sends the request at hand."""
    return current().identity or _ANONYMOUS


def cache_salt(given: str | None) -> bytes:
    """Return the salt of the request's KV: its adapter's key, its tenant's salt, then `given`, its own."""
    return adapter_salt(current().adapter_key, current_identity().salt + (given or "").encode())


def tenant_salt(name: str) -> bytes:
    """Return the salt with this name. One tenant has it, or several share it."""
    return _SALT_MARK + hashlib.blake2b(name.encode(), digest_size=_SALT_BYTES).digest()


class AuthError(ApiError):
    """401: the request needs a valid key."""

    def headers(self) -> dict[str, str]:
        """Return `WWW-Authenticate` and the headers of every `ApiError`."""
        return {**super().headers(), "WWW-Authenticate": 'Bearer realm="trunkline"'}


class Authenticator:
    """Finds out from a request's headers who sends it."""

    def __init__(
        self, *, header: str = "", single_key: str = "", admin_key: str = "", needs_keys: bool = False
    ) -> None:
        """
        Args:
            header: name of the header in which a trusted gateway names the tenant; "": there is no gateway.
            single_key: digest of a key that is not in the file; with `header` it is the gateway's key.
            admin_key: digest of the key that commands on this machine use.
            needs_keys: whether requests need keys even if neither the file nor `single_key` has any.
        """
        self._header = header
        self._own: dict[str, Key] = {}
        if single_key:
            self._own[single_key] = Key(DEFAULT, DEFAULT, gateway=bool(header))
        if admin_key:
            self._own[admin_key] = Key(ADMIN, ADMIN, KeyRole.ADMIN)
        self._needs_keys = needs_keys or bool(single_key)

    def needs_keys(self, rules: TenantRules) -> bool:
        """Return whether requests need keys. Once they do, they do until the process ends: removing the last key
        from the file must not open the server to everyone."""
        self._needs_keys = self._needs_keys or rules.has_keys
        return self._needs_keys

    def admit(self, headers: Mapping[str, str], access: Access, rules: TenantRules, now: float) -> Identity:
        """Return who sends a request.

        Args:
            access: what the request's endpoint asks of its key.
            now: Unix time in seconds.

        Raises:
            ApiError: 400, a header is malformed; 401, the router does not know the key; 403, the key may not do
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
        if named and needed and not (key is not None and (key.gateway or key.role is KeyRole.ADMIN)):
            raise ApiError(
                403,
                f"header {self._header}: this key may not name a tenant; only a gateway's key may",
                kind="permission_error",
                code="insufficient_permissions",
            )
        if named:
            role, name = (KeyRole.USER, "") if key is None else (key.role, key.name)
            return Identity(named, role, name, owner=named, salt=salt_of(named, rules))
        if key is not None:
            return _of_key(key, rules, owns=needed)
        tenant = f"{KEY_PREFIX}{digest[:32]}" if digest else ANONYMOUS
        return Identity(tenant)

    def acting_for(self, identity: Identity, tenant: str, rules: TenantRules) -> Identity:
        """Return an admin's identity acting for a tenant.

        Raises:
            ApiError: 400, `tenant` is no tenant's name; 403, the identity is no admin's.
        """
        if identity.role is not KeyRole.ADMIN:
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
        """Return the tenant that a gateway names in its header; "": it names none."""
        name = headers.get(self._header) if self._header else None
        if not name:
            return ""
        if sum(given.lower() == self._header.lower() for given in headers) > 1:
            # With a gateway that adds its header beside the client's, clients could choose their tenant.
            raise bad_value(self._header, f"header {self._header}: it is given more than once")
        if not NAME.fullmatch(name):
            raise bad_value(
                self._header,
                f"header {self._header}: a tenant's name has 1 to 128 printable ASCII characters, no spaces",
            )
        return name


def check_once(headers: Mapping[str, str]) -> None:
    """Refuse a request that has one of the headers `_ONCE` more than once.

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
    is_admin = key.role is KeyRole.ADMIN
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
