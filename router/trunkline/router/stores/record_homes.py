"""Calls to the controllers' records (`controller/storage/records.py`), which store sessions and schemas for all
routers.

Every record has a home, the controller that stores it: the rendezvous hash of its key over the configured
controllers.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from trunkline.controller.messages import RecordCall
from trunkline.router.errors import ApiError, unavailable
from trunkline.router.messages import Record, RecordReply
from trunkline.router.routing.policies import rendezvous
from trunkline.router.streams.link import Answer, Call, ControllerLink

VALUE_BYTES_MAX: Final = 15 << 20
"""Largest size in bytes of a record's value. Controllers take slightly more. A larger value is refused before work
is spent on it."""
CALL_SECONDS: Final = 10.0


class RecordHomes:
    """The records of all controllers. Calls that no controller answers raise `ApiError` 503."""

    def __init__(self, links: Sequence[ControllerLink]) -> None:
        """`links`: the controllers by index; the list may grow later."""
        self._links = links

    def home_of(self, key: str) -> ControllerLink:
        """Return the controller that stores the record with this key."""
        return self._links[int(rendezvous(key, map(str, range(len(self._links)))))]

    async def page(self, kind: str, after: str, limit: int) -> list[Record]:
        """Return up to `limit` records of a kind whose ids follow `after`, in the order of ids, without their
        values."""
        if not self._links:
            return []
        pages = await asyncio.gather(*(_page(link, kind, after, limit) for link in self._links))
        return list(heapq.merge(*pages, key=lambda record: record.id))[:limit]


async def _page(link: ControllerLink, kind: str, after: str, limit: int) -> list[Record]:
    reply = await ask(link, record_call("list", kind, after, limit=limit))
    if reply.status != "ok":
        raise unavailable(f"stored records cannot be listed: {reply.detail}", code="not_listed")
    return reply.records


def record_call(op: str, kind: str, record_id: str, **fields: Any) -> Callable[[int], RecordCall]:
    """Return a function that makes a call about a record, given the call's ticket."""
    return lambda ticket: RecordCall(ticket, op, kind, record_id, **fields)


async def ask(home: ControllerLink, call: Callable[[int], RecordCall]) -> RecordReply:
    """Return a controller's answer to a call. If the controller dies meanwhile, ask again once it is back.

    Raises:
        ApiError: 503, no answer came.
    """
    answer, is_second = await call_persistently(home, call, CALL_SECONDS)
    reply = record_reply(answer)
    return await _first_answer(home, call(0), reply) if is_second else reply


async def call_persistently(
    home: ControllerLink,
    make: Callable[[int], Call],
    timeout_seconds: float | None,
    *,
    give_up: Callable[[int], Call] | None = None,
) -> tuple[Answer, bool]:
    """Call like `ControllerLink.call`, but send the call again if the connection was lost.

    Returns:
        The answer, and whether the call was sent twice, so that it may have been carried out before.

    Raises:
        ApiError: 503, no answer came.
    """
    deadline = asyncio.get_running_loop().time() + home.patience
    is_second = False
    while True:
        connection = home.connections if home.state is not None else -1
        try:
            return await home.call(make, timeout_seconds, give_up=give_up), is_second
        except ApiError:
            lost = home.state is None or home.connections != connection
            if not (lost and await home.again(deadline)):
                raise
        is_second = True


async def _first_answer(home: ControllerLink, call: RecordCall, reply: RecordReply) -> RecordReply:
    """Return the answer that the first of two equal calls got or would have got, given the second one's answer.

    A change may be refused the second time because the first call made it.
    """
    if call.op == "delete" and reply.status == "missing":
        return msgspec.structs.replace(reply, status="ok")
    refused = {"create": "exists", "put": "conflict"}
    if refused.get(call.op) != reply.status:
        return reply
    there = record_reply(await home.call(record_call("get", call.kind, call.id), CALL_SECONDS))
    if there.status == "ok" and there.records[0].value == call.value:
        return there
    return reply


def record_reply(answer: Answer) -> RecordReply:
    """Return an answer as the `RecordReply` that it must be.

    Raises:
        ApiError: 503, the answer has another type.
    """
    if not isinstance(answer, RecordReply):
        raise unavailable("the engine gave another answer than the one to the question")
    return answer
