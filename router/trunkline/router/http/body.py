"""From an HTTP body to a checked request: size, JSON, types, in this order, each with its own error.

Most bodies are small: they are parsed in the event loop. A large request is counted from the arrival of its body
until its answer has been sent. When too many bytes are held, further large requests are refused (503). One thread
parses and checks all large requests, one after the other: a second thread would only compete with the event loop
for Python's lock. Their memory is given back to the system when they are over.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import re
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from trunkline.router.errors import ApiError, bad_value
from trunkline.router.http.headers import headers_of
from trunkline.router.http.json_slices import PIECE_BYTES, TooManyPartsError, is_light, parse_slices

SMALL_BYTES: Final = 64 << 10
"""Bodies up to this size are not counted, and parsed in the event loop: mostly in 1 ms, in 20 ms at most."""
BODIES_AT_ONCE: Final = 16
"""Largest number of bodies of the largest size that may be in memory at once."""
_HELD: Final = "trunkline.body_bytes"
"""Key in a request's scope, for the number of bytes that the request counts for in `LargeRequests.bytes_held`."""
TAKE_BODY: Final = "trunkline.take_body"
"""Key in a request's scope, once its body has arrived: a function that returns what `receive` did not give out."""
_TRIM_BYTES: Final = 1 << 20
"""Smallest size in bytes of a request after which memory is given back to the system."""
_TRIM_DELAY_S: Final = 0.5
"""Delay in seconds before memory is given back to the system, so that it is done once for many requests that end
together."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's parameters M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, which `mallopt` sets."""
_BLOCK_BYTES: Final = 1 << 20
_T = TypeVar("_T")
_RULE: Final = "Input should "
"""What pydantic's own messages begin with; they do not say what was given."""
_SHOWN_CHARACTERS: Final = 40
_PYTHON_ONLY: Final = re.compile(r" or instance of \w+| after validation")
"""Parts of pydantic's messages that make sense in Python only."""
SESSION_HEADER: Final = "X-Session-ID"
"""Header that names the session if `session_id` is missing, for clients and gateways that cannot change bodies."""
_SESSION_CHARACTERS_MAX: Final = 128
"""Limit of the session header's length in characters, as for `session_id` in the body."""
_Model = TypeVar("_Model", bound=BaseModel)
_Result = TypeVar("_Result")


class LargeRequests:
    """The large requests of a router: their bytes, and the thread that works on them. Call its methods from the
    event loop's thread only."""

    def __init__(self, body_bytes_max: int) -> None:
        """`body_bytes_max`: largest size of one body."""
        self.bytes_max = BODIES_AT_ONCE * body_bytes_max
        self.bytes_held = 0
        """Bytes of bodies that are arriving, and of requests that are not over."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large-requests")
        self._trim_timer: asyncio.TimerHandle | None = None

    def hold(self, scope: MutableMapping[str, Any], size: int) -> None:
        """Count a request whose body has `size` bytes so far.

        Raises:
            ApiError: 503, all large requests together would hold too many bytes.
        """
        held = scope.get(_HELD, 0)
        if size <= max(held, SMALL_BYTES):
            return
        if self.bytes_held + size - held > self.bytes_max:
            raise ApiError(
                503,
                f"the bodies of the requests that this router works on have {self.bytes_held} bytes, and "
                f"{self.bytes_max} is the limit for all of them; try again later",
                kind="service_unavailable_error",
                code="too_many_large_requests",
            )
        self.bytes_held += size - held
        scope[_HELD] = size

    def holds(self, scope: MutableMapping[str, Any]) -> bool:
        """Return whether a request counts as large."""
        return _HELD in scope

    def release(self, scope: MutableMapping[str, Any]) -> None:
        """Release the bytes of a request that is over, large or not. May be called again."""
        held = scope.pop(_HELD, 0)
        self.bytes_held -= held
        if held >= _TRIM_BYTES:
            self.trim_soon()

    def trim_soon(self) -> None:
        """Give memory back to the system a little later."""
        if self._trim_timer is None:
            self._trim_timer = asyncio.get_running_loop().call_later(_TRIM_DELAY_S, self._trim)

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` in the thread with the caller's context variables, and return its result."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: context.run(work))

    def close(self) -> None:
        """Stop the thread."""
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _trim(self) -> None:
        self._trim_timer = None
        self._thread.submit(give_memory_back)


def bound_heap() -> None:
    """Make glibc give large blocks back to the system as soon as they are free. By default it begins to keep
    blocks of a size once one of that size was freed. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _BLOCK_BYTES)
        mallopt(_TRIM_THRESHOLD, _BLOCK_BYTES)


def give_memory_back() -> None:
    """Return free pages of all heaps to the system. Python's lock is not held meanwhile. Each thread's heap is
    locked while it is searched; that of the event loop is small.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Return the whole body. Its bytes are counted as they arrive (`LargeRequests`).

    Raises:
        ApiError: 413, it is too large; 408, it arrives too slowly; 503, there are too many large requests.
    """
    length = headers_of(request.scope).get("content-length", "")
    if length.isdigit() and int(length[:18]) > bytes_max:
        raise _too_large(bytes_max)
    take: Callable[[], bytes] | None = request.scope.pop(TAKE_BODY, None)
    if take is not None:  # there is nothing to wait for
        body = take()
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
        _large_requests(request).hold(request.scope, len(body))
        return body
    seconds_max: float = request.scope["app"].service.config.body_seconds
    try:
        async with asyncio.timeout(seconds_max):
            return await _received(request, bytes_max)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds_max:g} s") from None


