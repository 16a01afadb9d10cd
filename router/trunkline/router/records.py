"""Small documents that several routers share: records of the controllers (`controller/records.py`), which sessions
and schemas are made of.

Every record has a home, the controller that keeps it (rendezvous hash of a key over the configured controllers).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from typing import Any, Final

from trunkline.controller.messages import RecordCall
from trunkline.router.errors import unavailable
from trunkline.router.link import Answer, ControllerLink
from trunkline.router.messages import Record, RecordReply
from trunkline.router.policy import rendezvous

VALUE_BYTES_MAX: Final = 15 << 20
"""A controller takes a little more; what would be larger than this is refused before work is spent on it."""
CALL_SECONDS: Final = 10.0


class RecordHomes:
    """All records of all controllers. Calls that are not answered raise `ApiError` 503."""

    def __init__(self, links: Sequence[ControllerLink]) -> None:
        """`links`: the controllers, by index; they may be added later."""
        self._links = links

    def home_of(self, key: str) -> ControllerLink:
        """The controller that keeps what has this key."""
        return self._links[rendezvous(key, len(self._links))]

    async def page(self, kind: str, after: str, limit: int) -> list[Record]:
        """Records of a kind without their values, `limit` at most, in the order of their ids, behind `after`."""
        if not self._links:
            return []
        pages = await asyncio.gather(*(_page(link, kind, after, limit) for link in self._links))
        return list(heapq.merge(*pages, key=lambda record: record.id))[:limit]


async def _page(link: ControllerLink, kind: str, after: str, limit: int) -> list[Record]:
    reply = await ask(link, record_call("list", kind, after, limit=limit))
    if reply.status != "ok":
        raise unavailable(f"what is stored cannot be listed: {reply.detail}", code="not_listed")
    return reply.records


def record_call(op: str, kind: str, record_id: str, **fields: Any) -> Callable[[int], RecordCall]:
    """A call but for its ticket."""
    return lambda ticket: RecordCall(ticket, op, kind, record_id, **fields)


async def ask(home: ControllerLink, call: Callable[[int], RecordCall]) -> RecordReply:
    """The answer to a call, whatever it is.

    Raises:
        ApiError: 503, there is none.
    """
    return record_reply(await home.call(call, CALL_SECONDS))


def record_reply(answer: Answer) -> RecordReply:
    """An answer that is one to a `RecordCall`.

    Raises:
        ApiError: 503, it is not.
    """
    if not isinstance(answer, RecordReply):
        raise unavailable("the engine gave another answer than the one to the question")
    return answer
