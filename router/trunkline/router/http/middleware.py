"""The layers around every endpoint: a request's id and record, who sends it, and the limits of its tenant.

    RequestMiddleware ─► AccessMiddleware ─► ReplayMiddleware (replay.py) ─► Application.answer (app.py)

All that they run is on the way of each first token, mostly in caches that hold other programs' code. There a
function costs several times what it costs in a loop: so there are few layers.

With keys, the key decides who gets in. Without keys (a laptop), every user of the machine may ask for text. The
danger left is a web page in a browser of this machine, which reaches local addresses, too. Such requests are
recognised by what browsers send: a `Host` that is not this machine's (DNS rebinding), the `Origin` of another
page, or the content type of a form.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import os
import re
import time
import traceback
from collections.abc import Callable
from typing import Final
from urllib.parse import parse_qs

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.router.errors import ApiError, internal_error
from trunkline.router.http.answers import (
    BODY_OUTLET,
    BODY_SEND,
    CLIENT_LEFT_STATUS,
    ClientLeftError,
    StreamOutlet,
    error_response,
    is_anthropic,
)
from trunkline.router.http.headers import RequestHeaders, headers_of
from trunkline.router.request_context import AdapterChoice, known
from trunkline.router.streams.loop_turns import LoopTurns
from trunkline.router.telemetry.metrics import Metrics
from trunkline.router.telemetry.request_record import PROVIDER, RequestRecord, RequestTrace, operation_of
from trunkline.router.tenancy.auth import (
    Access,
    Identity,
    access_needed,
    check_once,
    is_loopback,
)
from trunkline.router.tenancy.tenants import Tenants
from trunkline.router.text.conversation_memory import ConversationMemory
from trunkline.runtime.spans import Value

SESSION_VERBS: Final = ("fork", "prefetch", "discard")
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""Names of methods in logs and spans; any other method, which may be any text, counts as "_OTHER"."""
_GOOD_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_log = structlog.get_logger("trunkline.router.http")
_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_TENANT: Final = b"tenant="
PORT_MAX: Final = 65535
_HOSTS_MAX: Final = 64
"""Number of hosts whose check is remembered. One is as long as headers may be, at most."""
_HOST_HEADER: Final = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9._-]{1,253}))(?::(?P<port>[0-9]{1,5}))?", re.ASCII
)
_RESPONSE_VERBS: Final = ("input_items", "cancel")
_JSON: Final = "application/json"
_FORM: Final = "multipart/form-data"
_UPLOADS: Final = "/v1/files"
"""The one path whose requests are forms."""
_OLLAMA: Final = "/api/"
"""Where paths of Ollama's API begin."""
_OF_PAGES: Final = ("origin", "referer", "sec-fetch-site")
"""Headers of which browsers send some with a request that a page makes."""
_TOKENIZING: Final = ("/tokenize", "/detokenize")