async def _received(request: Request, bytes_max: int) -> bytes:
    large = _large_requests(request)
    chunks: list[bytes] = []
    size, is_complete = 0, False
    while not is_complete:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client left before its body was complete")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > bytes_max:
            raise _too_large(bytes_max)
        large.hold(request.scope, size)
        chunks.append(chunk)
        is_complete = not message.get("more_body", False)
    request.scope.pop(TAKE_BODY, None)  # set meanwhile: nothing is left to take
    return b"".join(chunks)


def _too_large(bytes_max: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {bytes_max} bytes", code="body_too_large")


def _large_requests(request: Request) -> LargeRequests:
    large = request.scope["app"].service.large_requests
    assert isinstance(large, LargeRequests)
    return large


def session_header(request: Request) -> str | None:
    """Return the name of the session in the header `SESSION_HEADER`; None: the request does not have it.

    Raises:
        ApiError: 400, the name is empty or too long.
    """
    label: str | None = headers_of(request.scope).get(SESSION_HEADER)
    if label is not None and not 1 <= len(label) <= _SESSION_CHARACTERS_MAX:
        raise bad_value(
            SESSION_HEADER,
            f"header {SESSION_HEADER}: the name of a session has 1 to {_SESSION_CHARACTERS_MAX} characters, not "
            f"{len(label)}",
        )
    return label


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Return the body as a JSON object. NaN, lone surrogates, huge numbers and deep nesting are JSON errors.

    Raises:
        ApiError: 400, saying what is wrong and where; 413, a large body has too many parts.
    """
    try:
        is_one_piece = len(body) <= PIECE_BYTES or is_light(body)
        fields = from_json(body, allow_inf_nan=False) if is_one_piece else parse_slices(body)
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
    """Return whether a JSON value has more than `limit` parts and characters; stop counting there."""
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
    """Return a request model with these fields.

    Raises:
        ApiError: 400 naming the first parameter that is wrong.
    """
    try:
        made: _Model = model.__pydantic_validator__.validate_python(fields)
        return made
    except ValidationError as error:
        raise _to_api_error(error) from None


async def read_request(
    request: Request,
    model: type[_Model],
    bytes_max: int,
    check: Callable[[dict[str, Any]], None] | None = None,
    to_object: Callable[[bytes], dict[str, Any]] = parse_json_object,
) -> _Model:
    """Return the body as a request model. Large bodies are parsed and checked in a thread.

    Args:
        bytes_max: largest size of the body.
        check: called with the raw fields before the model is made; may raise `ApiError`.
        to_object: parses the body.

    Raises:
        ApiError: 4xx, saying what is wrong.
    """
    body = await read_body(request, bytes_max)

    def parse() -> _Model:
        try:
            fields = to_object(body)
        except ApiError as error:
            raise _with_encoding(error, request) from None
        if "session_id" in model.__pydantic_fields__ and fields.get("session_id") is None:
            label = session_header(request)
            if label is not None:
                fields["session_id"] = label
        if check is not None:
            check(fields)
        return validate(model, fields)

    return await beside_loop(request, parse)


def _with_encoding(error: ApiError, request: Request) -> ApiError:
    """Return the error that a client gets for a body that cannot be parsed: perhaps it is compressed. Some clients
    send this header with bodies that are not, so it says nothing about those that can be parsed."""
    encoding = headers_of(request.scope).get("content-encoding", "")
    if error.code != "invalid_json" or encoding.lower() in ("", "identity"):
        return error
    message = f"the body's Content-Encoding is {encoding[:40]!r}; please send it as it is: nothing is unpacked"
    return ApiError(415, message, code="unsupported_media_type")


async def beside_loop(request: Request, work: Callable[[], _Result]) -> _Result:
    """Return the result of `work`, which uses the request's whole body: run `work` in the thread for large
    requests if the body is large, else in the event loop."""
    large = _large_requests(request)
    return await large.run(work) if large.holds(request.scope) else work()


def _to_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    param = first.get("ctx", {}).get("param") or _param_name(first["loc"])
    if first["type"] == "missing":
        return bad_value(param, f"`{param}` is required", code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        shown = param if param.isprintable() else ascii(param)[1:-1]
        message = f"`{shown[:_SHOWN_CHARACTERS]}` is not a known parameter here"
        return bad_value(shown[:_SHOWN_CHARACTERS], message, code="unknown_parameter")
    message = _PYTHON_ONLY.sub("", first["msg"]).replace("a valid dictionary", "an object")
    rule = message.removeprefix(_RULE)
    if rule != message:
        return bad_value(param, f"`{param}` is {_shown(first['input'])}; it should {rule}")
    return bad_value(param, f"`{param}`: {message[0].lower()}{message[1:]}")


def _shown(given: Any) -> str:
    """Return a value of JSON for a message; of long ones and of structures what they are."""
    if isinstance(given, list | dict):
        return "a list" if isinstance(given, list) else "an object"
    if isinstance(given, str):
        return repr(given) if len(given) <= _SHOWN_CHARACTERS else f"a string of {len(given)} characters"
    if given is None or isinstance(given, bool):
        return {None: "null", True: "true", False: "false"}[given]
    is_long = isinstance(given, int) and given.bit_length() > 3 * _SHOWN_CHARACTERS
    return "a number of many digits" if is_long else str(given)[:_SHOWN_CHARACTERS]


def _param_name(location: tuple[int | str, ...]) -> str:
    """Return a name like "messages[0].content" from pydantic's path."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part}" if name else part
    return name or "body"
