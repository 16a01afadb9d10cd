"""Lists of stored items: those of a conversation, and those that a stored response was made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request

from trunkline.router.api.paging import choice_of, limit_of, page_parameters
from trunkline.router.errors import bad_value

_ORDERS: Final = ("asc", "desc")
ITEM_PARAMETERS: Final[list[dict[str, Any]]] = page_parameters(*_ORDERS)
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
    limit, after = limit_of(request), request.query_params.get("after")
    ordered = list(items) if choice_of(request, "order", "desc", _ORDERS) == "asc" else list(reversed(items))
    if after:
        places = [index for index, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise bad_value("after", f"`after` is {after[:80]!r}, which is not the id of an item in this list")
        ordered = ordered[places[0] + 1 :]
    return list_of(ordered[:limit], has_more=len(ordered) > limit)
