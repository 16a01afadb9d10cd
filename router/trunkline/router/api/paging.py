"""Common parts of `/v1/sessions` and `/v1/schemas`: pages of lists, and answers in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from trunkline.kvstore.records import Record
from trunkline.router.errors import bad_value

_PAGE_MAX: Final = 100
_PAGE_DEFAULT: Final = 20
_AFTER_CHARACTERS_MAX: Final = 256
PAGE_PARAMETERS: Final[list[dict[str, Any]]] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": _PAGE_MAX}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]
"""Query parameters of endpoints that answer with pages of a list, for the OpenAPI document."""


ListOf = TypeVar("ListOf", bound=msgspec.Struct)


class Page(NamedTuple):
    """The part of a list that a request asks for."""

    after: str
    """Id of the entry before the first one."""
    limit: int


def page_of(request: Request) -> Page:
    """Read `limit` and `after` of a request.

    Raises:
        ApiError: 400, `limit` is wrong.
    """
    given = request.query_params.get("limit", str(_PAGE_DEFAULT))
    if not (given.isascii() and given.isdigit() and len(given) < 9 and 1 <= int(given) <= _PAGE_MAX):
        raise bad_value("limit", f"`limit` must be a number from 1 to {_PAGE_MAX}")
    return Page(request.query_params.get("after", "")[:_AFTER_CHARACTERS_MAX], int(given))


def make_page(kind: type[ListOf], found: Sequence[Any], limit: int) -> ListOf:
    """Return a page of a list. `found`: the entries of the page, and one more entry if others follow."""
    data = list(found[:limit])
    return kind(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(found) > limit,
    )


def expiry_of(record: Record) -> int | None:
    """Return the Unix time in seconds at which a record will be deleted if it is not used; None: never."""
    return int(record.used + record.ttl) if record.ttl else None


def components_of(*answers: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schemas of answers, for the OpenAPI document."""
    return msgspec.json.schema_components(answers, ref_template="#/components/schemas/{name}")[1]


def answer_of(answer: type[msgspec.Struct], status: int = 200) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of an endpoint, for the OpenAPI document."""
    reference = {"schema": {"$ref": f"#/components/schemas/{answer.__name__}"}}
    return {status: {"description": answer.__name__, "content": {"application/json": reference}}}
