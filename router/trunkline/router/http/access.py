"""In front of all endpoints: who sends a request, whether the sender may, and within which limits.

With keys, the key decides. Without keys (a laptop), every user of the machine may ask for text. What is left to
fear are web pages in a browser of this machine, which reach local addresses, too. They are recognised by what
browsers send: a `Host` that is not this machine's (DNS rebinding), the `Origin` of another page, the content type
of a form.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qs

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.router.errors import ApiError
from trunkline.router.http.answers import JsonResponse
from trunkline.router.http.error_forms import error_body
from trunkline.router.request_context import known
from trunkline.router.tenancy.auth import (
    Access,
    Identity,
    access_needed,
    check_once,
    current_identity,
    is_loopback,
)
from trunkline.router.tenancy.tenants import Tenants, metered

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
    """ASGI middleware that finds out who sends a request. Inside of it `current_identity()` says who, as do
    "tenant" and "role" in `scope["state"]`."""

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
            on_refusal: called with the status of each refusal.
            hosts: names of this machine that clients without keys may use, besides its addresses.
            origins: pages in browsers that may send requests.
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
        """Return who sends the request.

        Raises:
            ApiError: the request is refused.
        """
        headers = Headers(scope=scope)
        check_once(headers)
        access = access_needed(scope["path"])
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
        """Without keys: refuse a request that a foreign web page has sent.

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
    """Return whether a page of this `Origin` came from the server that a request's `Host` names."""
    scheme, slashes, rest = origin.lower().partition("://")
    return scheme in ("http", "https") and bool(slashes and rest) and rest == host.lower()


def is_allowed_host(host: str, names: frozenset[str]) -> bool:
    """Return whether a `Host` header names this machine: by an address, as localhost, or by one of `names` (in
    lower case)."""
    name = host_name(host)
    return bool(name) and (is_local_name(name) or name in names)


def host_name(host: str) -> str:
    """Return the name (in lower case) or address of a `Host` header without its port; "": the header does not have
    exactly the form `host[:port]` (RFC 9110 §7.2).

    A header that only begins or ends like a good one must not pass: a server that reads `[::1].evil.example`
    differently from the browser that sent it lets that browser's page in.
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
    """Return whether no foreign page can have been loaded under this name: it is an address, or `localhost`."""
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


_TOKENIZING: Final = ("/tokenize", "/detokenize")


def is_metered(path: str) -> bool:
    """Return whether requests to a path count. Those of operators and load balancers do not."""
    if path in _TOKENIZING:
        return True
    return path.startswith("/v1/") and path != "/v1/models" and not path.startswith("/v1/models/")


class AdmissionMiddleware:
    """ASGI middleware that keeps each tenant within its limits, and tells clients how much is left. It stands
    inside of `AccessMiddleware`, which says whose a request is. A request is let in before its body is read, and
    is over when its answer has been sent, or its client has left."""

    def __init__(self, app: ASGIApp, tenants: Tenants, on_refusal: Callable[[str], Any]) -> None:
        """`on_refusal`: called with the name of the limit that a request has reached."""
        self._app = app
        self._tenants = tenants
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http" or not is_metered(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            meter = self._tenants.enter(current_identity().tenant)
        except ApiError as error:
            if "limit" in error.details:
                self._on_refusal(error.details["limit"])
            await JsonResponse(error_body(scope["path"], error), error.status, error.headers())(
                scope, receive, send
            )
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in meter.headers().items():
                    headers[name] = value
            await send(message)

        with metered(meter):
            await self._app(scope, receive, send_with_limits)
