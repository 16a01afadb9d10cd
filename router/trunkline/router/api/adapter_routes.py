"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM: adapters come and go while requests run.

All groups of a model that are connected load an adapter, or none of them does.
"""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from trunkline.router.api.requests import check_model, service_of
from trunkline.router.errors import ApiError, bad_value, unavailable
from trunkline.router.http.answers import while_connected
from trunkline.router.http.body import read_request
from trunkline.router.jobs.late_model import LateModel
from trunkline.router.service import RouterService
from trunkline.router.streams.adapters import load_adapter, unload_adapter
from trunkline.router.streams.health import describe
from trunkline.router.streams.link import ControllerLink

routes = APIRouter()
NAME_CHARACTERS_MAX: Final = 256
PATH_CHARACTERS_MAX: Final = 4096


class UnloadRequest(LateModel):
    """The request `POST /v1/unload_lora_adapter`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX)]


class LoadRequest(UnloadRequest):
    """The request `POST /v1/load_lora_adapter`."""

    lora_path: Annotated[str, Field(min_length=1, max_length=PATH_CHARACTERS_MAX)]
    """A PEFT folder, at the same path on the hosts of all workers."""
    base_model_name: str | None = None
    """The model that the adapter is for; None: the first one."""


@routes.post("/v1/load_lora_adapter")
async def load(request: Request) -> Response:
    """Load an adapter into all groups of a model; answered when requests may use it."""
    service = _allowed(request)
    body = await read_request(request, LoadRequest, service.config.max_body_bytes)
    if body.lora_name in service.models.names:
        raise bad_value("lora_name", f"{body.lora_name!r} is the name of a model; the adapter needs another one")
    links = _links(service, body.base_model_name)
    if not await while_connected(request, load_adapter(links, body.lora_name, body.lora_path)):
        message = f"the adapter {body.lora_name!r} has already been loaded"
        raise ApiError(400, message, param="lora_name", code="already_loaded")
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")


@routes.post("/v1/unload_lora_adapter")
async def unload(request: Request) -> Response:
    """Unload an adapter from all groups. Requests that use it go on to their ends."""
    service = _allowed(request)
    body = await read_request(request, UnloadRequest, service.config.max_body_bytes)
    links = [link for link in service.links if link.state is not None]
    if not links:
        raise unavailable(f"no engine is connected: {describe(service.links)}")
    if not await while_connected(request, unload_adapter(links, body.lora_name)):
        message = f"the adapter {body.lora_name!r} is not loaded"
        raise ApiError(404, message, param="lora_name", code="model_not_found")
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")


def _allowed(request: Request) -> RouterService:
    service = service_of(request)
    if not service.config.lora_updates:
        raise ApiError(
            403, "adapters cannot be changed at run time here; --lora-updates allows it", code="disabled"
        )
    return service


def _links(service: RouterService, model: str | None) -> list[ControllerLink]:
    """Return the connections to the groups of a model.

    Raises:
        ApiError: 404, no such model; 503, none of its groups is ready.
    """
    service = check_model(service, model)
    links = [link for link in service.links_of(service.model_name) if link.ready]
    if not links:
        raise unavailable(f"no engine is ready: {describe(service.links_of(service.model_name))}")
    return links
