"""The FastAPI application: endpoints, error forms, and the schema of what may be sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trunkline.router.api import (
    adapter_routes,
    admin,
    anthropic,
    chat,
    completions,
    embeddings,
    message_batches,
    model_routes,
    ollama,
    openai_responses,
    scoring,
    stored_responses,
)
from trunkline.router.api import batch_routes as batches
from trunkline.router.api import conversation_routes as conversations
from trunkline.router.api import file_routes as files
from trunkline.router.api import schema_routes as schemas
from trunkline.router.api import session_routes as sessions
from trunkline.router.api import tokenize_routes as tokens
from trunkline.router.api.anthropic import CountTokensRequest, MessagesRequest
from trunkline.router.api.batch_routes import BatchRequest
from trunkline.router.api.conversation_routes import ConversationRequest, ConversationUpdate, ItemsRequest
from trunkline.router.api.message_batches import MessageBatchRequest
from trunkline.router.api.openai_items import HistoryRequest, ResponsesRequest
from trunkline.router.api.requests import SeenNames
from trunkline.router.api.schema_types import SchemaRequest, SchemaUpdate
from trunkline.router.api.session_types import DiscardRequest, ForkRequest, SessionRequest, SessionUpdate
from trunkline.router.errors import ApiError, internal_error
from trunkline.router.http.answers import SCHEMAS, SPELT, error_response, schema_of
from trunkline.router.http.idempotency import IdempotencyStore
from trunkline.router.http.middleware import AccessMiddleware, RequestMiddleware
from trunkline.router.http.replay import ReplayMiddleware
from trunkline.router.jobs.ollama_models import (
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from trunkline.router.jobs.pooling_models import EmbeddingRequest, RerankRequest, ScoreRequest
from trunkline.router.jobs.request_models import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from trunkline.router.service import RouterService
from trunkline.router.stores.background_store import PREFIX as BACKGROUND_PREFIX
from trunkline.router.stores.batch_store import PREFIX as BATCH_PREFIX
from trunkline.router.tasks.background_run import BackgroundHandler
from trunkline.router.tasks.batch_run import BatchHandler
from trunkline.router.tasks.runner import TaskRunner
from trunkline.router.telemetry.metrics_page import MetricsPage
from trunkline.router.ui import routes as ui
from trunkline.router.ui.dashboard import Dashboard
from trunkline.runtime.tracing import start as start_tracing

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    **dict.fromkeys(("/score", "/v1/score"), ScoreRequest),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RerankRequest),
    "/v1/responses": ResponsesRequest,
    **dict.fromkeys(("/v1/responses/compact", "/v1/responses/input_tokens"), HistoryRequest),
    "/v1/conversations": ConversationRequest,
    "/v1/conversations/{conversation_id}": ConversationUpdate,
    "/v1/conversations/{conversation_id}/items": ItemsRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/messages/batches": MessageBatchRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingRequest,
    "/api/show": OllamaShowRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/batches": BatchRequest,
    "/v1/schemas": SchemaRequest,
    "/v1/schemas/{schema_id}": SchemaUpdate,
    "/v1/sessions": SessionRequest,
    "/v1/sessions/{session_id}": SessionUpdate,
    "/v1/sessions/{session_id}/fork": ForkRequest,
    "/v1/sessions/{session_id}/discard": DiscardRequest,
}
"""Types of request bodies by path: the body of POST or, where there is no POST, of PATCH."""
_PATHS = frozenset(
    {
        *_BODIES,
        *("/v1/files", "/v1/models", "/tokenizer_info", "/reset_prefix_cache", "/flush_cache"),
        *("/api/tags", "/api/ps", "/api/version"),
        *("/health", "/ping", "/load", "/version", "/metrics"),
    }
)


class Application(FastAPI):
    """The application. A request passes the router's own layers, and goes from there straight to an endpoint that
    generates, or through FastAPI's layers and routes to any other one."""

    def __init__(self, **options: Any) -> None:
        """`options`: FastAPI's."""
        super().__init__(**options)
        self.straight: dict[str, Callable[[Request], Awaitable[Response]]] = {}
        """Endpoints of POST requests that need nothing of FastAPI, by their paths."""
        self.service: RouterService
        """What endpoints work with, set before the first request."""
        self.layers: ASGIApp = self.answer
        """The outermost layer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        scope["app"] = self
        await (self.layers if scope["type"] == "http" else super().__call__)(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has passed the layers."""
        endpoint = self.straight.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
            await response(scope, receive, send)
        except ApiError as error:  # nothing has been sent
            response = await _on_api_error(request, error)
            await response(scope, receive, send)


async def _nothing() -> None:
    pass


