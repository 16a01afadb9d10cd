"""The first checks of requests: is the model served, is the text short enough, are the parameters known?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import structlog
from starlette.requests import Request

from trunkline.router.errors import ApiError, bad_value, unsupported
from trunkline.router.http.answers import SPELT
from trunkline.router.http.body import read_request
from trunkline.router.http.continued_bodies import parse_body
from trunkline.router.jobs.generation_parameters import RequestBody
from trunkline.router.jobs.parameter_table import Endpoint, Reading
from trunkline.router.request_context import choose_adapter
from trunkline.router.service import RouterService
from trunkline.router.stores.session_state import SessionState
from trunkline.router.streams.adapters import offered

SEEN_MAX: Final = 256
"""Largest number of unknown parameters that a router logs."""

_Body = TypeVar("_Body", bound=RequestBody)
_log = structlog.get_logger("trunkline.router.api")


def service_of(request: Request) -> RouterService:
    """Return the service of the application that received a request."""
    service = request.scope["app"].service
    assert isinstance(service, RouterService)
    return service


def check_model(service: RouterService, model: str | None) -> RouterService:
    """Return the service of the model that a request asks for, and note its adapter if it asks for one. None
    stands for the first model.

    Raises:
        ApiError: 404.
    """
    if model is not None and service.models.find(model) is None:
        names = [*service.models.names, *(each.name for each in offered(service.links))]
        raise ApiError(
            404,
            f"the model {model[:200]!r} does not exist here; served: {', '.join(names)}",
            param="model",
            code="model_not_found",
        )
    adapter = None if model is None else service.models.adapter(model)
    choose_adapter("", b"") if adapter is None else choose_adapter(adapter.name, adapter.key)
    return service.of_model(service.models.first.name if model is None else model)


def of_session(service: RouterService, session: SessionState) -> RouterService:
    """Return the service of the model of a stored session, and note its adapter.

    Raises:
        ApiError: 404, its adapter is not loaded any more.
    """
    return check_model(service, session.adapter) if session.adapter else service.of_model(session.model)


TOKENIZE_CHARACTERS_MAX: Final = 4 << 20
"""Largest number of characters of a text that is tokenised although it cannot fit the context. `TEXT_BYTES_MAX`
bounds every text."""


def check_length(characters: int, param: str) -> None:
    """Refuse a text that takes too long to tokenise.

    Raises:
        ApiError: 400, naming `param`.
    """
    if characters > TOKENIZE_CHARACTERS_MAX:
        raise bad_value(
            param,
            f"`{param}` has {characters} characters; at most {TOKENIZE_CHARACTERS_MAX} are tokenised at once. "
            "Please send it in parts.",
            code="string_above_max_length",
        )


class SeenNames:
    """The unknown parameters that were logged. There are as many as `limit` at most: clients may make up names."""

    def __init__(self, limit: int = SEEN_MAX) -> None:
        self._limit = limit
        self._names: set[str] = set()

    def add(self, name: str) -> bool:
        """Return whether a name is to be logged: it is new, and there is room for it."""
        if name in self._names or len(self._names) >= self._limit:
            return False
        self._names.add(name)
        return True


async def read_parameters(
    request: Request, endpoint: Endpoint[_Body], to_object: Callable[[bytes], dict[str, Any]] = parse_body
) -> _Body:
    """Return the body of a request to a generating endpoint. Errors of the request will name parameters as the
    client spelt them; unknown ones are told to the client (`RequestBody.warnings`), and logged once.

    Args:
        to_object: Parses the body.

    Raises:
        ApiError: 4xx, saying what is wrong.
    """
    reading = Reading()

    def check(fields: dict[str, Any]) -> None:
        nonlocal reading
        reading = endpoint.read(fields)
        request.scope[SPELT] = reading.names

    service = service_of(request)
    body = await read_request(request, endpoint.model, service.config.max_body_bytes, check, to_object)
    if reading.unknown:
        body.name_unknown(reading.unknown)
        for name in reading.unknown:
            if request.app.state.seen_names.add(name):
                _log.warning("unknown_parameter", parameter=name, endpoint=endpoint.name)
    return body


def check_session(fields: dict[str, Any]) -> None:
    """Check the raw fields of a new session; one with modules may have a `cache_salt`.

    Raises:
        ApiError: 400.
    """
    if fields.get("cache_salt") is not None and not any(fields.get(name) for name in ("schema", "prompt", "pml")):
        raise unsupported(
            "cache_salt",
            "a session without modules has no salt of its own; send `cache_salt` with each of its requests",
        )