class RequestMiddleware:
    """Gives each request its id and its record, counts and logs it, and answers 500 for errors that should never
    happen. Plain ASGI: Starlette's `BaseHTTPMiddleware` buffers streams and hides disconnects."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        paths: frozenset[str],
        on_over: Callable[[Scope], None] = lambda scope: None,
        conversations: Callable[[], ConversationMemory | None] = lambda: None,
        *,
        turns: LoopTurns,
    ) -> None:
        """
        Args:
            metrics: counts requests, and has the tracer.
            paths: paths with a label of their own in metrics. All others count as "other": a scanner must not make
                series.
            on_over: called with the scope of each request that is over.
            conversations: returns what the router remembers of conversations.
            turns: in which requests begin, but for probes and scrapers, which must have an answer in time.
        """
        self._app = app
        self._metrics = metrics
        self._paths = paths
        self._tracer = metrics.tracer
        self._on_over = on_over
        self._conversations = conversations
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        headers = headers_of(scope)
        given = headers.get("x-request-id", "")
        request_id = given if _GOOD_ID.fullmatch(given) else os.urandom(16).hex()
        path = self._label(scope["path"])
        record, began, status = self._record(request_id, path, headers), time.monotonic(), 0
        if not is_routine(path):
            await self._turns.enter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(b"x-request-id", request_id.encode())]
                if is_anthropic(scope["path"]) or "anthropic-version" in headers:
                    own.append((b"request-id", request_id.encode()))  # the name of Anthropic's API
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        scope[BODY_SEND] = send
        with known(record=record, conversations=self._conversations(), choice=AdapterChoice()):
            try:
                await self._app(scope, receive, send_with_id)
                if scope.get("state", {}).get("client_left"):
                    status = CLIENT_LEFT_STATUS
            except ClientLeftError:
                status = CLIENT_LEFT_STATUS
            except Exception as error:  # noqa: BLE001 (whatever a request does, the process goes on)
                _log_failure(error)
                outlet: StreamOutlet | None = scope.get(BODY_OUTLET)
                if not (status if outlet is None else outlet.has_begun):
                    await error_response(scope["path"], internal_error())(scope, receive, send_with_id)
            finally:
                self._on_over(scope)
            self._over(scope, path, status, record, began)

    def _record(self, request_id: str, path: str, headers: RequestHeaders) -> RequestRecord:
        """Return the record of a new request, with its trace if the request is traced."""
        record = RequestRecord(request_id, asyncio.get_running_loop().time())
        if self._tracer.is_on and not is_routine(path):
            begun = self._tracer.begin(headers.get("traceparent", ""))
            if begun is not None:
                record.trace = RequestTrace(self._tracer, *begun)
        return record

    def _over(self, scope: Scope, path: str, status: int, record: RequestRecord, began: float) -> None:
        """Count a request that is over, write its log line and end its span."""
        self._metrics.requests.labels(path, str(status)).inc()
        state = scope.get("state", {})
        record.tenant = state.get("tenant", "")
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        write = _log.debug if is_routine(path) else _log.info
        seconds = round(time.monotonic() - began, 4)
        write("request", method=method, endpoint=path, status=status, duration_s=seconds, **record.fields())
        if record.trace is not None:
            error = "stream_failed" if state.get("stream_failed") else ""
            attributes = span_attributes(record, path)
            record.trace.finish(method, path, status, attributes, error)

    def _label(self, path: str) -> str:
        if path in self._paths and "{" not in path:
            return path
        if path.startswith("/v1/models/"):
            return "/v1/models/{model}"
        if path.startswith("/v1/sessions/"):
            verb = path.split("/", 4)[4:]
            return "/v1/sessions/{session}" + (f"/{verb[0]}" if verb and verb[0] in SESSION_VERBS else "")
        if path.startswith("/v1/responses/"):
            last = path.rpartition("/")[2]
            return "/v1/responses/{response}" + (f"/{last}" if last in _RESPONSE_VERBS else "")
        if path.startswith("/v1/conversations/"):
            below = path.split("/")[4:]
            items = "" if below[:1] != ["items"] else "/items" if len(below) == 1 else "/items/{item}"
            return "/v1/conversations/{conversation}" + items
        if path.startswith("/v1/files/"):
            return "/v1/files/{file}" + ("/content" if path.endswith("/content") else "")
        if path.startswith("/v1/batches/"):
            return "/v1/batches/{batch}" + ("/cancel" if path.endswith("/cancel") else "")
        if path.startswith("/v1/messages/batches/"):
            last = path.rpartition("/")[2]
            return "/v1/messages/batches/{batch}" + (f"/{last}" if last in ("cancel", "results") else "")
        if path.startswith("/v1/schemas/"):
            return "/v1/schemas/{schema}"
        return "other"


def is_routine(path: str) -> bool:
    """Return whether probes, scrapers or pages poll a path. Such requests are not traced, and logged as debug
    only."""
    return path in ("/health", "/ping", "/load", "/metrics", "/version") or path.startswith("/ui")


def span_attributes(record: RequestRecord, path: str) -> dict[str, Value]:
    """Return the attributes of a request's span besides HTTP's. They never hold a prompt's or an answer's text."""
    found: dict[str, Value] = {"trunkline.request_id": record.id}
    if record.tenant:
        found["trunkline.tenant"] = record.tenant
    job = record.job
    if job is None:
        return found
    found |= {
        "gen_ai.operation.name": operation_of(path),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.request.max_tokens": job.max_tokens,
        "gen_ai.request.temperature": job.sampling.temperature,
        "gen_ai.request.top_p": job.sampling.top_p,
        "gen_ai.response.finish_reasons": record.outcomes,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "trunkline.attempts": record.attempts,
    }
    if job.decoding.choices > 1:
        found["gen_ai.request.choice.count"] = job.decoding.choices
    if record.first_token_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = record.first_token_s
    return found


def _log_failure(error: Exception) -> None:
    # An exception's message may quote a prompt, so only its type and place are logged.
    frames = [
        f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)
    ]
    _log.error("request_failed", error=type(error).__name__, frames=frames[-8:])


class AccessMiddleware:
    """Identifies the sender of each request, keeps each tenant within its limits, and tells clients in headers how
    much is left. A request is admitted before its body is read. It is over when its answer has been sent or its
    client has left.

    Inside of it `current_identity()` returns the sender, `current_meter()` the tenant's account, and
    `scope["state"]` has "tenant" and "role"."""

    def __init__(
        self,
        app: ASGIApp,
        tenants: Tenants,
        on_denied: Callable[[int], object],
        on_limit: Callable[[str], object],
        hosts: tuple[str, ...] = (),
        origins: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            tenants: knows the keys and the limits.
            on_denied: called with the status of each request that is refused for its sender.
            on_limit: called with the name of the limit because of which a request is refused.
            hosts: names of this machine, besides its addresses, that clients without keys may use.
            origins: origins of web pages that may send requests.
        """
        self._app = app
        self._tenants = tenants
        self._on_denied = on_denied
        self._on_limit = on_limit
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        try:
            identity = self._enter(scope)
        except ApiError as error:
            self._on_denied(error.status)
            await error_response(scope["path"], error)(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["tenant"], state["role"] = identity.tenant, identity.role
        if not is_metered(scope["path"]):
            with known(identity=identity):
                await self._app(scope, receive, send)
            return
        try:
            meter = await self._tenants.enter(identity.tenant)
        except ApiError as error:
            if "limit" in error.details:
                self._on_limit(error.details["limit"])
            await error_response(scope["path"], error)(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start" and (left := meter.headers()):
                MutableHeaders(scope=message).update(left)
            await send(message)

        try:
            with known(identity=identity, meter=meter):
                await self._app(scope, receive, send_with_limits)
        finally:
            meter.close()

    def _enter(self, scope: Scope) -> Identity:
        """Return who sends the request.

        Raises:
            ApiError: the request is refused.
        """
        headers = headers_of(scope)
        if headers.repeats:
            check_once(headers)
        access = access_needed(scope["path"])
        if not self._tenants.needs_keys:
            self._check_page(scope, headers)
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

    def _check_page(self, scope: Scope, headers: RequestHeaders) -> None:
        """Refuse a request that a foreign web page has sent. For servers without keys.

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
        if scope["method"] in _SAFE:
            return
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and not is_own(origin, host):
            raise ApiError(
                403,
                f"the server has no keys, and pages of {origin[:100]!r} may not use it; see --cors-origin",
                kind="permission_error",
                code="origin_not_allowed",
            )
        if scope["path"].startswith(_OLLAMA) and not any(name in headers for name in _OF_PAGES):
            return  # Ollama's clients, and its documentation's calls of curl, do not say that they send JSON
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        wanted = _FORM if scope["path"] == _UPLOADS else _JSON
        if has_body and kind != wanted:
            raise ApiError(
                415,
                f"the body's Content-Type is {kind[:80]!r}; please send `Content-Type: {wanted}`",
                code="unsupported_media_type",
            )


def is_own(origin: str, host: str) -> bool:
    """Return whether a page with this `Origin` was loaded from the server that the request's `Host` names."""
    scheme, slashes, rest = origin.lower().partition("://")
    return scheme in ("http", "https") and bool(slashes and rest) and rest == host.lower()


@functools.lru_cache(_HOSTS_MAX)
def is_allowed_host(host: str, names: frozenset[str]) -> bool:
    """Return whether a `Host` header names this machine: by an address, as localhost, or by one of `names` (in
    lower case)."""
    name = host_name(host)
    return bool(name) and (is_local_name(name) or name in names)


def host_name(host: str) -> str:
    """Return the name (in lower case) or address in a `Host` header, without the port; "": the header does not
    have exactly the form `host[:port]` (RFC 9110 §7.2).

    A header that only begins or ends like a valid one must not pass: a server that takes `[::1].evil.example` for
    an address lets in a page of that host.
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
    """Return whether a host name is an address or `localhost`, so that no foreign page can be loaded under it."""
    if is_loopback(name):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_metered(path: str) -> bool:
    """Return whether requests to a path count against the tenant's limits. Requests of operators and load
    balancers do not."""
    if path in _TOKENIZING:
        return True
    return path.startswith("/v1/") and path != "/v1/models" and not path.startswith("/v1/models/")
