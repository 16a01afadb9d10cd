"""Lists, page by page: what a request for one says."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from starlette.requests import Request

from trunkline.router.errors import bad_value

_PAGE_MAX: Final = 100
_PAGE_DEFAULT: Final = 20
_AFTER_CHARACTERS_MAX: Final = 256
PAGE_PARAMETERS: Final[list[dict[str, Any]]] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": _PAGE_MAX}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]
"""For the OpenAPI document."""


class Page(NamedTuple):
    """A part of a list."""

    after: str
    """The id before its first one."""
    limit: int


def page_of(request: Request) -> Page:
    """What a request asks for.

    Raises:
        ApiError: 400.
    """
    given = request.query_params.get("limit", str(_PAGE_DEFAULT))
    if not (given.isascii() and given.isdigit() and len(given) < 9 and 1 <= int(given) <= _PAGE_MAX):
        raise bad_value("limit", f"`limit` must be a number from 1 to {_PAGE_MAX}")
    return Page(request.query_params.get("after", "")[:_AFTER_CHARACTERS_MAX], int(given))
