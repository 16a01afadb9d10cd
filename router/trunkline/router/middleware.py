"""Around every HTTP request: its id, its count, and the net that catches what should never happen."""

from __future__ import annotations

import re
import secrets
import traceback
from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.router.api.connection import BODY_SEND, CLIENT_LEFT_STATUS, ClientLeftError
from trunkline.router.api.error_forms import error_body
from trunkline.router.api.responses import JsonResponse
from trunkline.router.errors import ApiError
from trunkline.router.metrics import Metrics

SESSION_VERBS: Final = ("fork", "prefetch", "discard")
_GOOD_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_log = structlog.get_logger("trunkline.router.http")


class RequestMiddleware:
    """Plain ASGI (Starlette's `BaseHTTPMiddleware` buffers streams and hides disconnects)."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        """`paths`: labels for metrics; everything else counts as "other", or scanners would make series."""
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _GOOD_ID.fullmatch(given) else secrets.token_hex(16)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        scope.setdefault(BODY_SEND, send)  # unless somebody further out knows a shorter way
        with structlog.contextvars.bound_contextvars(request_id=request_id):
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
            path = self._label(scope["path"])
            self._metrics.requests.labels(path, str(status)).inc()
            _log.debug("request", method=scope["method"], endpoint=path, status=status)

    def _label(self, path: str) -> str:
        if path.startswith("/v1/models/"):
            return "/v1/models/{model}"
        if path.startswith("/v1/sessions/"):
            verb = path.split("/", 4)[4:]
            return "/v1/sessions/{session}" + (f"/{verb[0]}" if verb and verb[0] in SESSION_VERBS else "")
        if path.startswith("/v1/schemas/"):
            return "/v1/schemas/{schema}"
        return path if path in self._paths else "other"


def _log_failure(error: Exception) -> None:
    # The message of an exception may quote a prompt; its type and place do not.
    frames = [
        f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)
    ]
    _log.error("request_failed", error=type(error).__name__, frames=frames[-8:])
