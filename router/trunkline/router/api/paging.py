"""Common parts of endpoints that list things: pages, and answers in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from trunkline.kvstore.records import Record
from trunkline.router.errors import bad_value

_PAGE_MAX: Final = 100
_PAGE_DEFAULT: Final = 20
_ID_CHARACTERS_MAX: Final = 256
_SHOWN_CHARACTERS: Final = 80


def page_parameters(*orders: str) -> list[dict[str, Any]]:
    """Return the query parameters of an endpoint that answers with pages of a list, for the OpenAPI document.

    Args:
        orders: the values that its `order` may have.
    """
    return [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": _PAGE_MAX}},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
        {"name": "order", "in": "query", "schema": {"type": "string", "enum": list(orders)}},
    ]


ListOf = TypeVar("ListOf", bound=msgspec.Struct)


class Page(NamedTuple):
    """The part of a list that a request asks for."""

    after: str
    """Id of the entry before the first one."""
    limit: int


def page_of(request: Request, order: str, *, prefix: str = "") -> Page:
    """Read `limit`, `after` and `order` of a request for a list that has one order only.

    Args:
        order: the list's order, "asc" or "desc".
        prefix: as in `id_of`.

    Raises:
        ApiError: 400, one of them is wrong.
    """
    choice_of(request, "order", order, (order,))
    return Page(id_of(request, "after", prefix), limit_of(request))


def limit_of(request: Request, default: int = _PAGE_DEFAULT, most: int = _PAGE_MAX) -> int:
    """Read `limit` of a request.

    Raises:
        ApiError: 400, it is wrong.
    """
    given = request.query_params.get("limit", str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 9 and 1 <= int(given) <= most):
        raise bad_value("limit", f"`limit` is {_shown(given)}; allowed are 1 to {most}")
    return int(given)


def choice_of(request: Request, name: str, default: str, allowed: Collection[str]) -> str:
    """Read a parameter of the query that has one of some values; `default` if it is not given.

    Raises:
        ApiError: 400, it has another one.
    """
    given = request.query_params.get(name)
    if given is None:
        return default
    if given not in allowed:
        rule = ", ".join(f'"{each}"' for each in allowed)
        raise bad_value(
            name, f"`{name}` is {_shown(given)}; allowed {'is' if len(allowed) == 1 else 'are'} {rule}"
        )
    return given


def id_of(request: Request, name: str, prefix: str = "") -> str:
    """Read the id of a list's entry from a parameter of the query; "": it is not given. The entry need not exist
    (any more): a page begins behind its place.

    Args:
        prefix: the beginning of all ids of the list; "": ids are names, which a client chooses.

    Raises:
        ApiError: 400, no entry can have this id.
    """
    given = request.query_params.get(name, "")
    if given and not (given.startswith(prefix) and given.isprintable() and len(given) <= _ID_CHARACTERS_MAX):
        rule = f"; ids in this list begin with {prefix!r}" if prefix else ", which cannot be a name"
        raise bad_value(name, f"`{name}` is {_shown(given)}{rule}")
    return given


def named_of(request: Request, name: str, names: Sequence[str]) -> str | None:
    """Read one of a list's names from a parameter of the query; None: it is not given.

    Raises:
        ApiError: 400, the list has no such name.
    """
    given = request.query_params.get(name)
    if given is not None and given not in names:
        raise bad_value(name, f"`{name}` is {_shown(given)}, which is not in the list")
    return given


def _shown(given: str) -> str:
    return repr(given[:_SHOWN_CHARACTERS])


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
