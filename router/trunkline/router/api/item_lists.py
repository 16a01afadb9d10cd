"""Lists of stored items: those of a conversation, and those that a stored response was made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request

from trunkline.router.api.paging import PAGE_PARAMETERS, page_of
from trunkline.router.errors import bad_value

ITEM_PARAMETERS: Final[list[dict[str, Any]]] = [
    *PAGE_PARAMETERS,
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
]
"""Query parameters of endpoints that list items, for the OpenAPI document."""


class ItemList(msgspec.Struct, kw_only=True):
    """A page of a list of items."""

    object: Literal["list"] = "list"
    data: Sequence[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def list_of(items: Sequence[dict[str, Any]], *, has_more: bool = False) -> ItemList:
    """Return items as a list. `has_more`: whether others follow them."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return ItemList(data=items, first_id=first, last_id=last, has_more=has_more)


def page_of_items(request: Request, items: Sequence[dict[str, Any]]) -> ItemList:
    """Return the part of `items` that a request asks for: `order` (by default "desc"), `after`, `limit`.

    Raises:
        ApiError: 400, a parameter is wrong.
    """
    page, order = page_of(request), request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_value("order", '`order` must be "asc" or "desc"')
    ordered = list(items) if order == "asc" else list(reversed(items))
    if page.after:
        places = [index for index, item in enumerate(ordered) if item["id"] == page.after]
        if not places:
            raise bad_value("after", "`after` is not the id of an item in this list")
        ordered = ordered[places[0] + 1 :]
    return list_of(ordered[: page.limit], has_more=len(ordered) > page.limit)
