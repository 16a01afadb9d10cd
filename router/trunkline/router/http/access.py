"""The door: in front of all endpoints, it finds out who sends a request and whether they may.

With keys, the key decides. Without any (a laptop), everybody on the machine may ask for text; what is left to fear
are pages in its browser, which reach local addresses, too. They are known by what browsers tell: a name in `Host`
that is not this machine's (DNS rebinding), an `Origin` that is another page's, a form's content type.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Final
from urllib.parse import parse_qs

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from trunkline.router.errors import ApiError
from trunkline.router.http.error_forms import error_body
from trunkline.router.http.json_response import JsonResponse
from trunkline.router.request_context import known
from trunkline.router.tenancy.auth import Access, access_needed, is_loopback
from trunkline.router.tenancy.identity import Identity, check_once
from trunkline.router.tenancy.tenants import Tenants

_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_TENANT: Final = b"tenant="
PORT_MAX: Final = 65535
_HOST_HEADER: Final = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9._-]{1,253}))(?::(?P<port>[0-9]{1,5}))?", re.ASCII
)
UI_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Of every answer that a browser shows as a page or loads as a part of one: it reaches nothing but this server,
and nobody frames it."""


class AccessMiddleware:
    """Plain ASGI. Who gets in is in `scope["state"]`: "tenant", "role", and `current_identity()`."""

    def __init__(
        self,
        app: ASGIApp,
        tenants: Tenants,
        on_refusal: Callable[[int], object],
        hosts: tuple[str, ...] = (),
        origins: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            on_refusal: told the status of each refusal.
            hosts: names of this machine, besides its addresses, that clients without keys may use.
            origins: pages that may ask from a browser.
        """
        self._app = app
        self._tenants = tenants
        self._on_refusal = on_refusal
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            identity = self._enter(scope)
        except ApiError as error:
            self._on_refusal(error.status)
            body = error_body(scope["path"], error)
            await JsonResponse(body, error.status, error.headers())(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["tenant"], state["role"] = identity.tenant, identity.role
        with known(identity=identity), structlog.contextvars.bound_contextvars(**_for_logs(identity)):
            await self._app(scope, receive, send)

    def _enter(self, scope: Scope) -> Identity:
        """
        Raises:
            ApiError: this request is not let in.
        """
        headers = Headers(scope=scope)
        check_once(headers)
        access = access_needed(scope["method"], scope["path"])
        if not self._tenants.needs_keys:
            self._check_page(scope["method"], headers)
        if access is Access.OPEN:
            return Identity()
        if access is Access.UNKNOWN:
            if self._tenants.needs_keys:
                self._tenants.identify(headers, Access.USER)
            raise ApiError(404, f"Not Found: {scope['method']} {scope['path'][:200]}")
        identity = self._tenants.identify(headers, access)
        query: bytes = scope.get("query_string", b"")
        if _TENANT in query:
            for name in parse_qs(query.decode("latin-1")).get("tenant", [])[:1]:
                identity = self._tenants.acting_for(identity, name)
        return identity

    def _check_page(self, method: str, headers: Headers) -> None:
        """Without keys: refuse what a page of somebody else's has sent.

        Raises:
            ApiError: 403 or 415.
        """
        host = headers.get("host", "")
        if not is_allowed_host(host, self._hosts):
            raise ApiError(
                403,
                f"the server has no keys, and answers to its addresses, to localhost and to names given with "
                f"--allowed-host (each with a port or without), not to the Host {host[:100]!r}",
                kind="permission_error",
                code="host_not_allowed",
            )
        if method in _SAFE:
            return
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and not is_own(origin, host):
            raise ApiError(
                403,
                f"the server has no keys, and pages of {origin[:100]!r} may not use it; see --cors-origin",
                kind="permission_error",
                code="origin_not_allowed",
            )
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if has_body and kind != "application/json":
            raise ApiError(
                415,
                f"the body's Content-Type is {kind[:80]!r}; please send `Content-Type: application/json`",
                code="unsupported_media_type",
            )


def is_own(origin: str, host: str) -> bool:
    """Whether a page of this `Origin` came from the server that a request's `Host` names."""
    scheme, slashes, rest = origin.lower().partition("://")
    return scheme in ("http", "https") and bool(slashes and rest) and rest == host.lower()


def is_allowed_host(host: str, names: frozenset[str]) -> bool:
    """Whether a `Host` header names this machine: by an address, as localhost, or by one of `names` (in lower
    case)."""
    name = host_name(host)
    return bool(name) and (is_local_name(name) or name in names)


def host_name(host: str) -> str:
    """The name (in lower case) or address that a `Host` header has, without its port; "": it is not of the form
    `host[:port]` (RFC 9110 §7.2) to the letter.

    What only begins or ends like a good one must not pass: who reads `[::1].evil.example` otherwise than the
    browser that sent it lets its page in.
    """
    found = _HOST_HEADER.fullmatch(host)
    if found is None or int(found["port"] or 0) > PORT_MAX:
        return ""
    if found["address"] is None:
        name = found["name"].lower()
        return "" if re.search(r"[0-9]\.$", name) else name.removesuffix(".")  # an address has no dot behind it
    try:
        return str(ipaddress.IPv6Address(found["address"]))
    except ValueError:
        return ""


def is_local_name(name: str) -> bool:
    """Whether no page of a stranger can have been loaded under this name: an address, or `localhost`."""
    if is_loopback(name):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _for_logs(identity: Identity) -> dict[str, str]:
    named = {"tenant": identity.tenant, "key": identity.key}
    return {name: value for name, value in named.items() if value}
