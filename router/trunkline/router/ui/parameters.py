"""Numbers in the query of a dashboard endpoint."""

from __future__ import annotations

import math
from typing import TypeVar

from starlette.requests import Request

from trunkline.router.errors import bad_value

_Number = TypeVar("_Number", int, float)


def number_of(request: Request, name: str, default: _Number, low: _Number, high: _Number) -> _Number:
    """A parameter that lies between `low` and `high`; `default` if it is not given.

    Raises:
        ApiError: 400, it is something else.
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
