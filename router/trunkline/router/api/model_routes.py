"""`/v1/models` and `/tokenizer_info`: what is served, in OpenAI's form, or in Anthropic's for its clients.

A name that stands for many (`claude-*`) is no entry of the list, but each name for which it stands can be looked
up.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.paging import limit_of, named_of
from trunkline.router.api.requests import check_model, service_of
from trunkline.router.config import is_pattern
from trunkline.router.http.answers import JsonResponse
from trunkline.router.service import RouterService
from trunkline.router.streams.adapters import offered

routes = APIRouter()
_VERSION_HEADER: Final = "anthropic-version"
"""Header that clients of Anthropic's API send with each request."""
_PAGE_MAX: Final = 1000
Object = dict[str, Any]


def listed_names(service: RouterService) -> list[str]:
    """Return the names that lists of models show: those that stand for one model, then those of adapters."""
    names = [name for name in service.models.names if not is_pattern(name)]
    return [*names, *(each.name for each in offered(service.links) if each.name not in names)]


def display_name(service: RouterService, name: str) -> str:
    """Return the name of a model for people, who should see which model another name of it stands for."""
    return name if name == service.model_name else f"{service.model_name} ({name})"


@routes.head("/v1/models", include_in_schema=False)
@routes.get("/v1/models")
async def models(request: Request) -> Response:
    """List the names under which models are served."""
    service = service_of(request)
    names = listed_names(service)
    if _VERSION_HEADER in request.headers:
        return JsonResponse(_anthropic_page(request, names))
    return JsonResponse({"object": "list", "data": [_card(service.of_model(name), name) for name in names]})


@routes.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> Response:
    """Return one of the served names (names may contain slashes)."""
    service = check_model(service_of(request), model)
    form = _anthropic_card if _VERSION_HEADER in request.headers else _card
    return JsonResponse(form(service, model))


@routes.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Return the configuration of a model's tokenizer, with its chat template. The query may name the model."""
    service = check_model(service_of(request), request.query_params.get("model"))
    files = service.tokenizer.files
    return JsonResponse(
        {
            "tokenizer_class": files.tokenizer_class,
            **files.special_tokens,
            "model_max_length": service.limits.max_context,
            "vocab_size": service.tokenizer.vocab_size,
            "chat_template": files.chat_template,
            "tool_chat_template": files.tool_chat_template,
            "fingerprint": service.tokenizer.fingerprint,
        }
    )


def _card(service: RouterService, name: str) -> Object:
    original = service.tokenizer.files.stretched_from
    adapter = service.models.adapter(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "trunkline",
        "display_name": display_name(service, name),
        "root": service.model_name if adapter is None else name,
        "parent": None if adapter is None else service.model_name,
        "max_model_len": service.limits.max_context,
        **({"context_stretched_from": original} if original else {}),
    }


def _anthropic_card(service: RouterService, name: str) -> Object:
    context = service.limits.max_context
    return {
        "type": "model",
        "id": name,
        "display_name": display_name(service, name),
        "created_at": datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def _anthropic_page(request: Request, names: list[str]) -> Object:
    """Return the part of the list that the query asks for.

    Raises:
        ApiError: 400, a parameter is wrong.
    """
    limit = limit_of(request, _PAGE_MAX, _PAGE_MAX)
    before, after = (named_of(request, name, names) for name in ("before_id", "after_id"))
    if after in names:
        names = names[names.index(after) + 1 :]
    if before in names:
        names = names[: names.index(before)]
        shown = names[-limit:]
    else:
        shown = names[:limit]
    service = service_of(request)
    return {
        "data": [_anthropic_card(service.of_model(name), name) for name in shown],
        "has_more": len(shown) < len(names),
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }
