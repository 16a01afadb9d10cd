"""In front of the endpoints: lets requests in, tenant by tenant, and tells clients how much is left to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.router.errors import ApiError
from trunkline.router.http.error_forms import error_body
from trunkline.router.http.json_response import JsonResponse
from trunkline.router.tenancy.identity import current_identity
from trunkline.router.tenancy.tenants import Tenants, metered

_TOKENIZING: Final = ("/tokenize", "/detokenize")


def is_metered(path: str) -> bool:
    """Whether requests to a path count. What operators and load balancers ask does not."""
    if path in _TOKENIZING:
        return True
    return path.startswith("/v1/") and path != "/v1/models" and not path.startswith("/v1/models/")


class AdmissionMiddleware:
    """Plain ASGI, inside of `AccessMiddleware`, which says whose requests they are. A request is let in before its
    body is read, and is over when its answer has been sent, or its client has left."""

    def __init__(self, app: ASGIApp, tenants: Tenants, on_refusal: Callable[[str], Any]) -> None:
        """`on_refusal` is told the limit that a request was over."""
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
