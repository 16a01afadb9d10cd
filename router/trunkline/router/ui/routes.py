"""The endpoints of the dashboard: its page and files under `/ui`, and the data that it shows under `/ui/api`.

The page and its files hold no data and are open to all. The middleware decides who may ask for data. The data's
form is made for the page of the same version, and may change with it.
"""

from __future__ import annotations

import math
from typing import Any, Final, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from trunkline.router.api.purge import purge
from trunkline.router.api.requests import service_of
from trunkline.router.errors import bad_value, not_found
from trunkline.router.http.answers import JsonResponse
from trunkline.router.http.body import read_body
from trunkline.router.request_context import known
from trunkline.router.routing.decision_log import DECISIONS_MAX
from trunkline.router.tenancy.auth import current_identity
from trunkline.router.ui.assets import PAGE, Asset, Assets, is_current
from trunkline.router.ui.chunk_tree import NODES_DEFAULT, NODES_MAX
from trunkline.router.ui.dashboard import Dashboard
from trunkline.router.ui.overview import decisions, overview, requests
from trunkline.router.ui.prompt_pieces import prompt_pieces
from trunkline.router.ui.records import records
from trunkline.router.ui.stored import LIMIT_MAX

_Number = TypeVar("_Number", int, float)
routes = APIRouter(include_in_schema=False)
_assets = Assets()
_READ: Final = ["GET", "HEAD"]
_API: Final = ("overview", "history", "tree", "requests", "sessions", "records", "decisions", "prompt", "purge")
PATHS: Final = frozenset({"/ui", "/docs", *(f"/ui/api/{name}" for name in _API)})
"""Paths of the dashboard that have a label of their own in metrics."""
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of the page and of all files that it loads: it may reach only this server, and no other page may frame
it."""
_DATA_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@routes.api_route("/ui", methods=_READ)
async def page(request: Request) -> Response:
    """The dashboard's page."""
    asset = _assets.find(PAGE)
    if asset is None:
        raise not_found("path", "this installation has no dashboard page", code="not_found")
    return _send(request, asset)


@routes.api_route("/docs", methods=_READ)
async def docs(request: Request) -> Response:
    """A page about all endpoints, made from `/openapi.json`."""
    asset = _assets.find("docs.html")
    if asset is None:
        raise not_found("path", "this installation has no page about the API", code="not_found")
    return _send(request, asset)


@routes.api_route("/ui/", methods=_READ)
async def page_with_slash(request: Request) -> Response:
    """Redirect to `/ui`: the page's relative addresses are right there only."""
    return RedirectResponse("../ui", status_code=308, headers=_PAGE_HEADERS)


@routes.api_route("/ui/static/{name:path}", methods=_READ)
async def static(request: Request, name: str) -> Response:
    """A file of the dashboard's page."""
    asset = _assets.find(name)
    if asset is None:
        raise not_found("path", f"there is no file {name[:100]!r}", code="not_found")
    return _send(request, asset)


def _send(request: Request, asset: Asset) -> Response:
    headers = {
        "ETag": asset.etag,
        "Cache-Control": asset.cache_control,
        "Vary": "Accept-Encoding",
        **_PAGE_HEADERS,
    }
    if is_current(asset, request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    content = asset.content
    if asset.compressed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        content = asset.compressed
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers | {"Content-Type": asset.media_type})


def _dashboard(request: Request) -> Dashboard:
    dashboard = request.app.state.dashboard
    assert isinstance(dashboard, Dashboard)
    return dashboard


def _answer(content: Any) -> Response:
    return JsonResponse(content, headers=_DATA_HEADERS)


@routes.get("/ui/api/overview")
async def get_overview(request: Request) -> Response:
    """Groups, their loads and tiers, and this router."""
    return _answer(overview(service_of(request)))


@routes.get("/ui/api/history")
async def get_history(request: Request) -> Response:
    """Loads and rates over time."""
    seconds = number_of(request, "seconds", 900.0, 1.0, 21_600.0)
    after = number_of(request, "after", 0.0, 0.0, 1e12)
    return _answer(_dashboard(request).history(seconds, after or None))


@routes.get("/ui/api/tree")
async def get_tree(request: Request) -> Response:
    """The chunk tree of a group."""
    group = number_of(request, "group", 0, 0, 1_000_000)
    nodes = number_of(request, "nodes", NODES_DEFAULT, 1, NODES_MAX)
    return _answer(await _dashboard(request).tree(group, nodes))


@routes.get("/ui/api/requests")
async def get_requests(request: Request) -> Response:
    """The requests that run or wait."""
    return _answer(requests(service_of(request)))


@routes.get("/ui/api/sessions")
async def get_sessions(request: Request) -> Response:
    """Sessions, the ones that were used last first."""
    limit = number_of(request, "limit", 200, 1, LIMIT_MAX)
    return _answer(await _dashboard(request).sessions.table(limit))


@routes.get("/ui/api/records")
async def get_records(request: Request) -> Response:
    """The store of sessions, schemas and kept answers."""
    return _answer(await records(service_of(request)))


@routes.get("/ui/api/decisions")
async def get_decisions(request: Request) -> Response:
    """The last choices of controllers, with their reasons."""
    after = number_of(request, "after", 0, 0, 1 << 62)
    limit = number_of(request, "limit", 200, 1, DECISIONS_MAX)
    return _answer(decisions(service_of(request), after, limit))


@routes.post("/ui/api/prompt")
async def post_prompt(request: Request) -> Response:
    """The prompt that a request would have, with its chunks."""
    service = service_of(request)
    content = await read_body(request, service.config.max_body_bytes)
    return _answer(await prompt_pieces(service, content))


@routes.post("/ui/api/purge")
async def post_purge(request: Request) -> Response:
    """Delete what is stored for the tenant that the query names."""
    service, tenant = service_of(request), request.query_params.get("tenant", "")
    with known(identity=service.tenants.acting_for(current_identity(), tenant)):
        return _answer(await purge(service))


def number_of(request: Request, name: str, default: _Number, low: _Number, high: _Number) -> _Number:
    """Return a number of the query that lies between `low` and `high`; `default` if it is not given.

    Raises:
        ApiError: 400, the value is no such number.
    """
    given = request.query_params.get(name)
    if given is None:
        return default
    try:
        number = type(default)(given) if len(given) <= 32 else None
    except ValueError:
        number = None
    if number is None or not math.isfinite(number) or not low <= number <= high:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise bad_value(name, f"`{name}`: {given[:40]!r} is not {kind} between {low:g} and {high:g}")
    return number
