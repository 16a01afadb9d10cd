"""Keep the dashboard's history, and share one look at a chunk tree among all clients that ask at the same time.

No stream waits for this: each second a sample is taken of numbers that the router has anyway. Everything else is
computed when a client asks, in portions between which streams go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final

from trunkline.controller.messages import DescribeTree
from trunkline.router.errors import ApiError, not_found, unavailable
from trunkline.router.messages import TreeDescription
from trunkline.router.service import RouterService
from trunkline.router.streams.link import ControllerLink
from trunkline.router.ui.chunk_tree import HEAD_TOKENS, Texts, TreeView, head_of
from trunkline.router.ui.history import History, HistorySampler, Measured
from trunkline.router.ui.overview import wall_clock
from trunkline.router.ui.stored import StoredSessions

SAMPLE_SECONDS: Final = 1.0
TREE_SECONDS_MAX: Final = 10.0
TREE_FRESH_SECONDS: Final = 0.5
"""Shortest time in seconds for which the description of a tree is given to all clients that ask."""
TREE_FRESH_SHARE: Final = 3.0
"""Time for which the description of a tree is given to all clients that ask, as a multiple of the time that it
took to make; between `TREE_FRESH_SECONDS` and `TREE_FRESH_SECONDS_MAX`."""
TREE_FRESH_SECONDS_MAX: Final = 10.0
"""Longest time in seconds for which the description of a tree is given to all clients that ask. It may have taken
long to make because a controller was away."""
_PORTION: Final = 25
"""Number of nodes that are made before streams get their turn."""
_SESSIONS_MAX: Final = 300
"""Largest number of sessions whose chunks are looked for in a tree. They are the ones that were used last."""
_SAME_SAMPLE_S: Final = 0.05
"""Largest difference in seconds between two wall-clock times of one sample. Each answer reads the distance of both
clocks anew, and samples are a second apart."""


class Dashboard:
    """The dashboard's data; one object per router. Call `open` and `close` in the router's event loop."""

    def __init__(self, service: RouterService) -> None:
        self.sessions = StoredSessions(service)
        self._service = service
        self._history = History()
        self._sampler = HistorySampler()
        self._timer: asyncio.TimerHandle | None = None
        self._texts = Texts(lambda ids: service.tokenizer.decode(ids, skip_special_tokens=False))
        self._trees: dict[tuple[int, int], asyncio.Task[dict[str, Any]]] = {}
        """Descriptions of trees that are being made or are still fresh, by group and number of nodes."""

    def open(self) -> None:
        """Begin to take samples."""
        self._sample()

    def close(self) -> None:
        """Stop taking samples, and cancel descriptions that are being made."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._trees.values():
            task.cancel()

    def _sample(self) -> None:
        loop, service = asyncio.get_running_loop(), self._service
        self._timer = loop.call_later(SAMPLE_SECONDS, self._sample)
        groups = [Measured(link.state, link.ready, link.inflight) for link in service.links]
        now = loop.time()
        values = self._sampler.sample(now, groups, len(service.live), service.dispatcher.waiting_count)
        self._history.add(now, values)

    def history(self, seconds: float, after: float | None) -> dict[str, Any]:
        """Return the samples of the last `seconds`; only those younger than `after` (seconds since the epoch)."""
        offset = wall_clock()
        now = asyncio.get_running_loop().time()
        curves = self._history.read(now, seconds, None if after is None else after - offset + _SAME_SAMPLE_S)
        return {
            "now": now + offset,
            "t": [round(t + offset, 3) for t in curves.times],
            "series": curves.series,
        }

    async def tree(self, group: int, nodes: int) -> dict[str, Any]:
        """Return a group's chunk tree as it is now.

        Raises:
            ApiError: 404, there is no such group; 503, its controller does not answer.
        """
        link = self._service.links.get(group)
        if link is None:
            known = ", ".join(str(each.index) for each in self._service.links)
            raise not_found("group", f"`group`: there is no group {group}; there are {known}", code="not_found")
        key = group, nodes
        task = self._trees.get(key)
        if task is None:
            task = self._trees[key] = asyncio.create_task(self._look(link, nodes))
            began = asyncio.get_running_loop().time()
            task.add_done_callback(lambda done: self._looked(key, done, began))
        return await asyncio.shield(task)

    def _looked(self, key: tuple[int, int], task: asyncio.Task[dict[str, Any]], began: float) -> None:
        if task.cancelled() or task.exception() is not None:
            self._trees.pop(key, None)
        else:
            loop = task.get_loop()
            took = loop.time() - began
            keep = max(TREE_FRESH_SECONDS, min(TREE_FRESH_SECONDS_MAX, TREE_FRESH_SHARE * took))
            loop.call_later(keep, self._trees.pop, key, None)

    async def _look(self, link: ControllerLink, nodes: int) -> dict[str, Any]:
        if link.state is None:
            raise unavailable(f"group {link.index} is {link.why_not_ready()}")
        found = await link.call(
            lambda ticket: DescribeTree(ticket, nodes_max=nodes, head_tokens=HEAD_TOKENS), TREE_SECONDS_MAX
        )
        if not isinstance(found, TreeDescription):
            raise unavailable("the engine gave another answer than the one to the question")
        with contextlib.suppress(ApiError):  # then the tree is shown without the sessions' names
            await self.sessions.look()
        names = {found.names[at : at + 16] for at in range(0, len(found.names), 16)}
        view = TreeView(found, self._texts, await self.sessions.by_chunk(names, _SESSIONS_MAX))
        for _ in view.portions(_PORTION):
            await asyncio.sleep(0)
        return head_of(link.index, found, time.time()) | {"nodes": view.nodes}