def create_app(service: RouterService, opened: Callable[[], Awaitable[None]] = _nothing) -> Application:
    """Return the application of a service; the service opens and closes with it.

    Args:
        opened: awaited when the service is open, before the first request.
    """
    config, metrics = service.config, service.metrics
    metrics.tracer = start_tracing(config.otlp_endpoint, "router", f"router-{config.number}", config.trace_sample)
    page = MetricsPage(metrics, config.metrics_path, config.number, config.routers)
    dashboard = Dashboard(service)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.open()
        dashboard.open()
        runner.open()
        try:
            async with page.open():
                await opened()
                yield
        finally:
            await runner.close()
            dashboard.close()
            await service.close()
            await asyncio.to_thread(metrics.tracer.close)

    app = Application(
        title="Trunkline",
        version=service.version,
        lifespan=lifespan,
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_exception,
            Exception: _on_failure,
        },
    )
    app.service = app.state.service = service
    app.state.seen_names = SeenNames()
    runner = TaskRunner(service, {BATCH_PREFIX: BatchHandler(app), BACKGROUND_PREFIX: BackgroundHandler(app)})
    app.state.dashboard = dashboard
    app.state.metrics_page = page
    _include(app)
    app.layers = _layers(app, service)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    return app


def _include(app: Application) -> None:
    """Add all endpoints to an application."""
    generating = (chat, completions, openai_responses, anthropic, embeddings, scoring, ollama)
    stored = (stored_responses, conversations, schemas, sessions)
    served = (tokens, model_routes, adapter_routes)
    for module in generating:
        add_shortcuts(app, module.routes)
    for module in (*generating, *stored, files, batches, message_batches, *served, admin, ui):
        app.include_router(module.routes)


def add_shortcuts(app: Application, routes: APIRouter) -> None:
    """Answer POST requests straight by endpoints that depend on nothing. FastAPI's routes stay for the OpenAPI
    document and other methods."""
    for route in routes.routes:
        if not isinstance(route, APIRoute) or route.methods != {"POST"}:
            continue
        if not (route.param_convertors or route.dependant.dependencies):
            app.straight[route.path] = route.endpoint


def _layers(app: Application, service: RouterService) -> ASGIApp:
    """Return the layers around all endpoints (`http/middleware.py`)."""
    config, metrics = service.config, service.metrics
    layers: ASGIApp = app.answer
    if config.idempotency_ttl_seconds:
        layers = ReplayMiddleware(
            layers,
            IdempotencyStore(service.records, config.idempotency_ttl_seconds, quota_of=service.tenants.quota_of),
            bytes_max=config.max_body_bytes,
            on_result=lambda result: metrics.admission.keys.labels(result).inc(),
        )
    layers = AccessMiddleware(
        layers,
        service.tenants,
        on_denied=lambda status: metrics.admission.denied.labels(str(status)).inc(),
        on_limit=lambda limit: metrics.admission.refused.labels(limit).inc(),
        hosts=tuple(config.allowed_hosts),
        origins=tuple(config.cors_origins),
    )
    if config.cors_origins:
        layers = _for_pages_of(config.cors_origins, layers)
    return RequestMiddleware(
        layers,
        metrics=metrics,
        paths=_PATHS | ui.PATHS,
        on_over=service.large_requests.release,
        turns=service.dispatcher.turns,
        conversations=lambda: service.models.conversations,
    )


def _for_pages_of(origins: list[str], app: ASGIApp) -> ASGIApp:
    """Let pages of other servers use this one from a browser."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "PATCH", "DELETE"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
        max_age=600,
    )


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.url.path, error.renamed(request.scope.get(SPELT, {})))


async def _on_failure(request: Request, error: Exception) -> Response:
    """Answer what should never happen; `RequestMiddleware` logs it."""
    return error_response(request.url.path, internal_error())


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods in the same form as all other errors."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    answer = ApiError(error.status_code, f"{error.detail}: {request.method} {path[:200]}")
    return error_response(path, answer, error.headers)


def _schema(app: FastAPI) -> dict[str, Any]:
    """Return OpenAPI with request bodies and errors, which FastAPI does not see (`http/body.py` handles them)."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = models_json_schema(
            [(model, "validation") for model in _BODIES.values()],
            ref_template="#/components/schemas/{model}",
        )
        # Instead of what FastAPI has there: its own form of errors, which is never sent.
        schema["components"] = {
            "schemas": definitions["$defs"]
            | SCHEMAS
            | stored_responses.SCHEMAS
            | conversations.SCHEMAS
            | files.SCHEMAS
            | batches.SCHEMAS
            | sessions.SCHEMAS
            | schemas.SCHEMAS
        }
        for path, model in _BODIES.items():
            reference = {"$ref": f"#/components/schemas/{model.__name__}"}
            operations = schema["paths"][path]
            operations.get("post", operations.get("patch"))["requestBody"] = {
                "required": model not in (ForkRequest, ConversationRequest),
                "content": {"application/json": {"schema": reference}},
            }
        for path, operations in schema["paths"].items():
            error = {"schema": {"$ref": f"#/components/schemas/{schema_of(path)}"}}
            for operation in operations.values():
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = {
                    "description": "An error",
                    "content": {"application/json": error},
                }
        schema["paths"]["/health"]["get"]["responses"]["503"] = {"description": "No token can be generated"}
        app.openapi_schema = schema
    return app.openapi_schema
