"""Which other groups have texts of a schema that a controller is about to encode. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from trunkline.controller.messages import ModuleText, PromptLayout
from trunkline.kvstore.chunks import TOKEN_BYTES, pack_int32
from trunkline.router.routing.core import NoControllerError, RoutingCore
from trunkline.router.routing.request import RouteRequest

LOOKED_UP_MAX: Final = 512
"""Largest number of texts that are looked up for one call: each takes some 10 µs, in which no stream goes on."""


def with_holders(
    core: RoutingCore, controller: int, texts: Sequence[ModuleText], salt: bytes, now: float, *, relocate: bool
) -> list[ModuleText]:
    """Return texts of a schema with their `holders`: the groups from which a controller can pull those that it
    lacks. Of a schema with very many texts, the first `LOOKED_UP_MAX` are looked up.

    Args:
        controller: index of the controller that is about to encode the texts.
        now: seconds, of any origin.
        relocate: as in `PromptLayout`.
    """
    first = [
        replace(text, seen=pack_int32([0, len(text.tokens) // TOKEN_BYTES])) for text in texts[:LOOKED_UP_MAX]
    ]
    route = RouteRequest(b"", salt, layout=PromptLayout(first, b"", relocate=relocate), pinned=controller)
    try:
        return core.route(route, now).with_holders(texts)
    except NoControllerError:
        return list(texts)
