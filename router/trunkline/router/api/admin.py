"""Endpoints of operators and load balancers: health, load, version, metrics, cache.

Endpoints that answer GET also answer HEAD, which load balancers and `wget --spider` use.
"""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.requests import service_of
from trunkline.router.http.answers import JsonResponse, while_connected
from trunkline.router.service import RouterService
from trunkline.router.streams.link import ControllerLink
from trunkline.router.telemetry.metrics_page import MetricsPage

routes = APIRouter()
_OLD_TENANTS: Final = "an older version of the file of tenants is in force, because the present one is wrong"


@routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def index(request: Request) -> Response:
    """Return what a browser shows at the printed address: name, version, models, links."""
    service = service_of(request)
    return JsonResponse(
        {
            "name": "trunkline",
            "version": service.version,
            "models": list(service.models.names),
            "ui": "/ui",
            "docs": "/docs",
            "api": "/openapi.json",
            "health": "/health",
            "metrics": "/metrics",
        }
    )


def _records_health(away: str) -> dict[str, str]:
    """Return what `/health` says of the record store. `away`: why it does not answer. Requests without stored
    sessions or schemas do not need it, so it makes no 503."""
    return {"records": "away", "records_reason": away} if away else {"records": "ok"}


def _status(service: RouterService, link: ControllerLink) -> str:
    if link.state is None:
        return "disconnected"
    return "warming up" if service.groups.is_warming(link) else link.state.status


@routes.head("/ping", include_in_schema=False)
@routes.get("/ping")
@routes.head("/health", include_in_schema=False)
@routes.get("/health")
async def health(request: Request) -> Response:
    """Answer 200 if a token can be generated, else 503 with the reason."""
    service = service_of(request)
    result = await while_connected(request, service.health())
    body = {
        "status": "ok" if result.ok else "unavailable",
        "reason": result.why,
        **_records_health(service.records.away),
        **({"members": service.groups.members_problem} if service.groups.members_problem else {}),
        **({"tenants": _OLD_TENANTS} if service.tenants.file_problem else {}),
        "models": {
            model.name: any(link.ready for link in service.links_of(model.name)) for model in service.models
        },
        "controllers": [
            {
                "index": link.index,
                "name": link.name,
                "ready": link.ready,
                "model": link.standing.model,
                "role": link.state.role if link.state else "",
                "dtype": link.state.dtype if link.state else "",
                "problem": link.problem,
                "status": _status(service, link),
                "running": link.state.running if link.state else 0,
                "waiting": link.state.waiting if link.state else 0,
                "events": service.groups.events_status(link.index),
            }
            for link in service.links
        ],
    }
    return JsonResponse(body, 200 if result.ok else 503, {} if result.ok else {"Retry-After": "1"})


@routes.head("/load", include_in_schema=False)
@routes.get("/load")
async def load(request: Request) -> Response:
    """Return how many requests there are: those that this router works on, and those of all groups."""
    service = service_of(request)
    states = [link.state for link in service.links if link.ready and link.state is not None]
    running, waiting = sum(state.running for state in states), sum(state.waiting for state in states)
    return JsonResponse({"server_load": len(service.live), "running": running, "waiting": waiting})


@routes.head("/version", include_in_schema=False)
@routes.get("/version")
async def version(request: Request) -> Response:
    """Return the version of the package."""
    return JsonResponse({"version": service_of(request).version})


@routes.head("/metrics", include_in_schema=False)
@routes.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics of all routers in Prometheus's format."""
    page = request.app.state.metrics_page
    assert isinstance(page, MetricsPage)
    return Response(await page.scrape(), headers={"Content-Type": CONTENT_TYPE_LATEST})


@routes.post("/reset_prefix_cache")
@routes.post("/flush_cache")
async def flush_cache(request: Request) -> Response:
    """Drop every cached block that no running request holds."""
    return JsonResponse({"blocks_freed": await service_of(request).flush_cache()})
