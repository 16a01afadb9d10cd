"""Around every HTTP request: its id, its record, its count, and a 500 for errors that should never happen."""

from __future__ import annotations

import re
import secrets
import time
import traceback
from collections.abc import Callable
from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.router.errors import ApiError
from trunkline.router.http.answers import BODY_SEND, CLIENT_LEFT_STATUS, ClientLeftError, JsonResponse
from trunkline.router.http.error_forms import error_body
from trunkline.router.request_context import known
from trunkline.router.telemetry.metrics import Metrics
from trunkline.router.telemetry.request_record import PROVIDER, RequestRecord, RequestTrace, operation_of
from trunkline.runtime.spans import Value

SESSION_VERBS: Final = ("fork", "prefetch", "discard")
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""Others are whatever a client writes."""
_GOOD_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_log = structlog.get_logger("trunkline.router.http")


class RequestMiddleware:
    """Plain ASGI (Starlette's `BaseHTTPMiddleware` buffers streams and hides disconnects)."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        paths: frozenset[str],
        model: str = "",
        on_over: Callable[[Scope], None] = lambda scope: None,
    ) -> None:
        """
        Args:
            metrics: counts requests, and has the tracer.
            paths: labels for metrics; everything else counts as "other", or scanners would make series.
            model: the name that spans say.
            on_over: called with each request whose answer was sent, or whose client has left.
        """
        self._app = app
        self._metrics = metrics
        self._paths = paths
        self._tracer = metrics.tracer
        self._model = model
        self._on_over = on_over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _GOOD_ID.fullmatch(given) else secrets.token_hex(16)
        path = self._label(scope["path"])
        record, began, status = self._record(request_id, path, headers), time.monotonic(), 0
        ids = {"request_id": request_id}
        if record.trace is not None:
            ids["trace_id"] = record.trace.context.trace_id.hex()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        scope.setdefault(BODY_SEND, send)  # unless somebody further out knows a shorter way
        with structlog.contextvars.bound_contextvars(**ids), known(record=record):
            try:
                await self._app(scope, receive, send_with_id)
                if scope.get("state", {}).get("client_left"):
                    status = CLIENT_LEFT_STATUS
            except ClientLeftError:
                status = CLIENT_LEFT_STATUS
            except Exception as error:  # noqa: BLE001 (whatever a request does, the process goes on)
                _log_failure(error)
                if not status:
                    response = ApiError(500, "internal error", kind="internal_error", code="internal_error")
                    await JsonResponse(error_body(scope["path"], response), 500)(scope, receive, send_with_id)
            finally:
                self._on_over(scope)
            self._over(scope, path, status, record, began)

    def _record(self, request_id: str, path: str, headers: Headers) -> RequestRecord:
        """Begin the record of a request, and its trace if it is traced."""
        record = RequestRecord(request_id)
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
            attributes = span_attributes(record, path, self._model)
            record.trace.finish(method, path, status, attributes, error)

    def _label(self, path: str) -> str:
        if path.startswith("/v1/models/"):
            return "/v1/models/{model}"
        if path.startswith("/v1/sessions/"):
            verb = path.split("/", 4)[4:]
            return "/v1/sessions/{session}" + (f"/{verb[0]}" if verb and verb[0] in SESSION_VERBS else "")
        if path.startswith("/v1/schemas/"):
            return "/v1/schemas/{schema}"
        return path if path in self._paths else "other"


def is_routine(path: str) -> bool:
    """Return whether machines ask for a path again and again: it is not traced, and logged at level debug only."""
    return path in ("/health", "/metrics", "/version") or path.startswith("/ui")


def span_attributes(record: RequestRecord, path: str, model: str) -> dict[str, Value]:
    """Return the attributes of a request's span besides HTTP's; never what was asked or answered."""
    found: dict[str, Value] = {"trunkline.request_id": record.id}
    if record.tenant:
        found["trunkline.tenant"] = record.tenant
    job = record.job
    if job is None:
        return found
    found |= {
        "gen_ai.operation.name": operation_of(path),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
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
    # The message of an exception may quote a prompt; its type and place do not.
    frames = [
        f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)
    ]
    _log.error("request_failed", error=type(error).__name__, frames=frames[-8:])
