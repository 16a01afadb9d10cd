"""The home of each schema: the controller that computes its modules and pins them.

A schema's prompts go to its home unless another controller is the better choice, so its modules need memory on one
controller only. Homes follow from the schema's key and the controllers that are ready, so routers agree on them
without talking. If a controller goes, only the schemas at home there move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from trunkline.router.errors import ApiError, unavailable
from trunkline.router.routing.policies import rendezvous
from trunkline.router.streams.health import describe
from trunkline.router.streams.link import Answer, Call, ControllerLink

CALL_SECONDS: Final = 10.0
"""Time limit in seconds of a call that a controller answers from memory."""


class Homes:
    """Chooses the controllers where schemas are at home."""

    def __init__(self, links: Collection[ControllerLink]) -> None:
        """`links`: the connections to all controllers, which may change later."""
        self.links = links

    def home_of(self, key: str, model: str) -> ControllerLink:
        """Return the home of a key among the ready controllers of a model or, if none is ready, among all of them.

        Raises:
            ApiError: 503, there is no controller.
        """
        found = [link for link in self.links if link.standing.may_serve(model)]
        links = {link.name: link for link in found if link.ready} or {link.name: link for link in found}
        if not links:
            raise unavailable(f"no engine is ready: {describe(found)}")
        return links[rendezvous(key, links)]


async def call_persistently(
    link: ControllerLink,
    make: Callable[[int], Call],
    timeout_seconds: float | None,
    *,
    give_up: Callable[[int], Call] | None = None,
) -> Answer:
    """Call like `ControllerLink.call`, but send the call again if the connection was lost. Only for calls that may
    be carried out twice.

    Raises:
        ApiError: 503, no answer came.
    """
    deadline = asyncio.get_running_loop().time() + link.patience
    while True:
        connection = link.connections if link.state is not None else -1
        try:
            return await link.call(make, timeout_seconds, give_up=give_up)
        except ApiError:
            lost = link.state is None or link.connections != connection
            if not (lost and await link.again(deadline)):
                raise
