"""From an HTTP body to a checked request: size, JSON, types, in this order, each with its own error."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from trunkline.router.errors import ApiError, bad_value
from trunkline.router.http.json_slices import PIECE_BYTES, TooManyPartsError, parse_slices
from trunkline.router.http.large_requests import LargeRequests

_PYTHON_ONLY: Final = re.compile(r" or instance of \w+| after validation")
"""Parts of pydantic's messages that clients cannot understand."""

SESSION_HEADER: Final = "X-Session-ID"
"""Stands for the body's `session_id`, for clients and gateways that cannot change bodies; the body comes first."""
_SESSION_CHARACTERS_MAX: Final = 128
"""As in the body."""

_Model = TypeVar("_Model", bound=BaseModel)
_Result = TypeVar("_Result")


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Return the whole body. Its bytes count as they arrive (`LargeRequests`).

    Raises:
        ApiError: 413 too large (known from the header, or met while reading), 408 too slow, 503 there are too many
            large ones.
    """
    too_large = ApiError(413, f"the request body is larger than {bytes_max} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:18]) > bytes_max:
        raise too_large
    seconds_max: float = request.app.state.service.config.body_seconds
    large = _large_requests(request)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds_max):
            async for chunk in request.stream():
                size += len(chunk)
                if size > bytes_max:
                    raise too_large
                large.hold(request.scope, size)
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds_max:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body was complete") from None
    return b"".join(chunks)


def _large_requests(request: Request) -> LargeRequests:
    large = request.app.state.service.large_requests
    assert isinstance(large, LargeRequests)
    return large


def session_header(request: Request) -> str | None:
    """Return the name of the conversation in the header; None: there is no such header.

    Raises:
        ApiError: 400, the header is no such name.
    """
    label = request.headers.get(SESSION_HEADER)
    if label is not None and not 1 <= len(label) <= _SESSION_CHARACTERS_MAX:
        raise bad_value(
            SESSION_HEADER,
            f"header {SESSION_HEADER}: the name of a session has 1 to {_SESSION_CHARACTERS_MAX} characters, not "
            f"{len(label)}",
        )
    return label


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Return the body as a JSON object. NaN, lone surrogates, absurd numbers and nesting are JSON errors.

    Raises:
        ApiError: 400 saying what and where, 413 too many parts.
    """
    try:
        fields = parse_slices(body)
    except TooManyPartsError as error:
        message = (
            f"the request body has {error}, the most that a body of more than {PIECE_BYTES} bytes may have; "
            "please send less at once"
        )
        raise ApiError(413, message, code="body_too_large") from None
    except ValueError as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the request body must be a JSON object", code="invalid_json")
    return fields


def is_heavier(value: object, limit: int) -> bool:
    """Return whether a JSON value has more than `limit` parts and characters; the rest is not looked at."""
    weight = 0
    parts = [value]
    while parts:
        part = parts.pop()
        weight += 1 + (len(part) if isinstance(part, str | list | dict) else 0)
        if weight > limit:
            return True
        if isinstance(part, dict):
            parts += part
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return False


def validate(model: type[_Model], fields: dict[str, Any]) -> _Model:
    """Check the fields against a request model.

    Raises:
        ApiError: 400 naming the first parameter that is wrong.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _to_api_error(error) from None


async def read_request(
    request: Request,
    model: type[_Model],
    bytes_max: int,
    check: Callable[[dict[str, Any]], None] | None = None,
) -> _Model:
    """Return the body as a request model; `check` sees the raw fields first. Large bodies are read in a thread.

    Raises:
        ApiError: 4xx, saying what is wrong.
    """
    body = await read_body(request, bytes_max)

    def parse() -> _Model:
        fields = parse_json_object(body)
        if "session_id" in model.model_fields and fields.get("session_id") is None:
            label = session_header(request)
            if label is not None:
                fields["session_id"] = label
        if check is not None:
            check(fields)
        return validate(model, fields)

    return await beside_loop(request, parse)


async def beside_loop(request: Request, work: Callable[[], _Result]) -> _Result:
    """Return the result of `work` on the whole body, done in a thread if the body is large."""
    large = _large_requests(request)
    return await large.run(work) if large.holds(request.scope) else work()


def _to_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    param = first.get("ctx", {}).get("param") or _param_name(first["loc"])
    if first["type"] == "missing":
        return bad_value(param, f"`{param}` is required", code="missing_required_parameter")
    message = _PYTHON_ONLY.sub("", first["msg"]).replace("a valid dictionary", "an object")
    return bad_value(param, f"`{param}`: {message[0].lower()}{message[1:]}")


def _param_name(location: tuple[int | str, ...]) -> str:
    """Return a name like "messages[0].content" from pydantic's path."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part}" if name else part
    return name or "body"
